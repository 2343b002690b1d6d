//! Reader for the limits of an item: quotas, costs and delays.

use super::{Level, MapEntry, Reader};
use crate::algorithm::Algorithm;
use crate::model::{Delivery, LeaseTerms, Leasing, Micros};
use crate::rulefile::document::{DelayNode, LimitNode, LimitsNode};
use crate::rulefile::problem::Placed;
use crate::rulefile::yaml::{Content, Node, Nodes};
use crate::rules::tree::Position;

impl<'t> Reader<'_, 't> {
    pub(crate) fn rate_limit(&mut self, entry: MapEntry<'t>) -> LimitsNode {
        let Content::Mapping(mapping) = entry.value.content() else {
            let example = "a mapping like `{unit: second, requests_per_unit: 5}`";
            if matches!(entry.value.content(), Content::List(_)) {
                self.wrong(entry.name, entry.value, &format!("{example} (for several limits, write `rate_limits`)"));
            } else {
                self.wrong(entry.name, entry.value, example);
            }
            return LimitsNode::None;
        };
        let mappings = self.mappings(entry.value, mapping);
        let (limit, unlimited) = self.limit(entry.value.place, mappings, Level::Limit);
        if unlimited.is_some_and(|(_, is_unlimited)| is_unlimited) {
            return LimitsNode::Unlimited(Box::new(limit));
        }
        self.take(size_of::<LimitNode>(), entry.place);
        LimitsNode::Limited(if self.is_building { vec![limit] } else { Vec::new() })
    }

    pub(crate) fn rate_limits(&mut self, entry: MapEntry<'t>) -> LimitsNode {
        const EXAMPLE: &str = "`- {unit: second, requests_per_unit: 5}`";
        let Content::List(items) = entry.value.content() else {
            self.wrong(entry.name, entry.value, &format!("a list of mappings like {EXAMPLE}"));
            return LimitsNode::None;
        };
        if items.clone().next().is_none() {
            self.report.error(entry.place, || {
                format!("`rate_limits` is empty: write at least one limit like {EXAMPLE}, or remove `rate_limits`.")
            });
        }
        let limits = self.list_of_mappings(entry, items, EXAMPLE, |reader, item, mapping| {
            let (limit, unlimited) = reader.limit(item.place, [mapping], Level::ListedLimit);
            if let Some((place, _)) = unlimited {
                reader.report.error(place, || {
                    "`unlimited` is not allowed in `rate_limits`: remove it, or write `rate_limit: {unlimited: true}` \
                     instead of `rate_limits`."
                        .to_owned()
                });
            }
            limit
        });
        LimitsNode::Limited(limits)
    }

    /// Reads each item of a list of mappings with `read`; `example` is one for errors. An item that is no mapping is an error.
    pub(super) fn list_of_mappings<T>(
        &mut self,
        entry: MapEntry<'t>,
        items: Nodes<'t>,
        example: &str,
        mut read: impl FnMut(&mut Self, Node<'t>, Nodes<'t>) -> T,
    ) -> Vec<T> {
        let mut all = self.room_for(&items);
        for item in items {
            if self.is_full {
                break;
            }
            let Content::Mapping(mapping) = item.content() else {
                self.wrong_item(entry, item, example);
                continue;
            };
            self.take(size_of::<T>(), item.place);
            let one = read(self, item, mapping);
            if self.is_building {
                all.push(one);
            }
        }
        all
    }

    /// Returns a limit, and the place and value of its `unlimited`.
    fn limit(
        &mut self,
        place: Position,
        mappings: impl IntoIterator<Item = Nodes<'t>>,
        level: Level,
    ) -> (LimitNode, Option<(Position, bool)>) {
        let mut node = LimitNode { place, ..LimitNode::default() };
        let mut unlimited = None;
        let mut has_number = false;
        for entry in self.entries_of(mappings, level) {
            match entry.name {
                "unit" => node.unit = self.text(entry),
                "unit_multiplier" => node.unit_multiplier = self.number(entry),
                "window" => node.window = self.length(entry),
                "requests_per_unit" => {
                    has_number = !entry.value.is_null();
                    node.requests_per_unit = self.number(entry).map_or(0, |number| number.value);
                }
                "burst" => node.burst = self.number(entry),
                "algorithm" => node.algorithm = self.word(entry, &Algorithm::ALL),
                "count_refused" => node.count_refused = self.flag(entry),
                "refuse_peek_at_limit" => node.refuse_peek_at_limit = self.flag(entry).then_some(entry.place),
                "cost" => node.cost = self.number(entry),
                "warn_at" => node.warn_at = self.percent(entry),
                "delay" => node.delay = self.delay(entry),
                "lease" => node.lease = self.lease(entry),
                "shadow_mode" => node.shadow_mode = self.flag(entry).then_some(entry.place),
                "unlimited" => unlimited = Some((entry.place, self.flag(entry))),
                "name" => node.name = self.text(entry),
                "replaces" => node.replaces = self.replaces(entry),
                _ => {}
            }
        }
        if !has_number && unlimited.is_none() {
            self.report.warning(place, || {
                "`requests_per_unit` is missing, so the limit is 0 and refuses everything: write the number of hits per window."
                    .to_owned()
            });
        }
        (node, unlimited)
    }

    fn replaces(&mut self, entry: MapEntry<'t>) -> Vec<Placed<String>> {
        let Some(items) = self.list(entry, "`- name: OTHER`") else { return Vec::new() };
        let mut replaces = self.room_for(&items);
        for item in items {
            if self.is_full {
                break;
            }
            let Content::Mapping(mapping) = item.content() else {
                self.wrong_item(entry, item, "`- name: OTHER`");
                continue;
            };
            self.take(size_of::<Placed<String>>(), item.place);
            let mut name = None;
            for entry in self.entries(mapping, Level::Replaced) {
                name = self.text(entry);
            }
            if self.is_building {
                replaces.push(name.unwrap_or(Placed { value: String::new(), place: item.place }));
            }
        }
        replaces
    }

    pub(crate) fn delay(&mut self, entry: MapEntry<'t>) -> Option<Box<DelayNode>> {
        let Content::Mapping(mapping) = entry.value.content() else {
            if !entry.value.is_null() {
                self.wrong(
                    entry.name,
                    entry.value,
                    "a mapping like `{max: 2s}` or `{step: 100ms, max: 5s, beyond: admit}`",
                );
            }
            return None;
        };
        self.take(size_of::<DelayNode>(), entry.place);
        let mut node = DelayNode { place: entry.value.place, max: None, step: None, beyond: None, delivery: None };
        let mappings = self.mappings(entry.value, mapping);
        for entry in self.entries_of(mappings, Level::Delay) {
            match entry.name {
                "max" => node.max = self.length(entry),
                "step" => node.step = self.length(entry),
                "beyond" => node.beyond = self.word(entry, &[("admit", ())]).map(|_| entry.place),
                "delivery" => node.delivery = self.word(entry, &Delivery::ALL).map(|word| word.value),
                _ => {}
            }
        }
        Some(Box::new(node))
    }

    /// Returns the leases that `lease` chooses; `None` if null or wrong.
    pub(crate) fn lease(&mut self, entry: MapEntry<'t>) -> Option<Placed<Leasing>> {
        const EXAMPLE: &str = "a mapping like `{share: 5%, ttl: 1s}`, or `off`";
        let place = entry.value.place;
        let mapping = match entry.value.content() {
            Content::Mapping(mapping) => mapping,
            Content::Plain("off") | Content::Text("off") => return Some(Placed { value: Leasing::Off, place }),
            _ => {
                self.wrong(entry.name, entry.value, EXAMPLE);
                return None;
            }
        };
        let (mut share, mut ttl) = (LeaseTerms::DEFAULT_SHARE, LeaseTerms::DEFAULT_TTL);
        let mappings = self.mappings(entry.value, mapping);
        for entry in self.entries_of(mappings, Level::Lease) {
            match entry.name {
                "share" => share = self.share(entry).unwrap_or(share),
                "ttl" => ttl = self.lease_ttl(entry).unwrap_or(ttl),
                _ => {}
            }
        }
        LeaseTerms::new(share, ttl).map(|terms| Placed { value: Leasing::On(terms), place })
    }

    fn share(&mut self, entry: MapEntry<'t>) -> Option<u32> {
        const TAKES: &str = "a percentage like `5%` or `0.5%`";
        let share = LeaseTerms::parse_share(self.spelled(entry, TAKES)?);
        if share.is_none() {
            self.wrong(entry.name, entry.value, "a percentage from `0.0001%` to `100%`, like `5%`");
        }
        share
    }

    fn lease_ttl(&mut self, entry: MapEntry<'t>) -> Option<Micros> {
        let ttl = self.length(entry)?.value;
        if !LeaseTerms::TTL.contains(&ttl) {
            self.wrong(entry.name, entry.value, "a length of time from `50ms` to `1m`, like `1s`");
            return None;
        }
        Some(ttl)
    }
}
