//! A rule file as written: YAML read into documents, with the place of everything that can be wrong.

use std::sync::Arc;

use super::problem::{Place, Placed, Problem, Report};
use super::yaml;
use crate::algorithm::Algorithm;
use crate::model::{Charging, Colocation, Delivery, FailurePolicy, Metadata, Micros};

mod keys;
mod reader;

/// One rule file as written.
#[derive(Clone, Debug)]
pub struct Document {
    /// The name of the file.
    pub file: Arc<str>,
    /// The domain; never empty.
    pub domain: Placed<String>,
    /// How requests of the domain are charged.
    pub charging: Option<Charging>,
    /// The policy that answers while the store cannot be asked.
    pub on_store_failure: Option<FailurePolicy>,
    /// The policy that answers while the store is overloaded.
    pub on_store_overload: Option<FailurePolicy>,
    /// Which counters of the domain share a slot.
    pub colocate: Option<Colocation>,
    /// How the values of some entries are read.
    pub entries: Vec<ReadingNode>,
    /// The descriptor tree.
    pub descriptors: Vec<DescriptorNode>,
}

/// What `entries` says of one key, as written.
#[derive(Clone, Debug)]
pub struct ReadingNode {
    /// The key.
    pub key: Placed<String>,
    /// What its values are.
    pub form: Option<FormWord>,
    /// How many bits of an IPv4 address count.
    pub v4_prefix: Option<Placed<u32>>,
    /// How many bits of an IPv6 address count.
    pub v6_prefix: Option<Placed<u32>>,
    /// Whether upper and lower case are the same.
    pub is_lower: bool,
    /// Where `sensitive: true` stands, if it does.
    pub sensitive: Option<Place>,
}

/// What the values of an entry are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormWord {
    /// Addresses.
    Ip,
    /// Paths of URLs.
    Path,
}

impl FormWord {
    /// Each, with its word in a rule file.
    pub const ALL: [(&'static str, Self); 2] = [("ip", Self::Ip), ("path", Self::Path)];
}

/// One item of a `descriptors` list as written.
#[derive(Clone, Debug)]
pub struct DescriptorNode {
    /// Where the item begins.
    pub place: Place,
    /// Its key; `None` when missing or empty, which `compile` refuses.
    pub key: Option<Placed<String>>,
    /// Its value; `None` when missing, null or empty: any value.
    pub value: Option<Placed<String>>,
    /// The lists in place of a value, if it has any.
    pub among: Option<Box<AmongNode>>,
    /// Where `deny: true` stands, if it does.
    pub deny: Option<Place>,
    /// Where `exempt: true` stands, if it does.
    pub exempt: Option<Place>,
    /// What the hits of every limit of the request are multiplied by.
    pub request_cost: Option<Placed<u32>>,
    /// What a client is told that it refuses.
    pub message: Option<Placed<String>>,
    /// Where `expose: false` stands, if it does.
    pub quiet: Option<Place>,
    /// What it limits: nothing, nothing at all, or some quotas.
    pub limits: LimitsNode,
    /// Whether a refusal is only watched.
    pub shadow_mode: bool,
    /// Whether its refusal counts only together with those of all other quotas of the request.
    pub quota_mode: bool,
    /// Whether metrics carry all keys and values of the request.
    pub detailed_metric: bool,
    /// Whether metrics carry the value of this entry.
    pub value_to_metric: bool,
    /// Where `share_threshold: true` stands, if it does.
    pub share_threshold: Option<Place>,
    /// Free-form metadata for the answer.
    pub metadata: Option<Metadata>,
    /// How requests are charged, for this rule and those below it.
    pub charging: Option<Charging>,
    /// The policy that answers while the store cannot be asked, for this rule and those below it.
    pub on_store_failure: Option<FailurePolicy>,
    /// The policy that answers while the store is overloaded, for this rule and those below it.
    pub on_store_overload: Option<FailurePolicy>,
    /// True if this instance remembers refusals of this rule and of those below it.
    pub remember_refusals: Option<bool>,
    /// The items below.
    pub descriptors: Vec<DescriptorNode>,
}

/// The values of an item that has many, as written.
#[derive(Clone, Debug, Default)]
pub struct AmongNode {
    /// Networks.
    pub cidr: Vec<Placed<String>>,
    /// Addresses, networks or texts.
    pub values: Vec<Placed<String>>,
    /// A file of as many lines.
    pub file: Option<Placed<String>>,
}

/// The `rate_limit` or `rate_limits` of an item.
#[derive(Clone, Debug)]
pub enum LimitsNode {
    /// Neither, or null.
    None,
    /// `unlimited: true`.
    Unlimited(Box<LimitNode>),
    /// One (`rate_limit`) or several (`rate_limits`).
    Limited(Vec<LimitNode>),
}

/// One limit as written.
#[derive(Clone, Debug)]
pub struct LimitNode {
    /// Where it begins.
    pub place: Place,
    /// The unit's word as written; not yet known to be one.
    pub unit: Option<Placed<String>>,
    /// How many units make the window.
    pub unit_multiplier: Option<Placed<u32>>,
    /// The window's length, in place of a unit.
    pub window: Option<Placed<Micros>>,
    /// Hits per window; 0 when missing, as in the reference.
    pub requests_per_unit: u32,
    /// The most hits at once.
    pub burst: Option<Placed<u32>>,
    /// How hits are counted.
    pub algorithm: Option<Placed<Algorithm>>,
    /// Whether refused charges are recorded too.
    pub count_refused: bool,
    /// What a hit takes from its counter.
    pub cost: Option<Placed<u32>>,
    /// Of how much used, in percent, the caller is warned.
    pub warn_at: Option<Placed<u8>>,
    /// Waiting in place of a refusal.
    pub delay: Option<Box<DelayNode>>,
    /// Its name, never empty.
    pub name: Option<Placed<String>>,
    /// Names of the limits it takes the place of; an item without a name is an empty text.
    pub replaces: Vec<Placed<String>>,
}

/// A `delay` as written.
#[derive(Clone, Debug)]
pub struct DelayNode {
    /// Where it begins.
    pub place: Place,
    /// The longest wait.
    pub max: Option<Placed<Micros>>,
    /// The wait for each hit over the limit.
    pub step: Option<Placed<Micros>>,
    /// Where `beyond: admit` stands, if it does.
    pub beyond: Option<Place>,
    /// Who makes the request wait.
    pub delivery: Option<Delivery>,
}

/// The most bytes a rule file may have: 32 MiB. 100,000 rules take 8 MiB; the rest is room for comments.
pub const MAX_FILE_BYTES: usize = 32 << 20;

/// Reads one rule file. Every problem found goes to `problems`, in the order of the file. Without an error among them there
/// is a document; with one there may be, of what is right, to be looked at and not to be enforced.
pub fn read(file: &Arc<str>, text: &[u8], problems: &mut Vec<Problem>) -> Option<Document> {
    let mut report = Report::new(file);
    let text = decode(text, &mut report);
    let tree = if report.has_error() { None } else { yaml::parse(text, &mut report) };
    let document = tree.and_then(|tree| reader::read(file, &tree, &mut report));
    report.finish(text, problems);
    document
}

/// The text of a file without its byte order mark; up to the first byte that is not UTF-8, which is an error.
fn decode<'t>(bytes: &'t [u8], report: &mut Report) -> &'t str {
    if bytes.len() > MAX_FILE_BYTES {
        report.error(Place { line: 1, column: 1 }, || {
            format!(
                "The file is too large: it has {} bytes, and at most {MAX_FILE_BYTES} are read. Write fewer rules.",
                bytes.len()
            )
        });
        return "";
    }
    let mut chunks = bytes.utf8_chunks();
    let (text, is_whole) = chunks.next().map_or(("", true), |chunk| (chunk.valid(), chunk.invalid().is_empty()));
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if !is_whole {
        report.error(end_of(text), || {
            let advice = match bytes {
                [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "it looks like UTF-16; save it as UTF-8",
                _ => "save the file as UTF-8",
            };
            format!("Here is a byte that is not UTF-8: {advice}.")
        });
    }
    text
}

/// The place behind the last character.
fn end_of(text: &str) -> Place {
    let normal = text.replace("\r\n", "\n");
    let mut lines = normal.split(['\n', '\r']);
    let last = lines.next_back().unwrap_or_default();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1);
    Place { line: count(lines.count()), column: count(last.chars().count()) }
}

#[cfg(test)]
mod tests;
