//! Sums over instances: of refusals with their bounds, and of requests as they are estimated.
//!
//! An instance that does not list a descriptor says the most refusals that it can have, so a sum of these is too large by at most its error. A sum has no
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
    /// Most refusals of a descriptor that is not among the lines.
    pub(super) others: Most,
    /// Events since the start that are not counted.
    pub(super) missed: u64,
}

/// A descriptor under a rule, and its counts of the last minute.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) rule: String,
    pub(super) descriptor: String,
    pub(super) refused: Estimate,
    pub(super) asked: Sampled,
    /// Number of descriptors of an instance that are shown the same.
    pub(super) alike: u64,
    /// Most refusals of one of the descriptors that are shown the same.
    single: Most,
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

/// A number that is estimated from samples. It has no upper bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sampled {
    least: u64,
    estimate: u64,
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
    asked: Sampled,
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
            unlisted.push(Most(page.get("unlisted").and_then(|unlisted| number(unlisted, "refused"))));
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
        let others = unlisted.iter().fold(Most::default(), |sum, most| sum.plus(*most));
        Self { lines, others, missed }
    }

    /// Keeps the lines that contain `text`, those with the highest counts first, and at most `most` of them. Of refusals, what is certain counts.
    pub(super) fn select(&mut self, text: &str, is_by_asked: bool, most: usize) {
        self.lines.retain(|line| line.rule.contains(text) || line.descriptor.contains(text));
        self.lines.sort_by_key(|line| {
            let (refused, asked) = (line.refused.least, line.asked.estimate);
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
    /// Returns the line. `unlisted` are the most refusals of what each instance does not list.
    fn line(self, rule: String, descriptor: String, unlisted: &[Most]) -> Line {
        let Self { instances, is_ambiguous } = self;
        let alike = instances.values().map(|listed| listed.alike).max().unwrap_or(1);
        let is_several = is_ambiguous || alike > 1;
        let (mut refused, mut asked, mut single) = (Estimate::default(), Sampled::default(), Most::default());
        for (instance, most) in unlisted.iter().enumerate() {
            let listed = instances.get(&instance);
            let own = listed.copied().unwrap_or_default();
            let missing = match listed {
                _ if is_several => most.of_any_number(),
                Some(_) => Most::default(),
                None => *most,
            };
            refused = refused.plus(own.refused).plus(Estimate { least: 0, most: missing });
            asked = asked.plus(own.asked);
            let own = own.refused.most;
            single = single.plus(if listed.is_some() && !is_several { own } else { own.max(*most) });
        }
        Line { rule, descriptor, refused, asked, alike, single }
    }
}

impl Listed {
    fn add(&mut self, heavy: &Value) {
        let refused = Estimate::of(heavy.get("refused"));
        self.refused = self.refused.plus(refused);
        self.asked = self.asked.plus(Sampled::of(heavy.get("asked"), refused.least));
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

impl Most {
    /// Returns the bound of the sum of any number of descriptors with this bound.
    fn of_any_number(self) -> Self {
        Self(self.0.filter(|most| *most == 0))
    }

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

impl Sampled {
    /// Returns the number in an answer. An instance of an older version sends the estimate as `most`, and each of at least `refused` refusals
    /// was asked.
    fn of(value: Option<&Value>, refused: u64) -> Self {
        let number = |name: &str| value.and_then(|value| number(value, name));
        let least = number("least").unwrap_or(refused);
        let estimate = number("estimate").or_else(|| number("most")).unwrap_or_default();
        Self { least, estimate: estimate.max(least) }
    }

    fn plus(self, other: Self) -> Self {
        Self { least: self.least.saturating_add(other.least), estimate: self.estimate.saturating_add(other.estimate) }
    }

    fn json(self) -> Value {
        json!({ "least": self.least, "most": null, "estimate": self.estimate })
    }
}

impl fmt::Display for Sampled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("about {}", self.estimate))
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
        refused: u64,
        /// Error that the sketch has in the refusals.
        error: u64,
        /// Requests that were not refused.
        admitted: u64,
        is_listed: bool,
    }

    fn known() -> impl Strategy<Value = Known> {
        let numbers = (0_u64..100, 0_u64..10, 0_u64..100, any::<bool>());
        numbers.prop_map(|(refused, error, admitted, is_listed)| Known { refused, error, admitted, is_listed })
    }

    /// Returns the page of an instance, where `alike` descriptors in a row are shown the same. `slack` is added to the least possible bound of
    /// what is not listed; without it, the instance is of a version that does not send the bound.
    fn page(of: &[Known], alike: usize, slack: Option<u64>) -> Value {
        // Some of the error is real.
        let refused = |known: &Known| json!({ "most": known.refused + known.error / 2, "error": known.error });
        let least = |known: &Known| (known.refused + known.error / 2).saturating_sub(known.error);
        let asked = |known: &Known| json!({ "least": least(known), "most": null, "estimate": 16 * known.admitted });
        let listed = of.iter().enumerate().filter(|(_, known)| known.is_listed);
        let shown = |(number, known): (usize, &Known)| {
            let entries = json!([{ "key": "user", "value": (number / alike).to_string(), "is_cut": alike > 1 }]);
            json!({ "rule": "edge.user", "entries": entries, "is_cut": false, "refused": refused(known), "asked": asked(known) })
        };
        let unlisted = of.iter().filter(|known| !known.is_listed).map(|known| known.refused);
        let bound = slack.map(|slack| unlisted.max().unwrap_or_default() + slack);
        let top: Vec<Value> = listed.map(shown).collect();
        json!({ "top": top, "unlisted": { "refused": bound }, "missed": 1 })
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
            let sum = |number: usize| {
                let of = instances.iter().map(|(of, _)| &of[number]);
                of.fold((0, 0), |(refused, asked), one| (refused + one.refused, asked + one.refused + one.admitted))
            };
            let mut others: Vec<usize> = (0..DESCRIPTORS).collect();
            for line in &sums.lines {
                let shown: usize = line.descriptor.strip_prefix("user=").unwrap().parse().unwrap();
                let of_line = shown * alike..(shown + 1) * alike;
                others.retain(|other| !of_line.contains(other));
                let (refused, asked) = of_line.map(sum).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
                let bounds = line.refused;
                prop_assert!(bounds.least <= refused && is_within(refused, bounds.most), "{}: {:?}", refused, bounds);
                prop_assert!(line.asked.least <= asked, "{}: {:?}", asked, line.asked);
            }
            for (refused, _) in others.into_iter().map(sum) {
                prop_assert!(is_within(refused, sums.others), "{:?}", sums.others);
            }
        }
    }

    fn shown(pages: &[Value], most: usize) -> (Vec<String>, String) {
        let mut sums = Sums::of(pages.iter());
        sums.select("", false, most);
        let lines = sums.lines.iter().map(|line| format!("{} {}", line.refused, line.asked)).collect();
        (lines, sums.others.to_string())
    }

    fn counted(refused: u64, admitted: u64, is_listed: bool) -> Known {
        Known { refused, error: 0, admitted, is_listed }
    }

    #[test]
    fn a_sum_has_no_upper_bound_where_an_instance_may_have_more_that_looks_the_same() {
        // Both instances know both addresses of the network, and one of them lists one.
        let whole = page(&[counted(5, 5, true), counted(3, 3, true)], 2, Some(0));
        let part = page(&[counted(5, 5, true), counted(1, 3, false)], 2, Some(0));
        assert_eq!(shown(std::slice::from_ref(&whole), 9), (vec!["8 about 128".into()], "0".into()));
        assert_eq!(shown(&[whole.clone(), part.clone()], 9).0, ["13+ about 208"]);
        // Each of the two has at most what one instance lists, and the bound of the other one.
        assert_eq!(shown(&[whole, part], 0), (vec![], "13".into()));
    }

    #[test]
    fn an_instance_of_an_older_version_makes_a_bound_unknown_and_not_zero() {
        let (listed, missing) = ([counted(5, 5, true)], [counted(7, 7, false)]);
        let [new, old] = [Some(0), None].map(|slack| page(&listed, 1, slack));
        assert_eq!(shown(&[new.clone(), old.clone()], 9), (vec!["10 about 160".into()], "unknown".into()));
        let silent = page(&missing, 1, None);
        assert_eq!(shown(&[new, silent], 9).0, ["5+ about 80"]);
        assert_eq!(Sums::of([old].iter()).lines[0].json()["refused"], json!({ "least": 5, "most": 5 }));
        let mut older = page(&listed, 1, None);
        older["top"][0]["asked"] = json!({ "most": 80, "error": 16 });
        assert_eq!(
            Sums::of([older].iter()).lines[0].json()["asked"],
            json!({ "least": 5, "most": null, "estimate": 80 })
        );
    }

    #[test]
    fn one_instance_that_lists_all_has_exact_refusals_and_estimated_requests() {
        let mut sums = Sums::of([page(&[counted(7, 1, true)], 1, Some(0))].iter());
        sums.select("user=0", false, 20);
        let line = &sums.lines[0];
        assert_eq!((line.refused.to_string(), line.asked.to_string()), ("7".into(), "about 16".into()));
        assert_eq!(line.json()["asked"], json!({ "least": 7, "most": null, "estimate": 16 }));
        assert_eq!(sums.others, Most::default());
        sums.select("user=1", false, 20);
        assert_eq!(sums.lines.len(), 0);
    }
}
