//! State of the process: the rules in force, the health and the log level.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, put};
use axum::{Extension, Router};
use serde_json::json;
use tokio::sync::watch;

use super::access::Reader;
use super::{RulesStatus, Shown, json_page, no_parameters, wrong};
use crate::edge::json::Readiness;
use crate::limiter::Limiter;

/// Path of the health.
pub(super) const HEALTH: &str = "/v1/health";
/// Maximum bytes of a log level in a request: 1 KiB. A wrong word of this length still gets the error that explains it.
const LONGEST_WORD: usize = 1 << 10;

/// Log level of the process, which can change while it runs.
pub trait LogLevel: Send + Sync {
    /// Returns the name of the level.
    fn get(&self) -> String;

    /// Sets the level to `word`. `token` is the name of the token of the reader who does this; `None` on this machine.
    ///
    /// # Errors
    /// Returns the expected words, as text for people.
    fn set(&self, word: &str, token: Option<&str>) -> Result<(), String>;
}

/// Returns the routes.
pub(super) fn routes(shown: &Shown) -> Router {
    let rules = get(rules).with_state((Arc::clone(&shown.limiter), shown.loaded.clone()));
    let level = reads_level().merge(sets_level()).with_state(Arc::clone(&shown.level));
    Router::new()
        .route("/v1/rules", rules)
        .route(HEALTH, get(health).with_state(shown.readiness.clone()))
        .route("/v1/log-level", level)
}

/// Returns the method that returns the log level.
pub(super) fn reads_level() -> MethodRouter<Arc<dyn LogLevel>> {
    get(async |State(level): State<Arc<dyn LogLevel>>| level.get() + "\n")
}

/// Returns the method that sets the log level, for requests with a [`Reader`].
pub(super) fn sets_level() -> MethodRouter<Arc<dyn LogLevel>> {
    put(set_level).layer(DefaultBodyLimit::max(LONGEST_WORD))
}

async fn set_level(
    State(level): State<Arc<dyn LogLevel>>,
    Extension(reader): Extension<Reader>,
    word: String,
) -> Response {
    match level.set(word.trim(), reader.token()) {
        Ok(()) => (level.get() + "\n").into_response(),
        Err(why) => (StatusCode::BAD_REQUEST, why + "\n").into_response(),
    }
}

async fn rules(
    State((limiter, loaded)): State<(Arc<Limiter>, watch::Receiver<RulesStatus>)>,
    RawQuery(query): RawQuery,
) -> Response {
    if let Err(why) = no_parameters(query.as_deref()) {
        return wrong(why);
    }
    let RulesStatus { since, what, rejected, .. } = loaded.borrow().clone();
    let rules = limiter.rules();
    let (sources, overlays) = rules.sources();
    json_page(&json!({
        "generation": rules.generation(),
        "digest": rules.digest(),
        "age_ms": u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
        "summary": what,
        "sources": sources,
        "overlays": overlays,
        "domains": rules.domains(),
        "rejected": rejected,
    }))
}

async fn health(State(readiness): State<Readiness>) -> Response {
    let is_ready = readiness.get();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, json_page(&json!({ "is_ready": is_ready }))).into_response()
}
