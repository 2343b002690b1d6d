//! One run: the servers, the instances and the callers of a seed.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tidegate::limiter::Limiter;
use tidegate::model::{Clock, Descriptor, Entry, Micros, Request};
use tidegate::rulefile::{Documents, File, Options, compile};
use tidegate::rules::RuleSet;
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
use tokio::sync::watch;
use tokio::task::{AbortHandle, LocalSet};
use tokio::time::{Instant, sleep};

use super::calls::Call;
use super::clock::SimulatedClock;
use super::deployment::{Deployment, Kind};
use super::network::{Link, Links};
use super::rules::Rules;

/// Time in which callers call while things fail.
const CALLING: Duration = Duration::from_secs(8);
/// Time without faults and calls: longer than two windows.
const REST: Duration = Duration::from_secs(25);
/// Time in which callers call again, while nothing fails.
const CALLING_AGAIN: Duration = Duration::from_secs(2);

/// Result of a seed.
pub struct Run {
    pub seed: u64,
    pub trace: Vec<String>,
    /// Promises that were not kept.
    pub broken: Vec<String>,
    /// The number of calls.
    pub calls: usize,
}

impl Run {
    /// Runs a seed.
    pub fn of(seed: u64) -> Self {
        on_virtual_time(World::run(seed))
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

/// A request with a descriptor of one entry for each of these keys and values. Hits below 0 are given back.
pub fn request<'a>(descriptors: impl IntoIterator<Item = (&'a str, &'a str)>, hits: i64) -> Request {
    let descriptor = |(key, value): (&str, &str)| Descriptor {
        entries: vec![Entry::new(key.to_owned(), value.to_owned())],
        hits_addend: Some(hits.unsigned_abs()),
        is_negative_hits: hits < 0,
        ..Descriptor::default()
    };
    let descriptors = descriptors.into_iter().map(descriptor).collect();
    Request::new("d".to_owned(), descriptors, 0).expect("a request")
}

/// An instance of the service, from its start to its end.
pub struct Process {
    /// Its number in the order of their starts.
    pub number: usize,
    pub limiter: Arc<Limiter>,
    pub rules: Arc<LiveRules>,
    pub clock: SimulatedClock,
    /// The ways to each server, and then to each sentinel.
    pub links: Vec<Arc<Link>>,
    pub is_killed: watch::Sender<bool>,
    tasks: [AbortHandle; 3],
}

pub type Processes = Rc<RefCell<Vec<Rc<Process>>>>;

impl Process {
    /// Starts an instance with these rules. There are `replicas` of them.
    pub fn start(
        (number, replicas): (usize, usize),
        text: &str,
        clock: SimulatedClock,
        latency: RangeInclusive<u64>,
        seed: u64,
        deployment: &Deployment,
    ) -> Rc<Self> {
        let hosts = deployment.hosts().into_iter().zip(seed..);
        let links: Vec<_> = hosts.map(|(host, seed)| Link::new(latency.clone(), seed, host)).collect();
        let access = Access {
            credentials: Arc::new(Credentials::fixed(Login::default())),
            max_age: None,
            tls: None,
            db: 0,
            prefix: Arc::default(),
            connect_timeout: Duration::from_millis(500),
            alive: Arc::default(),
            metrics: Arc::default(),
            network: Arc::new(Links::new(&links)),
        };
        let address = |place: usize| {
            let (host, port) = links[place].address().split_once(':').expect("a port");
            Address::Tcp(host.to_owned(), port.parse().expect("a number"))
        };
        let topology = match deployment.kind {
            Kind::Single => Topology::Single(address(0)),
            Kind::Sentinel => {
                let sentinels = (deployment.servers.len()..links.len()).map(address).collect();
                Topology::Sentinel { master: "main".to_owned(), sentinels, login: Login::default() }
            }
            Kind::Cluster => Topology::Cluster((0..3).map(address).collect()),
        };
        let redis = Redis::new(Instance { topology, access }, None, "", 1);
        let shared: Arc<dyn Clock> = Arc::new(clock.clone());
        let memory = Arc::new(Memory::new(Arc::clone(&shared), 10_000));
        let store = Arc::new(redis.clone()) as Arc<dyn Store>;
        let replicas = Replicas::set(NonZeroU32::new(u32::try_from(replicas).expect("few")).expect("one"));
        let guard = Arc::new(Guard::new(store, Deadline::Auto, memory, Arc::new(replicas), shared));
        let (settling, leasing) = (Arc::clone(&guard), Arc::clone(&guard));
        let tasks = [
            tokio::spawn(async move { redis.supervise().await }),
            tokio::spawn(async move { settling.settle().await }),
            tokio::spawn(leasing.keep_leases()),
        ];
        let rules = Arc::new(LiveRules::new(compiled(text)));
        let limiter = Arc::new(Limiter::new(Arc::clone(&rules), guard));
        let (is_killed, tasks) = (watch::Sender::new(false), tasks.map(|task| task.abort_handle()));
        Rc::new(Self { number, limiter, rules, clock, links, is_killed, tasks })
    }

    /// Ends it as `kill -9` does: its calls have no answer, and nothing of it reaches a server any more.
    pub fn kill(&self) {
        self.is_killed.send_replace(true);
        self.tasks.iter().for_each(AbortHandle::abort);
        for link in &self.links {
            link.way.send_modify(|way| (way.is_closed, way.resets) = (true, way.resets + 1));
        }
    }

    pub fn reload(&self, text: &str) {
        self.rules.replace(compiled(text));
    }
}

fn compiled(text: &str) -> RuleSet {
    let file = File { name: "rules.yaml".into(), bytes: text.as_bytes().to_vec() };
    compile(Documents::parse(vec![file]), &Options::default()).expect("rules").rules
}

/// Ends a fault after a time.
pub fn after(length: Duration, end: impl FnOnce() + 'static) {
    tokio::task::spawn_local(async move {
        sleep(length).await;
        end();
    });
}

pub struct World {
    pub random: fastrand::Rng,
    pub began: Instant,
    pub deployment: Rc<Deployment>,
    pub clock: SimulatedClock,
    pub processes: Processes,
    /// Number of processes that were started.
    pub started: usize,
    pub latency: RangeInclusive<u64>,
    pub calls: Rc<RefCell<Vec<Call>>>,
    /// The rules, and from when on they were in force.
    pub rules: Vec<(Instant, Rules)>,
    /// Steps of the clock of Redis: when it was set, and its time before and after.
    pub steps: Vec<(Instant, Micros, Micros)>,
    /// Intervals in which something failed.
    pub faults: Vec<std::ops::Range<Instant>>,
    /// Intervals in which the store decides on all calls.
    pub calm: Vec<std::ops::Range<Instant>>,
    pub broken: Vec<String>,
    pub trace: Rc<RefCell<Vec<String>>>,
}

impl World {
    async fn run(seed: u64) -> Run {
        let mut random = fastrand::Rng::with_seed(seed);
        let (began, trace) = (Instant::now(), Rc::<RefCell<Vec<String>>>::default());
        let rules = Rules::new(&mut random);
        let clock = SimulatedClock::new(began, random.i64(-5_000_000..5_000_000));
        let kind = [Kind::Single, Kind::Sentinel, Kind::Cluster, Kind::Cluster][random.usize(..4)];
        let deployment = Rc::new(Deployment::new(kind, &clock, &trace));
        let least = [50, 200, 1_000, 4_000][random.usize(..4)];
        let latency = least..=least * random.u64(1..=3);
        trace.borrow_mut().push(format!("seed {seed}, latency {latency:?} us\n{}", rules.text()));
        let mut world = Self {
            random,
            began,
            deployment,
            clock,
            processes: Rc::default(),
            started: 0,
            latency,
            calls: Rc::default(),
            rules: vec![(began, rules)],
            steps: Vec::new(),
            faults: Vec::new(),
            calm: Vec::new(),
            broken: Vec::new(),
            trace,
        };
        let instances = world.random.usize(1..=4);
        for _ in 0..instances {
            let process = world.process(instances);
            world.processes.borrow_mut().push(process);
        }
        // Connections are made, as before a real instance is ready.
        sleep(Duration::from_millis(1_000)).await;
        let until = Instant::now() + CALLING;
        let callers: Vec<_> = (0..world.random.usize(1..=12)).map(|_| world.caller(until)).collect();
        world.fail(until).await;
        for caller in callers {
            caller.await.expect("a caller ends");
        }
        world.heal().await;
        sleep(REST).await;
        world.rest_honestly().await;
        let (calls, before) = (world.calls.borrow().len(), world.counters());
        let began = Instant::now();
        let until = Instant::now() + CALLING_AGAIN;
        let callers: Vec<_> = (0..6).map(|_| world.caller(until)).collect();
        for caller in callers {
            caller.await.expect("a caller ends");
        }
        world.calm.push(began..Instant::now());
        // What a refused request took elsewhere is given back.
        sleep(Duration::from_secs(2)).await;
        world.judge(seed, calls, &before)
    }

    /// Starts an instance, of `replicas`.
    pub fn process(&mut self, replicas: usize) -> Rc<Process> {
        self.started += 1;
        let clock = SimulatedClock::new(self.began, self.random.i64(-5_000_000..5_000_000));
        let (rules, seed) = (self.rules.last().expect("rules").1.text(), self.random.u64(..u64::MAX / 2));
        Process::start((self.started - 1, replicas), &rules, clock, self.latency.clone(), seed, &self.deployment)
    }

    /// Returns one of the instances.
    pub fn some_process(&mut self) -> Rc<Process> {
        let processes = self.processes.borrow();
        Rc::clone(&processes[self.random.usize(..processes.len())])
    }

    pub fn note(&self, what: &str) {
        self.deployment.note(what);
    }
}
