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
}

/// The way from a domain to a rule, one word a level: `edge.plan_free.user`, as the reference names rules in metrics. Levels are
/// shared, so that long keys above many rules are held once.
#[derive(Debug)]
pub struct Path {
    above: Option<Arc<Path>>,
    word: String,
    /// How many bytes of the word are the key.
    key: usize,
}

impl Path {
    /// The way to a domain.
    pub fn of_domain(domain: &str) -> Self {
        Self { above: None, word: domain.to_owned(), key: domain.len() }
    }

    /// The way to a level below `above`, by its key and what stands for its value, if anything does.
    pub fn below(above: &Arc<Self>, key: &str, value: Option<&str>) -> Self {
        let word = value.map_or_else(|| key.to_owned(), |value| format!("{key}_{value}"));
        Self { above: Some(Arc::clone(above)), word, key: key.len() }
    }

    /// The keys alone, from the outside in: `plan.user`; empty for a domain.
    pub fn keys(&self) -> String {
        let Some(above) = &self.above else { return String::new() };
        let key = self.word.get(..self.key).unwrap_or_default();
        let mut keys = above.keys();
        if !keys.is_empty() {
            keys.push('.');
        }
        keys.push_str(key);
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
