//! Debug listener: the rules in force, in the reference's format, the log level, who was refused lately, and what met no rule.
//!
//! Paths below `/v1/` are about users and addresses. [`Access`] decides who may read them.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::edge::json::Readiness;
use crate::limiter::Limiter;
use crate::model::Micros;
use crate::telemetry::records::Records;

mod access;
mod counters;
mod decisions;
mod explain;
mod mask;
mod process;
mod refusals;
mod tokens;
mod top;
mod unmatched;

pub use access::{AUDIT, Access, TokenGate};
use access::{Reader, addressed_directly, enter};
pub use mask::ValueDigest;
pub use process::LogLevel;
pub use tokens::{AdminTokens, InvalidTokens};

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

/// Parts of the process that the debug listener shows.
pub struct Shown {
    /// Limiter with the rules in force.
    pub limiter: Arc<Limiter>,
    /// State of the rules.
    pub loaded: watch::Receiver<RulesStatus>,
    /// Description of the source of the rules.
    pub source: Description,
    /// Log level.
    pub level: Arc<dyn LogLevel>,
    /// Readiness of this instance.
    pub readiness: Readiness,
    /// Records of decisions, if they are kept.
    pub records: Option<Arc<Records>>,
    /// Signal of the stop.
    pub stopped: watch::Receiver<bool>,
}

/// Returns the routes of the debug listener, for the readers that `access` admits.
pub fn routes(shown: Shown, access: &Access) -> Router {
    let details = details(&shown, access);
    let Shown { limiter, loaded, source, level, .. } = shown;
    let about = get(index).with_state((Arc::clone(&limiter), loaded, source));
    let log_level = process::reads_level().merge(process::sets_level());
    let log_level = log_level.layer(middleware::from_fn_with_state(access.clone(), enter)).with_state(level);
    let rlconfig = get(rlconfig).with_state(limiter);
    let routes = Router::new().route("/", about).route("/rlconfig", rlconfig).route("/log_level", log_level);
    let routes = details.merge(routes);
    match access {
        Access::Loopback => routes.layer(middleware::from_fn(addressed_directly)),
        Access::Closed | Access::Tokens(_) => routes,
    }
}

/// Description of the routes below `/v1/`.
const OPENAPI: &str = include_str!("admin/openapi.json");

/// Maximum number of parameters `entry` of a filter: 16, more than descriptors have. Every decision is compared with them.
const MOST_ENTRIES: usize = 16;

/// Returns the routes below `/v1/`. They name users and addresses, so only readers that `access` admits may read them.
fn details(shown: &Shown, access: &Access) -> Router {
    let Shown { limiter, records, stopped, .. } = shown;
    let mut routes = process::routes(shown)
        .merge(counters::routes(Arc::clone(limiter)))
        .merge(explain::routes(Arc::clone(limiter)))
        .route("/v1/openapi.json", get(async || ([(header::CONTENT_TYPE, "application/json")], OPENAPI)))
        .route("/v1/{*path}", any(async || StatusCode::NOT_FOUND));
    if let Some(records) = records {
        routes = routes
            .merge(refusals::routes(Arc::clone(records)))
            .merge(top::routes(Arc::clone(records)))
            .merge(decisions::routes(Arc::clone(records), stopped.clone()))
            .merge(unmatched::routes(Arc::clone(limiter), Arc::clone(records)));
    }
    routes.layer(middleware::from_fn_with_state(access.clone(), enter))
}

/// Returns an answer of JSON, with the values of clients as `reader` may see them.
fn page_for(reader: &Reader, mut page: Value) -> Response {
    reader.mask(&mut page);
    json_page(&page)
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

/// Adds the value of a parameter `entry` to those of a filter.
fn add_entry(entries: &mut Vec<(String, String)>, value: &str) -> Result<(), String> {
    if entries.len() >= MOST_ENTRIES {
        return Err(format!("entry is repeated more than {MOST_ENTRIES} times"));
    }
    entries.push(entry(value)?);
    Ok(())
}

/// Returns the error for the parameter `name`, which a path does not have; `expected` are those that it has.
fn unknown(name: &str, expected: &str) -> String {
    format!("there is no parameter {name}: expected {expected}")
}

/// Rejects the query of a path that takes none.
fn no_parameters(query: Option<&str>) -> Result<(), String> {
    match form_urlencoded::parse(query.unwrap_or_default().as_bytes()).next() {
        Some((name, _)) => Err(unknown(&name, "none")),
        None => Ok(()),
    }
}

fn millis(time: Micros) -> u64 {
    time.get() / 1_000
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
/log_level: the least severity that is logged; PUT another, such as debug, to change it; also /v1/log-level
/v1/rules: the load of the rules in force, with its digest and sources, as JSON
/v1/explain: the rule that answers for a descriptor, and the reason, as JSON
/v1/health: if this instance accepts calls, as JSON
/v1/refusals: who was refused lately, by which rule and limit, as JSON; `tidegate why` asks several instances
/v1/openapi.json: what the paths below /v1/ take and answer
/v1/counters: what is used and left of the limits of a descriptor, as JSON; `tidegate counter` asks several instances
/v1/decisions: decisions as they are made, one line of JSON each; `tidegate tap` shows those of several instances
/v1/top: who is refused, or asks, most in the last minute, as JSON; `tidegate top` shows several instances
/v1/unmatched: descriptors and domains without a rule, and the nearest rule, as JSON; `tidegate top --unmatched` asks several instances
"
    )
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
        let flags = |is_shadow: bool, more: &str| {
            format!(
                "shadow_mode: {}, quota_mode: {}{more}{from}",
                rule.role().is_shadow() || is_shadow,
                rule.role().is_quota()
            )
        };
        if rule.is_unlimited() {
            let _ = writeln!(text, "{}: unit=UNKNOWN requests_per_unit=0, {}", rule.path(), flags(false, ""));
        }
        for limit in rule.limits() {
            let (quota, algorithm) = (limit.limit.quota(), limit.limit.algorithm());
            let mut more = String::new();
            // The reference has no other algorithm than the default.
            if algorithm != Default::default() {
                let _ = write!(more, ", algorithm: {}", algorithm.name());
            }
            if algorithm.has_burst() {
                let _ = write!(more, ", burst: {}", quota.burst());
            }
            let unit = match quota.window().unit() {
                Some((unit, 1)) => unit.name().to_uppercase(),
                _ => quota.window().length().to_string(),
            };
            let _ = writeln!(
                text,
                "{}: unit={unit} requests_per_unit={}, {}",
                rule.path(),
                quota.limit(),
                flags(limit.is_shadow, &more)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{MOST_ENTRIES, add_entry};

    #[test]
    fn a_filter_takes_sixteen_entries_and_says_so() {
        let mut entries = Vec::new();
        assert!((0..MOST_ENTRIES).all(|_| add_entry(&mut entries, "user=ann").is_ok()));
        assert_eq!(add_entry(&mut entries, "user=ann").unwrap_err(), "entry is repeated more than 16 times");
        assert!(add_entry(&mut Vec::new(), "user").unwrap_err().contains("entry=KEY=VALUE"));
        assert_eq!(entries.len(), MOST_ENTRIES);
    }
}
