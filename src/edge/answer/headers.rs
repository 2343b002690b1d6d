//! Headers of an answer, in the style that the operator chose.
//!
//! Envoy writes names and values unchecked. So every header is made by [`header`], and none contains what a client
//! sent.

use std::fmt::Write;
use std::sync::Arc;

use http::HeaderName;
use http::header::InvalidHeaderName;
use smallvec::SmallVec;

use super::quotable;
use crate::model::deciding::described;
use crate::model::{About, Clock, Decision, LimitedPart, Micros, Outcome, Tightest};
use crate::proto::envoy::config::core::v3::HeaderValue;

/// Maximum number of limits in one header: 16. With [`LONGEST_NAME`], two such headers stay below 4 KiB, half of what
/// most servers and proxies accept for all headers.
const MOST_ITEMS: usize = 16;
/// Maximum length of a limit's name in a header: 64 characters.
const LONGEST_NAME: usize = 64;
/// Maximum age of the verdict when its reset is sent as a moment: 20 ms, Envoy's default call timeout. The end of a
/// window is a whole second, and would otherwise be sent as the next one.
const SINCE_VERDICT: Micros = Micros::from_millis(20);
/// Headers that many services send, in their spelling.
const X_RATE_LIMIT: [&str; 3] = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"];
/// Name of a limit that a caller sent for a descriptor without a rule.
const OVERRIDE: &str = "override";

/// Style of the headers that describe the limits.
#[derive(Clone, Default)]
pub enum Headers {
    /// No such headers. Warnings, and Retry-After for an unavailable store, are sent all the same.
    #[default]
    Off,
    /// The three of `LIMIT_RESPONSE_HEADERS_ENABLED`, and nothing else, as the reference sends them.
    Three(HeaderNames),
    /// The same three, and Retry-After.
    Reference(HeaderNames),
    /// X-RateLimit-Limit, -Remaining and -Reset, and Retry-After. The reset is in seconds of the epoch by this clock.
    XRateLimit(Arc<dyn Clock>),
    /// RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-11, and Retry-After.
    Ietf,
    /// Those of both styles, and one Retry-After.
    XRateLimitAndIetf(Arc<dyn Clock>),
}

/// Names of the three headers: valid, and in the operator's spelling.
#[derive(Clone, Debug)]
pub struct HeaderNames {
    limit: String,
    remaining: String,
    reset: String,
}

/// Names of the items of one list, in order and without duplicates.
#[derive(Default)]
struct ItemNames(SmallVec<[String; 4]>);

impl Headers {
    /// Returns the headers for the client.
    pub(super) fn response(&self, decision: &Decision<'_>) -> Vec<HeaderValue> {
        let mut headers = match self {
            Self::Off => Vec::new(),
            Self::Three(names) | Self::Reference(names) => {
                let chosen = described(exposed(decision));
                let names = [names.limit.as_str(), &names.remaining, &names.reset];
                chosen.map(|chosen| three(names, chosen, until_reset(chosen))).unwrap_or_default()
            }
            Self::XRateLimit(clock) => x_rate_limit(decision, clock.now()),
            Self::Ietf => policies(decision),
            Self::XRateLimitAndIetf(clock) => {
                let mut headers = x_rate_limit(decision, clock.now());
                headers.extend(policies(decision));
                headers
            }
        };
        if let Some(wait) = self.retry_after(decision) {
            headers.push(header("retry-after", wait.ceil_secs().max(1).to_string()));
        }
        headers.extend(warning(decision));
        headers
    }

    /// Returns the time that the client of a refused request has to wait. Every style reports an unavailable store.
    fn retry_after(&self, decision: &Decision<'_>) -> Option<Micros> {
        let is_told = decision.outcome.is_refused() && !matches!(self, Self::Off | Self::Three(_));
        decision.unavailable_for.or(decision.retry.filter(|_| is_told))
    }
}

impl HeaderNames {
    /// Creates the names of the headers for the limit, the remaining hits, and the seconds until the reset.
    ///
    /// # Errors
    /// Returns an error if one of them is not a valid header name.
    pub fn new(limit: String, remaining: String, reset: String) -> Result<Self, InvalidHeaderName> {
        for name in [&limit, &remaining, &reset] {
            HeaderName::try_from(name.as_str())?;
        }
        Ok(Self { limit, remaining, reset })
    }
}

impl ItemNames {
    /// Returns a unique name of the item as a string of RFC 9651, including the quotes.
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

/// Returns a header that Envoy can write unchanged. Replaces characters other than printable ASCII, which could end the
/// header, or all headers.
pub(super) fn header(key: &str, value: String) -> HeaderValue {
    let is_plain = |c: char| c.is_ascii_graphic() || c == ' ';
    let value = match value.chars().all(is_plain) {
        true => value,
        false => value.chars().map(|c| if is_plain(c) { c } else { '_' }).collect(),
    };
    HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() }
}

/// Returns the header that makes Envoy's fault filter delay an admitted request. The filter reads whole milliseconds
/// only.
pub(super) fn request(decision: &Decision<'_>) -> Vec<HeaderValue> {
    let wait = decision.wait.header;
    if wait == Micros::ZERO || decision.outcome != Outcome::Admitted {
        return Vec::new();
    }
    vec![header("x-envoy-fault-delay-request", wait.get().div_ceil(1_000).to_string())]
}

/// Returns the descriptors of [`Decision::counted`] that may be exposed.
pub(super) fn exposed<'d, 'a>(decision: &'d Decision<'a>) -> impl Iterator<Item = LimitedPart<'d, 'a>> + Clone {
    decision.counted().filter(|(part, _)| part.is_exposed())
}

/// Returns the limit that keeps a refused request waiting, if it may be exposed: the one with the longest wait. A limit
/// that never lets it pass comes first. Quotas refuse only together, so of quotas the one with the shortest wait.
pub(super) fn refusing<'d, 'a>(decision: &'d Decision<'a>) -> Option<LimitedPart<'d, 'a>> {
    let wait = |(_, tightest): &LimitedPart<'_, '_>| tightest.verdict.retry.map_or(u64::MAX, Micros::get);
    let refused = exposed(decision).filter(|(part, _)| decision.outcome.is_refused() && part.outcome().is_refused());
    let alone = refused.clone().filter(|(_, tightest)| !tightest.role.is_quota()).max_by_key(wait);
    alone.or_else(|| refused.min_by_key(wait))
}

/// Returns the headers for the limit, the remaining hits, and the reset.
fn three(names: [&str; 3], (_, tightest): LimitedPart<'_, '_>, reset: u64) -> Vec<HeaderValue> {
    let values = [u64::from(tightest.quota.limit()), u64::from(tightest.verdict.remaining_for_client()), reset];
    names.into_iter().zip(values).map(|(name, value)| header(name, value.to_string())).collect()
}

/// Returns X-RateLimit-Limit, -Remaining and -Reset at `now`.
fn x_rate_limit(decision: &Decision<'_>, now: Micros) -> Vec<HeaderValue> {
    let chosen = refusing(decision).or_else(|| described(exposed(decision)));
    chosen.map(|chosen| three(X_RATE_LIMIT, chosen, moment_of_reset(now, chosen))).unwrap_or_default()
}

fn until_reset((_, tightest): LimitedPart<'_, '_>) -> u64 {
    tightest.verdict.duration_until_reset().ceil_secs()
}

/// Returns the second of the epoch in which the reset is over.
fn moment_of_reset(now: Micros, (_, tightest): LimitedPart<'_, '_>) -> u64 {
    now.saturating_sub(SINCE_VERDICT).saturating_add(tightest.verdict.duration_until_reset()).ceil_secs()
}

/// Returns the two headers of the draft: a list of quotas, and a list of what is left of them.
fn policies(decision: &Decision<'_>) -> Vec<HeaderValue> {
    let (mut quotas, mut left, mut names) = (String::new(), String::new(), ItemNames::default());
    for chosen in exposed(decision).take(MOST_ITEMS) {
        let (part, Tightest { quota, name, verdict, .. }) = chosen;
        let name = names.add(*name, part.rule);
        let window = quota.window().length();
        let _ = write!(quotas, "{}{name};q={}", comma(&quotas), quota.limit());
        // The draft has no fractions of a second, and allows a quota without a window.
        if window == Micros::from_secs(window.ceil_secs()) {
            let _ = write!(quotas, ";w={}", window.ceil_secs());
        }
        let _ = write!(left, "{}{name};r={}", comma(&left), verdict.remaining_for_client());
        // After a refusal that no wait ends, 0 would mean to try again now.
        let until_reset = until_reset(chosen);
        if until_reset > 0 || !verdict.never_fits() {
            let _ = write!(left, ";t={until_reset}");
        }
    }
    // An empty list is not a valid header.
    if quotas.is_empty() { Vec::new() } else { vec![header("RateLimit-Policy", quotas), header("RateLimit", left)] }
}

/// Returns the header that warns the client of an admitted request if its limits are nearly used up.
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
