//! The support itself: what it claims to start and to break is started and broken.

use rustix::process::Signal;

use super::Single;
use super::cluster::{Cluster, NODES, Shard, slot};
use crate::support::eventually;

#[tokio::test]
async fn a_server_answers_and_ends_with_its_owner() {
    let server = Single::start(&["--maxmemory", "10mb"]).await;
    assert_eq!(server.cli(&["CONFIG", "GET", "maxmemory"]).await, "maxmemory\n10485760");
    assert_eq!(server.cli(&["SET", "key", "value"]).await, "OK");
    assert_eq!(server.cli(&["GET", "key"]).await, "value");
    assert!(server.cli(&["INCR", "key"]).await.contains("not an integer"));
    let process = format!("/proc/{}/exe", server.pid());
    assert!(std::fs::read_link(&process).expect("it runs").ends_with("redis-check-rdb"), "{process}");
    drop(server);
    eventually("it is gone", async || (!std::fs::exists(&process).expect("it can be asked")).then_some(())).await;
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
    assert!(super::cli(&stranger, &["PING"]).await.contains("NOAUTH"));
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
