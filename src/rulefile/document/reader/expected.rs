//! Reader for the expected answers of a test case.

use super::{Level, MapEntry, Reader};
use crate::model::{Outcome, counted};
use crate::rulefile::document::cases::Expected;
use crate::rulefile::problem::{Placed, quoted};
use crate::rulefile::yaml::{Content, Node, Nodes};

/// Words of `code`, as in the protocol's `Code`, each with its outcome.
const CODES: [(&str, Outcome); 2] = [("ok", Outcome::Admitted), ("over_limit", Outcome::Refused)];
const EXAMPLE: &str = "`ok`, `over_limit`, or a mapping like `{ code: ok, remaining: 3 }`";

impl<'t> Reader<'_, 't> {
    /// Returns the value of `expect`: a code, or a mapping.
    pub(super) fn expected(&mut self, entry: MapEntry<'t>) -> Option<Expected> {
        let expected = self.expected_answer(entry, entry.value, Level::Expect)?;
        if !self.report.has_error() && expected.is_empty() {
            self.report.error(entry.value.place, || {
                format!("`expect` expects nothing, so it can never fail: write {EXAMPLE}, or remove it.")
            });
        }
        Some(expected)
    }

    /// Reports an error unless there is an expected answer for each of `number` descriptors.
    pub(super) fn count_expected(&mut self, expected: &Expected, number: usize) {
        let Some(descriptors) = &expected.descriptors else { return };
        let found = descriptors.value.len();
        if found != number {
            self.report.error(descriptors.place, || {
                format!("`descriptors` inside `expect` has {found} items, and the request {number}: write one for each, in the same order.")
            });
        }
    }

    /// Reports an error if more admitted requests are expected than `times`, the number that is sent.
    pub(super) fn count_admitted(&mut self, expected: &Expected, times: u32) {
        let Some(admitted) = expected.admitted.as_ref().filter(|admitted| admitted.value > times) else { return };
        self.report.error(admitted.place, || {
            let sent = counted(times, "request");
            format!("`admitted` is {}, and the step sends {sent}, so it can never pass: write a number up to {times}, or more `times`.", admitted.value)
        });
    }

    fn expected_answer(&mut self, entry: MapEntry<'t>, node: Node<'t>, level: Level) -> Option<Expected> {
        match node.content() {
            Content::Mapping(mapping) => Some(self.expected_fields(mapping, level)),
            Content::Plain(_) | Content::Text(_) if !node.is_blank() => {
                let code = self.word(MapEntry { value: node, ..entry }, &CODES)?;
                Some(Expected { code: Some(code), ..Expected::default() })
            }
            _ => {
                self.wrong(entry.name, node, EXAMPLE);
                None
            }
        }
    }

    fn expected_fields(&mut self, mapping: Nodes<'t>, level: Level) -> Expected {
        let mut expected = Expected::default();
        for entry in self.entries(mapping, level) {
            if entry.value.is_blank() {
                self.report.error(entry.place, || {
                    format!("{} is empty, so it expects nothing: write a value, or remove it.", quoted(entry.name))
                });
                continue;
            }
            match entry.name {
                "code" => expected.code = self.word(entry, &CODES),
                "admitted" => expected.admitted = self.number(entry),
                "rule" => expected.rule = self.text(entry),
                "limit" => expected.limit = self.text(entry),
                "remaining" => expected.remaining = self.number(entry),
                "retry_after" => expected.retry_after = self.length(entry),
                "reset_after" => expected.reset_after = self.length(entry),
                "delay" => expected.delay = self.length(entry),
                _ => expected.descriptors = Some(self.expected_descriptors(entry)),
            }
        }
        expected
    }

    fn expected_descriptors(&mut self, entry: MapEntry<'t>) -> Placed<Vec<Expected>> {
        let items = match entry.value.content() {
            Content::List(items) => items.collect(),
            _ => {
                self.wrong(
                    entry.name,
                    entry.value,
                    &format!("a list with one item for each descriptor, which is {EXAMPLE}"),
                );
                Vec::new()
            }
        };
        let value =
            items.into_iter().filter_map(|item: Node<'t>| self.expected_answer(entry, item, Level::ExpectedDescriptor));
        Placed { value: value.collect(), place: entry.value.place }
    }
}
