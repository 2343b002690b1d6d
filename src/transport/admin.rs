//! The debug listener: the rules in force, as the reference lists them.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::limiter::Limiter;

/// What became of the rule files.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// When the rules in force were loaded.
    pub since: Instant,
    /// How many they are and where they come from, in words.
    pub what: String,
    /// Why the files as they are now are not in force, if they are not.
    pub rejected: Option<String>,
}

/// The routes of the debug listener.
pub fn routes(limiter: Arc<Limiter>, loaded: watch::Receiver<Loaded>) -> Router {
    let about = get(index).with_state((Arc::clone(&limiter), loaded));
    Router::new().route("/", about).route("/rlconfig", get(rlconfig)).with_state(limiter)
}

async fn index(State((limiter, loaded)): State<(Arc<Limiter>, watch::Receiver<Loaded>)>) -> String {
    let Loaded { since, what, rejected } = loaded.borrow().clone();
    let (load, age) = (limiter.rules().generation(), since.elapsed().as_secs());
    let rejected = rejected.map_or_else(String::new, |why| {
        format!("the rule files as they are now were rejected, so these rules stay:\n{}\n", why.trim_end())
    });
    format!(
        "rules in force: load {load}, {age} s ago: {what}\n{rejected}/rlconfig: the rate limits in force, one per line\n"
    )
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
