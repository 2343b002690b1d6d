//! What the largest log costs.

use std::iter::repeat_n;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Unit, Window};

use crate::charges::{charge, charges, limit};
use crate::embedded::Embedded;
use crate::redis::{FEW, FEWER, MANY, Redis};
use crate::{Effort, Outcome, median, thousands};

const MOST: u32 = 10_000;
const FULL: usize = MOST as usize;
/// How often a charge that changes nothing is repeated.
const REPEATED: usize = 1_000;
/// A window short enough to wait for, and long enough to fill a log and to copy it.
const SHORT: Micros = Micros::from_secs(5);

/// A charge, and the log it comes to.
struct Case {
    says: &'static str,
    /// The limit, by the window.
    limit: fn(Window) -> Limit,
    hits: u64,
    /// Whether it comes with another limit, and both or none are charged.
    is_beside: bool,
    /// Moments of one hit that are in the log.
    moments: usize,
    is_admitted: bool,
    /// Whether each log is charged once, because the charge changes it.
    is_once: bool,
    /// Whether all that is in the log has become old.
    is_old: bool,
}

const ORDINARY: Case = Case {
    says: "",
    limit: |window| limit(Algorithm::SlidingLog, MOST, window),
    hits: 1,
    is_beside: false,
    moments: FULL,
    is_admitted: false,
    is_once: false,
    is_old: false,
};

const CASES: [Case; 8] = [
    Case { says: "1 hit into an empty log", moments: 0, is_admitted: true, is_once: true, ..ORDINARY },
    Case {
        says: "10,000 hits into an empty log",
        hits: 10_000,
        moments: 0,
        is_admitted: true,
        is_once: true,
        ..ORDINARY
    },
    Case { says: "1 hit into a log of 9,999 moments", moments: FULL - 1, is_admitted: true, is_once: true, ..ORDINARY },
    Case {
        says: "the same beside another limit, under `all_or_nothing`",
        is_beside: true,
        moments: FULL - 1,
        is_admitted: true,
        is_once: true,
        ..ORDINARY
    },
    Case { says: "1 hit refused by a full log", ..ORDINARY },
    Case { says: "5,000 hits refused by a full log", hits: 5_000, ..ORDINARY },
    Case {
        says: "1 hit refused by a full log and recorded (`count_refused`)",
        limit: |window| limit(Algorithm::SlidingLog, MOST, window).counting_refused(),
        ..ORDINARY
    },
    Case {
        says: "1 hit into a log of 10,000 moments that have all become old",
        is_admitted: true,
        is_once: true,
        is_old: true,
        ..ORDINARY
    },
];

pub fn print(effort: Effort) -> Outcome {
    let mut redis = Redis::start()?;
    println!("## The largest log\n");
    println!(
        "A limit of {}; where the charge changes the log, {} logs of which each is charged once, else {} charges of one \
         log; {} rounds, the median of small groups.\n",
        thousands(MOST.into()),
        effort.logs,
        thousands(REPEATED as u64),
        effort.rounds
    );
    println!("| charge | Redis | embedded | bytes of the key in Redis afterwards |");
    println!("|---|---|---|---|");
    for case in &CASES {
        let (mut in_redis, mut embedded, mut bytes) = (Vec::new(), Vec::new(), 0);
        for _ in 0..effort.rounds {
            let (us, after) = case.in_redis(&mut redis, effort)?;
            in_redis.extend(us);
            bytes = after;
            embedded.extend(case.embedded(effort));
        }
        println!(
            "| {} | {:.1} us | {} ns | {} |",
            case.says,
            median(in_redis),
            thousands(median(embedded).round() as u64),
            thousands(bytes)
        );
    }
    println!();
    Ok(())
}

impl Case {
    fn window(&self) -> Window {
        // A year: no other becomes old while it is measured.
        if self.is_old { Window::of_length(SHORT).expect("it is in bounds") } else { Window::of_unit(Unit::Year) }
    }

    /// What fills the logs, and the requests that are measured.
    fn requests(&self, effort: Effort) -> (Vec<Charge>, Vec<Vec<Charge>>) {
        let logs = if self.is_once { effort.logs } else { 1 };
        let fill = charges(limit(Algorithm::SlidingLog, MOST, self.window()), logs);
        let limit = (self.limit)(self.window());
        let requests = fill.iter().enumerate().map(|(user, log)| {
            let mut charges = vec![Charge { limit, hits: Hits::take(self.hits), ..log.clone() }];
            if self.is_beside {
                charges.push(charge(other(), user));
                for charge in &mut charges {
                    charge.charging = Charging::AllOrNothing;
                }
            }
            charges
        });
        let requests = requests.collect();
        (fill, requests)
    }

    fn in_redis(&self, redis: &mut Redis, effort: Effort) -> Outcome<(Vec<f64>, u64)> {
        redis.empty()?;
        let (fill, requests) = self.requests(effort);
        let mut filled = Instant::now();
        if self.moments > 0 {
            // Filled once and copied.
            let template = charge(fill[0].limit, FULL);
            redis.send(repeat_n(from_ref(&template), self.moments), MANY, true)?;
            filled = Instant::now();
            for log in &fill {
                redis.copy(&template, log)?;
            }
        }
        if self.is_old {
            // Redis keeps an idle counter for a second more, and the copies took some of that.
            let old = filled + Duration::from_micros(SHORT.get() + 10_000);
            std::thread::sleep(old.saturating_duration_since(Instant::now()));
        }
        if let (Some(last), true) = (fill.last(), self.moments > 0) {
            redis.bytes(last).map_err(|error| format!("the logs are gone before they are charged: {error}"))?;
        }
        let us = redis.send(self.repeated(&requests), if self.is_once { FEWER } else { FEW }, self.is_admitted)?;
        Ok((us, redis.bytes(&fill[0])?))
    }

    fn embedded(&self, effort: Effort) -> Vec<f64> {
        let (fill, requests) = self.requests(effort);
        let store = Embedded::new();
        store.fill(&fill, self.moments);
        store.pass(if self.is_old { SHORT } else { Micros::new(1) });
        if self.limit_records() {
            // Each of them is a moment of its own, as in Redis.
            let each = self.repeated(&requests).flat_map(|charges| {
                store.pass(Micros::new(1));
                store.send(std::iter::once(charges), self.is_admitted)
            });
            return each.collect();
        }
        store.send(self.repeated(&requests), self.is_admitted)
    }

    fn repeated<'a>(&self, requests: &'a [Vec<Charge>]) -> impl Iterator<Item = &'a [Charge]> {
        let times = if self.is_once { requests.len() } else { REPEATED };
        requests.iter().map(Vec::as_slice).cycle().take(times)
    }

    fn limit_records(&self) -> bool {
        (self.limit)(self.window()).records_every_charge()
    }
}

/// The limit beside a log.
fn other() -> Limit {
    limit(Algorithm::FixedWindow, u32::MAX, Window::of_unit(Unit::Year))
}
