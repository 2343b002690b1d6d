//! A master of a cluster of six fails while calls that share its scripts wait there.
//!
//! The master is told to run no script before it fails, so what it was asked for then is charged to nobody, and all that it has
//! charged is at its replica: not one hit is lost or doubled, whatever comes after.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

use super::{
    AT_ONCE, Asker, Books, Call, LIMIT, MOST_SCRIPTS, assert_kept, begun, held, lasting, one_worker_of, spent,
    undecided,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::cluster::{Cluster, Shard, slot};
use crate::support::{Tidegate, eventually};

/// Counters of few hits, beside those without an end.
const FEW: Range<usize> = 1_000..1_016;
/// So many calls are made to each of them at once.
const EACH: usize = 2;
/// Calls without an end and with one, and all of them.
const ENDLESS_CALLS: usize = AT_ONCE - FEW_CALLS;
const FEW_CALLS: usize = EACH * (FEW.end - FEW.start);
/// So often all calls are made after a fault: more often than the counters of few hits can take them.
const ROUNDS: usize = LIMIT;

/// The slot of a counter.
fn slot_of(key: &str, number: usize) -> u16 {
    slot(&format!("{{d|{key}={number}}}"))
}

/// Who makes calls, and what they were told.
struct Callers {
    asker: Asker,
    books: Books,
    /// How many hits each counter of few hits has admitted.
    admitted: HashMap<usize, usize>,
}

impl Callers {
    async fn of(server: &Tidegate) -> Self {
        let mut asker = Asker::of(server).await;
        let books = spent(&mut asker, 1..=ENDLESS_CALLS).await;
        Self { asker, books, admitted: HashMap::new() }
    }

    /// Begins calls to all counters at once.
    fn begin(&self) -> [Vec<Call>; 2] {
        let few = FEW.flat_map(|number| [number; EACH]);
        [begun(&self.asker, "open", 1..=ENDLESS_CALLS), begun(&self.asker, "few", few)]
    }

    /// The slots of those of these calls that no master decided. All others were told of their own counters.
    async fn end(&mut self, [endless, few]: [Vec<Call>; 2]) -> Vec<u16> {
        let undecided = undecided(endless, &mut self.books).await;
        let mut slots: Vec<_> = undecided.into_iter().map(|number| slot_of("open", number)).collect();
        for call in few {
            let (number, answer) = call.await.expect("it is answered");
            let Some(answer) = answer else {
                slots.push(slot_of("few", number));
                continue;
            };
            let admitted = self.admitted.entry(number).or_default();
            *admitted += usize::from(answer.overall_code() == Outcome::Ok);
            assert!(*admitted <= LIMIT, "counter {number} admits {admitted} of {LIMIT}");
        }
        slots
    }

    /// All masters decide all calls, in fewer scripts.
    async fn share(&mut self, cluster: &Cluster) {
        let before = cluster.scripts_run().await;
        let calls = self.begin();
        assert_eq!(self.end(calls).await, [0; 0], "all are decided");
        let scripts = cluster.scripts_run().await - before;
        assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");
    }
}

/// Waits until the replica of a master has all that the master has.
async fn is_replicated(master: &Single) {
    eventually("the replica has everything", async || {
        let info = master.cli(&["INFO", "replication"]).await;
        let number = |line: &str| line.trim().parse::<u64>().ok();
        let own = info.lines().find_map(|line| number(line.strip_prefix("master_repl_offset:")?))?;
        let replica = info.lines().find(|line| line.starts_with("slave0:"))?;
        let offset = replica.split(',').find_map(|field| number(field.strip_prefix("offset=")?))?;
        (offset == own).then_some(())
    })
    .await;
}

/// Lets a master fail while calls wait for it, and all go on afterwards: whether the policy had to answer for it.
async fn through(cluster: &Cluster, fault: impl AsyncFnOnce(&Shard, &Single)) -> bool {
    let server = one_worker_of(cluster).await;
    let shards = cluster.shards().await;
    let (broken, master) = (&shards[0], &cluster.nodes()[shards[0].master]);
    let mut callers = Callers::of(&server).await;
    callers.share(cluster).await;

    is_replicated(master).await;
    // Scripts wait, and what is said about clients does not.
    assert_eq!(master.cli(&["CLIENT", "PAUSE", "60000", "WRITE"]).await, "OK");
    let calls = callers.begin();
    eventually("a script waits", async || {
        let clients = master.cli(&["CLIENT", "LIST"]).await;
        clients.lines().any(|client| client.contains(" flags=b ")).then_some(())
    })
    .await;
    fault(broken, master).await;
    let undecided = callers.end(calls).await;
    assert!(undecided.iter().all(|slot| broken.owns(*slot)), "only the master that failed is answered for");

    let probe = (10_000..).find(|number| broken.owns(slot_of("open", *number))).expect("there are many");
    assert!(callers.asker.decided("open", &probe.to_string()).await);
    for _ in 0..ROUNDS {
        let calls = callers.begin();
        assert_eq!(callers.end(calls).await, [0; 0], "all are decided again");
    }
    assert!(FEW.clone().all(|number| callers.admitted[&number] == LIMIT), "{:?} of {LIMIT}", callers.admitted);
    assert_kept(&held(cluster).await, &callers.books);
    !undecided.is_empty()
}

/// A cluster in which nobody is thought dead.
async fn steady() -> Cluster {
    Cluster::start_with(&["--cluster-node-timeout", "60000"]).await
}

#[tokio::test]
async fn shared_calls_to_a_master_that_loses_its_connections_take_no_answer_of_others_and_charge_nobody() {
    let cluster = steady().await;
    let is_by_policy = through(&cluster, async |_, master| {
        let killed = master.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
        assert_ne!(killed, "0");
        assert_eq!(master.cli(&["CLIENT", "UNPAUSE"]).await, "OK");
    });
    assert!(is_by_policy.await, "what was on its way is answered by policy");
}

#[tokio::test]
async fn shared_calls_to_a_master_that_pauses_are_all_decided_each_by_its_own_answer() {
    let cluster = steady().await;
    let is_by_policy = through(&cluster, async |_, master| {
        lasting(Duration::from_millis(300)).await;
        assert_eq!(master.cli(&["CLIENT", "UNPAUSE"]).await, "OK");
    });
    assert!(!is_by_policy.await, "all are decided");
}

#[tokio::test]
async fn shared_calls_go_on_with_the_replica_of_a_killed_master_each_by_its_own_answer() {
    let _alone = alone().await;
    let cluster = Cluster::start().await;
    let is_by_policy = through(&cluster, async |broken, master| {
        master.signal(Signal::KILL);
        cluster.promoted(broken).await;
    });
    assert!(is_by_policy.await, "what was on its way is answered by policy");
}
