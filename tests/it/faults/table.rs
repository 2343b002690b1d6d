//! The faults of Redis, one row each: how it is made, what is answered meanwhile, and how much may be admitted.
//!
//! A row names its tests by what they run:
//!
//! * `plain`: calls to one instance, each with a counter of its own;
//! * `leased`: three instances that use up counters with leases.
//!
//! `topology::nodes` makes the faults of `of_a_node` at one master of a cluster, and `recorded` makes them and those of a cluster in any order:
//! there a row needs no test of its own.

use std::time::Duration;

use rustix::process::Signal;
use tokio::join;
use tokio::time::{Instant, sleep};

use super::{
    Books, ENVOY, FAR, assert_policies, exact, is_counted, lasting, late, load, ms, openings, pause, report,
    report_restored, restored, tidegate,
};
use crate::leases::cluster::leased as leased_on_cluster;
use crate::leases::faults::leased;
use crate::load::{Calls, Load, alone};
use crate::redis::Single;
use crate::redis::cluster::{Cluster, NAMES_NO_HOST, Shard};
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::support::{Tidegate, eventually};
use crate::topology::APART;
use crate::topology::masters::{cut_master, lose_master, replica_follows};

use Decided::{Nothing, Something};
use How::{Busy, ClockSet, Commands, Flushed, Killed, Loading, Paused, Proxied, Restarted};

/// A fault of one Redis, which has a proxy in front of it.
#[derive(Clone)]
pub struct Fault {
    /// The name in reports.
    pub name: &'static str,
    how: How,
    lasts: Duration,
    /// How often it happens where nothing is measured.
    times: u32,
    decided: Decided,
    /// Limits of a counter that are admitted at most.
    pub limits: usize,
    /// True if leases admit nearly a whole limit all the same.
    pub is_used_up: bool,
}

#[derive(Clone)]
enum How {
    Killed,
    Paused,
    /// By what happens at the proxy, one after the other.
    Proxied(Vec<Faults>),
    /// By a command, and ended by another.
    Commands(&'static [&'static str], &'static [&'static str]),
    /// Connections and scripts are lost.
    Flushed,
    Busy,
    Loading,
    /// It is killed, and loads what it saved.
    Restarted,
    /// The clock is set back and ahead.
    ClockSet,
}

/// The calls that the store decides while a fault lasts.
#[derive(Clone, Copy)]
enum Decided {
    Anything,
    Nothing,
    Something,
}

/// A fault of a cluster, at its shard `broken`.
#[derive(Clone, Copy, Debug)]
pub enum ClusterFault {
    MasterKilled,
    MasterPausedUntilReplaced,
    MasterCutFromItsCluster,
    InstanceCutFromAShard,
}

macro_rules! faults {
    ($($row:ident: $type:ty = $fault:expr, $($run:ident: fn $test:ident()),+;)+) => {
        $(
            pub fn $row() -> $type {
                $fault
            }
            $(
                #[tokio::test]
                async fn $test() {
                    $run(&$row()).await;
                }
            )+
        )+
    };
}

faults! {
    killed: Fault = Fault::new("killed for 1 s", Killed).lasting(1_000).decided(Nothing).losing_data(),
    plain: fn a_killed_redis_is_answered_for_by_policy_until_it_is_back(),
    leased: fn a_redis_that_comes_back_empty_admits_one_limit_more_with_leases_too();

    // Grants whose replies came too late are given back or wasted.
    paused: Fault = Fault::new("paused three times", Paused).lasting(400).times(3),
    leased: fn a_redis_that_pauses_grants_nothing_twice();

    silent: Fault = Fault::new("half-open for 3 s", Proxied(vec![Faults::both(Way::black_hole())]))
        .lasting(3_000).decided(Nothing),
    replaced: fn a_connection_that_swallows_everything_is_replaced();

    reset: Fault = Fault::new(
        "reset every 0.2 s for 4 s",
        Proxied(vec![Faults { reset_each: Some(Duration::from_millis(200)), ..Faults::default() }])
    ).lasting(4_000).decided(Something),
    plain: fn connections_reset_again_and_again_charge_nobody_twice();

    byte_by_byte: Fault = Fault::new(
        "a byte each 10 ms",
        Proxied(vec![Faults { to_client: slices(), ..Faults::default() }])
    ).lasting(2_000),
    plain: fn answers_that_come_byte_by_byte_are_not_waited_for();

    slow_path: Fault = Fault::new("a path that is slow in four ways", Proxied(vec![
        Faults::both(Way::latency_ms(8)),
        Faults { to_client: Way::latency_ms(300), ..Faults::default() },
        Faults::both(Way { straggler: Some((100, Duration::from_secs(1))), ..Way::default() }),
        Faults::both(slices()),
    ])).lasting(300),
    leased: fn a_slow_path_to_redis_grants_nothing_twice();

    flushed: Fault = Fault::new("connections and scripts lost twenty times", Flushed).lasting(50).times(20),
    leased: fn connections_that_are_reset_and_scripts_that_are_flushed_cost_no_hit_too_many();

    full: Fault = Fault::new(
        "out of memory",
        Commands(&["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"])
    ).lasting(700).used_up(),
    leased: fn a_redis_without_memory_grants_nothing_that_it_cannot_charge();

    refusing: Fault = Fault::new(
        "without the right to run scripts",
        Commands(&["ACL", "SETUSER", "default", "-evalsha"], &["ACL", "SETUSER", "default", "+evalsha"])
    ).lasting(1_000).used_up(),
    leased: fn a_redis_that_refuses_commands_grants_nothing();

    busy: Fault = Fault::new("busy with a script for 1 s", Busy).lasting(1_000).decided(Nothing).used_up(),
    plain: fn a_redis_busy_with_a_script_is_answered_for_by_policy(),
    leased: fn a_redis_that_is_busy_with_a_script_grants_nothing_twice();

    restarted: Fault = Fault::new("loading after a restart", Restarted).lasting(300).decided(Nothing).losing_data(),
    plain: fn while_redis_loads_the_policies_answer();

    loading: Fault = Fault::new("loading its data", Loading).used_up(),
    leased: fn a_redis_that_loads_its_data_grants_nothing_twice();

    evicted: Fault = Fault::new("all keys evicted", Commands(&["FLUSHALL"], &[])).losing_data(),
    leased: fn counters_that_are_evicted_admit_one_limit_more_with_leases_too();

    clock_set: Fault = Fault::new("a clock that is set three times", ClockSet),
    leased: fn a_clock_of_redis_that_steps_admits_no_hit_too_many_within_a_year();

    master_killed: ClusterFault = ClusterFault::MasterKilled,
    lose_master: fn a_killed_master_costs_its_shard_at_most_a_limit_and_the_others_nothing();

    master_paused: ClusterFault = ClusterFault::MasterPausedUntilReplaced,
    lose_master: fn a_master_paused_until_another_is_promoted_costs_its_shard_at_most_a_limit();

    master_cut: ClusterFault = ClusterFault::MasterCutFromItsCluster,
    cut_master: fn a_master_cut_from_its_cluster_is_left_once_it_knows_and_its_old_map_is_refused(),
    leased_on_cluster: fn a_master_that_is_cut_from_its_cluster_costs_its_shard_at_most_a_limit_with_leases_too();

    instance_cut: ClusterFault = ClusterFault::InstanceCutFromAShard,
    leased_on_cluster: fn an_instance_that_is_cut_from_a_shard_spends_only_what_that_granted();
}

/// The faults that a master of a cluster can have too, without losing what it has charged.
pub fn of_a_node() -> [Fault; 7] {
    [paused(), silent(), reset(), byte_by_byte(), flushed(), full(), refusing()]
}

pub fn of_a_cluster() -> [ClusterFault; 4] {
    [master_killed(), master_paused(), master_cut(), instance_cut()]
}

#[tokio::test]
async fn a_slow_redis_decides_what_it_can_in_time_and_charges_nothing_after_it() {
    // A call may take 10 ms.
    for (latency_ms, decided) in [(2, Something), (8, Something), (15, Nothing), (500, Nothing)] {
        println!("slower by {latency_ms} ms:");
        let faults = Faults { to_server: Way::latency_ms(latency_ms), ..Faults::default() };
        plain(&Fault::new("slow", Proxied(vec![faults])).lasting(2_000).decided(decided)).await;
    }
}

#[tokio::test]
async fn connections_that_fall_silent_or_are_reset_cost_no_hit_too_many() {
    for fault in [silent(), reset()] {
        leased(&fault).await;
    }
}

#[tokio::test]
async fn a_master_that_is_killed_or_paused_costs_its_shard_at_most_a_limit_with_leases_too() {
    for fault in [master_killed(), master_paused()] {
        leased_on_cluster(&fault).await;
    }
}

fn slices() -> Way {
    Way { slices: Some((1, Duration::from_millis(10))), ..Way::default() }
}

impl Fault {
    fn new(name: &'static str, how: How) -> Self {
        let (lasts, decided) = (Duration::ZERO, Decided::Anything);
        Self { name, how, lasts, times: 1, decided, limits: 1, is_used_up: false }
    }

    fn lasting(self, ms: u64) -> Self {
        Self { lasts: Duration::from_millis(ms), ..self }
    }

    fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }

    fn decided(self, decided: Decided) -> Self {
        Self { decided, ..self }
    }

    fn losing_data(self) -> Self {
        Self { limits: 2, ..self }
    }

    fn used_up(self) -> Self {
        Self { is_used_up: true, ..self }
    }

    /// Starts a server that can have it, and a proxy.
    pub async fn start(&self) -> (Single, Proxy) {
        let redis = match self.how {
            Busy => Single::start(&["--busy-reply-threshold", "100"]).await,
            Loading => Single::slow_to_load(20_000).await,
            Restarted => Single::slow_to_load(60_000).await,
            ClockSet => Single::with_clock(&[]).await,
            _ => Single::start(&[]).await,
        };
        let proxy = Proxy::start(redis.address()).await;
        (redis, proxy)
    }

    /// Returns the address by which instances reach the server.
    pub fn address(&self, redis: &Single, proxy: &Proxy) -> String {
        if matches!(self.how, Proxied(_)) { proxy.address() } else { redis.address() }.to_string()
    }

    async fn begin(&self, redis: &mut Single, proxy: &Proxy) {
        match &self.how {
            Killed => {
                redis.signal(Signal::KILL);
                redis.ended().await;
            }
            Paused => pause(redis).await,
            Proxied(faults) => {
                for (place, faults) in faults.iter().enumerate() {
                    sleep(if place > 0 { self.lasts } else { Duration::ZERO }).await;
                    proxy.set(*faults);
                }
            }
            Commands(begin, _) => done(redis, begin).await,
            Flushed => {
                redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
                redis.cli(&["SCRIPT", "FLUSH"]).await;
            }
            Busy => {
                redis.send(&["EVAL", "while true do end", "0"]);
                eventually("it is busy", async || redis.cli(&["PING"]).await.contains("BUSY").then_some(())).await;
            }
            Loading => done(redis, &["DEBUG", "RELOAD"]).await,
            Restarted => {
                done(redis, &["SAVE"]).await;
                redis.restart_unready().await;
                eventually("it loads", async || is_loading(redis).await.then_some(())).await;
            }
            ClockSet => {
                for step_us in [-3_600_000_000, 1_000_000, -20_000_000] {
                    redis.shift_clock(step_us);
                    sleep(Duration::from_millis(300)).await;
                }
            }
        }
    }

    async fn end(&self, redis: &mut Single, proxy: &Proxy) {
        match &self.how {
            Killed => redis.restart().await,
            Paused => redis.signal(Signal::CONT),
            Proxied(_) => proxy.heal(),
            Busy => done(redis, &["SCRIPT", "KILL"]).await,
            Restarted => {
                eventually("it has loaded", async || (!is_loading(redis).await).then_some(())).await;
            }
            Commands(_, end) if !end.is_empty() => done(redis, end).await,
            Commands(..) | Flushed | Loading | ClockSet => {}
        }
    }

    /// Makes the fault and ends it, as often as it happens.
    pub async fn pass(&self, redis: &mut Single, proxy: &Proxy) {
        for _ in 0..self.times {
            self.begin(redis, proxy).await;
            sleep(self.lasts).await;
            self.end(redis, proxy).await;
            sleep(self.lasts / 2).await;
        }
    }
}

async fn is_loading(redis: &Single) -> bool {
    redis.cli(&["GET", "key:0"]).await.contains("LOADING")
}

async fn done(redis: &Single, command: &[&str]) {
    assert_eq!(redis.cli(command).await, "OK");
}

impl ClusterFault {
    /// Limits of a counter of the broken shard that are admitted at most.
    pub fn limits(self) -> usize {
        if matches!(self, Self::InstanceCutFromAShard) { 1 } else { 2 }
    }

    pub async fn begin(self, site: &Site) {
        match self {
            Self::MasterKilled => site.master().signal(Signal::KILL),
            Self::MasterPausedUntilReplaced => site.master().signal(Signal::STOP),
            Self::MasterCutFromItsCluster => site.master().cut().await,
            Self::InstanceCutFromAShard => {
                for node in site.broken.replicas.iter().chain([&site.broken.master]) {
                    site.proxies[*node].set(Faults::both(Way::black_hole()));
                }
            }
        }
    }

    /// Waits for the end of the fault, and until all is as it was, but for the roles of the nodes.
    pub async fn end(self, site: &mut Site) {
        if matches!(self, Self::InstanceCutFromAShard) {
            sleep(Duration::from_secs(1)).await;
            return site.proxies.iter().for_each(Proxy::heal);
        }
        site.cluster.promoted(&site.broken).await;
        match self {
            Self::MasterKilled => site.cluster.node_mut(site.broken.master).restart().await,
            Self::MasterCutFromItsCluster => site.master().rejoin().await,
            // It wakes to find that it was replaced.
            _ => site.master().signal(Signal::CONT),
        }
        replica_follows(&site.cluster, site.broken.master).await;
    }
}

/// A cluster, and a proxy in front of each node.
pub struct Site {
    pub cluster: Cluster,
    pub proxies: Vec<Proxy>,
    pub broken: Shard,
}

impl Site {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts a cluster whose nodes have these arguments.
    pub async fn start_with(arguments: &[&str]) -> Self {
        let cluster = Cluster::start_with(&[NAMES_NO_HOST, arguments].concat()).await;
        let proxies = cluster.proxies(APART).await;
        let broken = cluster.shards().await.remove(0);
        Self { cluster, proxies, broken }
    }

    /// Returns the addresses of the proxies.
    pub fn apart(&self) -> String {
        let addresses: Vec<_> = self.proxies.iter().map(|proxy| proxy.address().to_string()).collect();
        addresses.join(",")
    }

    fn master(&self) -> &Single {
        &self.cluster.nodes()[self.broken.master]
    }
}

/// A breaker opens after so long: 100 ms of failures, and 100 ms in which probes check them.
const OPEN: Duration = Duration::from_millis(200);
/// How often a breaker may open and close while a fault lasts.
const MOST_CHANGES: usize = 6;

/// Makes a fault while calls of each policy come, and compares them with what the server holds in the end.
async fn plain(fault: &Fault) {
    plain_while(fault, async |_, _, _| ()).await;
}

async fn replaced(fault: &Fault) {
    plain_while(fault, async |_, _, proxy| {
        let (before, began) = (proxy.accepted(), Instant::now());
        eventually("it connects anew", async || (proxy.accepted() > before).then_some(())).await;
        println!("{}: connects anew after {} (bar 2000.0 ms)", fault.name, ms(began.elapsed()));
        assert!(began.elapsed() <= Duration::from_secs(2));
    })
    .await;
}

#[tokio::test]
async fn what_is_sent_to_a_paused_redis_is_never_charged_later() {
    for ms in [200, 600] {
        plain(&Fault::new("paused", Paused).lasting(ms).decided(Nothing)).await;
    }
    let mut opens = Duration::ZERO;
    let long = Fault::new("paused for 5 s", Paused).lasting(5_000).decided(Nothing);
    let during = plain_while(&long, async |server, load, _| {
        let began = load.elapsed();
        eventually("the breaker opens", async || (openings(server) > 0).then_some(())).await;
        opens = load.elapsed() - began;
    })
    .await;
    println!("paused for 5 s: the breaker opens after {} (bar {})", ms(opens), ms(OPEN));
    assert!(opens <= OPEN * FAR);
    let began = during.iter().map(|call| call.made).min().expect("there are calls");
    let open = during.such_that(|call| call.made >= began + OPEN * FAR);
    println!("paused for 5 s: p99 {} with an open breaker (bar 1.0 ms)", ms(open.permille(990)));
    assert!(open.permille(500) < ENVOY / 4, "the breaker is open");
}

/// Returns the calls that were made and answered while the fault lasted.
async fn plain_while(fault: &Fault, meanwhile: impl AsyncFnOnce(&Tidegate, &Load, &Proxy)) -> Calls {
    let _alone = alone().await;
    let (mut redis, proxy) = fault.start().await;
    let server = tidegate(&fault.address(&redis, &proxy)).await;
    let load = load(&server).await;
    let opened = openings(&server);
    fault.begin(&mut redis, &proxy).await;
    let broken = load.elapsed();
    join!(meanwhile(&server, &load, &proxy), lasting(fault.lasts));
    let (ended, changes) = (load.elapsed(), 2 * (openings(&server) - opened));
    fault.end(&mut redis, &proxy).await;
    let healed = load.elapsed();
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    let kept = calls.such_that(|call| fault.limits == 1 || call.made >= healed);
    assert_eq!((books.double(&calls), books.forgotten(&kept)), (0, 0), "{}", fault.name);
    let during = calls.such_that(|call| call.made >= broken && call.answered <= ended);
    let (counted, late) = (during.such_that(is_counted).count(), late(&books, &calls, broken, ended));
    match fault.decided {
        Nothing => assert_eq!((counted, late), (0, 0), "{}", fault.name),
        Something => assert!(counted > 0, "{}: it is asked in between", fault.name),
        Decided::Anything => {}
    }
    assert!(changes <= MOST_CHANGES, "{}: {changes}", fault.name);
    let unheard = books.charged_unheard(&during);
    report(fault.name, &during, &format!("{counted} decided by the store, {unheard} replies lost, {changes} changes"));
    report_restored(fault.name, restored(&calls, healed));
    during
}
