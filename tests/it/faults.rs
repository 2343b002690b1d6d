//! Each test breaks one Redis in the way that its row of the fault matrix says, under load, through the real binary.
//!
//! Every call of a load has a counter of its own, so that afterwards each counter tells what became of its call: charged,
//! not charged, or charged twice. What this machine may be slow at is printed beside its bar, and fails only when it is
//! missed by far.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::time::sleep;
use tonic::Code;
use tonic::transport::Channel;

use crate::load::{Call, Calls, Load};
use crate::redis::Single;
use crate::support::{Tidegate, eventually, rule_file};

mod busy;
mod clocks;
mod full;
mod groups;
mod nonsense;
mod outage;
mod overload;
mod refusals;
mod restart;
mod shared;
mod slow;
pub mod table;
mod undo;

/// The policies, each the key of a rule that has it.
const POLICIES: [&str; 4] = ["open", "closed", "local", "error"];
/// Envoy's default (`rate_limit.proto`, field `timeout`).
const ENVOY: Duration = Duration::from_millis(20);
/// Calls in a second.
const RATE: u32 = 1_000;
/// More calls than any load here makes.
const MOST_CALLS: usize = 30_000;
/// What a counter holds, unless a test says otherwise.
const LIMIT: usize = 5;
/// The bars of the matrix for an answer while Redis fails: for 99 of 100 calls, and for all.
const BARS: [Duration; 2] = [Duration::from_millis(13), Duration::from_millis(18)];
/// The bar for being exact again.
const RESTORED: Duration = Duration::from_secs(1);
/// A bar that is missed so many times over is not missed because this machine is busy.
const FAR: u32 = 5;

/// A rule for each policy, each of 5 hits a year, by this algorithm.
fn rules(algorithm: &str) -> NamedTempFile {
    rules_and(algorithm, &[])
}

/// The same, and rules of 5 hits an hour, each for the algorithm that is its key, under the policy `open`.
fn rules_and(algorithm: &str, hourly: &[&str]) -> NamedTempFile {
    let rule = |key: &str, unit, algorithm, policy| {
        let limit = format!("{{ unit: {unit}, requests_per_unit: {LIMIT}, algorithm: {algorithm} }}");
        format!(
            "  - {{ key: {key}, on_store_failure: {policy}, on_store_overload: {policy}, remember_refusals: false, rate_limit: {limit} }}\n"
        )
    };
    let yearly = POLICIES.map(|policy| rule(policy, "year", algorithm, policy)).concat();
    let hourly: String = hourly.iter().map(|algorithm| rule(algorithm, "hour", algorithm, "open")).collect();
    rule_file(&format!("domain: d\ndescriptors:\n{yearly}{hourly}"))
}

/// A Tidegate in front of the Redis at a URL.
async fn tidegate(url: &str) -> Tidegate {
    tidegate_with(rules("fixed_window").path(), &[("REDIS_URL", url)]).await
}

async fn tidegate_with(rules: &Path, variables: &[(&str, &str)]) -> Tidegate {
    let variables: Vec<_> = variables.iter().copied().chain([("LOG_LEVEL", "warn")]).collect();
    Tidegate::start(rules, &variables).await
}

pub fn request(key: &str, value: &str) -> RateLimitRequest {
    let bytes = |text: &str| text.as_bytes().to_vec().into();
    let entries = vec![Entry { key: bytes(key), value: bytes(value) }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 }
}

/// A Tidegate that lets Redis take as long as it takes: what is answered by policy then is not for want of time.
async fn patient_tidegate(url: &str) -> Tidegate {
    tidegate_with(rules("fixed_window").path(), &[("REDIS_URL", url), ("STORE_DEADLINE", "10s")]).await
}

/// Calls of each policy in turn, each with a counter of its own, from callers that say that they wait for so long.
async fn load_of(server: &Tidegate, per_second: u32, told: Duration) -> Load {
    let requests = (0..MOST_CALLS).map(|call| request(POLICIES[call % POLICIES.len()], &call.to_string()));
    Load::patient(server.grpc, requests.collect(), per_second, told).await
}

/// Such calls as from an Envoy.
async fn start_load(server: &Tidegate) -> Load {
    load_of(server, RATE, ENVOY).await
}

/// The same, when the store decides them.
async fn load(server: &Tidegate) -> Load {
    let load = start_load(server).await;
    exact(&load, Duration::ZERO).await;
    load
}

/// Waits until calls that were made after a moment are answered by the store again, twenty one after the other.
async fn exact(load: &Load, healed: Duration) {
    eventually("the store decides", async || first_of(20, &load.since(healed), healed).map(drop)).await;
}

/// Waits until calls that were made after a moment are answered by policy.
async fn failing(load: &Load, broken: Duration) {
    eventually("the policies decide", async || {
        load.since(broken).iter().any(|call| call.made >= broken && !is_counted(call)).then_some(())
    })
    .await;
}

/// Which policies answered in the place of the store.
pub fn policies(answer: &RateLimitResponse) -> Vec<String> {
    use prost_types::value::Kind;
    let fields = answer.dynamic_metadata.as_ref().map(|metadata| &metadata.fields);
    let Some(Kind::ListValue(list)) =
        fields.and_then(|fields| fields.get("on_store_failure")).and_then(|value| value.kind.as_ref())
    else {
        return Vec::new();
    };
    let text = |value: &prost_types::Value| match &value.kind {
        Some(Kind::StringValue(text)) => text.clone(),
        other => panic!("no text: {other:?}"),
    };
    list.values.iter().map(text).collect()
}

/// Whether the store decided a call.
fn is_counted(call: &Call) -> bool {
    call.answer.as_ref().is_ok_and(|answer| policies(answer).is_empty())
}

/// The calls of a load that ends here, and the books: each call was answered by the store or by its policy, none was charged
/// twice, and none that the store answered is missing.
async fn settled(load: Load, redis: &Single) -> (Calls, Books) {
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
    (calls, books)
}

/// Each call of a load is answered as its policy says, whatever fails: with an error only where that is the policy.
fn assert_policies(calls: &Calls) {
    for call in calls.iter() {
        let policy = POLICIES[call.request % POLICIES.len()];
        match &call.answer {
            Err(code) => assert_eq!((policy, *code), ("error", Code::Unavailable), "{call:?}"),
            Ok(answer) if is_counted(call) => assert_eq!(answer.overall_code(), Outcome::Ok, "{call:?}"),
            Ok(answer) => {
                let outcome = if policy == "closed" { Outcome::OverLimit } else { Outcome::Ok };
                assert_ne!(policy, "error", "{call:?}");
                assert_eq!((policies(answer).as_slice(), answer.overall_code()), (&[policy.to_owned()][..], outcome));
            }
        }
    }
    assert!(calls.count() < MOST_CALLS, "some had no counter of their own");
}

/// What the counters say of the calls.
struct Books(HashMap<usize, u64>);

impl Books {
    /// Reads all counters of a server.
    async fn of(server: &Single) -> Self {
        let all = "local all = {} for _, key in ipairs(redis.call('KEYS', '{d|*')) do \
                   local _, hits = struct.unpack('<I8I8', redis.call('GET', key)) \
                   all[#all + 1] = string.format('%s %.0f', key, hits) end return all";
        let printed = server.cli(&["EVAL", all, "0"]).await;
        Self(printed.lines().filter(|line| !line.is_empty()).map(entry).collect())
    }

    fn hits(&self, call: &Call) -> u64 {
        self.0.get(&call.request).copied().unwrap_or(0)
    }

    /// Calls that were charged more than once.
    fn double(&self, calls: &Calls) -> usize {
        calls.such_that(|call| self.hits(call) > 1).count()
    }

    /// Calls that were answered by policy, and charged. What an instance admits by itself under overload is charged later.
    fn charged_unheard(&self, calls: &Calls) -> usize {
        let is_local = |call: &Call| call.answer.as_ref().is_ok_and(|answer| policies(answer) == ["local"]);
        calls.such_that(|call| !is_counted(call) && !is_local(call) && self.hits(call) > 0).count()
    }

    /// Calls that the store admitted, and of which it knows nothing.
    fn forgotten(&self, calls: &Calls) -> usize {
        calls.such_that(|call| is_counted(call) && self.hits(call) == 0).count()
    }
}

/// A counter as read, `{d|open=12}fixed_window:31536000s 1`: which call's it is, and its count.
fn entry(line: &str) -> (usize, u64) {
    let number = line.split_once('=').and_then(|(_, rest)| rest.split_once('}')).map(|(value, _)| value.parse());
    let count = line.rsplit_once(' ').map(|(_, count)| count.parse());
    match (number, count) {
        (Some(Ok(number)), Some(Ok(count))) => (number, count),
        _ => panic!("no counter of a call: {line}"),
    }
}

/// Calls that were made and answered while nobody could charge them, and are charged nevertheless.
fn late(books: &Books, calls: &Calls, from: Duration, to: Duration) -> usize {
    books.charged_unheard(&calls.such_that(|call| call.made >= from && call.answered <= to))
}

/// How long after a moment the store decides again: for all of eight calls one after the other, which every thread has a
/// part in.
fn restored(calls: &Calls, healed: Duration) -> Duration {
    first_of(8, calls, healed).expect("it does") - healed
}

/// When the first of so many calls was made that were all made after a moment, one after the other, and decided by the
/// store.
fn first_of(many: usize, calls: &Calls, moment: Duration) -> Option<Duration> {
    let mut after: Vec<_> = calls.iter().filter(|call| call.made >= moment).collect();
    after.sort_unstable_by_key(|call| call.due);
    let is_counted: Vec<_> = after.iter().map(|call| is_counted(call)).collect();
    let first = is_counted.windows(many).position(|calls| calls.iter().all(|is_counted| *is_counted))?;
    Some(after[first].made)
}

fn ms(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1_000.0)
}

/// Prints how long calls waited while Redis failed.
fn report(what: &str, calls: &Calls, more: &str) {
    let waited = |call: &Call| call.answered - call.made;
    let mut waits: Vec<_> = calls.iter().map(waited).collect();
    waits.sort_unstable();
    let most = |percent: usize| *waits.get((waits.len() * percent).div_ceil(100).max(1) - 1).expect("there are calls");
    let [bar, slowest_bar] = BARS;
    println!(
        "{what}: {} calls, p50 {}, p99 {} (bar {}), slowest {} (bar {}), {more}",
        calls.count(),
        ms(most(50)),
        ms(most(99)),
        ms(bar),
        ms(most(100)),
        ms(slowest_bar),
    );
    // A machine that does other things too may keep many waiting for long, but not every other one for as long as this.
    assert!(most(50) <= RESTORED, "{what}: {}", ms(most(50)));
}

/// Prints how long it took to be exact again.
fn report_restored(what: &str, took: Duration) {
    println!("{what}: exact again after {} (bar {})", ms(took), ms(RESTORED));
    assert!(took <= RESTORED * FAR, "{what}: {}", ms(took));
}

/// Returns the value of a metric, all of its series together.
async fn metric(server: &Tidegate, name: &str) -> f64 {
    let page = server.metrics().await;
    let samples = page.lines().filter(|line| line.starts_with(name));
    samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// How often a breaker opened, by the log.
fn openings(server: &Tidegate) -> usize {
    server.log().matches("store.breaker.opened").count()
}

/// Stops a server and waits until it stands.
async fn pause(server: &Single) {
    server.signal(Signal::STOP);
    let status = format!("/proc/{}/stat", server.pid());
    eventually("it stands", async || {
        let status = std::fs::read_to_string(&status).expect("the kernel tells");
        status.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')).then_some(())
    })
    .await;
}

/// How long a fault lasts is part of it.
async fn lasting(length: Duration) {
    sleep(length).await;
}

/// A client that asks one thing after the other and waits as long as it takes.
#[derive(Clone)]
struct Asker(RateLimitServiceClient<Channel>);

impl Asker {
    async fn of(server: &Tidegate) -> Self {
        let client = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await;
        Self(client.expect("it takes connections"))
    }

    /// Asks for a hit, leaving the store the most time it is ever given.
    async fn ask(&mut self, key: &str, value: &str) -> Result<RateLimitResponse, Code> {
        self.request(request(key, value)).await
    }

    async fn request(&mut self, request: RateLimitRequest) -> Result<RateLimitResponse, Code> {
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("grpc-timeout", "60S".parse().expect("it is text"));
        self.0.should_rate_limit(request).await.map(tonic::Response::into_inner).map_err(|status| status.code())
    }

    /// The same, until the store decides: whether it admits.
    async fn decided(&mut self, key: &str, value: &str) -> bool {
        eventually("the store decides", async || {
            let answer = self.ask(key, value).await.ok().filter(|answer| policies(answer).is_empty())?;
            Some(answer.overall_code() == Outcome::Ok)
        })
        .await
    }

    /// How many of so many hits the store admits.
    async fn admitted(&mut self, key: &str, value: &str, hits: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..hits {
            admitted += usize::from(self.decided(key, value).await);
        }
        admitted
    }
}
