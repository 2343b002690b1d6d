//! Tests of the split of a request into scripts, and of the permits that its nodes give.

use super::*;
use crate::algorithm::{Algorithm, Limit};
use crate::model::key::KeyPart;
use crate::model::{Colocation, CounterKey, Hits, Quota, StorePolicies, Window};
use crate::store::redis::address::Address;
use crate::store::redis::concurrency::CallPriority;
use crate::store::redis::credentials::Credentials;
use crate::store::redis::dialect::Dialect;
use crate::store::redis::login::Login;
use crate::store::redis::manager::Locate;

pub(super) fn access() -> Access {
    Access {
        credentials: Arc::new(Credentials::fixed(Login::default())),
        max_age: None,
        tls: None,
        db: 0,
        prefix: Arc::default(),
        connect_timeout: Duration::from_millis(1),
        alive: Arc::default(),
        metrics: Arc::default(),
    }
}

/// No server listens there.
pub(super) fn address() -> Address {
    Address::Tcp("127.0.0.1".to_owned(), 1)
}

fn redis() -> Redis {
    let redis = Redis::new(Instance { topology: Topology::Single(address()), access: access() }, None, "", 1);
    redis.node(b"any").expect("a single server has all").speaks(Dialect::default());
    redis
}

fn charge(value: usize, limit: Limit, charging: Charging) -> Charge {
    let bytes = value.to_le_bytes();
    let part = KeyPart::own(b"k", &bytes);
    let window = limit.quota().window().length();
    let key = CounterKey::new("d", std::iter::once(part), Colocation::Descriptor, limit.algorithm().name(), window);
    let (policies, remembers_refusals) = (StorePolicies::default(), true);
    Charge {
        key,
        limit,
        hits: Hits::take(1),
        descriptor: value,
        role: Role::Enforce,
        charging,
        policies,
        remembers_refusals,
        lease: None,
        ask: 0,
    }
}

#[test]
fn no_script_is_longer_than_its_bound_whatever_is_charged() {
    let minutely = |algorithm| Limit::new(algorithm, Quota::new(1, Window::of_unit(Unit::Minute))).unwrap();
    let (ordinary, log) = (minutely(Algorithm::FixedWindow), minutely(Algorithm::SlidingLog));
    for (charging, of_ordinary, of_logs) in
        [(Charging::Each, MOST_PER_SCRIPT, MOST_PER_SCRIPT), (Charging::AllOrNothing, MOST_TOGETHER, 100)]
    {
        for (mostly, most) in [(ordinary, of_ordinary), (Limit::closed(), of_ordinary), (log, of_logs)] {
            let limit = |value: usize| if value == 7 { ordinary } else { mostly };
            let charges: Vec<_> = (0..2_500).map(|value| charge(value, limit(value), charging)).collect();
            let groups = redis().0.groups(&charges, charging == Charging::AllOrNothing);
            assert!(groups.iter().all(|group| group.members.len() <= most), "{charging:?}");
            let mut members: Vec<_> = groups.iter().flat_map(|group| group.members.iter().copied()).collect();
            members.sort_unstable();
            assert_eq!(members, (0..2_500).collect::<Vec<_>>(), "each charge once");
        }
    }
}

#[test]
fn a_script_has_one_key_where_a_proxy_may_spread_the_keys_or_nothing_is_known() {
    let limit = Limit::new(Algorithm::FixedWindow, Quota::new(1, Window::of_unit(Unit::Minute))).unwrap();
    let unknown = Redis::new(Instance { topology: Topology::Single(address()), access: access() }, None, "", 1);
    let in_resp2 = redis();
    in_resp2.node(b"any").expect("it has all").speaks(Dialect { is_resp2: true, ..Dialect::default() });
    for charging in [Charging::Each, Charging::AllOrNothing] {
        // Counters 0 to 2, each twice, and limits of nothing, which have no counter.
        let mut charges: Vec<_> = (0..6).map(|value| charge(value % 3, limit, charging)).collect();
        charges.extend((6..9).map(|value| charge(value, Limit::closed(), charging)));
        let keys = |redis: &Redis| {
            let groups = redis.0.groups(&charges, charging == Charging::AllOrNothing);
            let open = |group: &SlotGroup| {
                let members = group.members.iter().map(|&member| &charges[member]);
                members.filter(|charge| !charge.limit.is_closed()).map(|charge| charge.key.clone()).collect()
            };
            let members: usize = groups.iter().map(|group| group.members.len()).sum();
            assert_eq!(members, charges.len(), "each charge once");
            groups.iter().map(open).collect::<Vec<Vec<_>>>()
        };
        for redis in [&unknown, &in_resp2] {
            let keys = keys(redis);
            assert_eq!(keys.len(), 3, "{charging:?}");
            assert!(keys.iter().all(|keys| keys.len() == 2 && keys[0] == keys[1]), "{keys:?}");
        }
        assert_eq!(keys(&redis()).len(), 1, "one script for all");
    }
}

/// Takes all permits of `node`.
async fn fill(node: &Arc<Node>) -> Vec<Permit> {
    let mut permits = Vec::new();
    while let Ok(permit) = node.permit(Instant::now(), 1, Instant::now(), CallPriority::AtOnce).await {
        permits.push(permit);
    }
    assert_eq!(node.room(), 0, "it is full");
    permits
}

#[tokio::test(start_paused = true)]
async fn a_request_that_one_node_cannot_take_leaves_the_others_to_whole_requests_unless_they_have_room_anyhow() {
    let redis = redis();
    let node = || Arc::new(Node::new(Locate::At(address()), access(), 1, Arc::default()));
    let nodes = [node(), node(), node()];
    let [was_full, full, idle] = &nodes;
    drop(fill(was_full).await);
    let _permits = fill(full).await;
    let group = SlotGroup { is_per_second: false, slot: 0, members: smallvec![] };
    let take = async |mode| {
        let batch =
            |node: &Arc<Node>| Batch { servers: &redis.0.main, node: Arc::clone(node), groups: smallvec![(0, &group)] };
        let mut batches = nodes.iter().rev().map(batch).collect();
        let permits = permits::take(&mut batches, mode, Instant::now() + Duration::from_millis(10)).await;
        let got = batches.iter().zip(&permits).filter(|(_, permit)| permit.is_ok());
        got.map(|(batch, _)| batch.node.number()).collect::<Vec<_>>()
    };
    assert_eq!(take(Mode::Each).await, [idle.number()], "the first has had no room of late");
    assert!(take(Mode::Take).await.is_empty(), "all of it or nothing");
    tokio::time::advance(Duration::from_millis(100)).await;
    assert_eq!(take(Mode::Each).await, [was_full.number(), idle.number()]);
}

#[tokio::test]
async fn hits_that_are_charged_later_take_the_room_that_there_is() {
    let redis = redis();
    let node = Arc::new(Node::new(Locate::At(address()), access(), 1, Arc::default()));
    let group = SlotGroup { is_per_second: false, slot: 0, members: smallvec![] };
    let later = async || {
        let groups = (0..100).map(|index| (index, &group)).collect();
        let mut batches = smallvec![Batch { servers: &redis.0.main, node: Arc::clone(&node), groups }];
        let permits = permits::take(&mut batches, Mode::Later, Instant::now() + Duration::from_secs(1)).await;
        (permits, batches[0].groups.len())
    };
    let room = node.room();
    let (permits, sent) = later().await;
    assert_eq!((permits[0].is_ok(), sent, node.room()), (true, room, 0), "all the room, and not more");
    assert_eq!(later().await.0[0].as_ref().err(), Some(&StoreError::Overloaded));
    drop(permits);
    assert_eq!(later().await.1, room, "it came back");
}
