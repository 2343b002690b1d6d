//! Debug listener: the rules in force, in the reference's format, the log level, who was refused lately, and what met no rule.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::limiter::Limiter;
use crate::model::Micros;
use crate::telemetry::Telemetry;

mod counters;
mod decisions;
mod refusals;
mod top;
mod unmatched;

/// State of the rule files: the load in force, a rejection, and a slow load.
#[derive(Clone, Debug)]
pub struct RulesStatus {
    /// Time at which the rules in force were loaded.
    pub since: Instant,
    /// Number and source of the rules in force, as text for people.
    pub what: String,
    /// Reason for which the current files are not in force; `None` if they are.
    pub rejected: Option<String>,
    /// Start of the load that is under way, once it is slow.
    pub slow_since: Option<Instant>,
}

/// Returns lines about the source of the rules, as text for people; empty if there is nothing to say.
pub type Description = Arc<dyn Fn() -> String + Send + Sync>;

/// Maximum bytes of a log level in a request: 1 KiB. A wrong word of this length still gets the error that explains it.
const LONGEST_WORD: usize = 1 << 10;

/// Log level of the process, which can change while it runs.
pub trait LogLevel: Send + Sync {
    /// Returns the name of the level.
    fn get(&self) -> String;

    /// Sets the level to `word`.
    ///
    /// # Errors
    /// Returns the expected words, as text for people.
    fn set(&self, word: &str) -> Result<(), String>;
}

/// State of the route `/log_level`. Only a listener on a loopback address can change the level, so its callers are on
/// this machine.
#[derive(Clone)]
struct Levels {
    level: Arc<dyn LogLevel>,
    is_local: bool,
}

/// Returns the routes of the debug listener; `at` is its address.
pub fn routes(
    limiter: Arc<Limiter>,
    loaded: watch::Receiver<RulesStatus>,
    source: Description,
    level: Arc<dyn LogLevel>,
    telemetry: &Telemetry,
    at: IpAddr,
    stopped: &watch::Receiver<bool>,
) -> Router {
    let details = details(&limiter, telemetry, at, stopped);
    let about = get(index).with_state((Arc::clone(&limiter), loaded, source));
    let levels = Levels { level, is_local: at.is_loopback() };
    let log_level = get(log_level).put(set_log_level).layer(DefaultBodyLimit::max(LONGEST_WORD)).with_state(levels);
    let rlconfig = get(rlconfig).with_state(limiter);
    let routes = Router::new().route("/", about).route("/rlconfig", rlconfig).route("/log_level", log_level);
    let routes = details.merge(routes);
    if at.is_loopback() { routes.layer(middleware::from_fn(addressed_directly)) } else { routes }
}

/// Description of the routes below `/v1/`.
const OPENAPI: &str = include_str!("admin/openapi.json");

/// Answer to requests from other machines.
const NOT_HERE: &str = "what is here names users and addresses, so it is served only where DEBUG_HOST is a loopback address, such as 127.0.0.1\n";

/// Returns the routes below `/v1/`. They name users and addresses, so only callers on this machine may read them: whoever can do that
/// could read the process too.
fn details(limiter: &Arc<Limiter>, telemetry: &Telemetry, at: IpAddr, stopped: &watch::Receiver<bool>) -> Router {
    if !at.is_loopback() {
        return Router::new().route("/v1/{*path}", any(async || (StatusCode::FORBIDDEN, NOT_HERE)));
    }
    let Some(records) = telemetry.records() else { return Router::new() };
    let routes = refusals::routes(Arc::clone(&records))
        .merge(top::routes(Arc::clone(&records)))
        .merge(decisions::routes(Arc::clone(&records), stopped.clone()))
        .merge(counters::routes(Arc::clone(limiter)))
        .route("/v1/openapi.json", get(async || ([(header::CONTENT_TYPE, "application/json")], OPENAPI)))
        .merge(unmatched::routes(Arc::clone(limiter), records));
    routes.layer(middleware::from_fn(not_by_a_page))
}

/// Rejects requests that a web page makes: a browser names the page in the Origin header.
async fn not_by_a_page(request: Request, next: Next) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        return (StatusCode::FORBIDDEN, "the Origin header names a web page, and no page may read this\n")
            .into_response();
    }
    next.run(request).await
}

/// Returns an answer of JSON.
fn json_page(page: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], format!("{page}\n")).into_response()
}

/// Returns the answer to a wrong query.
fn wrong(why: String) -> Response {
    (StatusCode::BAD_REQUEST, why + "\n").into_response()
}

/// Parses the value of the parameter `entry`: `KEY=VALUE`.
fn entry(value: &str) -> Result<(String, String), String> {
    let parsed = value.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    parsed.ok_or_else(|| format!("entry={value} has no value: write entry=KEY=VALUE"))
}

/// Returns the error for the parameter `name`, which a path does not have; `expected` are those that it has.
fn unknown(name: &str, expected: &str) -> String {
    format!("there is no parameter {name}: expected {expected}")
}

fn millis(time: Micros) -> u64 {
    time.get() / 1_000
}

/// Rejects requests whose host is neither an address nor localhost. Applies to loopback only: other callers use names.
async fn addressed_directly(request: Request, next: Next) -> Response {
    if is_addressed_directly(request.headers()) {
        return next.run(request).await;
    }
    let why = "the Host header is neither an address nor localhost: a page in a browser may have been led here\n";
    (StatusCode::FORBIDDEN, why).into_response()
}

type Index = (Arc<Limiter>, watch::Receiver<RulesStatus>, Description);

async fn index(State((limiter, loaded, source)): State<Index>) -> String {
    let source = source();
    let RulesStatus { since, what, rejected, slow_since } = loaded.borrow().clone();
    let (load, age) = (limiter.rules().generation(), since.elapsed().as_secs());
    let rejected = rejected.map_or_else(String::new, |why| {
        format!("the rule files as they are now were rejected, so these rules stay:\n{}\n", why.trim_end())
    });
    let slow = slow_since.map_or_else(String::new, |began| {
        let passed = began.elapsed().as_secs();
        format!("the next load has been under way for {passed} s: the file system of the rule files may not answer\n")
    });
    format!(
        "rules in force: load {load}, {age} s ago: {what}
{rejected}{slow}{source}/rlconfig: the rate limits in force, one per line
/log_level: the least severity that is logged; PUT another, such as debug, to change it
/v1/refusals: who was refused lately, by which rule and limit, as JSON; `tidegate why` asks several instances
/v1/openapi.json: what the paths below /v1/ take and answer
/v1/counters: what is used and left of the limits of a descriptor, as JSON; `tidegate counter` asks several instances
/v1/decisions: decisions as they are made, one line of JSON each; `tidegate tap` shows those of several instances
/v1/top: who is refused, or asks, most in the last minute, as JSON; `tidegate top` shows several instances
/v1/unmatched: descriptors and domains without a rule, and the nearest rule, as JSON; `tidegate top --unmatched` asks several instances
"
    )
}

async fn log_level(State(Levels { level, .. }): State<Levels>) -> String {
    level.get() + "\n"
}

async fn set_log_level(State(Levels { level, is_local }): State<Levels>, word: String) -> Response {
    if !is_local {
        let why =
            "the level of the log can be changed only where DEBUG_HOST is a loopback address, such as 127.0.0.1\n";
        return (StatusCode::FORBIDDEN, why).into_response();
    }
    match level.set(word.trim()) {
        Ok(()) => (level.get() + "\n").into_response(),
        Err(why) => (StatusCode::BAD_REQUEST, why + "\n").into_response(),
    }
}

/// Returns true if the Host header of the request is an address or localhost. This stops DNS rebinding: a foreign web
/// page can make its own name resolve to this machine, but the browser then sends that name.
fn is_addressed_directly(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    host.is_some_and(|host| {
        let name = host.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    })
}

async fn rlconfig(State(limiter): State<Arc<Limiter>>) -> String {
    let mut text = String::new();
    let rules = limiter.rules();
    for (domain, changed) in rules.changed_domains() {
        let _ = writeln!(text, "{domain}: with {}", changed.join(", "));
    }
    for rule in rules.rules() {
        // A line without an overlay is that of the reference.
        let from = if rules.is_overlaid(rule) { format!(", from: {}", rules.places(rule)) } else { String::new() };
        let flags = |is_shadow: bool| {
            format!(
                "shadow_mode: {}, quota_mode: {}{from}",
                rule.role().is_shadow() || is_shadow,
                rule.role().is_quota()
            )
        };
        if rule.is_unlimited() {
            let _ = writeln!(text, "{}: unit=UNKNOWN requests_per_unit=0, {}", rule.path(), flags(false));
        }
        for limit in rule.limits() {
            let quota = limit.limit.quota();
            let unit = match quota.window().unit() {
                Some((unit, 1)) => unit.name().to_uppercase(),
                _ => quota.window().length().to_string(),
            };
            let _ = writeln!(
                text,
                "{}: unit={unit} requests_per_unit={}, {}",
                rule.path(),
                quota.limit(),
                flags(limit.is_shadow)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_an_address_or_this_machines_own_name_is_direct() {
        let is_direct = |host: &str| {
            let host = HeaderValue::from_str(host).unwrap();
            is_addressed_directly(&HeaderMap::from_iter([(header::HOST, host)]))
        };
        for direct in ["127.0.0.1", "127.0.0.1:6070", "[::1]:6070", "[::1]", "localhost", "LocalHost:6070"] {
            assert!(is_direct(direct), "{direct}");
        }
        for led in ["", "evil.example", "evil.example:6070", "localhost.evil.example", "127.0.0.1.evil.example", "a b"]
        {
            assert!(!is_direct(led), "{led}");
        }
        assert!(!is_addressed_directly(&HeaderMap::new()));
    }
}
