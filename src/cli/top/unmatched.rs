//! Descriptors, domains and keys that no rule matches, over several instances.

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;

use clap::ArgMatches;
use serde_json::Value;

use crate::cli::admin::{self, Ago, Answers, flag, list, number, text};
use crate::cli::most_rows;
use crate::model::counted;

/// Path of what no rule matches.
const PATH: &str = "/v1/unmatched";

pub(super) async fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let answers = admin::ask(matches, PATH, &["shapes", "absent_keys"]).await?;
    answers.name_missing()?;
    let domain = matches.get_one::<String>("domain").map(String::as_str);
    crate::cli::print(&Report::of(&answers, domain, usize::try_from(most_rows(matches))?))?;
    Ok(ExitCode::SUCCESS)
}

/// Sum of the answers.
struct Report {
    shapes: Vec<Shape>,
    left_out: usize,
    /// Requests that were examined and those without a key, by domain and key.
    absent: BTreeMap<(String, String), (u64, u64)>,
    http1: u64,
    missed: u64,
    /// True if these are all descriptors of all instances.
    is_all: bool,
}

/// Descriptors with the same keys.
struct Shape {
    domain: String,
    keys: String,
    nearest: Nearest,
    count: u64,
    /// Milliseconds since the last one.
    ago: u64,
    instances: Vec<String>,
}

/// Relation between a shape and the nearest rule.
struct Nearest {
    rank: Rank,
    /// Kind of the relation, in a word or two.
    word: &'static str,
    text: String,
}

/// Order of the shapes: mistakes come first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// Usually a mistake in the rules or in what is sent.
    Mistake,
    /// No rule is similar, or an instance of a later version says something else.
    Unknown,
    /// Usually intended.
    Intended,
}

impl Report {
    fn of(answers: &Answers, domain: Option<&str>, most: usize) -> Self {
        let mut shapes: BTreeMap<(String, String), Shape> = BTreeMap::new();
        let mut absent: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
        let (mut http1, mut missed) = (0_u64, 0_u64);
        let is_shown = |value: &&Value| domain.is_none_or(|domain| text(value, "domain") == domain);
        let number = |value: &Value, name: &str| number(value, name).unwrap_or_default();
        for (instance, page) in &answers.pages {
            http1 = http1.saturating_add(number(page, "http1_connections"));
            missed = missed.saturating_add(number(page, "missed"));
            let now = number(page, "now_ms");
            for shape in list(page, "shapes").iter().filter(is_shown) {
                let (domain, keys) = (text(shape, "domain"), keys(shape));
                let ago = now.saturating_sub(number(shape, "last_ms"));
                let nearest = Nearest::of(shape.get("nearest"));
                let known = shapes.entry((domain.clone(), keys.clone())).or_insert_with(|| Shape {
                    domain,
                    keys,
                    nearest,
                    count: 0,
                    ago,
                    instances: Vec::new(),
                });
                known.count = known.count.saturating_add(number(shape, "count"));
                known.ago = known.ago.min(ago);
                known.instances.push(instance.clone());
            }
            for key in list(page, "absent_keys").iter().filter(is_shown) {
                let (examined, without) = absent.entry((text(key, "domain"), text(key, "key"))).or_default();
                *examined = examined.saturating_add(number(key, "examined"));
                *without = without.saturating_add(number(key, "without"));
            }
        }
        let mut shapes: Vec<Shape> = shapes.into_values().collect();
        shapes.sort_by_key(|shape| (shape.nearest.rank, std::cmp::Reverse(shape.count)));
        let left_out = shapes.len().saturating_sub(most);
        shapes.truncate(most);
        let is_all = domain.is_none() && missed == 0 && answers.missing.is_empty();
        Self { shapes, left_out, absent, http1, missed, is_all }
    }
}

impl Nearest {
    /// Returns the relation that an instance names.
    fn of(nearest: Option<&Value>) -> Self {
        let Some(nearest) = nearest.filter(|nearest| nearest.is_object()) else {
            return Self { rank: Rank::Unknown, word: "no rule", text: "no similar rule is known".to_owned() };
        };
        let (rank, word) = match &*text(nearest, "kind") {
            "unknown_domain" => (Rank::Mistake, "unknown domain"),
            "other_domain" => (Rank::Mistake, "other domain"),
            "misspelt" => (Rank::Mistake, "other key"),
            "other_order" => (Rank::Mistake, "other order"),
            "too_deep" => (Rank::Mistake, "too many keys"),
            "too_short" => (Rank::Mistake, "missing keys"),
            "other_values" => (Rank::Intended, "other value, usually intended"),
            _ => (Rank::Unknown, "no rule"),
        };
        Self { rank, word, text: text(nearest, "text") }
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.word, self.text)
    }
}

/// Returns the keys of a shape in order.
fn keys(shape: &Value) -> String {
    let keys = list(shape, "keys").iter();
    let mut keys: Vec<String> = keys.map(|key| admin::printable(key.as_str().unwrap_or_default())).collect();
    if flag(shape, "is_cut") {
        keys.push("…".to_owned());
    }
    keys.join(", ")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let are = |is_one| if is_one { "is" } else { "are" };
        for Shape { domain, keys, nearest, count, ago, instances } in &self.shapes {
            let (what, last) = (if keys.is_empty() { "request" } else { "descriptor" }, Ago(*ago));
            let keys = if keys.is_empty() { "any descriptor" } else { keys };
            writeln!(f, "{domain}  {keys}\n  not limited: {}, the last {last} ago", counted(*count, what))?;
            writeln!(f, "  {nearest}\n  at {}", instances.join(", "))?;
            writeln!(f)?;
        }
        if self.shapes.is_empty() && self.is_all {
            writeln!(f, "No unmatched descriptor since the rules were loaded.")?;
        } else if self.shapes.is_empty() {
            writeln!(f, "No such descriptor is known.")?;
        }
        if self.left_out > 0 {
            writeln!(f, "{} more {} not shown: see --most and --domain.", self.left_out, are(self.left_out == 1))?;
        }
        if !self.absent.is_empty() {
            writeln!(f, "Keys of rules that some requests do not send:")?;
        }
        for ((domain, key), (examined, without)) in &self.absent {
            let share = without.saturating_mul(100) / (*examined).max(1);
            writeln!(
                f,
                "  {domain}  {key}  missing in {without} of {} ({share}%)",
                counted(*examined, "examined request")
            )?;
        }
        if self.http1 > 0 {
            writeln!(
                f,
                "Connections that used HTTP/1 on the gRPC port since the start: {}. It needs HTTP/2: in Envoy, set http2_protocol_options for the cluster.",
                self.http1
            )?;
        }
        if self.missed > 0 {
            writeln!(
                f,
                "{} {} not counted: there were too many shapes, or threads used the list at the same time.",
                counted(self.missed, "descriptor"),
                are(self.missed == 1)
            )?;
        }
        Ok(())
    }
}
