//! The counters of a descriptor, read without spending, as JSON.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::response::Response;
use axum::routing::get;
use serde_json::{Value, json};

use super::{entry, json_page, unknown, wrong};
use crate::limiter::Limiter;
use crate::model::{Answered, Decision, Descriptor, Entry, Finding, Micros, Request};

/// Path of the route.
pub const PATH: &str = "/v1/counters";
/// Timeout of the caller from which the deadline of the store is derived: 1 s.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Parameters of the query.
const EXPECTED: &str = "domain=NAME, and entry=KEY=VALUE for each entry of the descriptor, in order";

/// Returns the route.
pub fn routes(limiter: Arc<Limiter>) -> Router {
    Router::new().route(PATH, get(counters).with_state(limiter))
}

async fn counters(State(limiter): State<Arc<Limiter>>, RawQuery(query): RawQuery) -> Response {
    let request = match request(query.as_deref().unwrap_or_default()) {
        Ok(request) => request,
        Err(why) => return wrong(why),
    };
    let rules = limiter.rules();
    let decision = limiter.decide(&rules, &request, Some(TIMEOUT)).await;
    json_page(&page(&decision))
}

/// Parses a query into a request that spends nothing.
pub(super) fn request(query: &str) -> Result<Request, String> {
    let (mut domain, mut entries) = (None, Vec::new());
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "domain" => domain = Some(value.into_owned()),
            "entry" => {
                let (key, value) = entry(&value)?;
                entries.push(Entry::new(key, value));
            }
            other => return Err(unknown(other, EXPECTED)),
        }
    }
    let domain = domain.filter(|_| !entries.is_empty()).ok_or_else(|| format!("expected {EXPECTED}"))?;
    let look = Descriptor { entries, hits_addend: Some(0), ..Descriptor::default() };
    Request::new(domain, vec![look], 0).map_err(|why| why.to_string())
}

fn page(decision: &Decision<'_>) -> Value {
    let part = decision.parts.first();
    let finding = match (part.map(|part| &part.finding), decision.ruling) {
        (Some(Finding::Limited(_)), _) => "limited",
        (_, Some(ruling)) if ruling.is_denied => "denied",
        (_, Some(_)) => "exempt",
        (Some(Finding::Unlimited), None) => "unlimited",
        _ => "unmatched",
    };
    json!({
        "is_known_domain": decision.domain.is_some(),
        "finding": finding,
        "rule": part.and_then(|part| part.rule).map(|rule| rule.path.to_string()),
        "generation": decision.generation,
        "counters": decision.answers.iter().map(counter).collect::<Vec<_>>(),
    })
}

fn counter(answer: &Answered<'_>) -> Value {
    let verdict = &answer.verdict;
    // Without the store, what this instance decides alone is of its share.
    let is_read = verdict.provenance.is_counted() && !verdict.provenance.is_policy();
    let used = answer.capacity.saturating_sub(verdict.remaining);
    let counted = counted_for(answer).filter(|_| is_read && used > 0);
    json!({
        "limit": answer.limit,
        "rule": answer.rule.map(|rule| rule.path.to_string()),
        "is_shadow": answer.role.is_shadow(),
        "capacity": answer.capacity,
        "used": is_read.then_some(used),
        "counted_for_ms": counted.map(|counted| counted.get().div_ceil(1_000)),
        "left": is_read.then_some(verdict.remaining),
        "reset_ms": is_read.then(|| verdict.reset.get().div_ceil(1_000)),
        "provenance": verdict.provenance.name(),
    })
}

/// Returns the time over which the hits of a counter were counted. `None` for buckets and meters, which drain all the time and so have no
/// beginning.
fn counted_for(answer: &Answered<'_>) -> Option<Micros> {
    let window = answer.quota.window().length();
    match answer.algorithm {
        // The reset is the end of the window.
        "fixed_window" => Some(window.saturating_sub(answer.verdict.reset)),
        "sliding_window" | "sliding_log" => Some(window),
        _ => None,
    }
}
