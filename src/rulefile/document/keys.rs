//! The keys of a rule file, their places, and suggestions for mistyped words.

pub(crate) use crate::rules::spelling::nearest;

/// A kind of mapping in a rule file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The file itself.
    File,
    /// An item of `descriptors`.
    Descriptor,
    /// `rate_limit`.
    Limit,
    /// An item of `rate_limits`, with the keys of [`Level::Limit`] and more.
    ListedLimit,
    /// An item of `known_good`.
    KnownGood,
    /// `requests`.
    Requests,
    /// An entry of a descriptor in `requests`.
    RequestEntry,
    /// An item of `from` in such an entry.
    RequestPart,
    /// `missing` of such an entry.
    Missing,
    /// An item of `replaces`.
    Replaced,
    /// A value in `entries`.
    Normalizer,
    /// `delay`.
    Delay,
    /// `lease`.
    Lease,
    /// The file of an overlay.
    Overlay,
    /// An item of `apply`.
    Apply,
    /// `match` in an item of `apply`.
    Match,
    /// `limit` in an item of `apply`.
    Fields,
    /// The file of callers.
    Callers,
    /// An item of `callers`.
    Caller,
    /// The file of test cases.
    Cases,
    /// An item of `cases`.
    Case,
    /// An item of `steps`.
    Step,
    /// `expect` of a step.
    Expect,
    /// An item of `descriptors` in `expect`.
    ExpectedDescriptor,
}

/// A kind of file. A key means something in its own kind only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Rules,
    Callers,
    Cases,
}

/// A key and its place.
#[derive(Debug)]
pub(crate) struct Key {
    /// The key as written.
    pub(crate) name: &'static str,
    levels: &'static [Level],
    /// True for keys of the reference, which ignores them in a wrong place of a rule file. Our own keys in a wrong place are an error.
    pub(crate) is_of_reference: bool,
}

static KEYS: [Key; 94] = [
    own("empty_overlay", &[Level::Overlay]),
    own("overlay", &[Level::Overlay]),
    own("apply", &[Level::Overlay]),
    own("match", &[Level::Apply]),
    own("limit", &[Level::Apply]),
    own("path", &[Level::Match]),
    own("unsafe_index", &[Level::Match]),
    of_reference("domain", &[Level::File]),
    own("charging", &[Level::File, Level::Descriptor, Level::Overlay, Level::Apply, Level::Fields]),
    own("on_store_failure", &[Level::File, Level::Descriptor, Level::Overlay, Level::Apply, Level::Fields]),
    own("on_store_overload", &[Level::File, Level::Descriptor, Level::Overlay, Level::Apply, Level::Fields]),
    own("remember_refusals", &[Level::Descriptor, Level::Apply, Level::Fields]),
    own("lease", &[Level::File, Level::Descriptor, Level::Limit, Level::Overlay, Level::Fields]),
    own("share", &[Level::Lease]),
    own("ttl", &[Level::Lease]),
    own("colocate", &[Level::File]),
    own("entries", &[Level::File, Level::Overlay]),
    own("known_good", &[Level::File]),
    own("requests", &[Level::File]),
    own("from_gateway", &[Level::Requests]),
    own("trusted_proxies", &[Level::Requests]),
    own("refusal_status", &[Level::Requests]),
    own("timeout", &[Level::Requests]),
    own("escaped_slashes", &[Level::Requests]),
    own("from", &[Level::RequestEntry]),
    own("missing", &[Level::RequestEntry]),
    own("header", &[Level::RequestPart]),
    own("as", &[Level::Normalizer, Level::RequestPart]),
    own("v4_prefix", &[Level::Normalizer]),
    own("v6_prefix", &[Level::Normalizer]),
    own("not_an_address", &[Level::Normalizer]),
    own("case", &[Level::Normalizer]),
    own("sensitive", &[Level::Normalizer]),
    of_reference("descriptors", &[Level::File, Level::Descriptor, Level::Overlay, Level::Requests]),
    of_reference("key", &[Level::Descriptor, Level::KnownGood, Level::RequestEntry]),
    of_reference("value", &[Level::Descriptor, Level::KnownGood, Level::RequestEntry, Level::Missing]),
    own("values", &[Level::Descriptor, Level::KnownGood]),
    own("cidr", &[Level::Descriptor, Level::KnownGood]),
    own("values_file", &[Level::Descriptor, Level::KnownGood]),
    own("deny", &[Level::Descriptor]),
    own("exempt", &[Level::Descriptor]),
    own("replace", &[Level::Descriptor]),
    own("request_cost", &[Level::Descriptor, Level::Apply]),
    own("message", &[Level::Descriptor, Level::Apply]),
    own("expose", &[Level::Descriptor, Level::Apply]),
    of_reference("rate_limit", &[Level::Descriptor]),
    own("rate_limits", &[Level::Descriptor]),
    of_reference("shadow_mode", &[Level::Descriptor, Level::ListedLimit]),
    of_reference("quota_mode", &[Level::Descriptor]),
    of_reference("detailed_metric", &[Level::Descriptor]),
    of_reference("value_to_metric", &[Level::Descriptor]),
    of_reference("share_threshold", &[Level::Descriptor]),
    of_reference("metadata", &[Level::Descriptor, Level::Match]),
    of_reference("unit", &[Level::Limit, Level::Match]),
    own("unit_multiplier", &[Level::Limit, Level::Fields]),
    own("window", &[Level::Limit, Level::Fields]),
    of_reference("requests_per_unit", &[Level::Limit, Level::Match]),
    own("burst", &[Level::Limit, Level::Fields]),
    own("algorithm", &[Level::Limit, Level::Fields]),
    own("count_refused", &[Level::Limit, Level::Fields]),
    own("refuse_peek_at_limit", &[Level::Limit, Level::Fields]),
    own("cost", &[Level::Limit, Level::Fields]),
    own("warn_at", &[Level::Limit, Level::Fields]),
    own("delay", &[Level::Limit, Level::Fields]),
    own("max", &[Level::Delay]),
    own("step", &[Level::Delay]),
    own("beyond", &[Level::Delay]),
    own("delivery", &[Level::Delay]),
    of_reference("unlimited", &[Level::Limit]),
    of_reference("name", &[Level::Limit, Level::Replaced, Level::Match, Level::RequestEntry]),
    of_reference("replaces", &[Level::Limit]),
    own("callers", &[Level::Callers]),
    own("names", &[Level::Caller]),
    own("domains", &[Level::Caller]),
    own("rights", &[Level::Caller]),
    own("rules", &[Level::Cases]),
    own("cases", &[Level::Cases]),
    own("domain", &[Level::Cases, Level::Case, Level::Step]),
    own("name", &[Level::Case]),
    own("steps", &[Level::Case]),
    own("at", &[Level::Step]),
    own("after", &[Level::Step]),
    own("descriptors", &[Level::Step, Level::Expect]),
    own("hits", &[Level::Step]),
    own("limit", &[Level::Step, Level::Expect, Level::ExpectedDescriptor]),
    own("times", &[Level::Step]),
    own("expect", &[Level::Step]),
    own("admitted", &[Level::Expect]),
    own("code", &[Level::Expect, Level::ExpectedDescriptor]),
    own("rule", &[Level::Expect, Level::ExpectedDescriptor]),
    own("remaining", &[Level::Expect, Level::ExpectedDescriptor]),
    own("retry_after", &[Level::Expect, Level::ExpectedDescriptor]),
    own("reset_after", &[Level::Expect, Level::ExpectedDescriptor]),
    own("delay", &[Level::Expect]),
];

impl Level {
    /// Returns the level's place as the end of a sentence, as in `` `x` has no effect ... ``.
    pub(crate) const fn inside(self) -> &'static str {
        match self {
            Self::File => "at the top of the file",
            Self::Descriptor => "in a descriptor",
            Self::Limit => "inside `rate_limit`",
            Self::ListedLimit => "in an item of `rate_limits`",
            Self::KnownGood => "in an item of `known_good`",
            Self::Requests => "inside `requests`",
            Self::RequestEntry => "in an entry of `requests`",
            Self::RequestPart => "in an item of `from`",
            Self::Missing => "inside `missing`",
            Self::Replaced => "inside `replaces`",
            Self::Normalizer => "inside an item of `entries`",
            Self::Delay => "inside `delay`",
            Self::Lease => "inside `lease`",
            Self::Overlay => "at the top of an overlay",
            Self::Apply => "inside an item of `apply`",
            Self::Match => "inside `match`",
            Self::Fields => "inside `limit` of an overlay",
            Self::Callers => "at the top of a file of callers",
            Self::Caller => "in an item of `callers`",
            Self::Cases => "at the top of a file of test cases",
            Self::Case => "in an item of `cases`",
            Self::Step => "in an item of `steps`",
            Self::Expect => "inside `expect`",
            Self::ExpectedDescriptor => "in an item of `descriptors` inside `expect`",
        }
    }

    /// Returns true for the levels of an overlay, which the reference does not have.
    pub(crate) const fn is_of_overlay(self) -> bool {
        matches!(self, Self::Overlay | Self::Apply | Self::Match | Self::Fields)
    }

    /// Returns the kind of file that has this level.
    const fn file_kind(self) -> FileKind {
        match self {
            Self::Callers | Self::Caller => FileKind::Callers,
            Self::Cases | Self::Case | Self::Step | Self::Expect | Self::ExpectedDescriptor => FileKind::Cases,
            _ => FileKind::Rules,
        }
    }

    /// Returns the keys that belong at this level.
    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> + Clone {
        KEYS.iter().filter(move |key| key.belongs(self)).map(|key| key.name)
    }
}

impl Key {
    /// Returns the key named `name`, of the kind of file to which `level` belongs.
    pub(crate) fn find(name: &str, level: Level) -> Option<&'static Self> {
        let is_of_file = |key: &&Self| key.levels.iter().any(|other| other.file_kind() == level.file_kind());
        KEYS.iter().filter(is_of_file).find(|key| key.name == name)
    }

    /// Returns true if the key belongs at `level`.
    pub(crate) fn belongs(&self, level: Level) -> bool {
        self.levels.contains(&level) || (level == Level::ListedLimit && self.belongs(Level::Limit))
    }

    /// Returns advice where the key belongs, for one that was found at `level`.
    pub(crate) fn advice(&self, level: Level) -> String {
        match level {
            Level::File if self.name == "name" => {
                "the rules are chosen by `domain`, and only a limit has a name, so remove it".to_owned()
            }
            Level::File if self.name == "rate_limits" => {
                "`actions` of Envoy stay in Envoy's configuration; here, write an item with `key` for each entry that they send, and the limits inside it".to_owned()
            }
            Level::Descriptor if self.name == "entries" => {
                "a descriptor has one entry, `key` and `value`; for a second entry, write an item in `descriptors` below it".to_owned()
            }
            Level::Overlay if self.name == "domain" => "write `overlay: NAME` in its place".to_owned(),
            Level::Overlay | Level::Apply if self.belongs(Level::Fields) => {
                "write it inside `limit` of an item of `apply`".to_owned()
            }
            Level::Fields if self.belongs(Level::Apply) => "write it beside `limit`".to_owned(),
            Level::Fields if self.belongs(Level::Limit) => {
                "the source of the rules decides it; for a limit of your own, add a rule to `descriptors` of the overlay"
                    .to_owned()
            }
            _ => format!("write it {}", self.home()),
        }
    }

    /// Returns the key's place as the end of a sentence that begins with `write it`.
    fn home(&self) -> &'static str {
        match self.levels {
            [Level::File, Level::Descriptor, ..] => "at the top of the file or in a descriptor",
            [Level::Descriptor, ..] if self.name == "key" => "in an item of `descriptors`",
            [Level::Descriptor, ..] => "in a descriptor, beside `key`",
            [level, ..] => level.inside(),
            [] => "",
        }
    }
}

const fn of_reference(name: &'static str, levels: &'static [Level]) -> Key {
    Key { name, levels, is_of_reference: true }
}

const fn own(name: &'static str, levels: &'static [Level]) -> Key {
    Key { name, levels, is_of_reference: false }
}

/// Words of other programs for what a key says here, with advice.
const OF_OTHERS: [(&[&str], &str); 4] = [
    (
        &["burst_limit", "burst_size", "max_burst", "burstlimit", "burstsize", "maxburst"],
        "write `burst: N` inside `rate_limit`, beside an `algorithm` that has a burst (`token_bucket`, `leaky_bucket` or `gcra`)",
    ),
    (
        &["actions"],
        "`actions` stay in Envoy's configuration; here, write an item with `key` for each entry that they send",
    ),
    (&["period", "per", "interval", "time_unit", "timeunit"], "write `unit` or `window`"),
    (&["max", "count", "quota", "requests_per_second"], "write `unit` or `window`, and `requests_per_unit`"),
];

/// Returns advice for an unknown key at `level`.
pub(crate) fn key_advice(word: &str, level: Level) -> String {
    let lower = word.to_ascii_lowercase().replace('-', "_");
    let is_of_rules = matches!(level, Level::File | Level::Descriptor | Level::Limit | Level::ListedLimit);
    match OF_OTHERS.iter().find(|(words, _)| is_of_rules && words.contains(&lower.as_str())) {
        Some((_, advice)) => format!("{advice}."),
        // Only the rules of an overlay may have `replace`.
        None => advice(word, level.names().filter(|name| level != Level::Descriptor || *name != "replace")),
    }
}

/// Returns advice for an unknown word: the nearest known word, or all of them.
pub(crate) fn advice<'a>(word: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(word, known.clone()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.clone().nth(1).is_none() => {
            format!("write {}.", known.map(|word| format!("`{word}`")).collect::<String>())
        }
        None => format!("write one of {}.", known.map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Key, Level, advice, nearest};

    #[test]
    fn a_mistyped_key_has_a_nearest_one() {
        let near = |word, level: Level| nearest(word, level.names());
        assert_eq!(near("ratelimit", Level::Descriptor), Some("rate_limit"));
        assert_eq!(near("rate-limits", Level::Descriptor), Some("rate_limits"));
        assert_eq!(near("requestsPerUnit", Level::Limit), Some("requests_per_unit"));
        assert_eq!(near("requests", Level::Limit), Some("requests_per_unit"));
        assert_eq!(near("burts", Level::Limit), Some("burst"));
        assert_eq!(near("Unit", Level::Limit), Some("unit"));
        assert_eq!(near("shadow", Level::Descriptor), Some("shadow_mode"));
        assert_eq!(near("version", Level::File), None);
        assert_eq!(near("burst", Level::File), None);
        assert_eq!(near("x", Level::Limit), None);
        assert_eq!(near("", Level::Limit), None);
        assert_eq!(near(&"k".repeat(10_000), Level::Limit), None);
    }

    #[test]
    fn a_far_word_is_answered_with_all_of_them() {
        assert_eq!(advice("foo", ["each", "all_or_nothing"].into_iter()), "write one of `each`, `all_or_nothing`.");
        assert_eq!(advice("eech", ["each", "all_or_nothing"].into_iter()), "did you mean `each`?");
    }

    #[test]
    fn every_key_has_a_home() {
        for level in [
            Level::File,
            Level::Descriptor,
            Level::Limit,
            Level::Replaced,
            Level::Normalizer,
            Level::Delay,
            Level::Callers,
            Level::Caller,
            Level::Cases,
            Level::Case,
            Level::Step,
            Level::Expect,
            Level::ExpectedDescriptor,
        ] {
            for name in level.names() {
                let key = Key::find(name, level).unwrap();
                assert!(key.belongs(level) && !key.home().is_empty(), "{name}");
            }
        }
    }

    #[test]
    fn the_sixteen_keys_of_the_reference_are_known() {
        let count = super::KEYS.iter().filter(|key| key.is_of_reference).count();
        assert_eq!(count, 16);
    }
}
