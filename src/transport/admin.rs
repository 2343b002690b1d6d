//! The debug listener: the rules in force, as the reference lists them.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::get;

use crate::limiter::Limiter;

/// The routes of the debug listener.
pub fn routes(limiter: Arc<Limiter>) -> Router {
    Router::new().route("/", get(index)).route("/rlconfig", get(rlconfig)).with_state(limiter)
}

async fn index() -> &'static str {
    "/rlconfig: the rate limits in force, one per line\n"
}

async fn rlconfig(State(limiter): State<Arc<Limiter>>) -> String {
    let mut text = String::new();
    for rule in limiter.rules().rules() {
        let flags = format!("shadow_mode: {}, quota_mode: {}", rule.role().is_shadow(), rule.role().is_quota());
        if rule.is_unlimited() {
            let _ = writeln!(text, "{}: unit=UNKNOWN requests_per_unit=0, {flags}", rule.path());
        }
        for limit in rule.limits() {
            let quota = limit.limit.quota();
            let unit = match quota.window().unit() {
                Some((unit, 1)) => unit.name().to_uppercase(),
                _ => quota.window().length().to_string(),
            };
            let _ = writeln!(text, "{}: unit={unit} requests_per_unit={}, {flags}", rule.path(), quota.limit());
        }
    }
    text
}
