//! Sums over instances, each with its bounds.
//!
//! An instance that does not list a descriptor says the most that it can have. So a sum is too large by at most its error.
//! It can be too small where an instance lists one of several descriptors that look the same, or is of an older version.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use crate::cli::admin::{self, flag, list, number, text};

/// The descriptors that at least one instance lists.
#[derive(Debug, Default)]
pub(super) struct Sums {
    pub(super) lines: Vec<Line>,
    /// Highest counts of a descriptor that is not among the lines.
    pub(super) others: Bounds,
    /// Events since the start that are not counted.
    pub(super) missed: u64,
}

/// A descriptor under a rule, and its counts of the last minute.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) rule: String,
    pub(super) descriptor: String,
    pub(super) refused: Estimate,
    pub(super) asked: Estimate,
    /// Number of descriptors of an instance that are shown the same.
    pub(super) alike: u64,
}

/// Upper bounds of counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) refused: u64,
    pub(super) asked: u64,
}

/// A number, and by how much it may be too large.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Estimate {
    most: u64,
    error: u64,
}

/// Counts of what is shown as one line.
#[derive(Default)]
struct Merged {
    refused: Estimate,
    asked: Estimate,
    /// Number of descriptors that are shown the same, of each instance that lists any.
    alike: BTreeMap<usize, u64>,
}

impl Sums {
    /// Returns the sums of the pages of all instances.
    pub(super) fn of<'v>(pages: impl Iterator<Item = &'v Value>) -> Self {
        let mut merged: BTreeMap<(String, String), Merged> = BTreeMap::new();
        let (mut unlisted, mut missed) = (Vec::new(), 0_u64);
        for (instance, page) in pages.enumerate() {
            missed = missed.saturating_add(number(page, "missed").unwrap_or_default());
            unlisted.push(Bounds::of(page.get("unlisted")));
            for heavy in list(page, "top") {
                let mut descriptor = admin::descriptor(list(heavy, "entries"));
                if flag(heavy, "is_cut") {
                    descriptor.push_str(",…");
                }
                let line = merged.entry((text(heavy, "rule"), descriptor)).or_default();
                line.refused.add(Estimate::of(heavy.get("refused")));
                line.asked.add(Estimate::of(heavy.get("asked")));
                *line.alike.entry(instance).or_default() += 1;
            }
        }
        let line = |((rule, descriptor), mut merged): (_, Merged)| {
            let silent = unlisted.iter().enumerate().filter(|(instance, _)| !merged.alike.contains_key(instance));
            for (_, Bounds { refused, asked }) in silent {
                merged.refused.add(Estimate::up_to(*refused));
                merged.asked.add(Estimate::up_to(*asked));
            }
            let Merged { refused, asked, alike } = merged;
            Line { rule, descriptor, refused, asked, alike: alike.into_values().max().unwrap_or(1) }
        };
        let lines = merged.into_iter().map(line).collect();
        Self { lines, others: unlisted.iter().copied().fold(Bounds::default(), Bounds::plus), missed }
    }

    /// Keeps the lines that contain `text`, those with the highest certain counts first, and at most `most` of them.
    pub(super) fn select(&mut self, text: &str, is_by_asked: bool, most: usize) {
        self.lines.retain(|line| line.rule.contains(text) || line.descriptor.contains(text));
        self.lines.sort_by_key(|line| {
            let (refused, asked) = (line.refused.least(), line.asked.least());
            std::cmp::Reverse(if is_by_asked { (asked, refused) } else { (refused, asked) })
        });
        for Line { refused, asked, .. } in self.lines.drain(most.min(self.lines.len())..) {
            let Bounds { refused: of_refused, asked: of_asked } = &mut self.others;
            (*of_refused, *of_asked) = ((*of_refused).max(refused.most), (*of_asked).max(asked.most));
        }
    }
}

impl Line {
    /// Returns the line for programs.
    pub(super) fn json(&self) -> Value {
        let Self { rule, descriptor, refused, asked, alike } = self;
        json!({ "rule": rule, "descriptor": descriptor, "refused": refused.json(), "asked": asked.json(), "alike": alike })
    }
}

impl Bounds {
    fn of(value: Option<&Value>) -> Self {
        let number = |name: &str| value.and_then(|value| number(value, name)).unwrap_or_default();
        Self { refused: number("refused"), asked: number("asked") }
    }

    fn plus(self, other: Self) -> Self {
        let Self { refused, asked } = other;
        Self { refused: self.refused.saturating_add(refused), asked: self.asked.saturating_add(asked) }
    }
}

impl Estimate {
    fn of(value: Option<&Value>) -> Self {
        let number = |name: &str| value.and_then(|value| number(value, name)).unwrap_or_default();
        Self { most: number("most"), error: number("error") }
    }

    /// Returns an unknown number of at most `most`.
    fn up_to(most: u64) -> Self {
        Self { most, error: most }
    }

    fn add(&mut self, other: Self) {
        self.most = self.most.saturating_add(other.most);
        self.error = self.error.saturating_add(other.error);
    }

    fn least(self) -> u64 {
        self.most.saturating_sub(self.error)
    }

    fn json(self) -> Value {
        json!({ "least": self.least(), "most": self.most })
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error {
            0 => f.pad(&self.most.to_string()),
            _ => f.pad(&format!("{}-{}", self.least(), self.most)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Descriptors that each instance knows.
    const DESCRIPTORS: usize = 8;

    /// A descriptor at an instance.
    #[derive(Clone, Debug)]
    struct Known {
        counts: [u64; 2],
        /// Errors that the sketch has in them.
        errors: [u64; 2],
        is_listed: bool,
    }

    fn known() -> impl Strategy<Value = Known> {
        let counts = (0_u64..100, 0_u64..100);
        (counts, (0_u64..10, 0_u64..10), any::<bool>()).prop_map(|(counts, errors, is_listed)| Known {
            counts: counts.into(),
            errors: errors.into(),
            is_listed,
        })
    }

    /// Returns the page of an instance. `slack` is added to the least possible bound of what is not listed.
    fn page(of: &[Known], slack: u64) -> Value {
        let estimate = |known: &Known, side: usize| {
            // Some of the error is real.
            let error = known.errors[side];
            json!({ "most": known.counts[side] + error / 2, "error": error })
        };
        let listed = of.iter().enumerate().filter(|(_, known)| known.is_listed);
        let shown = |(number, known): (usize, &Known)| {
            let entries = json!([{ "key": "user", "value": number.to_string() }]);
            json!({ "rule": "edge.user", "entries": entries, "is_cut": false, "refused": estimate(known, 0), "asked": estimate(known, 1) })
        };
        let bound = |side: usize| {
            let unlisted = of.iter().filter(|known| !known.is_listed).map(|known| known.counts[side]);
            unlisted.max().unwrap_or_default() + slack
        };
        let top: Vec<Value> = listed.map(shown).collect();
        json!({ "top": top, "unlisted": { "refused": bound(0), "asked": bound(1) }, "missed": 1 })
    }

    proptest! {
        #[test]
        fn a_sum_over_instances_is_within_its_bounds(
            instances in prop::collection::vec((prop::collection::vec(known(), DESCRIPTORS), 0_u64..3), 1..5),
            is_by_asked: bool,
            most in 0_usize..10,
        ) {
            let pages: Vec<Value> = instances.iter().map(|(of, slack)| page(of, *slack)).collect();
            let mut sums = Sums::of(pages.iter());
            sums.select("", is_by_asked, most);
            prop_assert_eq!(sums.missed, instances.len() as u64);
            let sum = |number: usize| [0, 1].map(|side| instances.iter().map(|(of, _)| of[number].counts[side]).sum::<u64>());
            let mut others: Vec<usize> = (0..DESCRIPTORS).collect();
            for line in &sums.lines {
                let number: usize = line.descriptor.strip_prefix("user=").unwrap().parse().unwrap();
                others.retain(|other| *other != number);
                for (estimate, sum) in [line.refused, line.asked].into_iter().zip(sum(number)) {
                    prop_assert!(estimate.least() <= sum && sum <= estimate.most, "{}: {:?}", sum, estimate);
                }
            }
            for [refused, asked] in others.into_iter().map(sum) {
                prop_assert!(refused <= sums.others.refused && asked <= sums.others.asked, "{:?}", sums.others);
            }
        }
    }

    #[test]
    fn one_instance_that_lists_all_has_exact_numbers() {
        let all = [Known { counts: [7, 16], errors: [0, 0], is_listed: true }];
        let mut sums = Sums::of([page(&all, 0)].iter());
        sums.select("user=0", false, 20);
        assert_eq!((sums.lines[0].refused.to_string(), sums.lines[0].asked.to_string()), ("7".into(), "16".into()));
        assert_eq!(sums.others, Bounds::default());
        sums.select("user=1", false, 20);
        assert_eq!(sums.lines.len(), 0);
    }
}
