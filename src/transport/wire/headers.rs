//! The headers of an answer, in the style that the operator chose.
//!
//! Envoy writes names and values unchecked, so every header is made by [`header`], and nothing a client sent is in one.

use std::fmt::Write;
use std::sync::Arc;

use http::HeaderName;
use http::header::InvalidHeaderName;
use smallvec::SmallVec;

use super::{UNLIMITED, quotable};
use crate::model::{About, Clock, Decision, Finding, Micros, Outcome, Part, Tightest};
use crate::proto::envoy::config::core::v3::HeaderValue;

/// The most limits that one header lists: 16. With [`LONGEST_NAME`] two such headers stay below 4 KiB, half of what most
/// servers and proxies take for all headers.
const MOST_ITEMS: usize = 16;
/// The longest name of a limit in a header: 64 characters.
const LONGEST_NAME: usize = 64;
/// How long ago the verdict may be when its reset is told as a moment: 20 ms, Envoy's default call time-out. The end of a
/// window is a whole second, and would be told as the next.
const SINCE_VERDICT: Micros = Micros::from_millis(20);
/// The headers that many services send, as they spell them.
const X_RATE_LIMIT: [&str; 3] = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"];
/// What a limit is called that a caller sent for a descriptor without a rule.
const OVERRIDE: &str = "override";

/// Which headers tell of the limits.
#[derive(Clone, Default)]
pub enum Headers {
    /// None.
    #[default]
    Off,
    /// The three of `LIMIT_RESPONSE_HEADERS_ENABLED`, and nothing else: what the reference sends.
    Three(HeaderNames),
    /// The same three, and Retry-After.
    Reference(HeaderNames),
    /// X-RateLimit-Limit, -Remaining and -Reset, the last in seconds of the epoch by this clock, and Retry-After.
    XRateLimit(Arc<dyn Clock>),
    /// RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-11, and Retry-After.
    Ietf,
}

/// The names of the three headers, spelled as the operator did and valid.
#[derive(Clone, Debug)]
pub struct HeaderNames {
    limit: String,
    remaining: String,
    reset: String,
}

/// The names of the items of one list, in order: no two are alike.
#[derive(Default)]
struct ItemNames(SmallVec<[String; 4]>);

/// A descriptor and its tightest limit, which some store counted.
pub(super) type Counted<'d, 'a> = (&'d Part<'a>, &'d Tightest<'a>);

impl Headers {
    /// The headers for the client.
    pub(super) fn response(&self, decision: &Decision<'_>) -> Vec<HeaderValue> {
        let mut headers = match self {
            Self::Off => Vec::new(),
            Self::Three(names) | Self::Reference(names) => {
                let told = described(exposed(decision));
                let names = [names.limit.as_str(), &names.remaining, &names.reset];
                told.map(|told| three(names, told, until_reset(told))).unwrap_or_default()
            }
            Self::XRateLimit(clock) => {
                let told = refusing(decision).or_else(|| described(exposed(decision)));
                told.map(|told| three(X_RATE_LIMIT, told, moment_of_reset(clock.now(), told))).unwrap_or_default()
            }
            Self::Ietf => policies(decision),
        };
        if let Some(wait) = self.retry_after(decision) {
            headers.push(header("retry-after", wait.ceil_secs().max(1).to_string()));
        }
        headers.extend(warning(decision));
        headers
    }

    /// How long the client of a refused request is told to wait. That nobody could be asked is told in every style.
    fn retry_after(&self, decision: &Decision<'_>) -> Option<Micros> {
        let is_told = decision.outcome.is_refused() && !matches!(self, Self::Off | Self::Three(_));
        decision.unavailable_for.or(decision.retry.filter(|_| is_told))
    }
}

impl HeaderNames {
    /// The names of the headers that tell the limit, what remains of it, and the seconds until its reset.
    ///
    /// # Errors
    /// When one of them is no name that a header can have.
    pub fn new(limit: String, remaining: String, reset: String) -> Result<Self, InvalidHeaderName> {
        for name in [&limit, &remaining, &reset] {
            HeaderName::try_from(name.as_str())?;
        }
        Ok(Self { limit, remaining, reset })
    }
}

impl ItemNames {
    /// The item's name as a string of RFC 9651, quotes and all.
    fn add(&mut self, limit: Option<&str>, rule: Option<&About>) -> String {
        let keys = || rule.map(|rule| rule.path.keys()).filter(|keys| !keys.is_empty());
        let name = limit.filter(|name| !name.is_empty()).map(str::to_owned).or_else(keys);
        let name: String = quotable(name.as_deref().unwrap_or(OVERRIDE)).chars().take(LONGEST_NAME).collect();
        let mut unique = name.clone();
        let mut number = 1;
        while self.0.contains(&unique) {
            number += 1;
            unique = format!("{name}-{number}");
        }
        self.0.push(unique.clone());
        format!("\"{unique}\"")
    }
}

/// A header that Envoy can write as it is: what is not printable ASCII could end the header, or all of them.
pub(super) fn header(key: &str, value: String) -> HeaderValue {
    let is_plain = |c: char| c.is_ascii_graphic() || c == ' ';
    let value = match value.chars().all(is_plain) {
        true => value,
        false => value.chars().map(|c| if is_plain(c) { c } else { '_' }).collect(),
    };
    HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() }
}

/// What asks Envoy's fault filter to delay an admitted request: whole milliseconds, all that it reads.
pub(super) fn request(decision: &Decision<'_>) -> Vec<HeaderValue> {
    let wait = decision.wait.header;
    if wait == Micros::ZERO || decision.outcome != Outcome::Admitted {
        return Vec::new();
    }
    vec![header("x-envoy-fault-delay-request", wait.get().div_ceil(1_000).to_string())]
}

/// The descriptors with limits that some store counted.
pub(super) fn counted<'d, 'a>(decision: &'d Decision<'a>) -> impl Iterator<Item = Counted<'d, 'a>> + Clone {
    decision.parts.iter().filter_map(|part| match &part.finding {
        Finding::Limited(tightest) if tightest.verdict.provenance.is_counted() => Some((part, tightest)),
        _ => None,
    })
}

/// Those of them that may be told of.
pub(super) fn exposed<'d, 'a>(decision: &'d Decision<'a>) -> impl Iterator<Item = Counted<'d, 'a>> + Clone {
    counted(decision).filter(|(part, _)| part.is_exposed())
}

/// The descriptor that three headers describe, chosen as the reference does: the least remaining, the first of equals; but
/// the last refused one that is no quota, if there is any.
pub(super) fn described<'d, 'a>(counted: impl Iterator<Item = Counted<'d, 'a>>) -> Option<Counted<'d, 'a>> {
    let mut best = UNLIMITED;
    let mut chosen = None;
    for (part, tightest) in counted {
        if tightest.verdict.remaining < best {
            best = tightest.verdict.remaining;
            chosen = Some((part, tightest));
        }
        if part.outcome().is_refused() && !tightest.role.is_quota() {
            best = 0;
            chosen = Some((part, tightest));
        }
    }
    chosen
}

/// The limit of a refused request that keeps it waiting, if it may be told of: the longest to wait for, and before all one
/// that never lets it pass. Quotas refuse only together, so of these the shortest to wait for.
pub(super) fn refusing<'d, 'a>(decision: &'d Decision<'a>) -> Option<Counted<'d, 'a>> {
    let wait = |(_, tightest): &Counted<'_, '_>| tightest.verdict.retry.map_or(u64::MAX, Micros::get);
    let refused = exposed(decision).filter(|(part, _)| decision.outcome.is_refused() && part.outcome().is_refused());
    let alone = refused.clone().filter(|(_, tightest)| !tightest.role.is_quota()).max_by_key(wait);
    alone.or_else(|| refused.min_by_key(wait))
}

/// The limit, what remains of it, and its reset.
fn three(names: [&str; 3], (_, tightest): Counted<'_, '_>, reset: u64) -> Vec<HeaderValue> {
    let values = [u64::from(tightest.quota.limit()), u64::from(tightest.verdict.remaining), reset];
    names.into_iter().zip(values).map(|(name, value)| header(name, value.to_string())).collect()
}

fn until_reset((_, tightest): Counted<'_, '_>) -> u64 {
    tightest.verdict.duration_until_reset().ceil_secs()
}

/// The second of the epoch in which the reset is over.
fn moment_of_reset(now: Micros, (_, tightest): Counted<'_, '_>) -> u64 {
    now.saturating_sub(SINCE_VERDICT).saturating_add(tightest.verdict.duration_until_reset()).ceil_secs()
}

/// The two headers of the draft: a list of quotas, and one of what is left of them.
fn policies(decision: &Decision<'_>) -> Vec<HeaderValue> {
    let (mut quotas, mut left, mut names) = (String::new(), String::new(), ItemNames::default());
    for told in exposed(decision).take(MOST_ITEMS) {
        let (part, Tightest { quota, name, verdict, .. }) = told;
        let name = names.add(*name, part.rule);
        let window = quota.window().length();
        let _ = write!(quotas, "{}{name};q={}", comma(&quotas), quota.limit());
        // The draft has no fractions of a second, and lets a window go unsaid.
        if window == Micros::from_secs(window.ceil_secs()) {
            let _ = write!(quotas, ";w={}", window.ceil_secs());
        }
        let _ = write!(left, "{}{name};r={};t={}", comma(&left), verdict.remaining, until_reset(told));
    }
    // A list without items is no header.
    if quotas.is_empty() { Vec::new() } else { vec![header("RateLimit-Policy", quotas), header("RateLimit", left)] }
}

/// What warns the client of an admitted request that its limits are nearly used up.
fn warning(decision: &Decision<'_>) -> Option<HeaderValue> {
    if decision.warnings.is_empty() || decision.outcome != Outcome::Admitted {
        return None;
    }
    let (mut list, mut names) = (String::new(), ItemNames::default());
    let warnings = decision.warnings.iter().filter(|warning| warning.rule.is_exposed);
    for warning in warnings.take(MOST_ITEMS) {
        let name = names.add(warning.name, Some(warning.rule));
        let (left, until) = (warning.verdict.remaining, warning.verdict.duration_until_reset().ceil_secs());
        let _ = write!(list, "{}{name};r={left};q={};t={until}", comma(&list), warning.capacity);
    }
    (!list.is_empty()).then(|| header("x-ratelimit-warning", list))
}

fn comma(list: &str) -> &'static str {
    if list.is_empty() { "" } else { ", " }
}
