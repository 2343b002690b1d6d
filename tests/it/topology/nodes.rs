//! The faults of one server, at a master of a cluster.

use std::time::Duration;

use super::{Counters, FAR, Instance, RESTORED, assert_none_failed, exact_again, last_failed, more};
use crate::faults::table::{Site, of_a_node};
use crate::load::alone;

#[tokio::test]
async fn a_fault_of_one_master_concerns_its_shard_only_and_charges_nobody_twice() {
    let _alone = alone().await;
    // Nobody is thought dead.
    let mut site = Site::start_with(&["--cluster-node-timeout", "60000"]).await;
    let instance = Instance::start(&site.apart()).await;
    let (shards, broken) = (site.cluster.shards().await, site.broken.master);
    let counters = Counters::of(&shards, &["one", "log"]);
    let load = instance.load(&counters).await;
    more(&load, 200).await;
    for fault in of_a_node() {
        fault.pass(site.cluster.node_mut(broken), &site.proxies[broken]).await;
        let healed = load.elapsed();
        exact_again(&load, &counters, broken, healed).await;
        let after = last_failed(&load.so_far(), healed, Duration::MAX).map_or(Duration::ZERO, |last| last - healed);
        println!("{} at a master: the last call by policy {after:.0?} after it (bar {RESTORED:?})", fault.name);
        assert!(after < RESTORED * FAR, "{}: the policy answers for {after:?} after it", fault.name);
    }
    let calls = load.stop().await;
    println!("{} of {} calls by policy, the other shards exact", calls.failed(), calls.count());
    assert_none_failed(&calls.such_that(|call| !counters.is_on(call, broken)), "another shard");
    counters.assert_exact(&mut instance.client().await, &calls).await;
}
