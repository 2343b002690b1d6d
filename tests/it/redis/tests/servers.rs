//! Servers start, answer, change their roles, and end.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use redis::{ClientTlsConfig, TlsCertificates};
use rustix::process::Signal;

use super::super::Single;
use super::super::certificates::Authority;
use super::super::cluster::{Cluster, NODES, Shard, slot};
use super::super::sentinel::{MASTER, Sentinel};
use crate::support::eventually;

#[tokio::test]
async fn a_server_answers_and_ends_with_its_owner() {
    let server = Single::start(&["--maxmemory", "10mb"]).await;
    assert_eq!(server.cli(&["CONFIG", "GET", "maxmemory"]).await, "maxmemory\n10485760");
    assert_eq!(server.cli(&["SET", "key", "value"]).await, "OK");
    assert_eq!(server.cli(&["GET", "key"]).await, "value");
    assert!(server.cli(&["INCR", "key"]).await.contains("not an integer"));
    let pid = server.pid();
    assert!(command_of(pid).starts_with("redis-server"));
    drop(server);
    eventually("it is gone", async || command_of(pid).is_empty().then_some(())).await;
}

/// How a process was started; of one that has ended, nothing.
fn command_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

#[tokio::test]
async fn a_server_ends_with_the_thread_that_started_it_though_nobody_ends_it() {
    let thread = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let server = runtime.block_on(Single::start(&[]));
        let left = (server.pid(), server.directory().to_owned());
        std::mem::forget(server);
        left
    });
    let (pid, directory) = thread.join().expect("it starts");
    eventually("it is gone", async || command_of(pid).is_empty().then_some(())).await;
    std::fs::remove_dir_all(directory).expect("nobody else does");
}

#[tokio::test]
async fn a_server_may_be_met_while_it_loads() {
    let mut server = Single::slow_to_load(20_000).await;
    assert_eq!(server.cli(&["SAVE"]).await, "OK");
    server.restart_unready().await;
    eventually("it loads", async || server.cli(&["GET", "key:0"]).await.contains("LOADING").then_some(())).await;
    eventually("it has loaded", async || (server.cli(&["GET", "key:0"]).await == "value:0").then_some(())).await;
}

#[tokio::test]
async fn a_restarted_server_has_its_port_and_what_it_kept_on_disk() {
    let mut forgetful = Single::start(&[]).await;
    let mut keeping = Single::start(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    for server in [&mut forgetful, &mut keeping] {
        let (address, pid) = (server.address(), server.pid());
        server.cli(&["SET", "key", "value"]).await;
        server.restart().await;
        assert_eq!(server.address(), address);
        assert_ne!(server.pid(), pid);
    }
    assert_eq!(forgetful.cli(&["GET", "key"]).await, "");
    assert_eq!(keeping.cli(&["GET", "key"]).await, "value");
    keeping.signal(Signal::KILL);
    keeping.ended().await;
    assert!(keeping.cli(&["PING"]).await.is_empty());
    assert!(keeping.log().contains("Ready to accept connections"));
    assert!(keeping.directory().join("appendonlydir").is_dir());
}

#[tokio::test]
async fn a_server_with_a_password_wants_it() {
    let server = Single::with_password("open:sesame", &[]).await;
    assert_eq!(server.cli(&["PING"]).await, "PONG");
    let stranger = format!("redis://{}", server.address());
    assert!(super::super::cli(&stranger, &["PING"]).await.contains("NOAUTH"));
}

#[tokio::test]
async fn the_shared_cluster_takes_a_key_on_each_shard() {
    let cluster = Cluster::shared().await;
    let shards = cluster.shards().await;
    assert_eq!(shards.len(), NODES / 2);
    for shard in &shards {
        assert_eq!(shard.replicas.len(), 1, "{shard:?}");
        let key = cluster.key_of(shard.master, "a_key_on_each_shard.").await;
        assert_eq!(cluster.nodes()[shard.master].cli(&["SET", &key, "7"]).await, "OK");
        assert_eq!(cluster.shard_of(slot(&key)).await, *shard);
        assert_eq!(cluster.contents().await[&key], "7");
    }
    assert!(cluster.addresses().starts_with(&format!("{},", cluster.nodes()[0].address())));
}

#[tokio::test]
async fn a_planned_failover_moves_the_master_and_a_slot_migrates_live() {
    let cluster = Cluster::start().await;
    let shards = cluster.shards().await;
    let (old, new) = (shards[0].master, shards[0].replicas[0]);
    cluster.failover(new).await;
    let key = cluster.key_of(new, "moving").await;
    assert!(cluster.nodes()[old].cli(&["SET", &key, "1"]).await.starts_with("MOVED"));
    assert_eq!(cluster.nodes()[new].cli(&["SET", &key, "1"]).await, "OK");
    assert_eq!(cluster.shard_of(slot(&key)).await.replicas, [old]);

    let to = shards[1].master;
    let migration = cluster.migrate(slot(&key), to).await;
    assert_eq!(cluster.nodes()[new].cli(&["GET", &key]).await, "1", "it has not moved yet");
    migration.move_keys().await;
    assert!(cluster.nodes()[new].cli(&["GET", &key]).await.starts_with("ASK"));
    migration.finish().await;
    assert_eq!(cluster.nodes()[to].cli(&["GET", &key]).await, "1");
    assert!(cluster.nodes()[new].cli(&["GET", &key]).await.starts_with("MOVED"));
    cluster.reshard(new, to, 10).await;
    let count = |shards: &[Shard], master| -> usize {
        let shard = shards.iter().find(|shard| shard.master == master).expect("it owns slots");
        shard.slots.iter().map(ExactSizeIterator::len).sum()
    };
    let now = cluster.shards().await;
    assert_eq!(count(&now, new), count(&shards, old) - 11);
    assert_eq!(count(&now, to), count(&shards, to) + 11);
}

#[tokio::test]
async fn a_dead_master_is_followed_by_its_replica_and_comes_back_as_one() {
    let mut cluster = Cluster::start().await;
    let shard = cluster.shards().await.swap_remove(0);
    cluster.nodes()[shard.master].signal(Signal::KILL);
    let after = cluster.promoted(&shard).await;
    assert_eq!((after.master, &after.slots), (shard.replicas[0], &shard.slots));
    cluster.node_mut(shard.master).restart().await;
    let is_replica = async || cluster.shards().await.iter().any(|now| now.replicas == [shard.master]).then_some(());
    eventually("it is a replica", is_replica).await;
}

/// What a client that trusts an authority, has this certificate and calls the server so hears to a PING.
async fn ping_over_tls(
    server: &Single,
    name: &str,
    trusted: &Authority,
    client: Option<&Authority>,
) -> redis::RedisResult<String> {
    // Only the first test of the process does.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let read = |file: &Path| std::fs::read(file).expect("it reads");
    let client_tls = client.map(|authority| {
        let issued = authority.issue("a client");
        ClientTlsConfig { client_cert: read(&issued.certificate), client_key: read(&issued.key) }
    });
    let certificates = TlsCertificates { client_tls, root_cert: Some(read(&trusted.certificate())) };
    let url = format!("rediss://{name}:{}", server.tls_address().port());
    let client = redis::Client::build_with_tls(url, certificates)?;
    redis::cmd("PING").query_async(&mut client.get_multiplexed_async_connection().await?).await
}

#[tokio::test]
async fn a_server_that_speaks_tls_shows_its_name_and_wants_to_know_the_client() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = Single::with_tls(&authority, "localhost", &[]).await;
    assert_eq!(ping_over_tls(&server, "localhost", &authority, Some(&authority)).await, Ok("PONG".to_owned()));
    ping_over_tls(&server, "127.0.0.1", &authority, Some(&authority)).await.expect_err("the name is another");
    ping_over_tls(&server, "localhost", &other, Some(&authority)).await.expect_err("the server is not trusted");
    ping_over_tls(&server, "localhost", &authority, Some(&other)).await.expect_err("the client is not trusted");
    ping_over_tls(&server, "localhost", &authority, None).await.expect_err("the client is not known");
    let open = Single::with_tls(&authority, "127.0.0.1", &["--tls-auth-clients", "no"]).await;
    assert_eq!(ping_over_tls(&open, "127.0.0.1", &authority, None).await, Ok("PONG".to_owned()));
}

#[tokio::test]
async fn a_server_listens_on_a_unix_socket_and_has_users() {
    let user = ["--user", "alice", "on", ">sesame", "~own:*", "+get"];
    let server = Single::start(&[&["--unixsocket", "redis.sock"], &user[..]].concat()).await;
    let socket = format!("redis+unix://{}", server.directory().join("redis.sock").display());
    let client = redis::Client::open(socket).expect("a URL");
    let mut connection = client.get_multiplexed_async_connection().await.expect("it takes connections");
    assert_eq!(redis::cmd("PING").query_async(&mut connection).await, Ok("PONG".to_owned()));
    let alice = format!("redis://alice:sesame@{}", server.address());
    assert_eq!(super::super::cli(&alice, &["GET", "own:key"]).await, "");
    assert!(super::super::cli(&alice, &["GET", "key"]).await.contains("NOPERM"));
    assert!(super::super::cli(&alice, &["KEYS", "*"]).await.contains("NOPERM"));
}

#[tokio::test]
async fn a_servers_clock_can_be_shifted_while_it_runs() {
    let mut server = Single::with_clock(&[]).await;
    let ahead_s = async |server: &Single| -> i64 {
        let time = server.cli(&["TIME"]).await;
        let told: i64 = time.lines().next().and_then(|seconds| seconds.parse().ok()).expect("seconds");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        told - i64::try_from(now).expect("it fits")
    };
    assert!((-1..=1).contains(&ahead_s(&server).await));
    for shift_s in [-30, 3_600] {
        server.shift_clock(shift_s * 1_000_000 - 1);
        assert!((shift_s - 2..=shift_s + 1).contains(&ahead_s(&server).await));
        let in_script = server.cli(&["EVAL", "return redis.call('TIME')[1]", "0"]).await;
        let told: i64 = server.cli(&["TIME"]).await.lines().next().and_then(|time| time.parse().ok()).expect("seconds");
        assert!((0..=1).contains(&(told - in_script.parse::<i64>().expect("seconds"))), "{in_script}");
    }
    server.restart().await;
    assert!((3_598..=3_601).contains(&ahead_s(&server).await), "it keeps its clock");

    server.shift_clock(0);
    server.cli(&["SET", "key", "", "PX", "5000"]).await;
    server.shift_clock(-30_000_000);
    let left_ms: i64 = server.cli(&["PTTL", "key"]).await.parse().expect("milliseconds");
    assert!((30_000..=35_000).contains(&left_ms), "expiry is by the wall clock: {left_ms}");
}

#[tokio::test]
async fn each_node_of_a_cluster_may_have_a_clock_of_its_own() {
    let cluster = Cluster::with_clocks(&[]).await;
    cluster.nodes()[1].shift_clock(3_600_000_000);
    let times = futures_util::future::join_all(cluster.nodes().iter().map(|node| node.cli(&["TIME"]))).await;
    let seconds = times.iter().map(|time| time.lines().next().and_then(|time| time.parse().ok()).expect("seconds"));
    let seconds: Vec<i64> = seconds.collect();
    assert!(seconds[1] - seconds[0] > 3_500, "{seconds:?}");
    assert!((seconds[2] - seconds[0]).abs() < 60, "{seconds:?}");
    assert_eq!(cluster.shards().await.len(), 3, "it goes on");
}

#[tokio::test]
async fn sentinels_name_the_master_and_make_another_one() {
    let set = Sentinel::start().await;
    assert_eq!(set.master().await, 0);
    assert!(set.addresses().starts_with(&format!("{MASTER},{}", set.sentinels()[0].address())));
    set.failover().await;
    assert_eq!(set.servers()[1].cli(&["SET", "key", ""]).await, "OK");
}

#[tokio::test]
async fn sentinels_may_want_a_password_and_replace_a_dead_master() {
    let set = Sentinel::with_password("sesame").await;
    assert_eq!(set.master().await, 0);
    let stranger = format!("redis://{}", set.sentinels()[0].address());
    assert!(super::super::cli(&stranger, &["SENTINEL", "MASTERS"]).await.contains("NOAUTH"));
    set.servers()[0].signal(Signal::KILL);
    eventually("the replica is named", async || (set.master().await == 1).then_some(())).await;
}
