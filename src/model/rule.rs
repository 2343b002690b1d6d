//! Description of a rule for answers, metrics and logs.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::FixedState;

/// Dense number of a rule within its rule set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// Free-form metadata of a rule, as in its rule file.
pub type Metadata = serde_json::Map<String, serde_json::Value>;

/// Description of a rule for answers, metrics and logs.
#[derive(Debug)]
pub struct About {
    /// Number in the rule set.
    pub id: RuleId,
    /// Place in the descriptor tree.
    pub path: Arc<Path>,
    /// Message to a client that the rule refuses.
    pub message: Option<Box<str>>,
    /// True if headers, bodies and statuses may expose the rule.
    pub is_exposed: bool,
    /// Free-form metadata for the answer.
    pub metadata: Option<Box<Metadata>>,
    /// Split of its counts in metrics.
    pub series: Series,
}

/// Split of a rule's counts into metric series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Series {
    /// No split: one series for the rule.
    #[default]
    Rule,
    /// One series for each combination of the request's values at the levels with `value_to_metric`.
    Values,
    /// One series for each combination of all values of the request (`detailed_metric`).
    Detailed,
}

/// Path from a domain to a rule, one word for each level: `edge.plan_free.user`, as the reference names rules in metrics. Levels
/// are shared, so that long keys above many rules are stored once.
#[derive(Debug)]
pub struct Path {
    above: Option<Arc<Path>>,
    word: String,
    /// Number of bytes at the beginning of the word that are the key.
    key: usize,
    shown: Shown,
    /// Hash of all levels.
    digest: u64,
}

/// Prefix of the first word of an overlay's rules: `edge.overlay+user`. The source may have a rule at the same place.
const OVERLAY: &str = "overlay+";

/// Text of a level in metrics, if its rule asks for values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// The word, unless the rule asks for all values.
    #[default]
    Word,
    /// The request's value.
    Value,
    /// Always the word: the level's values share a counter.
    Pattern,
}

impl Path {
    /// Returns the path of a domain.
    pub fn of_domain(domain: &str) -> Self {
        Self::level(None, domain.to_owned(), domain.len(), Shown::Pattern)
    }

    /// Returns the path of a level below `above`. `value` is the text for the value of the level, if any.
    pub fn below(above: &Arc<Self>, key: &str, value: Option<&str>, shown: Shown) -> Self {
        let word = value.map_or_else(|| key.to_owned(), |value| format!("{key}_{value}"));
        Self::level(Some(Arc::clone(above)), word, key.len(), shown)
    }

    fn level(above: Option<Arc<Self>>, word: String, key: usize, shown: Shown) -> Self {
        let digest = FixedState::default().hash_one((above.as_ref().map(|above| above.digest), &word, key));
        Self { above, word, key, shown, digest }
    }

    /// Returns the path of a first level in an overlay. `domain` is the path of its domain.
    pub fn in_overlay(domain: &Arc<Self>, key: &str, value: Option<&str>, shown: Shown) -> Self {
        Self::below(domain, &format!("{OVERLAY}{key}"), value, shown)
    }

    /// Returns true for the path of a domain.
    pub fn is_domain(&self) -> bool {
        self.above.is_none()
    }

    /// Returns the levels from the outside in: the domain, then one for each entry.
    pub fn levels(&self) -> Vec<&Self> {
        let mut levels = self.above.as_ref().map(|above| above.levels()).unwrap_or_default();
        levels.push(self);
        levels
    }

    /// Returns the word of the last level: `plan_free`.
    pub fn word(&self) -> &str {
        &self.word
    }

    /// Returns the key of the last level: `plan`.
    pub fn key(&self) -> &str {
        self.word.get(..self.key).unwrap_or_default()
    }

    /// Returns a hash of all levels. It is the same for an equal path of another load of the rules in this process.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Returns the text of the last level in metrics.
    pub fn shown(&self) -> Shown {
        self.shown
    }

    /// Returns the keys of the entries that lead to the rule, the last one first; nothing for a domain.
    pub fn entry_keys(&self) -> impl Iterator<Item = &str> {
        let levels = std::iter::successors(Some(self), |path| path.above.as_deref());
        levels.filter(|path| !path.is_domain()).map(|path| path.key().strip_prefix(OVERLAY).unwrap_or(path.key()))
    }

    /// Returns the keys alone, from the outside in: `plan.user`; empty for a domain.
    pub fn keys(&self) -> String {
        let mut keys: Vec<_> = self.entry_keys().collect();
        keys.reverse();
        keys.join(".")
    }

    /// Returns the name of the domain.
    pub fn domain(&self) -> &str {
        self.above.as_ref().map_or(&self.word, |above| above.domain())
    }
}

/// Writes the words of all levels: `edge.plan_free.user`.
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(above) = &self.above {
            write!(f, "{above}.")?;
        }
        f.write_str(&self.word)
    }
}
