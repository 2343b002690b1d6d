//! Documents: a rule file as written in YAML, with the place of each value that `compile` may report.

use std::sync::Arc;

use http::HeaderName;

use super::problem::{Placed, Problem, Report};
use super::yaml;
use crate::algorithm::Algorithm;
use crate::model::{Charging, Colocation, Delivery, FailurePolicy, Leasing, Metadata, Micros, Rights};
use crate::rules::changes::Changes;
use crate::rules::requests::{Gateway, Missing, has_address};
use crate::rules::tree::Position;

pub(super) mod cases;
mod keys;
mod reader;

/// One rule file as written.
#[derive(Clone, Debug)]
pub struct Document {
    /// File name.
    pub file: Arc<str>,
    /// Domain; never empty.
    pub domain: Placed<String>,
    /// Charging mode of the domain.
    pub charging: Option<Placed<Charging>>,
    /// Policy that answers while the store is unavailable.
    pub on_store_failure: Option<Placed<FailurePolicy>>,
    /// Policy that answers while the store is overloaded.
    pub on_store_overload: Option<Placed<FailurePolicy>>,
    /// Leases of the domain.
    pub lease: Option<Placed<Leasing>>,
    /// Counters of the domain that share a Redis cluster slot.
    pub colocate: Option<Colocation>,
    /// Normalisation of the values of some entries.
    pub entries: Vec<EntryNode>,
    /// Descriptor tree.
    pub descriptors: Vec<DescriptorNode>,
    /// Entries of callers whose refusals are mistakes: items with a key and values, and nothing else.
    pub known_good: Vec<DescriptorNode>,
    /// Reading of plain HTTP requests.
    pub requests: Option<Box<RequestsNode>>,
    /// The items of `apply` in an overlay, whose `domain` is a pattern; `None` in a rule file.
    pub overlay: Option<Vec<ApplyNode>>,
}

/// `requests` of a domain, as written.
#[derive(Clone, Debug)]
pub struct RequestsNode {
    /// Position of `requests`.
    pub place: Position,
    /// The gateway that asks.
    pub from_gateway: Option<Placed<Gateway>>,
    /// Addresses that may ask.
    pub trusted_proxies: Vec<Placed<String>>,
    /// True if paths may have escaped slashes.
    pub keeps_escaped_slashes: bool,
    /// Status of a refusal.
    pub refusal_status: Option<Placed<u32>>,
    /// Time that the gateway waits for an answer.
    pub timeout: Option<Placed<Micros>>,
    /// Position of `descriptors`, if it is written, and the entries of each descriptor.
    pub descriptors: Option<(Position, Vec<Vec<RequestEntryNode>>)>,
}

/// An entry of a descriptor in `requests`, as written.
#[derive(Clone, Debug)]
pub struct RequestEntryNode {
    /// Position of the entry's first character.
    pub place: Position,
    /// Key.
    pub key: Option<Placed<String>>,
    /// Parts of the request: the value comes from the first that it has.
    pub from: Vec<PartNode>,
    /// Name of the header, if `from` is the word `header`.
    pub name: Option<Placed<String>>,
    /// Value that is always the same.
    pub value: Option<Placed<String>>,
    /// Consequence of a missing header.
    pub missing: Option<Placed<Missing>>,
}

/// An item of `from`, as written.
#[derive(Clone, Debug)]
pub struct PartNode {
    /// Position of the item's first character.
    pub place: Position,
    /// Part of the request.
    pub part: RequestPart,
    /// Name of the header, if the item stands in a list.
    pub header: Option<Placed<String>>,
    /// True if the header has the client's address (`as: ip`).
    pub is_address: bool,
}

impl PartNode {
    /// Returns true if the item is the client's address or a header with it. `name` is the name of the header beside `from`.
    pub fn is_address(&self, name: Option<&Placed<String>>) -> bool {
        let name = || self.header.as_ref().or(name).and_then(|name| HeaderName::from_bytes(name.value.as_bytes()).ok());
        match self.part {
            RequestPart::ClientIp => true,
            RequestPart::Header => self.is_address || name().as_ref().is_some_and(has_address),
            RequestPart::Path | RequestPart::Method => false,
        }
    }
}

impl RequestsNode {
    /// Returns the keys of the entries whose values are addresses and nothing else.
    pub fn address_keys(&self) -> impl Iterator<Item = &str> {
        let entries = self.descriptors.iter().flat_map(|(_, descriptors)| descriptors).flatten();
        let is_address = |entry: &&RequestEntryNode| {
            !entry.from.is_empty() && entry.from.iter().all(|part| part.is_address(entry.name.as_ref()))
        };
        entries.filter(is_address).filter_map(|entry| entry.key.as_ref()).map(|key| key.value.as_str())
    }
}

/// Part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPart {
    /// The client's address.
    ClientIp,
    /// The path.
    Path,
    /// The method.
    Method,
    /// A header.
    Header,
}

impl RequestPart {
    /// Every part with its word in a rule file.
    pub const ALL: [(&'static str, Self); 4] =
        [("client_ip", Self::ClientIp), ("path", Self::Path), ("method", Self::Method), ("header", Self::Header)];
}

/// One item of `apply` in an overlay, as written.
#[derive(Clone, Debug)]
pub struct ApplyNode {
    /// Position of the item's first character.
    pub place: Position,
    /// The limits that the item changes.
    pub target: MatchNode,
    /// Fields of the limits that the item sets.
    pub limit: LimitNode,
    /// Fields of the rules that the item sets.
    pub rule: DescriptorNode,
    /// Place of each field, by its name.
    pub places: Vec<(&'static str, Position)>,
}

impl ApplyNode {
    /// Returns the place of a field; that of the item if the field is not written.
    pub fn place_of(&self, field: &str) -> Position {
        self.places.iter().find(|(name, _)| *name == field).map_or(self.place, |(_, place)| *place)
    }
}

/// The `match` of an item of `apply`, as written. A criterion that is not written matches everything.
#[derive(Clone, Debug, Default)]
pub struct MatchNode {
    /// Steps from the domain to the rule: `key`, `key=value`, `*` (one level) or `**` (any number of levels).
    pub path: Vec<Placed<String>>,
    /// Unit of the limit.
    pub unit: Option<Placed<String>>,
    /// Hits per window of the limit.
    pub requests_per_unit: Option<Placed<u32>>,
    /// Name of the limit; `*` matches any text.
    pub name: Option<Placed<String>>,
    /// Metadata that the rule must have, among other metadata.
    pub metadata: Option<Metadata>,
    /// True if a step may name an index that moves.
    pub is_index_safe: bool,
}

/// Settings of one key in `entries`, as written.
#[derive(Clone, Debug)]
pub struct EntryNode {
    /// The entry's key.
    pub key: Placed<String>,
    /// Form of the values (`as`).
    pub form: Option<FormWord>,
    /// Prefix length of IPv4 addresses, in bits.
    pub v4_prefix: Option<Placed<u32>>,
    /// Prefix length of IPv6 addresses, in bits.
    pub v6_prefix: Option<Placed<u32>>,
    /// True if a request whose value is no address is refused (`not_an_address`).
    pub refuses_others: Option<Placed<bool>>,
    /// True if upper and lower case are equal (`case: lower`).
    pub is_lower: bool,
    /// Position of `sensitive: true`, if written.
    pub sensitive: Option<Position>,
    /// True for an entry of an overlay, laid over a document without it. The overlay reports its problems.
    pub is_laid: bool,
}

/// Form of the values of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormWord {
    /// IP addresses.
    Ip,
    /// URL paths.
    Path,
}

impl FormWord {
    /// Every form with its word in a rule file.
    pub const ALL: [(&'static str, Self); 2] = [("ip", Self::Ip), ("path", Self::Path)];
}

/// One item of a `descriptors` list as written.
#[derive(Clone, Debug, Default)]
pub struct DescriptorNode {
    /// Position of the item's first character.
    pub place: Position,
    /// Key; `None` if missing or empty, which `compile` refuses.
    pub key: Option<Placed<String>>,
    /// Value; `None` (any value) if missing, null or empty.
    pub value: Option<Placed<String>>,
    /// Lists in place of a value, if any.
    pub value_list: Option<Box<ValueListNode>>,
    /// Position of `deny: true`, if written.
    pub deny: Option<Position>,
    /// Position of `exempt: true`, if written.
    pub exempt: Option<Position>,
    /// Position of `replace: true`, if written. Only rules of an overlay may have it.
    pub replace: Option<Position>,
    /// Factor for the hits of every limit of the request.
    pub request_cost: Option<Placed<u32>>,
    /// Message for a refused client.
    pub message: Option<Placed<String>>,
    /// Position of `expose: false`, if written.
    pub unexposed: Option<Position>,
    /// Limits of the item: none, unlimited, or a list.
    pub limits: LimitsNode,
    /// True if a refusal is only recorded.
    pub shadow_mode: bool,
    /// True if the request is refused only when all its quotas refuse.
    pub quota_mode: bool,
    /// True if metrics carry all keys and values of the request.
    pub detailed_metric: bool,
    /// True if metrics carry the value of this entry.
    pub value_to_metric: bool,
    /// Position of `share_threshold: true`, if written.
    pub share_threshold: Option<Position>,
    /// Free-form metadata for the answer.
    pub metadata: Option<Metadata>,
    /// Charging mode of this rule and the rules below it.
    pub charging: Option<Charging>,
    /// Policy that answers while the store is unavailable, for this rule and the rules below it.
    pub on_store_failure: Option<FailurePolicy>,
    /// Policy that answers while the store is overloaded, for this rule and the rules below it.
    pub on_store_overload: Option<FailurePolicy>,
    /// True if this instance remembers refusals of this rule and of the rules below it.
    pub remember_refusals: Option<bool>,
    /// Leases of this rule and of the rules below it.
    pub lease: Option<Leasing>,
    /// Items below this one.
    pub descriptors: Vec<DescriptorNode>,
    /// Settings of the item and its limits that overlays have set.
    pub(crate) changes: Option<Box<Changes>>,
}

/// Lists of values of one item, as written.
#[derive(Clone, Debug, Default)]
pub struct ValueListNode {
    /// Networks (`cidr`).
    pub cidr: Vec<Placed<String>>,
    /// Addresses, networks or texts (`values`).
    pub values: Vec<Placed<String>>,
    /// Name of a file with one value per line (`values_file`).
    pub file: Option<Placed<String>>,
}

/// The `rate_limit` or `rate_limits` of an item.
#[derive(Clone, Debug, Default)]
pub enum LimitsNode {
    /// Missing or null.
    #[default]
    None,
    /// `unlimited: true`.
    Unlimited(Box<LimitNode>),
    /// One limit (`rate_limit`) or several (`rate_limits`).
    Limited(Vec<LimitNode>),
}

impl LimitsNode {
    /// Returns true if there are limits and each of them has `shadow_mode`.
    pub fn only_watch(&self) -> bool {
        matches!(self, Self::Limited(limits) if !limits.is_empty() && limits.iter().all(|limit| limit.shadow_mode.is_some()))
    }
}

/// One limit as written.
#[derive(Clone, Debug, Default)]
pub struct LimitNode {
    /// Position of the limit's first character.
    pub place: Position,
    /// Unit word as written; not validated yet.
    pub unit: Option<Placed<String>>,
    /// Number of units in the window.
    pub unit_multiplier: Option<Placed<u32>>,
    /// Length of the window, in place of a unit.
    pub window: Option<Placed<Micros>>,
    /// Hits per window; 0 if missing, as in the reference.
    pub requests_per_unit: u32,
    /// Maximum number of hits at once.
    pub burst: Option<Placed<u32>>,
    /// Algorithm that counts the hits.
    pub algorithm: Option<Placed<Algorithm>>,
    /// True if refused charges are recorded too.
    pub count_refused: bool,
    /// Place of `refuse_peek_at_limit`, if it is true.
    pub refuse_peek_at_limit: Option<Position>,
    /// Factor for the hits on this limit.
    pub cost: Option<Placed<u32>>,
    /// Usage of the limit, in percent, from which the caller is warned.
    pub warn_at: Option<Placed<u8>>,
    /// Delay in place of a refusal.
    pub delay: Option<Box<DelayNode>>,
    /// Leases of the limit.
    pub lease: Option<Placed<Leasing>>,
    /// Position of `shadow_mode: true`, if written.
    pub shadow_mode: Option<Position>,
    /// Name; never empty.
    pub name: Option<Placed<String>>,
    /// Names of the limits that this limit replaces; empty text for an item without a name.
    pub replaces: Vec<Placed<String>>,
}

/// A `delay` as written.
#[derive(Clone, Debug)]
pub struct DelayNode {
    /// Position of the delay's first character.
    pub place: Position,
    /// Longest wait.
    pub max: Option<Placed<Micros>>,
    /// Wait for each hit over the limit.
    pub step: Option<Placed<Micros>>,
    /// Position of `beyond: admit`, if written.
    pub beyond: Option<Position>,
    /// Delivery of the delay: the request waits in Envoy or in Tidegate.
    pub delivery: Option<Delivery>,
}

/// One item of `callers` as written.
#[derive(Clone, Debug)]
pub struct CallerNode {
    /// Position of the item's first character.
    pub place: Position,
    /// Names of the callers.
    pub names: Vec<Placed<String>>,
    /// Domains about which they may ask.
    pub domains: Vec<Placed<String>>,
    /// Rights in these domains.
    pub rights: Rights,
}

/// Maximum size of a rule file: 32 MiB. 100,000 rules take 8 MiB; the rest is room for comments.
pub const MAX_FILE_BYTES: usize = 32 << 20;
/// Maximum nesting of lists and mappings in metadata: 16. Each level is about three in the protocol's dynamic metadata, and common
/// decoders refuse the whole message at a hundred levels.
pub const MAX_METADATA_DEPTH: usize = 16;

/// Reads one rule file. Adds every problem to `problems`, in file order. Returns a document if there is no error. With an
/// error it may return a document of the valid parts, which must only be checked and never enforced.
pub fn read(file: &Arc<str>, text: &[u8], problems: &mut Vec<Problem>) -> Option<Document> {
    let mut report = Report::new(file);
    let text = decode(text, &mut report);
    let tree = if report.has_error() { None } else { yaml::parse(text, &mut report) };
    let document = tree.and_then(|tree| reader::read(file, &tree, &mut report));
    report.finish(text, problems);
    document
}

/// Reads a file of callers. Adds its problems to `report`.
pub(super) fn read_callers<'t>(text: &'t [u8], report: &mut Report) -> (Vec<CallerNode>, &'t str) {
    let text = decode(text, report);
    let tree = if report.has_error() { None } else { yaml::parse(text, report) };
    (tree.map(|tree| reader::read_callers(&tree, report)).unwrap_or_default(), text)
}

/// Reads a file of test cases. Adds its problems to `report`.
pub(super) fn read_cases<'t>(text: &'t [u8], report: &mut Report) -> (cases::CaseFile, &'t str) {
    let text = decode(text, report);
    let tree = if report.has_error() { None } else { yaml::parse(text, report) };
    (tree.map(|tree| reader::read_cases(&tree, report)).unwrap_or_default(), text)
}

/// Returns true if `word` is probably meant as `known`.
pub(super) fn is_near(word: &str, known: &str) -> bool {
    keys::nearest(word, std::iter::once(known)).is_some()
}

/// Returns the text without its byte order mark, up to the first byte that is not UTF-8. Reports such a byte as an error.
fn decode<'t>(bytes: &'t [u8], report: &mut Report) -> &'t str {
    if bytes.len() > MAX_FILE_BYTES {
        report.error(Position { line: 1, column: 1 }, || {
            format!(
                "The file is too large: it has {} bytes, and the maximum is {MAX_FILE_BYTES}. Write fewer rules.",
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
                [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "the file looks like UTF-16; save it as UTF-8",
                _ => "save the file as UTF-8",
            };
            format!("This byte is not UTF-8: {advice}.")
        });
    }
    text
}

/// Returns the place after the last character.
fn end_of(text: &str) -> Position {
    let normal = text.replace("\r\n", "\n");
    let mut lines = normal.split(['\n', '\r']);
    let last = lines.next_back().unwrap_or_default();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1);
    Position { line: count(lines.count()), column: count(last.chars().count()) }
}

#[cfg(test)]
mod tests;
