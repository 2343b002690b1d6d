//! One counter that everybody asks for, and counters that nobody asks for twice.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

use super::{Client, Counter, ENDLESS, FEW, Instance, hits};
use crate::load::alone;
use crate::redis::cluster::Cluster;
use crate::support::eventually;

/// How long everybody asks for one counter.
const HOT: Duration = Duration::from_secs(3);
const CLIENTS: usize = 32;

async fn instances(prefix: &str) -> Vec<Instance> {
    let addresses = Cluster::shared().await.addresses();
    let variables = [("CACHE_KEY_PREFIX", prefix), ("STORE_DEADLINE", "10s")];
    join_all((0..3).map(|_| Instance::start_with(&addresses, &variables))).await
}

/// One call among many for one counter.
struct Told {
    /// How long after the full second it was made.
    after: Duration,
    took: Duration,
    is_admitted: bool,
    remaining: u32,
}

/// Asks for one counter at all instances, by many clients, each again as soon as it is answered.
async fn hammer(instances: &[Instance], key: &str) -> Vec<Told> {
    let ask = async |instance: &Instance| {
        let mut client = instance.client().await;
        let (began, mut told) = (Instant::now(), Vec::new());
        while began.elapsed() < HOT {
            let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock that is set");
            let made = Instant::now();
            let answer = client.ask(&hits(&[(key, "hot")], 1)).await.expect("the cluster decides");
            told.push(Told {
                after: Duration::from_nanos(since_epoch.subsec_nanos().into()),
                took: made.elapsed(),
                is_admitted: answer.overall_code() == Outcome::Ok,
                remaining: answer.statuses[0].limit_remaining,
            });
        }
        told
    };
    let clients = instances.iter().flat_map(|instance| std::iter::repeat_n(instance, CLIENTS));
    join_all(clients.map(ask)).await.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_hot_counter_is_exact_for_three_instances() {
    let _alone = alone().await;
    let instances = instances("hot:").await;
    let told = hammer(&instances, "one").await;
    let mut hits: Vec<_> = told.iter().map(|told| ENDLESS - told.remaining).collect();
    hits.sort_unstable();
    let count = u32::try_from(hits.len()).expect("it fits");
    assert!(hits.iter().copied().eq(1..=count), "each hit is told once");
    let counter = Counter { key: "one", value: "hot".to_owned(), master: 0 };
    assert_eq!(instances[0].client().await.used(&counter).await, count);
    println!(
        "B7 one counter, 3 instances, {} clients: {:.0} decisions in a second (without leases; bar with them 20,000), all exact (bar all)",
        3 * CLIENTS,
        f64::from(count) / HOT.as_secs_f64()
    );
}

/// How long the turn of a window lasts, for those who look at it.
const TURN: Duration = Duration::from_millis(100);

#[tokio::test]
async fn a_herd_at_the_turn_of_a_window_gets_each_window_once() {
    let _alone = alone().await;
    let instances = instances("herd:").await;
    let told = hammer(&instances, "herd").await;
    let mut windows = vec![0_usize; usize::try_from(FEW).expect("it fits")];
    for told in told.iter().filter(|told| told.is_admitted) {
        windows[usize::try_from(told.remaining).expect("it fits")] += 1;
    }
    // Each window has one first hit, one second hit and so on; when the herd goes away the last may have some left.
    let (fewest, most) = (windows[0], windows[windows.len() - 1]);
    assert!(windows.iter().all(|times| (fewest..=most).contains(times)) && most - fewest <= 1, "{windows:?}");
    // Windows that begin after it and before its end, and the one it begins in.
    assert!(u64::try_from(most).expect("it fits") <= HOT.as_secs() + 2, "{most} windows in {HOT:?}");
    let p99 = |is_such: &dyn Fn(&Told) -> bool| {
        let mut took: Vec<_> = told.iter().filter(|told| is_such(told)).map(|told| told.took).collect();
        took.sort_unstable();
        took[took.len() * 99 / 100]
    };
    println!(
        "C4 a herd of {} at the turn of {most} windows: p99 {:.1?} at the turn, {:.1?} between (bar: twice that), each window granted once",
        3 * CLIENTS,
        p99(&|told| told.after < TURN),
        p99(&|told| told.after >= TURN)
    );
}

/// Counters of one request.
const AT_ONCE: u32 = 1_000;
/// Requests.
const REQUESTS: u32 = 200;
/// What Tidegate may take for them.
const MORE_MEMORY: u64 = 32 * 1_024 * 1_024;
/// What a counter of a second lives, in milliseconds: its window, and a second.
const LIFE_MS: i64 = 2_000;

async fn ask_for_new(client: &mut Client, request: u32) {
    let values: Vec<_> = (0..AT_ONCE).map(|value| (request * AT_ONCE + value).to_string()).collect();
    let descriptors: Vec<_> = values.iter().map(|value| ("second", &**value)).collect();
    let answer = client.ask(&hits(&descriptors, 1)).await.expect("the cluster decides");
    assert!(answer.statuses.iter().all(|status| status.limit_remaining == ENDLESS - 1), "each is new");
}

/// The counters of this test at one master.
async fn scan(cluster: &Cluster, master: usize) -> Vec<String> {
    let found = cluster.nodes()[master].cli(&["EVAL", "local all, at = {}, '0' repeat local step = redis.call('SCAN', at, 'MATCH', 'new:*', 'COUNT', 1000) at = step[1] for _, key in ipairs(step[2]) do all[#all + 1] = redis.call('PTTL', key) .. '' end until at == '0' return all", "0"]).await;
    found.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[tokio::test]
async fn counters_that_nobody_asks_for_again_go_and_tidegate_remembers_none() {
    let _alone = alone().await;
    let cluster = Cluster::shared().await;
    let variables = [("CACHE_KEY_PREFIX", "new:"), ("STORE_DEADLINE", "10s"), ("REPLICAS", "1")];
    let instance = Instance::start_with(&cluster.addresses(), &variables).await;
    let mut client = instance.client().await;
    // Buffers for requests of this size are made once.
    for request in 0..10 {
        ask_for_new(&mut client, request).await;
    }
    let before = instance.tidegate.peak_memory();
    for request in 10..REQUESTS {
        ask_for_new(&mut client, request).await;
    }
    // The kernel counts roughly: a peak may sink by some pages.
    let more = instance.tidegate.peak_memory().saturating_sub(before);
    let masters: Vec<_> = cluster.shards().await.iter().map(|shard| shard.master).collect();
    for &master in &masters {
        let lives = scan(cluster, master).await;
        let is_bounded =
            |life: &String| life.parse::<i64>().is_ok_and(|life| (-2..=LIFE_MS).contains(&life) && life != -1);
        assert!(lives.iter().all(is_bounded), "{:?}", lives.iter().find(|life| !is_bounded(life)));
    }
    for &master in &masters {
        eventually("the counters are gone", async || scan(cluster, master).await.is_empty().then_some(())).await;
    }
    println!(
        "E10 {} new counters: {more} bytes more in Tidegate at most (bar {MORE_MEMORY}), all gone from Redis in the end",
        AT_ONCE * REQUESTS
    );
    assert!(more <= MORE_MEMORY, "{more} bytes for {} counters", AT_ONCE * REQUESTS);
}
