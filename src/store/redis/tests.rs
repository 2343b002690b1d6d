//! Tests of the split of a request into scripts, and of the permits that its nodes give.

use super::groups::{MOST_PER_SCRIPT, MOST_TOGETHER};
use super::*;
use crate::algorithm::{Algorithm, Limit, Refusals};
use crate::model::key::KeyPart;
use crate::model::{
    Colocation, CounterKey, Hits, Outcome, Provenance, Quota, Role, StorePolicies, Unit, Verdict, Window,
};
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
        network: Arc::new(HostNetwork),
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

/// The mode of a script that has all charges of a request.
fn mode(charging: Charging) -> Mode {
    match charging {
        Charging::Each => Mode::Each,
        Charging::Group(_) => Mode::Group,
        Charging::AllOrNothing => Mode::All,
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
            let groups = redis().0.groups(&charges, mode(charging));
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
            let groups = redis.0.groups(&charges, mode(charging));
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
    let group = SlotGroup { is_per_second: false, slot: 0, mode: Mode::Each, members: smallvec![] };
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
    let group = SlotGroup { is_per_second: false, slot: 0, mode: Mode::Each, members: smallvec![] };
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

#[test]
fn what_a_policy_answers_for_a_charge_stays_when_the_hits_of_the_others_are_given_back() {
    let limit = Limit::new(Algorithm::FixedWindow, Quota::new(9, Window::of_unit(Unit::Minute))).unwrap();
    let charges: Vec<_> = (0..3).map(|value| charge(value, limit, Charging::AllOrNothing)).collect();
    let redis = redis();
    let mut groups = redis.0.groups(&charges, Mode::All);
    groups.iter_mut().for_each(|group| group.mode = Mode::Take);
    // An admitted charge, one without memory, and one of a key that holds no counter, at the time 7.
    let row = |code: u8, left: u32| {
        let look = |remaining: u32| [&remaining.to_le_bytes()[..], &60_u64.to_le_bytes()].concat();
        [vec![code], look(left - 1), (-1_i64).to_le_bytes().to_vec(), vec![0; 4], look(left)].concat()
    };
    let rows = [row(0, 9), row(4, 9), row(2, 9)].concat();
    let length = u32::try_from(8 + rows.len()).unwrap();
    let reply = [&length.to_le_bytes()[..], &7_u64.to_le_bytes(), &rows].concat();
    let reply = script::read(redis::Value::BulkString(reply), charges.len(), Mode::Take);
    let Some(script::ScriptReply::Done { now, rows }) = reply else { panic!("{reply:?}") };
    let charged = redis.conclude(&groups, &charges, smallvec![Ok((now, rows))]);
    let failed: Vec<_> = charged.answers.iter().map(|answer| answer.err()).collect();
    assert_eq!(failed, [None, Some(StoreError::OutOfMemory), Some(StoreError::Foreign)]);
    let verdict = Verdict { remaining: 3, ..Verdict::uncounted(Outcome::Admitted, Provenance::Local) };
    let mut verdicts = [verdict; 3];
    let refusals = Refusals::new(std::iter::once((&charges[0], Outcome::Refused)));
    charged.undos.into_iter().for_each(|undo| assert!(undo.settle(&refusals, &mut verdicts), "one was taken"));
    assert_eq!(verdicts.map(|verdict| verdict.remaining), [9, 3, 3]);
}
