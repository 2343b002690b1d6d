//! One run: instances, callers and faults by a seed, and what must hold whatever fails.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::limiter::Limiter;
use tidegate::model::{Clock, Descriptor, Entry, Micros, Outcome, Provenance, Quota, Request, Window};
use tidegate::rulefile::{Documents, File, Options, compile};
use tidegate::rules::live::LiveRules;
use tidegate::store::Store;
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::redis::address::{Address, Topology};
use tidegate::store::redis::credentials::Credentials;
use tidegate::store::redis::login::Login;
use tidegate::store::redis::manager::Access;
use tidegate::store::redis::{Instance, Redis};
use tidegate::store::replicas::Replicas;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::clock::SimulatedClock;
use super::cluster::Cluster;
use super::network::{Accepted, Link, Links};
use super::server::Server;
use crate::laws::bound;

/// The name of a server in the network.
fn server_name(place: usize) -> String {
    format!("10.0.0.{}:6379", place + 1)
}

/// How long callers call.
const CALLING: Duration = Duration::from_secs(8);
/// What the service has to come to rest in.
const REST: Duration = Duration::from_secs(20);
/// The longest time for which hits are leased: six times `ttl`.
const LEASED: Micros = Micros::from_secs(6);
/// A limit that no run reaches, of a year: it counts what is charged.
const COUNTED: u32 = 9_000;

/// A call, and how it ended.
#[derive(Clone, Debug)]
struct Call {
    from: Micros,
    to: Micros,
    /// Keys and values of its descriptors.
    descriptors: Vec<(String, String)>,
    hits: u32,
    /// `None` if the caller left before.
    outcome: Option<Outcome>,
    /// The store gave all of the answer. Where it did not, it may have charged all the same: its answer may be late, or lost.
    is_certain: bool,
    took: Duration,
    timeout: Option<Duration>,
}

impl Call {
    /// The number of its descriptors with this key and value.
    fn descriptors_of(&self, key: &str, value: &str) -> u64 {
        self.descriptors.iter().filter(|(own, text)| own == key && text == value).count() as u64
    }
}

/// What became of a seed.
pub struct Run {
    seed: u64,
    pub trace: Vec<String>,
    /// Promises that were not kept.
    broken: Vec<String>,
    calls: Vec<Call>,
}

impl Run {
    /// Runs a seed.
    pub fn of(seed: u64) -> Self {
        on_virtual_time(World::run(seed))
    }

    pub fn calls(&self) -> usize {
        self.calls.len()
    }

    /// Fails with all promises that were not kept.
    pub fn assert_kept(&self) {
        let from = self.trace.len().saturating_sub(200);
        assert!(
            self.broken.is_empty(),
            "seed {}: {}\n{}",
            self.seed,
            self.broken.join("\n"),
            self.trace[from..].join("\n")
        );
    }
}

/// Runs this on a clock that goes on when nothing else is left to do.
pub fn on_virtual_time<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    LocalSet::new().block_on(&runtime.expect("a runtime"), future)
}

/// A request with a descriptor of one entry for each of these keys and values.
pub fn request<'a>(descriptors: impl IntoIterator<Item = (&'a str, &'a str)>, hits: u32) -> Request {
    let descriptor = |(key, value): (&str, &str)| Descriptor {
        entries: vec![Entry::new(key.to_owned(), value.to_owned())],
        hits_addend: Some(hits.into()),
        ..Descriptor::default()
    };
    let descriptors = descriptors.into_iter().map(descriptor).collect();
    Request::new("d".to_owned(), descriptors, 0).expect("a request")
}

struct World {
    random: fastrand::Rng,
    trace: Rc<RefCell<Vec<String>>>,
    /// The servers: one, or the masters of a cluster.
    servers: Vec<Rc<Server>>,
    clock: SimulatedClock,
    cluster: Option<Rc<Cluster>>,
    instances: Vec<Process>,
    calls: Rc<RefCell<Vec<Call>>>,
    rules: Rules,
    /// When redis lost its data, and when its clock was set ahead.
    losses: Vec<Micros>,
    steps: Vec<Micros>,
}

/// An instance of the service.
pub struct Process {
    pub limiter: Arc<Limiter>,
    /// The ways to each server.
    pub links: Vec<Arc<Link>>,
}

/// The rules of a run.
struct Rules {
    text: String,
    /// The limits, by the key of their descriptor.
    limits: BTreeMap<String, Limit>,
    charging: &'static str,
    /// The part of a limit that may be leased, in percent.
    leased: u32,
}

fn rules(random: &mut fastrand::Rng) -> Rules {
    let charging = if random.bool() { "each" } else { "all_or_nothing" };
    let (leased, most) = if random.u8(..3) == 0 { (random.u32(10..=50), 200) } else { (0, 20) };
    let lease = if leased > 0 { format!("{{ share: {leased}%, ttl: 1s }}") } else { "off".to_owned() };
    let mut text = format!(
        "domain: d\ncharging: {charging}\non_store_failure: closed\non_store_overload: closed\nlease: {lease}\ndescriptors:\n"
    );
    let mut limits = BTreeMap::new();
    for (name, algorithm) in Algorithm::ALL {
        let (hits, window) = (random.u32(1..=most), [1, 2, 5, 60][random.usize(..4)]);
        let lease = if algorithm == Algorithm::SlidingLog { ", lease: off" } else { "" };
        let _ = writeln!(
            text,
            "  - {{ key: {name}{lease}, rate_limit: {{ window: {window}s, requests_per_unit: {hits}, algorithm: {name} }} }}"
        );
        let quota = Quota::new(hits, Window::of_length(Micros::from_secs(window)).expect("a window"));
        limits.insert(name.to_owned(), Limit::new(algorithm, quota).expect("a limit"));
    }
    let (hits, window) = (random.u32(1..=20), Micros::from_secs(2));
    let quota = Quota::new(hits, Window::of_length(window).expect("a window"));
    limits.insert("list".to_owned(), Limit::new(Algorithm::FixedWindow, quota).expect("a limit"));
    let few = format!("{{ window: 2s, requests_per_unit: {hits} }}");
    let _ = writeln!(
        text,
        "  - {{ key: list, lease: off, rate_limits: [{few}, {{ unit: year, requests_per_unit: {COUNTED} }}] }}"
    );
    let counted = format!("{{ unit: year, requests_per_unit: {COUNTED} }}");
    let _ = writeln!(text, "  - {{ key: counted, lease: off, rate_limit: {counted} }}");
    Rules { text, limits, charging, leased }
}

pub fn process(
    text: &str,
    clock: SimulatedClock,
    latency: std::ops::RangeInclusive<u64>,
    seed: u64,
    servers: &[UnboundedSender<Accepted>],
) -> Process {
    let file = File { name: "rules.yaml".into(), bytes: text.as_bytes().to_vec() };
    let rules = compile(Documents::parse(vec![file]), &Options::default()).expect("rules").rules;
    let link = |(place, server): (usize, &UnboundedSender<Accepted>)| {
        Link::new(latency.clone(), seed.wrapping_add(place as u64), server.clone())
    };
    let to_each: Vec<_> = servers.iter().enumerate().map(link).collect();
    let links = Links::default();
    links.0.lock().extend(to_each.iter().enumerate().map(|(place, link)| (server_name(place), Arc::clone(link))));
    let access = Access {
        credentials: Arc::new(Credentials::fixed(Login::default())),
        max_age: None,
        tls: None,
        db: 0,
        prefix: Arc::default(),
        connect_timeout: Duration::from_millis(500),
        alive: Arc::default(),
        metrics: Arc::default(),
        network: Arc::new(links),
    };
    let address = |place| {
        let name = server_name(place);
        let (host, port) = name.split_once(':').expect("a port");
        Address::Tcp(host.to_owned(), port.parse().expect("a number"))
    };
    let topology = match servers.len() {
        1 => Topology::Single(address(0)),
        masters => Topology::Cluster((0..masters).map(address).collect()),
    };
    let redis = Redis::new(Instance { topology, access }, None, "", 1);
    let clock: Arc<dyn Clock> = Arc::new(clock);
    let memory = Arc::new(Memory::new(Arc::clone(&clock), 10_000));
    let store = Arc::new(redis.clone()) as Arc<dyn Store>;
    let guard = Arc::new(Guard::new(store, Deadline::Auto, memory, Arc::new(Replicas::counted()), clock));
    let settling = Arc::clone(&guard);
    tokio::spawn(async move { redis.supervise().await });
    tokio::spawn(async move { settling.settle().await });
    tokio::spawn(Arc::clone(&guard).keep_leases());
    Process { limiter: Arc::new(Limiter::new(Arc::new(LiveRules::new(rules)), guard)), links: to_each }
}

/// Ends a fault after a time.
fn after(length: Duration, end: impl FnOnce() + 'static) {
    tokio::task::spawn_local(async move {
        sleep(length).await;
        end();
    });
}

impl World {
    async fn run(seed: u64) -> Run {
        let mut random = fastrand::Rng::with_seed(seed);
        let (began, trace) = (Instant::now(), Rc::new(RefCell::new(Vec::new())));
        let rules = rules(&mut random);
        let text = rules.text.clone();
        let clock = SimulatedClock::new(began, random.i64(-5_000_000..5_000_000));
        let masters = if random.bool() { 1 } else { 3 };
        let cluster = (masters > 1).then(|| Rc::new(Cluster::new((0..masters).map(server_name).collect())));
        let place = |place| cluster.clone().map(|cluster| (place, cluster));
        let start = |number| Server::start(clock.clone(), place(number), Rc::clone(&trace));
        let (servers, accepted): (Vec<_>, Vec<_>) = (0..masters).map(start).unzip();
        let least = [50, 200, 1_000, 4_000][random.usize(..4)];
        let latency = least..=least * random.u64(1..=3);
        trace.borrow_mut().push(format!("seed {seed}, latency {latency:?} us\n{text}"));
        let instances = (0..random.usize(1..=4))
            .map(|_| {
                let wrong_by = random.i64(-5_000_000..5_000_000);
                process(&text, SimulatedClock::new(began, wrong_by), latency.clone(), random.u64(..), &accepted)
            })
            .collect();
        let mut world = Self {
            random,
            trace,
            servers,
            clock,
            cluster,
            instances,
            calls: Rc::default(),
            rules,
            losses: Vec::new(),
            steps: Vec::new(),
        };
        // Connections are made, as before a real instance is ready.
        sleep(Duration::from_millis(500)).await;
        let until = Instant::now() + CALLING;
        let callers: Vec<_> = (0..world.random.usize(1..=12)).map(|_| world.caller(until)).collect();
        world.fail(until).await;
        world.heal();
        for caller in callers {
            caller.await.expect("a caller ends");
        }
        sleep(REST).await;
        world.judge(seed).await
    }

    /// Starts a caller, which calls until the end.
    fn caller(&mut self, until: Instant) -> tokio::task::JoinHandle<()> {
        let mut random = self.random.fork();
        let (clock, calls) = (self.clock.clone(), Rc::clone(&self.calls));
        let trace = Rc::clone(&self.trace);
        let instances: Vec<_> = self.instances.iter().map(|instance| Arc::clone(&instance.limiter)).collect();
        let keys: Vec<String> = self.rules.limits.keys().cloned().collect();
        let pace = random.u64(1_000..200_000);
        tokio::task::spawn_local(async move {
            while Instant::now() < until {
                sleep(Duration::from_micros(random.u64(1..=2 * pace))).await;
                let place = random.usize(..instances.len());
                let value = format!("{}", random.u8(..3));
                let mut descriptors = vec![(keys[random.usize(..keys.len())].clone(), value.clone())];
                if random.u8(..3) == 0 {
                    descriptors.push((keys[random.usize(..keys.len())].clone(), "other".to_owned()));
                }
                descriptors.push(("counted".to_owned(), value));
                let hits = [1, 1, 1, 2, 5][random.usize(..5)];
                let timeout_of_caller =
                    [None, Some(20), Some(100), Some(250)][random.usize(..4)].map(Duration::from_millis);
                let request = request(descriptors.iter().map(|(key, value)| (key.as_str(), value.as_str())), hits);
                let (limiter, rules) = (&instances[place], instances[place].rules());
                let (began, from) = (Instant::now(), clock.now());
                let deciding = limiter.decide(&rules, &request, timeout_of_caller);
                // Some callers leave before.
                let patience =
                    if random.u8(..10) == 0 { Duration::from_micros(random.u64(1..20_000)) } else { Duration::MAX };
                let decision = timeout(patience, deciding).await.ok();
                let verdicts = decision.iter().flat_map(|decision| decision.limited());
                let by: Vec<_> = verdicts.map(|(_, tightest)| tightest.verdict.provenance).collect();
                let is_certain = decision.is_some() && by.iter().all(|by| *by == Provenance::Store);
                let outcome = decision.map(|decision| decision.outcome);
                let (to, took) = (clock.now(), began.elapsed());
                trace.borrow_mut().push(format!(
                    "{to} instance {place} {outcome:?} for {descriptors:?} x {hits} by {by:?} after {took:?} of {timeout_of_caller:?}"
                ));
                calls.borrow_mut().push(Call {
                    from,
                    to,
                    descriptors,
                    hits,
                    outcome,
                    is_certain,
                    took,
                    timeout: timeout_of_caller,
                });
            }
        })
    }

    fn note(&self, what: &str) {
        self.trace.borrow_mut().push(format!("{} {what}", self.clock.now()));
    }

    /// Lets things fail until the end.
    async fn fail(&mut self, until: Instant) {
        let mean = self.random.u64(100..2_000);
        while Instant::now() < until {
            sleep(Duration::from_millis(self.random.u64(1..=2 * mean))).await;
            let (place, of) = (self.random.usize(..self.instances.len()), self.random.usize(..self.servers.len()));
            let (way, server) = (self.instances[place].links[of].way.clone(), Rc::clone(&self.servers[of]));
            let length = Duration::from_millis([5, 30, 200, 1_500][self.random.usize(..4)]);
            match self.random.u8(..11) {
                0 => {
                    self.note(&format!("instance {place} is not heard by redis {of} for {length:?}"));
                    way.send_modify(|way| way.is_silent = true);
                    after(length, move || way.send_modify(|way| way.is_silent = false));
                }
                1 | 2 => {
                    self.note(&format!("the connections of instance {place} with redis {of} are cut"));
                    way.send_modify(|way| way.resets += 1);
                }
                3 => {
                    self.note(&format!("redis {of} pauses for {length:?}"));
                    server.is_paused.send_replace(true);
                    after(length, move || server.is_paused.send_modify(|paused| *paused = false));
                }
                4 => {
                    self.note(&format!("redis {of} forgets its scripts"));
                    server.flush_scripts();
                }
                5 => {
                    self.note(&format!("redis {of} has no memory for {length:?}"));
                    server.keys(|keys| keys.is_full = true);
                    after(length, move || server.keys(|keys| keys.is_full = false));
                }
                6 => {
                    let most = [200, 2_000, 30_000][self.random.usize(..3)];
                    self.note(&format!("bytes between instance {place} and redis {of} take up to {most} us"));
                    way.send_modify(|way| way.latency = most / 2..=most);
                }
                7 => {
                    let step = self.random.i64(1..5_000_000);
                    self.note(&format!("the clock of redis is set {step} us ahead"));
                    self.clock.step(step);
                    self.steps.push(self.clock.now());
                }
                8 => {
                    self.note(&format!("redis {of} loses its data"));
                    self.losses.push(self.clock.now());
                    server.keys(super::keys::Keys::clear);
                }
                9 => self.move_slots(of),
                _ => {
                    self.note(&format!("instance {place} cannot connect to redis {of} for {length:?}"));
                    way.send_modify(|way| (way.is_closed, way.resets) = (true, way.resets + 1));
                    after(length, move || way.send_modify(|way| way.is_closed = false));
                }
            }
        }
        sleep_until(until).await;
    }

    /// Moves slots of a cluster, with their keys, to server `to`.
    fn move_slots(&mut self, to: usize) {
        let Some(cluster) = self.cluster.clone() else { return };
        let first = self.random.usize(..16_384);
        let slots = first..(first + self.random.usize(1..6_000)).min(16_384);
        self.note(&format!("slots {slots:?} move to redis {to}"));
        // A server has keys of its own slots only.
        for (_, from) in self.servers.iter().enumerate().filter(|(place, _)| *place != to) {
            let taken = from.keys(|keys| keys.take(&slots));
            self.servers[to].keys(|keys| keys.add(taken));
        }
        cluster.give(slots, to);
    }

    fn heal(&self) {
        self.note("all is well");
        for link in self.instances.iter().flat_map(|instance| &instance.links) {
            link.way.send_modify(|way| (way.is_silent, way.is_closed, way.latency) = (false, false, 100..=200));
        }
        for server in &self.servers {
            server.is_paused.send_replace(false);
            server.keys(|keys| keys.is_full = false);
        }
    }

    /// Says which promises were not kept.
    async fn judge(self, seed: u64) -> Run {
        let mut broken: Vec<_> = self.servers.iter().flat_map(|server| server.broken.take()).collect();
        let calls = self.calls.borrow().clone();
        for call in &calls {
            // Deadline::Auto: what a caller without a timeout is given.
            let most = call.timeout.unwrap_or(Duration::from_millis(10));
            if call.took > most + Duration::from_millis(1) {
                broken.push(format!("late: {call:?}"));
            }
        }
        for (key, limit) in &self.rules.limits {
            for value in ["0", "1", "2", "other"] {
                broken.extend(self.too_many(&calls, key, value, limit));
            }
        }
        for value in ["0", "1", "2"].iter().filter(|_| self.losses.is_empty()) {
            broken.extend(["counted", "list"].into_iter().filter_map(|key| self.miscounted(&calls, key, value)));
        }
        broken.extend(self.undecided().await);
        for server in &self.servers {
            let endless = server.keys(|keys| {
                keys.begin(self.clock.now().get());
                keys.endless()
            });
            broken.extend(endless.iter().map(|key| format!("without an end: {key}")));
        }
        drop(self.instances);
        Run { seed, trace: self.trace.take(), broken, calls }
    }

    /// Compares what is charged to a counter of a year with what its callers were told.
    fn miscounted(&self, calls: &[Call], key: &str, value: &str) -> Option<String> {
        let sum = |is_meant: &dyn Fn(&Call) -> bool| -> u64 {
            let hits = |call: &Call| u64::from(call.hits) * call.descriptors_of(key, value);
            calls.iter().filter(|call| is_meant(call)).map(hits).sum()
        };
        let is_admitted = |call: &Call| call.outcome == Some(Outcome::Admitted);
        let admitted = sum(&is_admitted);
        let uncertain = sum(&|call| !call.is_certain && !is_admitted(call));
        // Each on its own: a refusal by another limit charges this one all the same.
        let refused =
            if self.rules.charging == "each" { sum(&|call| call.is_certain && !is_admitted(call)) } else { 0 };
        let name = format!("{{d|{key}={value}}}fixed_window:365d");
        let charged: u64 = self.servers.iter().map(|server| server.keys(|keys| keys.count(name.as_bytes()))).sum();
        let most = admitted + uncertain + refused;
        (charged < admitted || charged > most).then(|| {
            format!("{key} {value}: {charged} are charged, {admitted} were admitted, {uncertain} uncertain, {refused} refused, at most {most}")
        })
    }

    /// Says for which instance Redis does not decide, although all is well.
    async fn undecided(&self) -> Vec<String> {
        let mut undecided = Vec::new();
        for (place, Process { limiter, .. }) in self.instances.iter().enumerate() {
            for value in ["0", "1", "2"] {
                let request = request([("counted", value)], 0);
                let rules = limiter.rules();
                let mut by = None;
                // Where all calls were too late, a call is followed by a pause (`concurrency`), until some are in time.
                for _ in 0..10 {
                    sleep(Duration::from_millis(300)).await;
                    let decision = limiter.decide(&rules, &request, Some(Duration::from_millis(250))).await;
                    by = decision.limited().next().map(|(_, tightest)| tightest.verdict.provenance);
                    if by == Some(Provenance::Store) {
                        break;
                    }
                }
                if by != Some(Provenance::Store) {
                    undecided.push(format!("instance {place}: at rest {by:?} decides {value}"));
                }
            }
        }
        undecided
    }

    /// Says if any interval has more admitted hits than its bound.
    fn too_many(&self, calls: &[Call], key: &str, value: &str, limit: &Limit) -> Option<String> {
        let is_of = |call: &&Call| call.outcome == Some(Outcome::Admitted) && call.descriptors_of(key, value) > 0;
        // docs/guarantees.md: a limit more for each loss of data, and what is leased when the interval begins.
        let once = u128::from(limit.quota().limit());
        let leased = once * u128::from(self.rules.leased) / 100;
        let lasting = if leased > 0 { LEASED } else { Micros::ZERO };
        let mut admitted: Vec<&Call> = calls.iter().filter(is_of).collect();
        admitted.sort_by_key(|call| call.to);
        for first in &admitted {
            let mut sum = 0;
            // Those that surely lie within: what is charged is charged between the call and its answer.
            for call in admitted.iter().filter(|call| call.from >= first.from) {
                sum += u128::from(u64::from(call.hits) * call.descriptors_of(key, value));
                // What was leased before a loss is spent after it.
                let is_within = |loss: &&Micros| loss.saturating_add(lasting) >= first.from && **loss <= call.to;
                let losses = self.losses.iter().filter(is_within).count() as u128;
                let is_before = |step: &Micros| step.saturating_add(LEASED) >= first.from && *step <= call.to;
                let leased = match limit.algorithm() {
                    Algorithm::SlidingLog => 0,
                    // A lease ends with its window by the clock that its instance knows.
                    Algorithm::FixedWindow if !self.steps.iter().any(is_before) => 0,
                    _ => leased,
                };
                let most = bound(limit, first.from, call.to) + once * losses + leased;
                if sum > most {
                    return Some(format!(
                        "{key} {value}: {sum} from {} to {}, at most {most} of {limit:?}",
                        first.from, call.to
                    ));
                }
            }
        }
        None
    }
}
