//! The last refusals of this instance as JSON.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};

use crate::model::Micros;
use crate::telemetry::recent::{KEPT_FOR, MOST_OF_RULE, RecentRefusals, Refusal, RefusalFilter, ShownDescriptor};

/// Path of the route.
pub const PATH: &str = "/v1/refusals";
/// Maximum number of refusals in an answer: 1,000, about a megabyte.
const MOST: usize = 1_000;
/// Parameters of the query.
const EXPECTED: &str = "domain=NAME, rule=PATH, or entry=KEY=VALUE, which can be repeated";

/// Returns the routes; `at` is the address of the listener. Refusals name users and addresses, so only callers on this machine may
/// read them: whoever can do that could read the process too.
pub fn routes(recent: Arc<RecentRefusals>, at: IpAddr) -> Router {
    let routes = Router::new().route(PATH, get(refusals).with_state(recent));
    if at.is_loopback() {
        routes.layer(middleware::from_fn(not_by_a_page))
    } else {
        Router::new().route(PATH, get(async || (StatusCode::FORBIDDEN, NOT_HERE)))
    }
}

const NOT_HERE: &str = "refusals name users and addresses, so they are served only where DEBUG_HOST is a loopback address, such as 127.0.0.1\n";

/// Rejects requests that a web page makes: a browser names the page in the Origin header.
async fn not_by_a_page(request: Request, next: Next) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        return (StatusCode::FORBIDDEN, "the Origin header names a web page, and no page may read this\n")
            .into_response();
    }
    next.run(request).await
}

async fn refusals(State(recent): State<Arc<RecentRefusals>>, RawQuery(query): RawQuery) -> Response {
    let filter = match filter(query.as_deref().unwrap_or_default()) {
        Ok(filter) => filter,
        Err(why) => return (StatusCode::BAD_REQUEST, why + "\n").into_response(),
    };
    let (found, now) = recent.select(&filter);
    let shown: Vec<Value> = found.iter().take(MOST).map(shown).collect();
    let page = json!({
        "now_ms": millis(now),
        "kept_for_ms": millis(KEPT_FOR),
        "most_of_rule": MOST_OF_RULE,
        "left_out": found.len().saturating_sub(MOST),
        "missed": recent.missed(),
        "refusals": shown,
    });
    ([(header::CONTENT_TYPE, "application/json")], format!("{page}\n")).into_response()
}

/// Parses a query.
fn filter(query: &str) -> Result<RefusalFilter, String> {
    let mut filter = RefusalFilter::default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match (&*name, value.split_once('=')) {
            ("domain", _) => filter.domain = Some(value.into_owned()),
            ("rule", _) => filter.rule = Some(value.into_owned()),
            ("entry", Some((key, value))) => filter.entries.push((key.to_owned(), value.to_owned())),
            ("entry", None) => return Err(format!("entry={value} has no value: write entry=KEY=VALUE")),
            (other, _) => return Err(format!("there is no parameter {other}: expected {EXPECTED}")),
        }
    }
    Ok(filter)
}

fn shown(refusal: &Refusal) -> Value {
    let Refusal { domain, rule, limit, quota, refused, descriptors, is_cut, first, last, count, .. } = refusal;
    let descriptor = |descriptor: &ShownDescriptor| -> Vec<Value> {
        descriptor.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect()
    };
    json!({
        "domain": domain,
        "rule": rule.as_ref().map(ToString::to_string),
        "limit": limit,
        "quota": quota.map(|quota| quota.to_string()),
        "refused": refused,
        "descriptors": descriptors.iter().map(descriptor).collect::<Vec<_>>(),
        "is_cut": is_cut,
        "first_ms": millis(*first),
        "last_ms": millis(*last),
        "count": count,
        "remaining": refusal.remaining,
        "retry_ms": refusal.retry.map(|retry| retry.get().div_ceil(1_000)),
        "provenance": refusal.origin.name(),
        "generation": refusal.generation,
    })
}

fn millis(time: Micros) -> u64 {
    time.get() / 1_000
}
