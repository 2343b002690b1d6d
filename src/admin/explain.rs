//! The rule that answers for a descriptor, and the reason, as JSON.

use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;

use super::counters::request;
use super::{json_page, wrong};
use crate::limiter::Limiter;

/// Path of the route.
const PATH: &str = "/v1/explain";

/// Returns the route.
pub fn routes(limiter: Arc<Limiter>) -> Router {
    Router::new().route(PATH, get(explain).with_state(limiter))
}

async fn explain(State(limiter): State<Arc<Limiter>>, RawQuery(query): RawQuery) -> Response {
    let request = match request(query.as_deref().unwrap_or_default()) {
        Ok(request) => request,
        Err(why) => return wrong(why),
    };
    // The text counts all rules beside those that match.
    let page = tokio::task::spawn_blocking(move || {
        let rules = limiter.rules();
        let matched = rules.find(&request);
        let rule = matched.items.first().and_then(|item| item.rule);
        json!({
            "generation": rules.generation(),
            "is_known_domain": matched.domain.is_some(),
            "rule": rule.map(|rule| rule.path().to_string()),
            "text": Limiter::explain(&rules, &request),
        })
    });
    match page.await {
        Ok(page) => json_page(&page),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
