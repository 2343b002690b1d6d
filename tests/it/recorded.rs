//! Recorded histories: three real instances on a real cluster under load and faults, whose every answer is compared with the bounds of
//! `docs/guarantees.md`.
//!
//! `HISTORY_SEED=17 HISTORY_SECONDS=300 cargo test --test it -- --ignored --nocapture recorded` makes the faults in the order of that seed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost_types::value::Kind::{StringValue, StructValue};
use tempfile::TempDir;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::time::{Instant, sleep};
use tonic::{Code, Request};

use self::checker::{Answer, Call, Fault, History, Time};
use self::faults::{Done, Kind};
use self::rules::{Ask, Rules};
use crate::faults::policies;
use crate::faults::table::Site;
use crate::load::{Load, alone};
use crate::support::{Tidegate, eventually, replace_file};

mod checker;
mod faults;
mod rules;

const INSTANCES: usize = 3;
/// Calls a second to each instance.
const RATE: u32 = 200;
/// The timeout of the callers, of which the store may take a part.
const TIMEOUT: Duration = Duration::from_secs(1);
const STORE_DEADLINE: &str = "500ms";
/// The length of a run without `HISTORY_SECONDS`.
const SECONDS: u64 = 60;
/// The most that the clock may be set by during a run: spans of calls are widened by it.
const MOST_DRIFT: Time = 50_000;
/// The time in which no counter holds hits any more, nor an instance.
const REST: Duration = Duration::from_secs(10);

/// The clock of this machine, which the servers have too.
#[derive(Clone, Copy)]
struct Clock {
    began: Instant,
    epoch_us: Time,
}

impl Clock {
    fn start() -> Self {
        Self { began: Instant::now(), epoch_us: epoch_us() }
    }

    fn at(self, moment: Instant) -> Time {
        self.epoch_us + micros(moment.saturating_duration_since(self.began))
    }

    fn now(self) -> Time {
        self.at(Instant::now())
    }

    /// The time by which the clock has been set or slewed since the start.
    fn drift(self) -> Time {
        self.now().abs_diff(epoch_us())
    }
}

fn epoch_us() -> Time {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock that is set"))
}

fn micros(duration: Duration) -> Time {
    u64::try_from(duration.as_micros()).expect("it fits")
}

/// The calls to an instance, each by the place of its request.
struct Callers {
    load: Load,
    asks: Vec<Ask>,
}

struct World {
    /// The cluster; its proxies are for the first instance.
    site: Site,
    addresses: [String; INSTANCES],
    instances: Vec<Tidegate>,
    callers: Vec<Callers>,
    rules: Rules,
    directory: TempDir,
    /// True after every second load of the rules.
    is_changed: bool,
    random: fastrand::Rng,
    turn: usize,
    clock: Clock,
    history: History,
}

impl World {
    async fn start(seed: u64) -> Self {
        let site = Site::start_with(&["--cluster-node-timeout", "2000"]).await;
        let (apart, direct) = (site.apart(), site.cluster.addresses());
        let rules = Rules::new();
        let (clock, counters) = (Clock::start(), rules.counters.clone());
        let history = History { began: clock.epoch_us, counters, instances: INSTANCES as u64, ..History::default() };
        let mut world = Self {
            site,
            addresses: [apart, direct.clone(), direct],
            instances: Vec::new(),
            callers: Vec::new(),
            rules,
            directory: tempfile::tempdir().expect("a directory"),
            is_changed: false,
            random: fastrand::Rng::with_seed(seed),
            turn: 0,
            clock,
            history,
        };
        world.write_rules();
        world.is_whole().await;
        for number in 0..INSTANCES {
            world.launch(number).await;
        }
        world
    }

    /// Puts the rules in force in the place of the last ones, at once.
    fn write_rules(&self) {
        replace_file(&self.directory.path().join("rules.yaml"), &self.rules.yaml(self.is_changed));
    }

    /// Starts an instance and its callers.
    async fn launch(&mut self, number: usize) {
        let variables = [
            ("REDIS_TYPE", "cluster"),
            ("REDIS_URL", &*self.addresses[number]),
            ("REPLICAS", "3"),
            ("STORE_DEADLINE", STORE_DEADLINE),
            ("DECISION_METADATA", "true"),
            ("LOG_LEVEL", "error"),
        ];
        let instance = Tidegate::start(&self.directory.path().join("rules.yaml"), &variables).await;
        let asks = self.rules.mixed(&mut self.random);
        let requests = asks.iter().map(|ask| ask.request.clone()).collect();
        let load = Load::patient(instance.grpc, requests, RATE, TIMEOUT).await;
        self.instances.insert(number, instance);
        self.callers.insert(number, Callers { load, asks });
    }

    /// Kills an instance, and starts it again.
    async fn restart(&mut self, number: usize) {
        let mut killed = self.instances.remove(number);
        killed.kill();
        killed.ended().await;
        let callers = self.callers.remove(number);
        self.record(number, callers).await;
        self.launch(number).await;
    }

    /// Ends the calls to an instance, and records them.
    async fn record(&mut self, number: usize, Callers { load, asks }: Callers) {
        let began = self.clock.at(load.began());
        for call in load.stop().await.iter() {
            let span = [call.made, call.answered].map(|after| began + micros(after));
            self.history.calls.push(recorded(number, &asks[call.request], span, &call.answer));
        }
    }

    /// Makes faults until the end, in the order of the seed: all of them, and all of them again.
    async fn fail(&mut self, length: Duration) {
        let (began, mut checked) = (Instant::now(), self.clock.now());
        let mut masters = self.masters().await;
        let mut kinds = Vec::new();
        while began.elapsed() < length {
            sleep(Duration::from_millis(self.random.u64(200..1_000))).await;
            if kinds.is_empty() {
                kinds = Kind::all();
                self.random.shuffle(&mut kinds);
            }
            let kind = kinds.pop().expect("there are some");
            let from = self.clock.now();
            let Done { name, forgotten, moved, killed } = self.make(kind).await;
            let (now, to) = (self.masters().await, self.clock.now());
            let slots = self.rules.slots.iter().enumerate();
            let of = |is_such: &dyn Fn(usize, &u16) -> bool| -> Vec<usize> {
                slots.clone().filter(|(counter, slot)| is_such(*counter, slot)).map(|(counter, _)| counter).collect()
            };
            let lost = of(&|_, slot| forgotten.contains(slot));
            let replaced = of(&|counter, slot| {
                now[counter] != masters[counter] && !moved.contains(slot) && !forgotten.contains(slot)
            });
            self.history.faults.push(Fault { name, from, to, forgotten: lost, killed });
            if !replaced.is_empty() {
                // A machine that is busy for long makes a cluster replace masters by itself.
                let name = "a failover that nobody asked for".to_owned();
                self.history.faults.push(Fault { name, from: checked, to, forgotten: replaced, killed: None });
            }
            (masters, checked) = (now, to);
        }
    }

    /// The master of each counter.
    async fn masters(&self) -> Vec<usize> {
        let shards = self.site.cluster.shards().await;
        let master = |slot: &u16| shards.iter().find(|shard| shard.owns(*slot)).expect("somebody owns it").master;
        self.rules.slots.iter().map(master).collect()
    }

    /// Ends the calls, and asks for all the hits of each counter once nothing is charged there.
    async fn rest(&mut self) {
        for number in 0..INSTANCES {
            let callers = self.callers.remove(0);
            self.record(number, callers).await;
        }
        sleep(REST).await;
        let asks: Vec<_> = self.rules.asks.iter().map(|ask| self.rules.whole(ask)).collect();
        for (place, ask) in asks.iter().enumerate() {
            let number = place % INSTANCES;
            let mut client = client(&self.instances[number]).await;
            eventually("the store decides", async || {
                let mut request = Request::new(ask.request.clone());
                request.set_timeout(TIMEOUT);
                let sent = self.clock.now();
                let answer = client.should_rate_limit(request).await;
                let answer = answer.map(tonic::Response::into_inner).map_err(|status| status.code());
                let call = recorded(number, ask, [sent, self.clock.now()], &answer);
                let is_decided = matches!(call.answer, Answer::Admitted | Answer::Refused);
                self.history.calls.push(call);
                is_decided.then_some(())
            })
            .await;
        }
    }

    /// Finds the keys that never expire.
    async fn find_endless(&mut self) {
        let script = "local all = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
                      if redis.call('PTTL', key) == -1 then all[#all + 1] = key end end return all";
        for shard in self.site.cluster.shards().await {
            let keys = self.site.cluster.nodes()[shard.master].cli(&["EVAL", script, "0"]).await;
            self.history.endless.extend(keys.lines().filter(|key| !key.is_empty()).map(str::to_owned));
        }
    }
}

async fn client(instance: &Tidegate) -> RateLimitServiceClient<tonic::transport::Channel> {
    let connected = RateLimitServiceClient::connect(format!("http://{}", instance.grpc)).await;
    connected.expect("it takes connections")
}

fn recorded(instance: usize, ask: &Ask, [sent, answered]: [Time; 2], answer: &Result<RateLimitResponse, Code>) -> Call {
    let provenance = answer.as_ref().map_or_else(|code| code.to_string(), provenance);
    let answer = match answer {
        Err(code) => Answer::Failed(*code),
        Ok(answer) => {
            let (names, is_admitted) = (policies(answer), answer.overall_code() == Outcome::Ok);
            match (names.is_empty(), is_admitted) {
                (true, true) => Answer::Admitted,
                (true, false) => Answer::Refused,
                (false, is_admitted) => Answer::Policy { names, is_admitted },
            }
        }
    };
    Call { instance, counters: ask.counters.clone(), hits: ask.hits, sent, answered, answer, provenance }
}

/// The origin of an answer, by its metadata.
fn provenance(answer: &RateLimitResponse) -> String {
    let metadata = answer.dynamic_metadata.as_ref();
    let decision = metadata.and_then(|metadata| metadata.fields.get("decision")?.kind.as_ref());
    let Some(StructValue(decision)) = decision else { return "unknown".to_owned() };
    match decision.fields.get("provenance").and_then(|value| value.kind.as_ref()) {
        Some(StringValue(name)) => name.clone(),
        _ => "unknown".to_owned(),
    }
}

/// One line about a run.
fn summary(seed: u64, history: &History) -> String {
    let History { calls, faults, .. } = history;
    let count = |is_such: &dyn Fn(&Call) -> bool| calls.iter().filter(|call| is_such(call)).count();
    let admitted = count(&|call| call.answer == Answer::Admitted);
    let leased = count(&|call| call.answer == Answer::Admitted && call.provenance == "lease");
    let refused = count(&|call| call.answer == Answer::Refused);
    let by_policy = count(&|call| matches!(call.answer, Answer::Policy { .. }));
    let failed = count(&|call| matches!(call.answer, Answer::Failed(_)));
    let longest = calls.iter().max_by_key(|call| call.answered - call.sent).map(|call| history.line(call));
    let mut names: BTreeMap<&str, u32> = BTreeMap::new();
    faults.iter().for_each(|fault| *names.entry(&fault.name).or_default() += 1);
    let names: Vec<_> = names.iter().map(|(name, times)| format!("{times} x {name}")).collect();
    format!(
        "seed {seed}: {} calls, {admitted} admitted ({leased} by leases), {refused} refused, {by_policy} by policy, {failed} failed; \
         median {} ms; {} faults: {}; longest answer: {}",
        calls.len(),
        history.median() / 1_000,
        faults.len(),
        names.join(", "),
        longest.unwrap_or_default()
    )
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn no_answer_of_three_instances_breaks_a_bound_whatever_fails() {
    let _alone = alone().await;
    let seed = variable("HISTORY_SEED").unwrap_or_else(epoch_us);
    let mut world = World::start(seed).await;
    world.fail(Duration::from_secs(variable("HISTORY_SECONDS").unwrap_or(SECONDS))).await;
    world.rest().await;
    world.find_endless().await;
    let drift = world.clock.drift();
    assert!(drift < MOST_DRIFT, "the clock of this machine was set by {drift} us: nothing can be said");
    let history = world.history.widened(drift);
    println!("{}", summary(seed, &history));
    for provenance in ["store", "lease", "closed"] {
        assert!(history.calls.iter().any(|call| call.provenance == provenance), "nothing was decided by {provenance}");
    }
    let breaches = history.check();
    if !breaches.is_empty() {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("history-{seed}.txt"));
        std::fs::write(&file, history.to_string()).expect("it is written");
        let mut text = format!("seed {seed}: {} breaches; the history is in {}\n", breaches.len(), file.display());
        for breach in breaches.iter().take(5) {
            let _ = writeln!(text, "{}", history.excerpt(breach));
        }
        panic!("{text}");
    }
}
