//! One counter that everybody asks for, and counters that nobody asks for twice.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::{Client, Counter, ENDLESS, Instance, hits};
use crate::load::alone;
use crate::redis::cluster::Cluster;
use crate::support::eventually;

/// How long everybody asks for one counter.
const HOT: Duration = Duration::from_secs(2);
const CLIENTS: usize = 32;

#[tokio::test]
async fn b7_a_hot_counter_is_exact_for_three_instances() {
    let _alone = alone().await;
    let cluster = Cluster::shared().await;
    let addresses = cluster.addresses();
    let prefix = [("CACHE_KEY_PREFIX", "hot:"), ("STORE_DEADLINE", "10s")];
    let instances = join_all((0..3).map(|_| Instance::start_with(&addresses, &prefix))).await;
    let ask = async |instance: &Instance| {
        let mut client = instance.client().await;
        let (began, mut told) = (Instant::now(), Vec::new());
        while began.elapsed() < HOT {
            let answer = client.ask(&hits(&[("one", "hot")], 1)).await.expect("the cluster decides");
            told.push(ENDLESS - answer.statuses[0].limit_remaining);
        }
        told
    };
    let clients = instances.iter().flat_map(|instance| std::iter::repeat_n(instance, CLIENTS));
    let mut told = join_all(clients.map(ask)).await.concat();
    told.sort_unstable();
    let count = u32::try_from(told.len()).expect("it fits");
    assert!(told.iter().copied().eq(1..=count), "each hit is told once");
    let counter = Counter { key: "one", value: "hot".to_owned(), master: 0 };
    assert_eq!(instances[0].client().await.used(&counter).await, count);
    println!(
        "B7 one counter, 3 instances, {} clients: {:.0} decisions in a second (without leases; bar with them 20,000), all exact (bar all)",
        3 * CLIENTS,
        f64::from(count) / HOT.as_secs_f64()
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
async fn e10_counters_that_nobody_asks_for_again_go_and_tidegate_remembers_none() {
    let _alone = alone().await;
    let cluster = Cluster::shared().await;
    let variables = [("CACHE_KEY_PREFIX", "new:"), ("STORE_DEADLINE", "10s")];
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
