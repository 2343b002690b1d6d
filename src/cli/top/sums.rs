//! Sums over instances, each with its bounds.
//!
//! An instance that does not list a descriptor says the most that it can have, so a sum is too large by at most its error. A sum has no
//! upper bound where that is not known: an instance of an older version does not say it, and a line whose text is masked or cut stands for
//! an unknown number of descriptors, which an instance may not list. Where instances mask values with different secrets, the same
//! descriptor has several lines, and each counts only the instances of its own text.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use crate::cli::admin::{self, flag, list, number, text};

/// Mark at the end of a text that is cut.
const CUT: char = '…';

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
    /// Highest counts of one of the descriptors that are shown the same.
    single: Bounds,
}

/// Upper bounds of counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) refused: Most,
    pub(super) asked: Most,
}

/// Upper bound of a count; `None` if it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Most(pub(super) Option<u64>);

/// Bounds of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Estimate {
    least: u64,
    most: Most,
}

/// Counts of what is shown as one line, of each instance that lists any of it.
#[derive(Default)]
struct Merged {
    instances: BTreeMap<usize, Listed>,
    /// True if the text does not name one descriptor: it is cut, or an address is shown as its network.
    is_ambiguous: bool,
}

/// Sum of what an instance lists under one text.
#[derive(Clone, Copy, Default)]
struct Listed {
    refused: Estimate,
    asked: Estimate,
    /// Number of descriptors.
    alike: u64,
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
                let entries = list(heavy, "entries");
                let (mut descriptor, is_cut) = (admin::descriptor(entries), flag(heavy, "is_cut"));
                if is_cut {
                    descriptor.push(',');
                    descriptor.push(CUT);
                }
                let line = merged.entry((text(heavy, "rule"), descriptor)).or_default();
                line.is_ambiguous |= is_cut || entries.iter().any(is_cut_entry);
                line.instances.entry(instance).or_default().add(heavy);
            }
        }
        let line = |((rule, descriptor), merged): (_, Merged)| merged.line(rule, descriptor, &unlisted);
        let lines = merged.into_iter().map(line).collect();
        let others = unlisted.iter().fold(Bounds::default(), |sum, bounds| sum.plus(*bounds));
        Self { lines, others, missed }
    }

    /// Keeps the lines that contain `text`, those with the highest certain counts first, and at most `most` of them.
    pub(super) fn select(&mut self, text: &str, is_by_asked: bool, most: usize) {
        self.lines.retain(|line| line.rule.contains(text) || line.descriptor.contains(text));
        self.lines.sort_by_key(|line| {
            let (refused, asked) = (line.refused.least, line.asked.least);
            std::cmp::Reverse(if is_by_asked { (asked, refused) } else { (refused, asked) })
        });
        for Line { single, .. } in self.lines.drain(most.min(self.lines.len())..) {
            self.others = self.others.max(single);
        }
    }
}

/// Returns true if several values of an entry are shown like this one.
fn is_cut_entry(entry: &Value) -> bool {
    flag(entry, "is_cut") || ["key", "value"].iter().any(|name| text(entry, name).ends_with(CUT))
}

impl Merged {
    /// Returns the line. `unlisted` are the bounds of what each instance does not list.
    fn line(self, rule: String, descriptor: String, unlisted: &[Bounds]) -> Line {
        let Self { instances, is_ambiguous } = self;
        let alike = instances.values().map(|listed| listed.alike).max().unwrap_or(1);
        let is_several = is_ambiguous || alike > 1;
        let (mut refused, mut asked, mut single) = (Estimate::default(), Estimate::default(), Bounds::default());
        for (instance, bounds) in unlisted.iter().enumerate() {
            let listed = instances.get(&instance);
            let own = listed.copied().unwrap_or_default();
            let missing = match listed {
                _ if is_several => bounds.of_any_number(),
                Some(_) => Bounds::default(),
                None => *bounds,
            };
            refused = refused.plus(own.refused).plus(Estimate { least: 0, most: missing.refused });
            asked = asked.plus(own.asked).plus(Estimate { least: 0, most: missing.asked });
            let own = Bounds { refused: own.refused.most, asked: own.asked.most };
            single = single.plus(if listed.is_some() && !is_several { own } else { own.max(*bounds) });
        }
        Line { rule, descriptor, refused, asked, alike, single }
    }
}

impl Listed {
    fn add(&mut self, heavy: &Value) {
        self.refused = self.refused.plus(Estimate::of(heavy.get("refused")));
        self.asked = self.asked.plus(Estimate::of(heavy.get("asked")));
        self.alike += 1;
    }
}

impl Line {
    /// Returns the line for programs.
    pub(super) fn json(&self) -> Value {
        let Self { rule, descriptor, refused, asked, alike, .. } = self;
        json!({ "rule": rule, "descriptor": descriptor, "refused": refused.json(), "asked": asked.json(), "alike": alike })
    }
}

impl Bounds {
    /// Returns the bounds in an answer. An instance of an older version does not send them.
    fn of(value: Option<&Value>) -> Self {
        let most = |name: &str| Most(value.and_then(|value| number(value, name)));
        Self { refused: most("refused"), asked: most("asked") }
    }

    /// Returns the bounds of the sum of any number of descriptors with these bounds.
    fn of_any_number(self) -> Self {
        let sum = |most: Most| Most(most.0.filter(|most| *most == 0));
        Self { refused: sum(self.refused), asked: sum(self.asked) }
    }

    fn plus(self, other: Self) -> Self {
        Self { refused: self.refused.plus(other.refused), asked: self.asked.plus(other.asked) }
    }

    fn max(self, other: Self) -> Self {
        Self { refused: self.refused.max(other.refused), asked: self.asked.max(other.asked) }
    }
}

impl Most {
    fn plus(self, other: Self) -> Self {
        Self(self.0.zip(other.0).map(|(one, other)| one.saturating_add(other)))
    }

    fn max(self, other: Self) -> Self {
        Self(self.0.zip(other.0).map(|(one, other)| one.max(other)))
    }
}

impl Default for Most {
    fn default() -> Self {
        Self(Some(0))
    }
}

impl fmt::Display for Most {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(most) => f.pad(&most.to_string()),
            None => f.pad("unknown"),
        }
    }
}

impl Estimate {
    fn of(value: Option<&Value>) -> Self {
        let number = |name: &str| value.and_then(|value| number(value, name)).unwrap_or_default();
        let most = number("most");
        Self { least: most.saturating_sub(number("error")), most: Most(Some(most)) }
    }

    fn plus(self, other: Self) -> Self {
        Self { least: self.least.saturating_add(other.least), most: self.most.plus(other.most) }
    }

    fn json(self) -> Value {
        json!({ "least": self.least, "most": self.most.0 })
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.most.0 {
            Some(most) if most == self.least => f.pad(&most.to_string()),
            Some(most) => f.pad(&format!("{}-{most}", self.least)),
            None => f.pad(&format!("{}+", self.least)),
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

    /// Returns the page of an instance, where `alike` descriptors in a row are shown the same. `slack` is added to the least possible bound of
    /// what is not listed; without it, the instance is of a version that does not send the bound.
    fn page(of: &[Known], alike: usize, slack: Option<u64>) -> Value {
        let estimate = |known: &Known, side: usize| {
            // Some of the error is real.
            let error = known.errors[side];
            json!({ "most": known.counts[side] + error / 2, "error": error })
        };
        let listed = of.iter().enumerate().filter(|(_, known)| known.is_listed);
        let shown = |(number, known): (usize, &Known)| {
            let entries = json!([{ "key": "user", "value": (number / alike).to_string(), "is_cut": alike > 1 }]);
            json!({ "rule": "edge.user", "entries": entries, "is_cut": false, "refused": estimate(known, 0), "asked": estimate(known, 1) })
        };
        let bound = |side: usize| {
            let unlisted = of.iter().filter(|known| !known.is_listed).map(|known| known.counts[side]);
            slack.map(|slack| unlisted.max().unwrap_or_default() + slack)
        };
        let top: Vec<Value> = listed.map(shown).collect();
        json!({ "top": top, "unlisted": { "refused": bound(0), "asked": bound(1) }, "missed": 1 })
    }

    proptest! {
        #[test]
        fn a_sum_over_instances_is_within_its_bounds(
            instances in prop::collection::vec(
                (prop::collection::vec(known(), DESCRIPTORS), prop::option::weighted(0.8, 0_u64..3)), 1..5),
            alike in prop::sample::select(vec![1, 1, 2, 4]),
            is_by_asked: bool,
            most in 0_usize..10,
        ) {
            let pages: Vec<Value> = instances.iter().map(|(of, slack)| page(of, alike, *slack)).collect();
            let mut sums = Sums::of(pages.iter());
            sums.select("", is_by_asked, most);
            prop_assert_eq!(sums.missed, instances.len() as u64);
            let is_within = |count: u64, most: Most| most.0.is_none_or(|most| count <= most);
            let sum = |number: usize| [0, 1].map(|side| instances.iter().map(|(of, _)| of[number].counts[side]).sum::<u64>());
            let mut others: Vec<usize> = (0..DESCRIPTORS).collect();
            for line in &sums.lines {
                let shown: usize = line.descriptor.strip_prefix("user=").unwrap().parse().unwrap();
                let of_line = shown * alike..(shown + 1) * alike;
                others.retain(|other| !of_line.contains(other));
                for (side, estimate) in [line.refused, line.asked].into_iter().enumerate() {
                    let sum = of_line.clone().map(|number| sum(number)[side]).sum::<u64>();
                    prop_assert!(estimate.least <= sum && is_within(sum, estimate.most), "{}: {:?}", sum, estimate);
                }
            }
            for [refused, asked] in others.into_iter().map(sum) {
                prop_assert!(is_within(refused, sums.others.refused) && is_within(asked, sums.others.asked), "{:?}", sums.others);
            }
        }
    }

    fn shown(pages: &[Value], most: usize) -> (Vec<String>, [String; 2]) {
        let mut sums = Sums::of(pages.iter());
        sums.select("", false, most);
        let lines = sums.lines.iter().map(|line| format!("{} {}", line.refused, line.asked)).collect();
        (lines, [sums.others.refused.to_string(), sums.others.asked.to_string()])
    }

    fn counted(refused: u64, asked: u64, is_listed: bool) -> Known {
        Known { counts: [refused, asked], errors: [0, 0], is_listed }
    }

    #[test]
    fn a_sum_has_no_upper_bound_where_an_instance_may_have_more_that_looks_the_same() {
        // Both instances know both addresses of the network, and one of them lists one.
        let whole = page(&[counted(5, 50, true), counted(3, 30, true)], 2, Some(0));
        let part = page(&[counted(5, 50, true), counted(0, 30, false)], 2, Some(0));
        assert_eq!(shown(std::slice::from_ref(&whole), 9), (vec!["8 80".into()], ["0".into(), "0".into()]));
        assert_eq!(shown(&[whole.clone(), part.clone()], 9).0, ["13 130+"]);
        // Each of the two has at most what one instance lists, and the bound of the other one.
        assert_eq!(shown(&[whole, part], 0), (vec![], ["13".into(), "130".into()]));
    }

    #[test]
    fn an_instance_of_an_older_version_makes_a_bound_unknown_and_not_zero() {
        let (listed, missing) = ([counted(5, 50, true)], [counted(7, 70, false)]);
        let [new, old] = [Some(0), None].map(|slack| page(&listed, 1, slack));
        assert_eq!(
            shown(&[new.clone(), old.clone()], 9),
            (vec!["10 100".into()], ["unknown".into(), "unknown".into()])
        );
        let silent = page(&missing, 1, None);
        assert_eq!(shown(&[new, silent], 9).0, ["5+ 50+"]);
        assert_eq!(Sums::of([old].iter()).lines[0].json()["refused"], json!({ "least": 5, "most": 5 }));
    }

    #[test]
    fn one_instance_that_lists_all_has_exact_numbers() {
        let all = [Known { counts: [7, 16], errors: [0, 0], is_listed: true }];
        let mut sums = Sums::of([page(&all, 1, Some(0))].iter());
        sums.select("user=0", false, 20);
        assert_eq!((sums.lines[0].refused.to_string(), sums.lines[0].asked.to_string()), ("7".into(), "16".into()));
        assert_eq!(sums.others, Bounds::default());
        sums.select("user=1", false, 20);
        assert_eq!(sums.lines.len(), 0);
    }
}
