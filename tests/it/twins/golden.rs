//! The counters that versions leave in Redis: what is written today is what the golden file says, and every later version
//! counts on from it.

use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Quota, Window};

use super::bench::{Bench, SLACK_MS};
use crate::histories::charge;
use crate::support::repository;
use crate::world::{NOON, micros};

/// The longest a counter is kept: ten years.
const LONGEST_MS: u64 = 315_360_000_000;

/// A counter of the golden file: how it came about and what its next charge is told.
struct Case {
    name: &'static str,
    limit: Limit,
    /// How long after noon, against which limit, and how many hits.
    charges: Vec<(&'static str, Limit, u64)>,
    /// The next: how long after noon, and how many hits.
    next: (&'static str, u64),
    told: Told,
}

/// Whether it is refused, what remains, the reset and the wait.
type Told = (bool, u32, Micros, Option<Micros>);

fn limit(algorithm: Algorithm, hits: u32, window: &str, burst: u32) -> Limit {
    let window = Window::of_length(micros(window)).expect("it is in bounds");
    Limit::new(algorithm, Quota::new(hits, window).with_burst(burst)).expect("it can be counted")
}

fn fixed(hits: u32, window: &str) -> Limit {
    limit(Algorithm::FixedWindow, hits, window, hits)
}

fn sliding(hits: u32, window: &str) -> Limit {
    limit(Algorithm::SlidingWindow, hits, window, hits)
}

fn log(hits: u32, window: &str) -> Limit {
    limit(Algorithm::SlidingLog, hits, window, hits)
}

fn gcra(hits: u32, window: &str, burst: u32) -> Limit {
    limit(Algorithm::Gcra, hits, window, burst)
}

fn admitted(remaining: u32, reset: &str) -> Told {
    (false, remaining, micros(reset), None)
}

fn refused(remaining: u32, reset: &str, retry: &str) -> Told {
    (true, remaining, micros(reset), Some(micros(retry)))
}

/// The counters of the file, in its order.
fn cases() -> Vec<Case> {
    let case = |name, limit, charges: &[u64], next, told| {
        let charges = charges.iter().map(|hits| ("0s", limit, *hits)).collect();
        Case { name, limit, charges, next, told }
    };
    let spread = |name, limit, charges: &[(&'static str, u64)], next, told| {
        let charges = charges.iter().map(|(after, hits)| (*after, limit, *hits)).collect();
        Case { name, limit, charges, next, told }
    };
    let (slow, fast) = (gcra(10, "1d", 10), gcra(1_000, "1d", 1_000));
    let most = gcra(1, "365d", 1).counting_refused();
    vec![
        case("second", fixed(10, "1s"), &[3], ("250ms", 1), admitted(6, "750ms")),
        case("day", fixed(1_000_000, "1d"), &[42], ("1h", 1_000_000), refused(0, "11h", "11h")),
        case("over", fixed(5, "15m"), &[4, 3], ("1m", 1), refused(0, "14m", "14m")),
        case("most", fixed(u32::MAX, "365d"), &[Hits::MOST; 2], ("1m", 1), refused(0, "38159m", "38159m")),
        // Half of three are left of the second before, rounded down, and one is taken of this one, which counts until the next second has begun.
        case("second", sliding(10, "1s"), &[3], ("1500ms", 1), admitted(8, "500001us")),
        // 22 are left of 30, beside 20; ten fit when less than 21 are left of them.
        spread(
            "minute",
            sliding(50, "1m"),
            &[("0s", 30), ("60s", 20)],
            ("75s", 10),
            refused(8, "102000100us", "3000100us"),
        ),
        spread("minute", log(5, "1m"), &[("0s", 3), ("1s", 1)], ("10s", 1), admitted(0, "60s")),
        // The first three are old. Four fit when the fourth is.
        spread("old", log(5, "2s"), &[("0s", 3), ("1s", 1), ("2s", 1)], ("2500ms", 4), refused(3, "1500ms", "500ms")),
        case("second", limit(Algorithm::TokenBucket, 10, "1s", 10), &[3], ("250ms", 1), admitted(8, "150ms")),
        case("second", limit(Algorithm::LeakyBucket, 10, "1s", 10), &[3], ("250ms", 1), admitted(8, "150ms")),
        // 2.5 of 3 have drained; what one and a half take to drain.
        case("second", gcra(10, "1s", 10), &[3], ("250ms", 1), admitted(8, "150ms")),
        // 10 of 25 have drained; 15 and 40 are 15 more than the burst.
        case("burst", gcra(20, "1m", 40), &[25], ("30s", 40), refused(25, "45s", "45s")),
        case("day", gcra(1_000_000, "1d", 1_000_000), &[42], ("1s", 1), admitted(999_968, "2800ms")),
        Case {
            charges: vec![("0s", slow, 8), ("0s", fast, 1)],
            ..case("slowest", slow, &[], ("1h", 1), admitted(0, "23h"))
        },
        case("most", most, &[Hits::MOST; 4], ("1d", 1), refused(0, "3650d", "3650d")),
    ]
}

impl Case {
    fn charge(&self, limit: Limit, hits: u64) -> Charge {
        charge(self.name, limit, Charging::Each, Hits::take(hits))
    }

    fn key(&self) -> String {
        self.charge(self.limit, 0).key.to_string()
    }
}

/// The lines of the golden file: key, text, milliseconds until it is idle.
fn golden() -> Vec<(String, String, u64)> {
    let file = std::fs::read_to_string(repository("tests/golden/counters.txt")).expect("it is there");
    let lines = file.lines().filter(|line| !line.starts_with('#'));
    let line = |line: &str| {
        let columns: Vec<_> = line.split(" | ").collect();
        let [key, text, idle_ms] = columns[..] else { panic!("{line:?} has three columns") };
        (key.to_owned(), text.to_owned(), idle_ms.parse().expect("milliseconds"))
    };
    lines.map(line).collect()
}

#[tokio::test]
async fn what_is_written_today_is_what_the_golden_file_says() {
    let mut bench = Bench::start(&[]).await;
    let (golden, cases) = (golden(), cases());
    assert_eq!(golden.len(), cases.len());
    for (_, algorithm) in Algorithm::ALL {
        assert!(cases.iter().any(|case| case.limit.algorithm() == algorithm), "{algorithm:?} has golden counters");
    }
    for (case, (key, text, idle_ms)) in cases.iter().zip(golden) {
        // A later charge may leave the expiry as it is.
        let (before, mut after, mut remaining) = (bench.time_ms(), 0, 0);
        for &(after_noon, limit, hits) in &case.charges {
            remaining = bench.charge(&[case.charge(limit, hits)], NOON.saturating_add(micros(after_noon)))[0].remaining;
            after = bench.time_ms();
        }
        // A fixed window that is used up is kept for the next one.
        let is_kept_longer = remaining == 0 && case.limit.algorithm() == Algorithm::FixedWindow;
        let longer_ms = if is_kept_longer { case.limit.quota().window().length().get() / 1_000 } else { 0 };
        let charge = case.charge(case.limit, 0);
        assert_eq!((case.key(), bench.text(&charge)), (key, Some(text)), "key and text");
        let kept_ms = (idle_ms + longer_ms + SLACK_MS).min(LONGEST_MS);
        let expires = bench.expires_ms(&charge);
        assert!(
            (before + kept_ms..=after + kept_ms).contains(&expires),
            "{}: {} ms, and not {kept_ms}",
            case.key(),
            expires - before
        );
    }
}

#[tokio::test]
async fn every_version_counts_on_from_the_golden_file() {
    let mut bench = Bench::start(&[]).await;
    for (case, (key, text, _)) in cases().iter().zip(golden()) {
        let (after, hits) = case.next;
        let charge = case.charge(case.limit, hits);
        assert_eq!(case.key(), key);
        // Packed, and as the text that the first versions wrote.
        for set in [Bench::set_packed, Bench::set] {
            bench.empty();
            set(&mut bench, &charge, &text);
            let verdict = bench.charge(std::slice::from_ref(&charge), NOON.saturating_add(micros(after)))[0];
            let told = (verdict.outcome.is_refused(), verdict.remaining, verdict.reset, verdict.retry);
            assert_eq!(told, case.told, "{key}");
        }
    }
}
