//! Worked examples of the literature, through rules: number by number the same in this process and on a real Redis.

use tidegate::model::{Descriptor, Micros, Outcome, Verdict};
use tidegate::rulefile::{Options, load};
use tidegate::rules::RuleSet;

use crate::twins::bench::Bench;
use crate::world::{Counters, NOON, descriptor, file, micros, request};

use Told::{Admitted, Refused};

/// What a charge is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// So much is left.
    Admitted(u32),
    /// So much is left, and the charge fits after that wait.
    Refused(u32, &'static str),
}

/// A rule whose counters are in this process, and on a Redis at the same moments.
struct Both {
    rules: RuleSet,
    memory: Counters,
    bench: Bench,
}

impl Both {
    /// A rule of this limit for every user.
    async fn new(limit: &str) -> Self {
        let rules = format!("domain: d\ndescriptors: [{{ key: user, rate_limit: {{ {limit} }} }}]\n");
        let loaded =
            load(&[file("rules.yaml", &rules)], Options::default()).unwrap_or_else(|invalid| panic!("{invalid}"));
        Self { rules: loaded.rules, memory: Counters::new(), bench: Bench::start(&[]).await }
    }

    /// Charges a user so long after noon.
    #[track_caller]
    fn hit(&mut self, user: &str, after: Micros, hits: u64) -> Verdict {
        let asked = Descriptor { hits_addend: Some(hits), ..descriptor(&format!("user={user}")) };
        let request = request([asked]);
        let charges = self.rules.find(&request).charges;
        let now = NOON.saturating_add(after);
        let here = self.memory.request(&charges, now);
        assert_eq!(self.bench.charge(&charges, now), here, "{user} {hits} after {after}");
        here[0]
    }

    /// Charges a user at each of these times after noon.
    #[track_caller]
    fn tells(&mut self, user: &str, table: &[(&str, u64, Told)]) {
        for &(after, hits, expected) in table {
            let verdict = self.hit(user, micros(after), hits);
            let expected = match expected {
                Admitted(left) => (Outcome::Admitted, left, None),
                Refused(left, wait) => (Outcome::Refused, left, Some(micros(wait))),
            };
            assert_eq!((verdict.outcome, verdict.remaining, verdict.retry), expected, "{user} {hits} after {after}");
        }
    }

    /// How many of so many hits, one by one, are admitted.
    #[track_caller]
    fn admits(&mut self, after: &str, hits: u32) -> u32 {
        let mut admitted = 0;
        for _ in 0..hits {
            admitted += u32::from(!self.hit("a", micros(after), 1).outcome.is_refused());
        }
        admitted
    }

    /// What redis-cell's `CL.THROTTLE` answers for a hit: limited, limit, remaining, retry after, reset after.
    #[track_caller]
    fn throttle(&mut self, after: &str) -> [i64; 5] {
        let verdict = self.hit("user123", micros(after), 1);
        let limit = self.rules.rules()[0].limits()[0].limit.capacity();
        let seconds = |length: Micros| i64::try_from(length.get() / 1_000_000).expect("it fits");
        [
            i64::from(verdict.outcome.is_refused()),
            limit.into(),
            verdict.remaining.into(),
            verdict.retry.map_or(-1, seconds),
            seconds(verdict.reset),
        ]
    }
}

/// A bucket of so many hits, filled or drained by so many in a second, one in each of these intervals.
async fn is_a_bucket(algorithm: &str, holds: u32, per_second: u32, interval: &'static str) {
    let limit = format!("unit: second, requests_per_unit: {per_second}, algorithm: {algorithm}, burst: {holds}");
    let mut both = Both::new(&limit).await;
    let (all, some) = (u64::from(holds), u64::from(per_second));
    both.tells("a", &[("0s", all - 1, Admitted(1)), ("0s", 1, Admitted(0)), ("0s", 1, Refused(0, interval))]);
    both.tells("a", &[("1s", 0, Admitted(per_second)), ("1s", some, Admitted(0)), ("1s", 1, Refused(0, interval))]);
    let full = micros("1s").saturating_add(Micros::from_secs(all / some));
    assert_eq!(both.hit("a", full.saturating_sub(Micros::new(1)), 0).remaining, holds - 1);
    assert_eq!(both.hit("a", full, 0).remaining, holds);
    for idle in ["1m", "1h", "1d", "30d"] {
        let never = both.hit("a", micros(idle), all + 1);
        assert_eq!((never.outcome, never.remaining, never.retry), (Outcome::Refused, holds, None), "idle for {idle}");
        both.tells("a", &[(idle, all, Admitted(0)), (idle, 1, Refused(0, interval))]);
    }
}

#[tokio::test]
async fn a_sliding_log_of_2_per_minute_admits_a_fourth_hit_and_remembers_the_refused_third_where_it_is_told_to() {
    let limit = "unit: minute, requests_per_unit: 2, algorithm: sliding_log";
    let table = |wait, left| {
        [("1s", 1, Admitted(1)), ("30s", 1, Admitted(0)), ("50s", 1, Refused(0, wait)), ("1m40s", 1, Admitted(left))]
    };
    Both::new(limit).await.tells("a", &table("11s", 1));
    // With the refused hit in the log, one more fits when two of the three are old.
    Both::new(&format!("{limit}, count_refused: true")).await.tells("a", &table("40s", 0));
}

#[tokio::test]
async fn a_sliding_window_a_quarter_over_weighs_60_hits_of_the_window_before_as_45() {
    let mut both = Both::new("unit: minute, requests_per_unit: 100, algorithm: sliding_window").await;
    both.tells("a", &[("40s", 60, Admitted(40)), ("1m5s", 20, Admitted(25))]);
    // 60 x 3/4 + 20 = 65. The share is rounded down, so one more fits a tick later.
    both.tells("a", &[("1m15s", 0, Admitted(35)), ("1m15s", 35, Admitted(0)), ("1m15s", 1, Refused(0, "100us"))]);
}

#[tokio::test]
async fn a_sliding_window_rounds_the_49_and_a_half_hits_of_cloudflares_example_down() {
    let mut both = Both::new("unit: minute, requests_per_unit: 50, algorithm: sliding_window").await;
    both.tells("a", &[("30s", 42, Admitted(8)), ("1m15s", 18, Admitted(1)), ("1m15s", 1, Admitted(0))]);
    assert!(both.hit("a", micros("1m15s"), 1).outcome.is_refused());
}

#[tokio::test]
async fn a_token_bucket_of_100_filled_by_10_in_a_second_is_full_after_ten_and_never_holds_more() {
    is_a_bucket("token_bucket", 100, 10, "100ms").await;
}

#[tokio::test]
async fn a_leaky_bucket_of_10_drained_by_2_in_a_second_is_empty_after_five_and_never_holds_more() {
    is_a_bucket("leaky_bucket", 10, 2, "500ms").await;
}

#[tokio::test]
async fn across_a_border_200_hits_in_59_seconds_pass_a_fixed_window_of_100_but_150_a_sliding_one_and_100_a_log() {
    for (algorithm, after) in [("fixed_window", 100), ("sliding_window", 50), ("sliding_log", 0)] {
        let mut both = Both::new(&format!("unit: minute, requests_per_unit: 100, algorithm: {algorithm}")).await;
        assert_eq!(both.admits("31s", 100), 100, "{algorithm}");
        // Half of the next window is over, so half of the hits before it count.
        assert_eq!(both.admits("1m30s", 100), after, "{algorithm}");
    }
}

#[tokio::test]
async fn gcra_tells_the_five_numbers_that_redis_cell_does() {
    // `CL.THROTTLE user123 15 30 60 1`: a burst of 15 beyond the first, and 30 per 60 seconds.
    let mut both = Both::new("unit: minute, requests_per_unit: 30, algorithm: gcra, burst: 16").await;
    for calls in 1..=16 {
        assert_eq!(both.throttle("0s"), [0, 16, 16 - calls, -1, 2 * calls]);
    }
    assert_eq!(both.throttle("0s"), [1, 16, 0, 2, 32]);
    assert_eq!(both.throttle("1s"), [1, 16, 0, 1, 31]);
    for later in ["2s", "4s", "6s"] {
        assert_eq!(both.throttle(later), [0, 16, 0, -1, 32]);
        assert_eq!(both.throttle(later), [1, 16, 0, 2, 32]);
    }
    assert_eq!(both.throttle("38s"), [0, 16, 15, -1, 2]);
}

#[tokio::test]
async fn ten_in_any_second_for_each_address_are_counted_to_the_millisecond() {
    let mut both = Both::new("window: 1s, requests_per_unit: 10, algorithm: sliding_log").await;
    for hit in 0..10 {
        let after = Micros::from_millis(100 * u64::from(hit));
        let verdict = both.hit("192.0.2.1", after, 1);
        assert_eq!((verdict.outcome, verdict.remaining), (Outcome::Admitted, 9 - hit), "after {after}");
    }
    both.tells("192.0.2.2", &[("950ms", 1, Admitted(9))]);
    // A hit that is a second old no longer counts.
    both.tells(
        "192.0.2.1",
        &[("999ms", 1, Refused(0, "1ms")), ("1000ms", 1, Admitted(0)), ("1s", 1, Refused(0, "100ms"))],
    );
    both.tells(
        "192.0.2.1",
        &[("1099ms", 1, Refused(0, "1ms")), ("1100ms", 1, Admitted(0)), ("1899ms", 7, Admitted(0))],
    );
    both.tells(
        "192.0.2.2",
        &[("1949ms", 9, Admitted(0)), ("1949ms", 1, Refused(0, "1ms")), ("1950ms", 1, Admitted(0))],
    );
}
