//! A long run: an instance under a load that changes all the time keeps neither memory nor open files.
//!
//! `SOAK_SECONDS=600 cargo test --test it soak -- --ignored --nocapture`

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use crate::environment::kernel;
use crate::grpc::{client, one};
use crate::http;
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::support::{Tidegate, directory, replace_file};

const RULES: &str = "domain: soak
lease: { share: 10%, ttl: 1s }
descriptors:
  - { key: user, rate_limit: { window: 5s, requests_per_unit: 3, algorithm: sliding_window } }
  - { key: log, lease: off, rate_limit: { window: 5s, requests_per_unit: 3, algorithm: sliding_log } }
  - { key: all, rate_limit: { unit: second, requests_per_unit: 500, algorithm: token_bucket } }
";
/// The length of a run without `SOAK_SECONDS`.
const SECONDS: u64 = 60;
/// The time after which what grows with the number of clients has grown: two windows, and the connections of each kind.
const WARM: Duration = Duration::from_secs(20);
/// What the resident memory may be above its most in the first half: what an allocator keeps differs from minute to minute.
const MORE: f64 = 1.15;
/// What the number of open files may be above its most in the first half: connections come and go.
const MORE_FILES: f64 = 16.0;

/// Rules with as many limits as `number` says beside those that are asked.
fn rules(number: u64) -> String {
    let others = (0..number % 50).map(|limit| {
        format!("  - {{ key: other, value: 'v{limit}', rate_limit: {{ unit: hour, requests_per_unit: {number} }} }}\n")
    });
    format!("{RULES}{}", others.collect::<String>())
}

/// One caller: a connection for some calls, each of another client, and then the next connection.
async fn call_on(server: &Tidegate, until: Instant, mut random: fastrand::Rng) -> u64 {
    let mut calls = 0;
    while Instant::now() < until {
        let key = ["user", "log", "all"][random.usize(..3)];
        if random.u8(..4) == 0 {
            let value = random.u32(..).to_string();
            // 429 is an answer as well as 200.
            let _ = http::post(server.http, "/json", http::descriptor("soak", &[(key, &value)])).sent().await;
            calls += 1;
            continue;
        }
        let mut client = client(server.grpc).await;
        for _ in 0..random.u32(1..200) {
            let request = one("soak", key, random.u32(..).to_string());
            // Some callers leave before their answer.
            let patience = Duration::from_micros(if random.u8(..10) == 0 { 300 } else { 1_000_000 });
            let _ = timeout(patience, client.should_rate_limit(request)).await;
            calls += 1;
        }
    }
    calls
}

async fn keeps_nothing(servers: &[&Single], variables: &[(&str, &str)]) {
    let seconds = std::env::var("SOAK_SECONDS").map_or(SECONDS, |text| text.parse().expect("a number of seconds"));
    let directory = directory([("rules.yaml", rules(0))]);
    let file = directory.path().join("rules.yaml");
    let server = Tidegate::start(&file, &[variables, &[("LOG_LEVEL", "error")]].concat()).await;
    let (began, until) = (Instant::now(), Instant::now() + WARM + Duration::from_secs(seconds));
    let callers =
        futures_util::future::join_all((0..8).map(|seed| call_on(&server, until, fastrand::Rng::with_seed(seed))));
    let disturbing = async {
        let (mut seen, mut number) = (Vec::new(), 0);
        while Instant::now() < until {
            number += 1;
            sleep(Duration::from_secs(1)).await;
            replace_file(&file, &rules(number));
            // A listener that leaves, and connections that are lost.
            let _ = timeout(
                Duration::from_millis(300),
                http::said(server.debug, "GET /v1/decisions HTTP/1.1\r\nhost: a\r\n\r\n"),
            )
            .await;
            if let (Some(redis), 0) = (servers.first(), number % 10) {
                redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
            }
            seen.push((began.elapsed(), kernel(server.pid())));
        }
        seen
    };
    let (calls, seen) = tokio::join!(callers, disturbing);
    let calls: u64 = calls.iter().sum();
    let half = WARM + Duration::from_secs(seconds / 2);
    let most = |from: Duration, to: Duration| {
        let within = seen.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, kernel)| kernel);
        within.fold([0.0_f64; 2], |[memory, files], kernel| [memory.max(kernel.resident), files.max(kernel.files)])
    };
    let [first, last] = [most(WARM, half), most(half, Duration::MAX)];
    let mib = |bytes: f64| bytes / 1_048_576.0;
    println!(
        "{calls} calls in {:.0?}, {} loads of the rules: at most {:.1} MiB and {} files in the first half, {:.1} MiB and {} in the second",
        began.elapsed(),
        seen.len(),
        mib(first[0]),
        first[1],
        mib(last[0]),
        last[1]
    );
    assert!(calls > 100 * seconds, "{calls} calls are too few");
    assert!(last[0] < first[0] * MORE, "memory grows from {:.1} to {:.1} MiB", mib(first[0]), mib(last[0]));
    assert!(last[1] < first[1] + MORE_FILES, "open files grow from {} to {}", first[1], last[1]);
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn nothing_is_kept_by_an_instance_on_a_cluster() {
    let cluster = Cluster::shared().await;
    let servers: Vec<_> = cluster.nodes().iter().collect();
    keeps_nothing(&servers, &[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses())]).await;
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn nothing_is_kept_by_an_instance_that_counts_by_itself() {
    keeps_nothing(&[], &[]).await;
}
