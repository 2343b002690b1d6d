//! The debug listener: the rules in force, as the reference lists them.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::limiter::Limiter;

/// The routes of the debug listener. `since` is when the rules in force were loaded.
pub fn routes(limiter: Arc<Limiter>, since: watch::Receiver<Instant>) -> Router {
    let about = get(index).with_state((Arc::clone(&limiter), since));
    Router::new().route("/", about).route("/rlconfig", get(rlconfig)).with_state(limiter)
}

async fn index(State((limiter, since)): State<(Arc<Limiter>, watch::Receiver<Instant>)>) -> String {
    let (load, age) = (limiter.rules().generation(), since.borrow().elapsed().as_secs());
    format!("rules in force: load {load}, {age} s ago\n/rlconfig: the rate limits in force, one per line\n")
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
