//! What answers and records say of a rule.

use std::fmt;
use std::sync::Arc;

use super::decision::Metadata;

/// The dense number of a rule within its rule set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// What answers and records say of a rule.
#[derive(Debug)]
pub struct About {
    /// Its number in the rule set.
    pub id: RuleId,
    /// Where it stands.
    pub path: Arc<Path>,
    /// What a client that it refuses is told.
    pub message: Option<Box<str>>,
    /// Whether headers, bodies and statuses may tell of it.
    pub is_exposed: bool,
    /// Free-form, for the answer.
    pub metadata: Option<Box<Metadata>>,
    /// What its counts are kept apart by in metrics.
    pub series: Series,
}

/// What a rule's counts are kept apart by in metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Series {
    /// Nothing: one series for the rule.
    #[default]
    Rule,
    /// The request's values at the levels that say so (`value_to_metric`).
    Values,
    /// All values of the request (`detailed_metric`).
    Detailed,
}

/// The way from a domain to a rule, one word a level: `edge.plan_free.user`, as the reference names rules in metrics. Levels are
/// shared, so that long keys above many rules are held once.
#[derive(Debug)]
pub struct Path {
    above: Option<Arc<Path>>,
    word: String,
    /// How many bytes of the word are the key.
    key: usize,
    shown: Shown,
}

/// What metrics show of a level, where its rule asks for values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// The word, unless the rule asks for all values.
    #[default]
    Word,
    /// The request's value.
    Value,
    /// The word whatever the rule asks for: the level's values share a counter.
    Pattern,
}

impl Path {
    /// The way to a domain.
    pub fn of_domain(domain: &str) -> Self {
        Self { above: None, word: domain.to_owned(), key: domain.len(), shown: Shown::Pattern }
    }

    /// The way to a level below `above`, by its key and what stands for its value, if anything does.
    pub fn below(above: &Arc<Self>, key: &str, value: Option<&str>, shown: Shown) -> Self {
        let word = value.map_or_else(|| key.to_owned(), |value| format!("{key}_{value}"));
        Self { above: Some(Arc::clone(above)), word, key: key.len(), shown }
    }

    /// Its levels from the outside in: the domain, then one for each entry.
    pub fn levels(&self) -> Vec<&Self> {
        let mut levels = self.above.as_ref().map(|above| above.levels()).unwrap_or_default();
        levels.push(self);
        levels
    }

    /// The last level's word: `plan_free`.
    pub fn word(&self) -> &str {
        &self.word
    }

    /// The last level's key: `plan`.
    pub fn key(&self) -> &str {
        self.word.get(..self.key).unwrap_or_default()
    }

    /// What metrics show of the last level.
    pub fn shown(&self) -> Shown {
        self.shown
    }

    /// The keys alone, from the outside in: `plan.user`; empty for a domain.
    pub fn keys(&self) -> String {
        let Some(above) = &self.above else { return String::new() };
        let mut keys = above.keys();
        if !keys.is_empty() {
            keys.push('.');
        }
        keys.push_str(self.key());
        keys
    }
}

/// `edge.plan_free.user`
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(above) = &self.above {
            write!(f, "{above}.")?;
        }
        f.write_str(&self.word)
    }
}
