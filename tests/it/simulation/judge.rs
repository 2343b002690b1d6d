//! Invariants of a run, each stated in `docs/guarantees.md`.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Clock as _, Micros, Provenance, Role};
use tokio::time::Instant;

use super::calls::{Call, Part};
use super::cluster::slot;
use super::deployment::Kind;
use super::keys::{VALUES, counter};
use super::world::{Run, World};
use crate::laws::bound;

/// The longest time for which hits are leased: six times `ttl`.
const LEASED: Duration = Duration::from_secs(6);
/// The values of descriptors.
const VALUES_OF: [&str; 4] = ["0", "1", "2", "other"];
/// The keys whose counters of a year are compared with what callers were told.
const OF_A_YEAR: [&str; 4] = ["counted", "later", "list", "refunded"];
/// The time in which what a refused request took is given back.
const GIVEN_BACK: Duration = Duration::from_millis(1_200);

/// The time from one look at the memory of a server to the next.
const LOOKED_AT: Duration = Duration::from_secs(1);

/// The time in which an instance learns that a server is not as far away as it was.
const FURTHER_AWAY: Duration = Duration::from_millis(300);

/// The time in which an instance with few calls learns how many scripts a server takes at once: each call that it answers raises the limit.
const TAKES_MORE: Duration = Duration::from_secs(1);

/// The time for which an instance uses what it has learnt of the clock of a server.
const SAMPLED: Duration = Duration::from_secs(2);

/// The time for which a counter is kept after it is idle. A step back by more can reach a moment at which a counter was not idle that is gone.
const KEPT: Micros = Micros::from_secs(1);

/// Charges of a counter that are compared with what was asked at the time.
const IN_A_ROW: usize = 8;

/// The longest timeout of a caller.
const LONGEST: Duration = Duration::from_millis(250);

/// The hits on the counters of a year, by key and value.
pub type Counters = BTreeMap<(&'static str, String), u64>;

impl World {
    /// Returns the counters of a year, as the present masters have them.
    pub fn counters(&self) -> Counters {
        let masters = self.deployment.masters();
        let each = OF_A_YEAR.into_iter().flat_map(|key| (0..VALUES).map(move |value| (key, value.to_string())));
        let sum = |(key, value): &(&str, String)| -> u64 {
            let name = counter(key, value);
            masters.iter().map(|at| self.deployment.servers[*at].keys(|keys| keys.count(name.as_bytes()))).sum()
        };
        each.map(|name| (name.clone(), sum(&name))).collect()
    }

    /// Says which promises were not kept. The calls from the place `rest` on were made while nothing failed, and found the counters `before`.
    pub fn judge(mut self, seed: u64, rest: usize, before: &Counters) -> Run {
        let mut broken = std::mem::take(&mut self.broken);
        let servers = self.deployment.servers.clone();
        broken.extend(servers.iter().flat_map(|server| server.broken.take()));
        let calls = self.calls.take();
        broken.extend(calls.iter().filter_map(|call| self.wrong(call)));
        let limits = self.rules[0].1.limits.clone();
        for key in limits.keys() {
            for value in VALUES_OF {
                broken.extend(self.too_many(&calls, key, value, None));
                let is_local = self.rules[0].1.policies_of(key).contains(&"local");
                for process in (0..self.started).filter(|_| is_local) {
                    broken.extend(self.too_many(&calls, key, value, Some(process)));
                }
            }
        }
        let (empty, after) = (Counters::new(), self.counters());
        for (key, value) in after.keys() {
            broken.extend(self.miscounted(&calls, (&empty, &after), key, value));
            broken.extend(self.miscounted(&calls[rest..], (before, &after), key, value));
        }
        broken.extend(self.undecided(&calls));
        broken.extend(self.charged_late(&calls));
        if self.rules[0].1.leased == 0 {
            broken.extend(refused_too_long(&calls));
        }
        for server in &servers {
            let endless = server.keys(|keys| {
                keys.begin(self.clock.now().get(), false);
                keys.endless()
            });
            broken.extend(endless.iter().map(|key| format!("without an end: {key}")));
        }
        Run { seed, trace: self.trace.take(), broken, calls: calls.len() }
    }

    /// Says if a call was answered too late, or if its outcome is not that of its parts.
    fn wrong(&self, call: &Call) -> Option<String> {
        let of = |role| call.parts.iter().filter(move |part| part.role == role);
        let is_enforced = of(Role::Enforce).any(|part| !part.is_admitted);
        let quotas_refuse = of(Role::Quota).next().is_some() && of(Role::Quota).all(|part| !part.is_admitted);
        // The policy `error` fails the call whatever the others say, of a quota too.
        let fails = call.parts.iter().any(|part| part.by == Some(Provenance::Error) && !part.role.is_shadow());
        let is_wrong = |part: &Part| {
            let policies = self.rules[0].1.policies_of(&part.key);
            // Hits that cannot be given back refuse nobody.
            call.hits > 0 && part.by.is_some_and(|by| by.is_policy() && !policies.contains(&by.name()))
        };
        let is_spared = |part: &Part| part.by == Some(Provenance::Spared);
        let wrong = if call.ended - call.began > call.patience() + Duration::from_millis(1) {
            "late"
        } else if call.outcome.is_some() && call.is_admitted() == (is_enforced || quotas_refuse || fails) {
            "not the outcome of its parts"
        } else if call.parts.iter().any(is_spared) && call.parts.iter().all(|part| is_spared(part) || part.is_admitted)
        {
            "not asked, and nothing refuses"
        } else if call.parts.iter().any(is_wrong) {
            "answered by another policy"
        } else {
            return None;
        };
        Some(format!("{wrong}: {call:?}"))
    }

    /// Says if a policy answered for a server while nothing failed. A first call may find a server further away than it is by now.
    fn undecided(&self, calls: &[Call]) -> Option<String> {
        for calm in &self.calm {
            let (mut first, mut present) = (BTreeMap::new(), BTreeMap::new());
            let is_calm = |call: &&Call| calm.contains(&call.began) && calm.contains(&call.ended);
            for call in calls.iter().filter(is_calm) {
                for (part, by) in call.parts.iter().filter_map(|part| Some((part, part.by?))) {
                    let server = self.deployment.master_of(slot(counter(&part.key, &part.value).as_bytes()));
                    let of = (call.process, server);
                    if by == Provenance::Store {
                        present.remove(&of);
                    }
                    if by.is_policy() {
                        let since = *present.entry(of).or_insert(call.began);
                        let first = *first.entry(of).or_insert(call.began);
                        if call.began > since + FURTHER_AWAY || call.began > first + TAKES_MORE {
                            return Some(format!("redis {server} works, and a policy answers: {call}"));
                        }
                    }
                }
            }
        }
        None
    }

    /// Returns the largest limit of `key` that was in force in an interval. A lease of an earlier one drains its counter once more when it is given
    /// back.
    fn limit(&self, key: &str, from: Instant, to: Instant) -> Option<Limit> {
        let lasting = if self.rules[0].1.leased > 0 && key != "fixed_window" { LEASED } else { Duration::ZERO };
        let ends = self.rules.iter().skip(1).map(|(since, _)| *since + lasting).chain([to]);
        let in_force = self.rules.iter().zip(ends).filter(|((since, _), end)| *since <= to && *end >= from);
        in_force.filter_map(|((_, rules), _)| rules.limits.get(key)).max_by_key(|limit| limit.quota().limit()).copied()
    }

    /// Says if any interval has more admitted hits than its bound: those that Redis admitted, or those of a `process` that decided alone.
    fn too_many(&self, calls: &[Call], key: &str, value: &str, process: Option<usize>) -> Option<String> {
        let is_of = |call: &Call, part: &Part| {
            let is_decided = match process {
                None => matches!(part.by, Some(Provenance::Store | Provenance::Lease)),
                Some(_) => part.by == Some(Provenance::Local),
            };
            // Hits that are given back may have arrived, whatever the answer was.
            call.hits < 0 || call.is_admitted() && part.is_admitted && is_decided
        };
        let hits_of = |call: &Call| {
            let parts = call.parts_of(key, value).filter(|part| is_of(call, part)).count();
            i128::from(call.hits) * i128::try_from(parts).expect("few")
        };
        let is_meant = |call: &&Call| process.is_none_or(|process| call.process == process);
        let mut admitted: Vec<_> = calls.iter().filter(is_meant).map(|call| (call, hits_of(call))).collect();
        admitted.retain(|(_, hits)| *hits != 0);
        admitted.sort_by_key(|(call, _)| call.ended);
        let clock = usize::from(process.is_some());
        let instances = NonZeroU32::new(u32::try_from(self.processes.borrow().len()).expect("few")).expect("one");
        for (first, _) in &admitted {
            let (mut sum, mut given_back) = (0, 0);
            // Those that surely lie within: what is charged is charged between the call and its answer.
            let after = admitted.partition_point(|(call, _)| call.ended < first.began);
            for (call, hits) in admitted[after..].iter().filter(|(call, _)| call.began >= first.began) {
                sum += hits.max(&0);
                given_back -= hits.min(&0);
                let limit = self.limit(key, first.began, call.ended)?;
                let limit = if process.is_some() { limit.shared_among(instances) } else { limit };
                let from = first.from[clock].min(first.to[clock].saturating_sub((first.ended - first.began).into()));
                // Where a clock steps back, a counter waits at the last moment that it had reached.
                let steps = self.steps_within(first, call).filter(|_| clock == 0);
                let to = steps.map(|(_, before, _)| *before).fold(call.to[clock].max(from), Micros::max);
                let most = i128::try_from(bound(&limit, from, to)).expect("it fits") + given_back;
                if sum <= most {
                    continue;
                }
                // Hits that are given back between the two may have been answered later, or asked for before.
                let returned = admitted.iter().filter(|(other, hits)| {
                    *hits < 0
                        && (other.began < first.began || other.ended > call.ended)
                        && other.ended >= first.began
                        && other.began <= call.ended
                });
                let most = most - returned.map(|(_, hits)| hits).sum::<i128>();
                let is_shared = process.is_none();
                let extra = if is_shared { self.extra(&admitted, (first, call), limit, key, value) } else { 0 };
                if sum > most + extra {
                    let by = process.map_or_else(|| "redis".to_owned(), |process| format!("process {process}"));
                    return Some(format!(
                        "{key} {value}: {by} admits {sum} from {} to {}, at most {most} and {extra} of {limit:?}",
                        first.from[0], call.to[0]
                    ));
                }
            }
        }
        None
    }

    /// Returns the steps of the clock of Redis between two calls.
    fn steps_within<'a>(
        &'a self,
        first: &Call,
        last: &Call,
    ) -> impl Iterator<Item = &'a (Instant, Micros, Micros)> + use<'a> {
        let interval = first.began..=last.ended;
        self.steps.iter().filter(move |(at, ..)| interval.contains(at))
    }

    /// Returns the hits that may be admitted beyond a limit in an interval: what Redis lost, and what was leased when it began.
    fn extra(
        &self,
        admitted: &[(&Call, i128)],
        (first, last): (&Call, &Call),
        limit: Limit,
        key: &str,
        value: &str,
    ) -> i128 {
        let once = i128::from(limit.quota().limit());
        let leased = once * i128::from(self.rules[0].1.leased) / 100;
        let lasting = if leased > 0 { LEASED } else { Duration::ZERO };
        let window = u128::from(limit.quota().window().length().get());
        let (losses, slot) = (self.deployment.losses.borrow(), slot(counter(key, value).as_bytes()));
        let steps_back = || self.steps_within(first, last).map(|(_, before, after)| before.saturating_sub(*after));
        let back: u64 = steps_back().map(Micros::get).sum();
        let is_within = |at: Instant| (first.began..=last.ended).contains(&at);
        let lost = losses.iter().filter(|loss| loss.concerns(slot)).filter(|loss| {
            // What was leased before is spent after.
            loss.to + lasting >= first.began && loss.at <= last.ended
        });
        let lost = lost.map(|loss| {
            let between = loss.from..=loss.to + lasting;
            let at_risk = admitted.iter().filter(|(call, _)| {
                between.contains(&call.ended) && is_within(call.ended)
                    || between.contains(&call.began) && is_within(call.began)
            });
            let windows = |time: u128| i128::try_from(time / window + 1).expect("few");
            // Two masters may live across a border of windows, and count on both sides of it.
            let has_borders = matches!(limit.algorithm(), Algorithm::FixedWindow | Algorithm::SlidingWindow);
            let border = i128::from(has_borders && loss.to > loss.at);
            let most = once * (windows((loss.to - loss.at).as_micros()) + border) + leased;
            // An empty counter does not know the moment that it had reached before a step back.
            let again = if back > 0 { once * windows(back.into()) } else { 0 };
            again + most.min(at_risk.map(|(_, hits)| *hits.max(&0)).sum())
        });
        let lost: i128 = lost.sum();
        let forgetting = steps_back().filter(|back| *back > KEPT).count();
        let lost = lost + once * i128::try_from(forgetting).expect("few");
        // A lease of a fixed window ends with it by the clock that its instance knows, which a step of the clock of Redis makes wrong.
        let is_set = self.steps.iter().any(|(at, ..)| *at + LEASED >= first.began && *at <= last.ended);
        let is_leased = match limit.algorithm() {
            Algorithm::SlidingLog => false,
            Algorithm::FixedWindow => is_set,
            _ => true,
        };
        lost + if is_leased { leased } else { 0 }
    }

    /// Compares what was charged to a counter of a year with what the callers of these calls were told.
    fn miscounted(
        &self,
        calls: &[Call],
        (before, after): (&Counters, &Counters),
        key: &'static str,
        value: &str,
    ) -> Option<String> {
        let (mut least, mut most) = (0, 0);
        for call in calls {
            for part in call.parts_of(key, value) {
                let [certain, possible] =
                    self.charged(call, part).map(|is_charged| if is_charged { call.hits } else { 0 });
                least += certain.min(possible);
                most += certain.max(possible);
            }
        }
        let name = (key, value.to_owned());
        let had = before.get(&name).copied().unwrap_or_default();
        let charged = after[&name].cast_signed() - had.cast_signed();
        let slot = slot(counter(key, value).as_bytes());
        let is_lost = had == 0 && self.deployment.losses.borrow().iter().any(|loss| loss.concerns(slot));
        // Hits that are given back after the loss of the charge have no effect.
        let is_kept = is_lost && key == "refunded";
        (charged > most && !is_kept || charged < least && !is_lost)
            .then(|| format!("{key} {value}: {charged} are charged on {had}, at least {least} and at most {most}"))
    }

    /// Returns whether the hits of a part are surely charged, and whether they may be.
    fn charged(&self, call: &Call, part: &Part) -> [bool; 2] {
        match part.by {
            // A fixed window alone counts what it refuses.
            Some(Provenance::Store | Provenance::Known) if !part.is_admitted => {
                [false, part.key == "refunded" && self.rules[0].1.charging == "each"]
            }
            // Not asked: another part is refused.
            Some(Provenance::Spared) => [false, false],
            Some(Provenance::Store) if call.is_admitted() => [true, true],
            // A refused request makes no counter while a server has little memory, which is looked at once a second.
            Some(Provenance::Store) if self.rules[0].1.charging == "each" => {
                [!self.fails_within(call.began - 2 * LOOKED_AT..call.ended), true]
            }
            // What a refused request took at one server is given back, if no fault comes between.
            Some(Provenance::Store) => {
                let is_whole = self.deployment.kind != Kind::Cluster;
                [false, !is_whole && self.fails_within(call.began..call.ended + GIVEN_BACK)]
            }
            _ => [false, true],
        }
    }

    /// Returns true if something failed in an interval.
    fn fails_within(&self, time: Range<Instant>) -> bool {
        self.faults.iter().any(|fault| fault.start < time.end && time.start < fault.end)
    }

    /// Says if some charges in a row of a counter are more than the callers have asked for that waited meanwhile.
    fn charged_late(&self, calls: &[Call]) -> Option<String> {
        // After a step back, a command looks as young as it was before, until a reply tells of the step.
        let is_set = |at: Instant| {
            let mut back = self.steps.iter().filter(|(_, before, after)| after < before);
            back.any(|(set, before, after)| {
                *set <= at && at < *set + Duration::from_micros(before.saturating_sub(*after).get()) + SAMPLED
            })
        };
        let mut charged: Vec<_> = self.deployment.servers.iter().flat_map(|server| server.charged.take()).collect();
        charged.retain(|(at, ..)| !is_set(*at));
        charged.sort();
        for (value, name) in (0..VALUES).map(|value| (value, value.to_string())) {
            let charged: Vec<_> = charged.iter().filter(|(_, of, _)| *of == value).collect();
            let mut asked: Vec<_> = calls.iter().flat_map(|call| call.asked(&name)).collect();
            asked.sort();
            for from in 0..charged.len() {
                let (first, mut sum) = (charged[from].0, 0);
                let after = asked.partition_point(|(began, ..)| *began + LONGEST < first);
                for (last, _, hits) in &charged[from..(from + IN_A_ROW).min(charged.len())] {
                    sum += hits;
                    let asked = asked[after..].iter().take_while(|(began, ..)| began <= last);
                    let most: u64 = asked.filter(|(_, until, _)| *until >= first).map(|(.., hits)| hits).sum();
                    if sum > most {
                        let [first, last] = [first, *last].map(|at| at - self.began);
                        return Some(format!(
                            "counted {value} is charged with {sum} from {first:?} to {last:?}, and callers wait for {most}"
                        ));
                    }
                }
            }
        }
        None
    }
}

impl Call {
    /// Returns the time in which it has to be answered: without a timeout, what `Deadline::Auto` gives.
    fn patience(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_millis(10))
    }

    /// Returns when it may be charged, and with how many hits, for each of its descriptors of `counted` with this value.
    fn asked<'a>(&'a self, value: &'a str) -> impl Iterator<Item = (Instant, Instant, u64)> + 'a {
        let patient = self.began + self.patience();
        self.parts_of("counted", value).map(move |part| {
            let until = if part.by == Some(Provenance::Store) { self.ended } else { patient };
            (self.began, until, self.hits.unsigned_abs())
        })
    }
}

/// Says if an instance refused by itself for longer than Redis had said.
fn refused_too_long(calls: &[Call]) -> Option<String> {
    let mut until: BTreeMap<(usize, &str, &str, i64), Instant> = BTreeMap::new();
    let mut in_order: Vec<_> = calls.iter().collect();
    in_order.sort_by_key(|call| call.ended);
    for call in in_order {
        let refusing = || call.parts.iter().filter(|part| part.by.is_some() && !part.is_admitted);
        // A part that is not asked, since another is known to be refused, shows its last answer.
        let holds = |part: &Part| {
            let of = |hits| (call.process, part.key.as_str(), part.value.as_str(), hits);
            let mut refusals = until.range(of(0)..=of(call.hits));
            part.by != Some(Provenance::Known) || refusals.any(|(_, until)| *until >= call.began)
        };
        if refusing().next().is_some() && !refusing().any(holds) {
            return Some(format!("refused for too long: {call:?}"));
        }
        for part in refusing().filter(|part| part.by == Some(Provenance::Store)) {
            let wait = Duration::from_micros(part.retry.map_or(3_600_000_000, Micros::get));
            let known =
                until.entry((call.process, part.key.as_str(), part.value.as_str(), call.hits)).or_insert(call.began);
            *known = (*known).max(call.began + wait);
        }
    }
    None
}
