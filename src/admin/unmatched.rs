//! Descriptors, domains and keys that no rule matches at this instance, as JSON, with the nearest rule.

use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};

use super::{json_page, millis, no_parameters, wrong};
use crate::limiter::Limiter;
use crate::telemetry::records::Records;
use crate::telemetry::unmatched::{AbsentKey, Shape, UnmatchedNow};

/// Path of the route.
pub const PATH: &str = "/v1/unmatched";

/// Returns the route.
pub fn routes(limiter: Arc<Limiter>, records: Arc<Records>) -> Router {
    Router::new().route(PATH, get(page).with_state((limiter, records)))
}

async fn page(State((limiter, records)): State<(Arc<Limiter>, Arc<Records>)>, RawQuery(query): RawQuery) -> Response {
    if let Err(why) = no_parameters(query.as_deref()) {
        return wrong(why);
    }
    // A walk over all rules.
    let page = tokio::task::spawn_blocking(move || {
        let rules = limiter.rules();
        let paths = rules.key_paths();
        let UnmatchedNow { now, since, shapes, absent, missed, http1 } = records.unmatched.now();
        let nearest = |domain: &str, keys: &[&str]| {
            let nearest = paths.nearest(domain, keys)?;
            Some(json!({ "kind": nearest.name(), "text": nearest.to_string() }))
        };
        let shapes: Vec<Value> = shapes.iter().map(|shape| shown(shape, nearest)).collect();
        json!({
            "now_ms": millis(now),
            "since_ms": millis(since),
            "missed": missed,
            "http1_connections": http1,
            "shapes": shapes,
            "absent_keys": absent.iter().map(absent_key).collect::<Vec<_>>(),
        })
    });
    match page.await {
        Ok(page) => json_page(&page),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn shown(shape: &Shape, nearest: impl Fn(&str, &[&str]) -> Option<Value>) -> Value {
    let Shape { domain, keys, is_cut, first, last, count } = shape;
    let texts: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
    // What is not all there has no nearest rule.
    let is_whole = !is_cut && !std::iter::once(&**domain).chain(texts.iter().copied()).any(|text| text.ends_with('…'));
    json!({
        "domain": domain,
        "keys": keys,
        "is_cut": is_cut,
        "first_ms": millis(*first),
        "last_ms": millis(*last),
        "count": count,
        "nearest": is_whole.then(|| nearest(domain, &texts)),
    })
}

fn absent_key(absent: &AbsentKey) -> Value {
    let AbsentKey { domain, key, examined, without } = absent;
    json!({ "domain": domain, "key": key, "examined": examined, "without": without })
}
