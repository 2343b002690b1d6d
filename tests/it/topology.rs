//! A cluster changes and breaks under load, in the way that each row of the fault matrix says.
//!
//! The policy is `error`, so a call that fails is one that a policy answered, and every other one was decided by the
//! cluster. Of a counter that holds out for ever the answers tell by what remains which hit was the how manieth: a charge
//! that is lost is told twice, and one that is doubled leaves a gap. The bounds on time are printed beside their bars and
//! fail only when they are missed by far.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use tempfile::NamedTempFile;
use tidegate::algorithm::Algorithm;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::Code;
use tonic::transport::Channel;

use crate::load::{Call, Calls, Load};
use crate::redis::cluster::{Cluster, NAMES_NO_HOST, Shard, slot};
use crate::redis::proxy::Proxy;
use crate::support::{Tidegate, eventually, in_time, rule_file};

mod keys;
pub mod masters;
mod nodes;
mod paths;
mod slots;
mod undo;

/// More than any test asks for.
const ENDLESS: u32 = 4_000_000_000;
/// Less than every load asks for.
const FEW: u32 = 40;
/// The most that a log counts, and more than any load asks of one.
const LOGGED: u32 = 10_000;
/// Counters of each kind in each shard.
const EACH: usize = 3;
/// Calls in a second.
const RATE: u32 = 400;
/// How long a caller waits where the machine may be slow and only what Redis does is looked at; the store has half of it.
const PATIENT: Duration = Duration::from_secs(2);
/// The bar for being exact again.
const RESTORED: Duration = Duration::from_secs(1);
/// A bar that is missed so many times over is not missed because this machine is busy.
const FAR: u32 = 5;

/// The address where an instance finds a cluster behind proxies.
pub const APART: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A cluster, a proxy in front of each of its nodes, and the addresses of the proxies.
pub async fn behind_proxies() -> (Cluster, Vec<Proxy>, String) {
    let cluster = Cluster::start_with(NAMES_NO_HOST).await;
    let proxies = cluster.proxies(APART).await;
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
    (cluster, proxies, addresses.join(","))
}

/// The windows are long, so that none ends meanwhile; but those of the counters that are late.
fn rules() -> String {
    let late = Algorithm::ALL.map(|(name, _)| {
        let quota = format!("unit: second, unit_multiplier: {}, requests_per_unit: {}", undo::SECONDS, undo::HITS);
        let limit = format!("charging: all_or_nothing, rate_limit: {{ {quota}, algorithm: {name} }}");
        format!("  - {{ key: late_{name}, {limit} }}\n")
    });
    // More than the month's: a limit that another one of its list makes useless is a warning in the log.
    let most = u32::MAX;
    format!(
        "domain: d
descriptors:
  - {{ key: one, rate_limit: {{ unit: year, requests_per_unit: {ENDLESS} }} }}
  - {{ key: log, rate_limit: {{ unit: year, requests_per_unit: {LOGGED}, algorithm: sliding_log }} }}
  - {{ key: few, charging: all_or_nothing, remember_refusals: false, rate_limit: {{ unit: year, requests_per_unit: {FEW} }} }}
  - key: tight
    charging: all_or_nothing
    rate_limits:
      - {{ unit: year, requests_per_unit: 2 }}
      - {{ unit: month, requests_per_unit: 1 }}
  - key: grows
    charging: all_or_nothing
    rate_limits:
      - {{ unit: year, requests_per_unit: 1, delay: {{ step: 1s, max: 2s, beyond: admit }} }}
      - {{ unit: month, requests_per_unit: {ENDLESS} }}
  - key: two
    rate_limits:
      - {{ unit: year, requests_per_unit: {most} }}
      - {{ unit: month, requests_per_unit: {ENDLESS} }}
  - {{ key: second, rate_limit: {{ unit: second, requests_per_unit: {ENDLESS} }} }}
  - {{ key: herd, rate_limit: {{ unit: second, requests_per_unit: {FEW} }} }}
{}",
        late.concat()
    )
}

/// An instance, and the file of its rules.
struct Instance {
    tidegate: Tidegate,
    _rules: NamedTempFile,
}

impl Instance {
    /// An instance whose cluster has a node at one of these addresses. The store may take a second, whatever the caller
    /// says.
    async fn start(addresses: &str) -> Self {
        Self::start_with(addresses, &[("STORE_DEADLINE", "1s")]).await
    }

    async fn start_with(addresses: &str, more: &[(&str, &str)]) -> Self {
        let instance = Self::launch(addresses, more).await;
        // It serves before it knows a cluster that takes long to answer.
        let mut client = instance.client().await;
        for value in 0..10 {
            let look = hits(&[("one", &format!("hello{value}"))], 0);
            eventually("the cluster decides", async || client.ask(&look).await.ok()).await;
        }
        instance
    }

    /// The same, which does not wait for a cluster that decides.
    async fn launch(addresses: &str, more: &[(&str, &str)]) -> Self {
        let file = rule_file(&rules());
        // Whatever the cluster does not decide fails.
        let policy = ("ON_STORE_OVERLOAD", "error");
        let own = [("REDIS_TYPE", "cluster"), ("REDIS_URL", addresses), ("LOG_LEVEL", "warn"), policy];
        let tidegate = Tidegate::start(file.path(), &[&own, more].concat()).await;
        Self { tidegate, _rules: file }
    }

    async fn client(&self) -> Client {
        let connected = RateLimitServiceClient::connect(format!("http://{}", self.tidegate.grpc));
        Client(in_time("the server is there", connected).await.expect("it takes connections"))
    }

    /// Asks for these counters in turn.
    async fn load(&self, counters: &Counters) -> Load {
        let requests = counters.0.iter().map(|counter| hits(&[(counter.key, &counter.value)], 1)).collect();
        Load::patient(self.tidegate.grpc, requests, RATE, PATIENT).await
    }
}

#[derive(Clone)]
struct Client(RateLimitServiceClient<Channel>);

impl Client {
    async fn ask(&mut self, request: &RateLimitRequest) -> Result<RateLimitResponse, Code> {
        let answer = in_time("it is answered", self.0.should_rate_limit(request.clone())).await;
        answer.map(tonic::Response::into_inner).map_err(|status| status.code())
    }

    /// How many hits a counter holds, when the cluster tells.
    async fn used(&mut self, counter: &Counter) -> u32 {
        let look = hits(&[(counter.key, &counter.value)], 0);
        let answer = eventually("the cluster tells", async || self.ask(&look).await.ok()).await;
        limit_of(counter.key) - answer.statuses[0].limit_remaining
    }
}

/// Asks each descriptor, of one entry, for so many hits; 0 only looks.
fn hits(descriptors: &[(&str, &str)], hits: u64) -> RateLimitRequest {
    let bytes = |text: &str| text.as_bytes().to_vec().into();
    let descriptor = |(key, value): &(&str, &str)| RateLimitDescriptor {
        entries: vec![Entry { key: bytes(key), value: bytes(value) }],
        hits_addend: Some(hits),
        ..RateLimitDescriptor::default()
    };
    let descriptors = descriptors.iter().map(descriptor).collect();
    RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 }
}

/// One counter, or two of one slot.
#[derive(Clone, Debug)]
struct Counter {
    key: &'static str,
    value: String,
    /// Who was the master of its slot when the test began.
    master: usize,
}

/// How many hits fit into one window of a counter.
fn limit_of(key: &str) -> u32 {
    match key {
        "few" => FEW,
        "log" => LOGGED,
        _ => ENDLESS,
    }
}

/// The slot of the counters of a descriptor.
pub fn slot_of(key: &str, value: &str) -> u16 {
    slot(&format!("{{d|{key}={value}}}"))
}

/// Counters that a load asks for: the number of a call's request is the counter's.
struct Counters(Vec<Counter>);

impl Counters {
    /// Some of each of these keys in each shard.
    fn of(shards: &[Shard], keys: &[&'static str]) -> Self {
        let mut counters = Vec::new();
        for shard in shards {
            for key in keys {
                let values = (0..).map(|number: u32| format!("v{number}"));
                let here = values.filter(|value| shard.owns(slot_of(key, value))).take(EACH);
                counters.extend(here.map(|value| Counter { key, value, master: shard.master }));
            }
        }
        Self(counters)
    }

    fn is_on(&self, call: &Call, master: usize) -> bool {
        self.0[call.request].master == master
    }

    /// What became of each counter: its calls, and what it holds now.
    async fn accounts(&self, client: &mut Client, calls: &Calls) -> Vec<Account> {
        let mut accounts = Vec::new();
        for (index, counter) in self.0.iter().enumerate() {
            let calls = calls.such_that(|call| call.request == index);
            let held = client.used(counter).await;
            accounts.push(Account { counter: counter.clone(), calls, held: usize::try_from(held).expect("it fits") });
        }
        accounts
    }

    /// Nothing was lost and nothing doubled, in none of them.
    async fn assert_exact(&self, client: &mut Client, calls: &Calls) {
        self.accounts(client, calls).await.iter().for_each(Account::assert_exact);
    }
}

/// What callers were told of one counter, and what it holds in the end.
struct Account {
    counter: Counter,
    calls: Calls,
    held: usize,
}

impl Account {
    fn admitted(&self) -> usize {
        self.calls.answered(Outcome::Ok)
    }

    /// How many admitted hits were forgotten.
    fn lost(&self) -> usize {
        let told = self.calls.iter().filter_map(|call| call.answer.as_ref().ok());
        let admitted = told.filter(|answer| answer.overall_code() == Outcome::Ok);
        let numbers: BTreeSet<_> = admitted.map(|answer| answer.statuses[0].limit_remaining).collect();
        self.admitted() - numbers.len()
    }

    fn assert_exact(&self) {
        let Self { counter, calls, held } = self;
        let (admitted, failed) = (self.admitted(), calls.failed());
        assert_eq!(self.lost(), 0, "hits of {counter:?} were told twice");
        assert!(admitted <= *held, "{counter:?} holds {held} of {admitted} admitted hits");
        // A call that failed may have been charged, if its answer was lost.
        assert!(*held <= admitted + failed, "{counter:?} holds {held}; {admitted} were admitted and {failed} failed");
    }
}

/// Waits until so many more calls are answered.
async fn more(load: &Load, calls: usize) {
    let from = load.so_far().count();
    eventually("calls are answered", async || (load.so_far().count() >= from + calls).then_some(())).await;
}

/// Waits until the store decides calls of a shard that were due after a moment.
async fn exact_again(load: &Load, counters: &Counters, master: usize, moment: Duration) {
    eventually("the shard is exact again", async || {
        let calls = load.since(moment).such_that(|call| call.due > moment && counters.is_on(call, master));
        (calls.such_that(|call| call.answer.is_ok()).count() > 20).then_some(())
    })
    .await;
}

/// When the last of the calls that failed between two moments was due, if any did.
fn last_failed(calls: &Calls, from: Duration, to: Duration) -> Option<Duration> {
    let failed = calls.between(from, to).such_that(|call| call.answer.is_err());
    failed.iter().map(|call| call.due).max()
}

fn assert_none_failed(calls: &Calls, what: &str) {
    let failed = calls.such_that(|call| call.answer.is_err());
    assert_eq!(failed.count(), 0, "{what}: {:?} of {}", failed.iter().next(), calls.count());
}
