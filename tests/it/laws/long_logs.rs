//! Logs of more than 10,000 moments, of which the oldest two become one: the definition, Rust and Lua say the same of them,
//! wherever the running numbers of the script begin.

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Charging, Hits, Micros, Window};

use super::oracle::{Oracle, Told};
use super::stores::{Counters, Store};
use crate::histories::{charge, limit};
use crate::world::NOON;

/// Where the running numbers begin again.
const TURN: u64 = 1 << 52;

/// How many moments a log is filled with, one in each millisecond: ten less than it keeps.
const FILLED: u64 = 9_990;

/// How a log is filled.
#[derive(Clone, Copy, Debug)]
struct Filling {
    /// How many hits a moment has at most; from one on they go round.
    most: u64,
    /// The running number of the first hit where Redis is given the log as a sorted set; without it the script makes it.
    origin: Option<u64>,
}

/// One log, three times.
struct Logs<'a> {
    filling: Filling,
    memory: Counters<'a>,
    redis: Counters<'a>,
    oracle: Oracle,
}

/// What refuses more than 10,000 hits in 15 seconds.
fn plain() -> Limit {
    let window = Window::of_length(Micros::from_secs(15)).expect("it is in bounds");
    limit(Algorithm::SlidingLog, window, 10_000, 1_000)
}

/// The same, which keeps what it refuses: more hits than it admits are in the log.
fn counting() -> Limit {
    plain().counting_refused()
}

fn after(millis: u64) -> Micros {
    NOON.saturating_add(Micros::from_millis(millis))
}

impl Filling {
    /// The hits of the moment after so many milliseconds.
    const fn hits_at(self, millis: u64) -> u64 {
        1 + millis % self.most
    }

    /// The members of the sorted set and their moments.
    fn members(self) -> Vec<(String, u64)> {
        let mut start = self.origin.unwrap_or(0);
        let member = |millis: u64| {
            let member = format!("{start} {}", self.hits_at(millis));
            start = (start + self.hits_at(millis)) % TURN;
            (member, after(millis).get())
        };
        (0..FILLED).map(member).collect()
    }
}

impl<'a> Logs<'a> {
    fn filled(redis: &'a Store, filling: Filling) -> Self {
        let mut logs = Self {
            filling,
            memory: Store::Memory.counters(),
            redis: redis.counters(),
            oracle: Oracle::new(Algorithm::SlidingLog),
        };
        for millis in 0..FILLED {
            let hits = Hits::take(filling.hits_at(millis));
            let charge = |counters: &Counters<'_>| counters.charge(counting(), Charging::Each, after(millis), hits);
            let told = charge(&logs.memory);
            if filling.origin.is_none() {
                assert_eq!(charge(&logs.redis), told, "after {millis} ms");
            }
        }
        if filling.origin.is_some() {
            logs.set(&filling.members());
        } else {
            assert_eq!(logs.stored(), filling.members(), "the script writes such members");
        }
        // The oracle goes over all of its entries at every charge, so it is given them at once.
        let nanos = |millis| u128::from(after(millis).get()) * 1_000;
        let entries = (0..FILLED).map(|millis| (nanos(millis), filling.hits_at(millis).into()));
        logs.oracle = Oracle::Log(entries.collect());
        logs
    }

    /// How many hits count; none of them is old.
    fn used(&self) -> u64 {
        let Oracle::Log(entries) = &self.oracle else { panic!("it is a log") };
        u64::try_from(entries.iter().map(|(_, hits)| hits).sum::<u128>()).expect("2^48 at most")
    }

    fn set(&mut self, members: &[(String, u64)]) {
        let Counters::Redis(keys) = &self.redis else { panic!("it is in Redis") };
        // The first charge makes the key known, so that it is gone in the end.
        self.redis.charge(plain(), Charging::Each, NOON, Hits::LOOK);
        let key = keys.key(&charge("only", plain(), Charging::Each, Hits::LOOK));
        let moments: Vec<_> = members.iter().map(|(_, moment)| moment.to_string()).collect();
        let pairs = members.iter().zip(&moments);
        let arguments: Vec<&[u8]> =
            pairs.flat_map(|((member, _), moment)| [moment.as_bytes(), member.as_bytes()]).collect();
        keys.run("ZADD", &key, &arguments);
    }

    /// The members that are stored, and their moments.
    fn stored(&self) -> Vec<(String, u64)> {
        let Counters::Redis(keys) = &self.redis else { panic!("it is in Redis") };
        let key = keys.key(&charge("only", plain(), Charging::Each, Hits::LOOK));
        let entries = keys.run("ZRANGE", &key, &[b"0", b"-1", b"WITHSCORES"]);
        redis::from_redis_value(entries).expect("members and scores")
    }

    /// A request of some charges, each on its own: what the definition says of them one by one.
    #[track_caller]
    fn request(&mut self, millis: u64, charges: &[(Limit, Hits)]) -> Vec<Told> {
        let told = self.told(millis, Charging::Each, charges);
        let oracle = &mut self.oracle;
        let one_by_one = charges.iter().map(|(limit, hits)| oracle.charge(limit, Charging::Each, after(millis), *hits));
        assert_eq!(told, one_by_one.collect::<Vec<_>>(), "after {millis} ms: {charges:?}");
        told
    }

    /// What both stores say of a request.
    #[track_caller]
    fn told(&self, millis: u64, charging: Charging, charges: &[(Limit, Hits)]) -> Vec<Told> {
        let request: Vec<_> = charges.iter().map(|(limit, hits)| charge("only", *limit, charging, *hits)).collect();
        let told = |counters: &Counters<'_>| {
            let verdicts = counters.request(&request, after(millis));
            verdicts.into_iter().map(Told::from).collect::<Vec<_>>()
        };
        let (memory, redis) = (told(&self.memory), told(&self.redis));
        assert_eq!(memory, redis, "after {millis} ms: {charges:?}");
        memory
    }

    #[track_caller]
    fn take(&mut self, millis: u64, hits: u64) {
        self.request(millis, &[(counting(), Hits::take(hits))]);
    }

    #[track_caller]
    fn give_back(&mut self, millis: u64, hits: u64) {
        self.request(millis, &[(counting(), Hits::give_back(hits))]);
    }

    /// How long so many hits have to wait, which is looked up all over the log and leaves it as it is.
    #[track_caller]
    fn waits(&mut self, millis: u64) {
        for hits in [0, 1, 2, 3, 700, 5_000, 9_999, 10_000, 10_001, Hits::MOST] {
            if !self.request(millis, &[(plain(), Hits::take(hits))])[0].is_refused {
                self.give_back(millis, hits);
            }
        }
    }
}

/// Fills a log past what it keeps, and does with it all that can be done.
fn grow_and_age(mut logs: Logs<'_>) {
    // The oldest two become one, once and again, and also where hits of one moment come one after the other.
    for millis in FILLED..10_030 {
        logs.take(millis, logs.filling.hits_at(millis));
        if millis % 4 == 0 {
            logs.take(millis, 1);
        }
        if millis % 10 == 0 {
            logs.waits(millis);
        }
    }
    assert_eq!(logs.stored().len(), 10_000, "no more are kept");
    // Parts of the latest entry, all of it, many entries.
    for hits in [1, 2, 7, 100] {
        logs.give_back(10_030, hits);
        logs.waits(10_030);
    }
    assert!(logs.stored().len() < 9_970);
    for millis in 10_031..10_160 {
        logs.take(millis, logs.filling.hits_at(millis));
    }
    assert_eq!(logs.stored().len(), 10_000, "no more are kept");
    logs.waits(10_160);

    // At one moment: two charges of one request, and more hits than the limit.
    for _ in 0..2 {
        logs.request(10_161, &[(counting(), Hits::take(2)), (counting(), Hits::take(3))]);
    }
    logs.request(10_161, &[(plain(), Hits::take(1)), (counting(), Hits::take(1)), (counting(), Hits::give_back(2))]);
    for hits in [10_000, 10_001, Hits::MOST] {
        logs.take(10_162, hits);
        logs.waits(10_162);
    }
    logs.give_back(10_163, Hits::MOST);
    logs.give_back(10_163, 19_999);
    logs.waits(10_163);
    // A clock that steps back waits.
    logs.take(9_000, 2);
    logs.give_back(9_000, 1);
    logs.waits(9_000);

    // A good part is old; the rest refuses nothing any more, but both charges of one request or none.
    logs.take(23_000, 1);
    logs.waits(23_000);
    logs.request(23_001, &[(plain(), Hits::take(10)), (plain(), Hits::take(20))]);
    let told = logs.told(23_001, Charging::AllOrNothing, &[(plain(), Hits::take(10)), (plain(), Hits::take(9_990))]);
    assert!(!told[0].is_refused && told[1].is_refused);
    logs.request(23_001, &[(plain(), Hits::LOOK)]);
    for millis in 23_002..23_020 {
        logs.take(millis, 400);
        logs.waits(millis);
    }
    // All of it, and once more from nothing.
    logs.give_back(23_020, u64::MAX);
    assert_eq!(logs.stored(), []);
    logs.take(23_021, 3);
    logs.waits(23_021);
}

/// Fills a log past what it keeps, and gives back all but some of its hits, down into those that became one.
fn shrink(mut logs: Logs<'_>) {
    for millis in FILLED..10_030 {
        logs.take(millis, logs.filling.hits_at(millis));
    }
    for (millis, left) in (10_030..).zip([9_999, 9_000, 3_000, 20, 2, 0]) {
        // The hits that come in the same request go on behind what is left.
        logs.request(millis, &[(counting(), Hits::give_back(logs.used() - left)), (counting(), Hits::take(2))]);
        logs.waits(millis);
    }
    assert_eq!(logs.stored().len(), 1);
    logs.give_back(10_040, 2);
    assert_eq!(logs.stored(), []);
}

#[tokio::test]
async fn a_log_of_more_moments_than_it_keeps_is_what_the_definition_says_in_rust_and_in_lua() {
    let redis = Store::redis().await;
    for most in [1, 3] {
        let filling = Filling { most, origin: None };
        grow_and_age(Logs::filled(&redis, filling));
        shrink(Logs::filled(&redis, filling));
    }
}

#[tokio::test]
async fn a_long_log_goes_on_where_its_running_numbers_begin_again() {
    let redis = Store::redis().await;
    for most in [1, 3] {
        let hits: u64 = (0..FILLED).map(|millis| Filling { most, origin: None }.hits_at(millis)).sum();
        // Between the first two entries, in the midst, and in what is charged after the log was filled.
        for before in [1, 5_000, hits + 5] {
            let filling = Filling { most, origin: Some(TURN - before) };
            grow_and_age(Logs::filled(&redis, filling));
            shrink(Logs::filled(&redis, filling));
        }
    }
}
