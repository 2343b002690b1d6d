//! What the definitions say of one counter: whole numbers of 128 bits, nanoseconds, and no thought of speed.

use std::collections::BTreeMap;

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Charging, Delay, Hits, Micros, Outcome, Verdict};

/// The longest wait that is promised: ten years.
const TEN_YEARS: u128 = 315_360_000 * 1_000_000_000;
/// What a counter holds at most: 2^52 of its smallest parts.
const MOST: u128 = 1 << 52;
/// What a log holds at most: so many hits, at so many moments.
const MOST_LOGGED: (u128, usize) = (1 << 48, 10_000);

/// An answer, without where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    pub is_refused: bool,
    pub remaining: u32,
    pub reset: Micros,
    pub retry: Option<Micros>,
    pub delay: Micros,
}

impl From<Verdict> for Told {
    fn from(verdict: Verdict) -> Self {
        let Verdict { outcome, remaining, reset, retry, delay, .. } = verdict;
        Self { is_refused: outcome == Outcome::Refused, remaining, reset, retry, delay }
    }
}

/// One charge, with its limit opened up.
#[derive(Clone, Copy)]
struct Asked {
    now: u128,
    window: u128,
    /// The part of time that is told apart: the smallest power of ten in microseconds of which the window has at most
    /// 2^20.
    tick: u128,
    limit: u128,
    burst: u128,
    taken: u128,
    given_back: u128,
    keeps_refused: bool,
}

/// One counter by the definitions.
#[derive(Clone, Debug)]
pub enum Oracle {
    /// The hits of every window ever counted.
    Windows(BTreeMap<u128, u128>),
    /// The same, where those of the window before count by the share of it that is left.
    Sliding(BTreeMap<u128, u128>),
    /// Every hit that counts, by the moment at which it came: how many at each.
    Log(Vec<(u128, u128)>),
    /// A level in hits times nanoseconds of the window, and when it stood there. A hit is worth one window, and the
    /// limit drains in each nanosecond, so the level is a whole number.
    Level(Option<(u128, u128)>),
}

impl Oracle {
    pub fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::FixedWindow => Self::Windows(BTreeMap::new()),
            Algorithm::SlidingWindow => Self::Sliding(BTreeMap::new()),
            Algorithm::SlidingLog => Self::Log(Vec::new()),
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => Self::Level(None),
        }
    }

    /// Decides one charge that is the whole of its request.
    pub fn charge(&mut self, limit: &Limit, charging: Charging, now: Micros, hits: Hits) -> Told {
        let quota = limit.quota();
        let window = u128::from(quota.window().length().get()) * 1_000;
        let tick = (0..).map(|power| 1_000 * 10_u128.pow(power)).find(|tick| window / tick <= 1 << 20);
        let asked = Asked {
            now: u128::from(now.get()) * 1_000,
            window,
            tick: tick.expect("some power of ten is large enough"),
            limit: u128::from(quota.limit()),
            burst: u128::from(quota.burst()),
            taken: u128::from(hits.taken()),
            given_back: u128::from(hits.given_back()),
            keeps_refused: limit.records_every_charge(),
        };
        if limit.refuses_full_peek(hits) {
            // It is refused as one hit would be, which it does not take.
            let one =
                self.clone().plain(limit, Charging::AllOrNothing, Asked { taken: 1, keeps_refused: false, ..asked });
            if one.is_refused {
                return one;
            }
        }
        match limit.delay() {
            Some(delay) if quota.limit() > 0 && asked.given_back == 0 => match delay {
                Delay::Slot { max } => return self.slot(limit.algorithm(), asked, max),
                Delay::Growing { step, max } => return self.growing(limit, charging, asked, step, max),
            },
            _ => {}
        }
        self.plain(limit, charging, asked)
    }

    /// Decides a charge of which nobody waits.
    fn plain(&mut self, limit: &Limit, charging: Charging, asked: Asked) -> Told {
        // A limit of nothing asks no counter and leaves none. It refuses a look like a hit.
        let mut nobodys = Self::new(limit.algorithm());
        let is_refused_look = limit.is_closed() && asked.taken == 0 && asked.given_back == 0;
        let asked = Asked { taken: if is_refused_look { 1 } else { asked.taken }, ..asked };
        let counter = if limit.is_closed() { &mut nobodys } else { self };
        match counter {
            Self::Windows(counts) => {
                windows(counts, Asked { keeps_refused: asked.keeps_refused || charging == Charging::Each, ..asked })
            }
            Self::Sliding(counts) => sliding(counts, asked),
            Self::Log(entries) => log(entries, asked),
            Self::Level(level) => {
                level_of(level, Asked { burst: if asked.limit == 0 { 0 } else { asked.burst }, ..asked })
            }
        }
    }
}

impl Oracle {
    /// Refuses nothing: how many hits over the limit there are tells the delay, and those stay that can make it longer.
    fn growing(&mut self, limit: &Limit, charging: Charging, asked: Asked, step: Micros, max: Micros) -> Told {
        let capacity = u128::from(limit.capacity());
        let (step, max) = (u128::from(step.get()), u128::from(max.get()));
        let delay = |used: u128| (used.saturating_sub(capacity) * step).min(max);
        let taken = asked.taken.min(1 << 31);
        let used = self.used(asked);
        // So many hits that even one of them would be enough.
        let stays = (used.saturating_sub(capacity)) * step < max;
        // Room for all that comes.
        let endless = Asked { limit: 1 << 60, burst: 1 << 60, keeps_refused: false, ..asked };
        let endless = match self {
            Self::Level(_) => Asked { limit: asked.limit, ..endless },
            _ => endless,
        };
        let told = self.plain(limit, charging, Asked { taken: if stays { taken } else { 0 }, ..endless });
        assert!(!told.is_refused);
        Told {
            remaining: small(capacity.saturating_sub(self.used(asked))),
            delay: Micros::new(u64::try_from(delay(used + taken)).expect("at most the longest")),
            ..told
        }
    }

    /// How many hits stand on the counter; a part of one counts as a whole.
    fn used(&self, asked: Asked) -> u128 {
        let Asked { now, window, tick, limit, .. } = asked;
        match self {
            Self::Windows(counts) => {
                let number = (now / window).max(counts.last_key_value().map_or(0, |(last, _)| *last));
                counts.get(&number).copied().unwrap_or(0)
            }
            Self::Sliding(counts) => {
                let begin = counts.last_key_value().map_or(0, |(last, _)| last * window).max(now / tick * tick);
                let of = |number: Option<u128>| number.and_then(|number| counts.get(&number)).copied().unwrap_or(0);
                let number = begin / window;
                of(Some(number)) + of(number.checked_sub(1)) * (window - begin % window) / window
            }
            Self::Log(entries) => {
                let clock = entries.last().map_or(now, |(last, _)| now.max(*last));
                entries.iter().filter(|(at, _)| at + window > clock).map(|(_, hits)| hits).sum()
            }
            Self::Level(level) => {
                let (at, stood) = level.unwrap_or((0, 0));
                stood.saturating_sub(((now / tick * tick).max(at) - at) * limit).div_ceil(window)
            }
        }
    }

    /// Reserves a slot: it is the first moment at which what has to drain has drained.
    fn slot(&mut self, algorithm: Algorithm, asked: Asked, max: Micros) -> Told {
        let Self::Level(level) = self else { panic!("{algorithm:?} has no slots") };
        let Asked { now, window, tick, limit, burst, taken, keeps_refused, .. } = asked;
        let (room, cost, max) = (burst * window, taken * window, u128::from(max.get()) * 1_000);
        let begin = level.map_or(now, |(at, _)| now.max(at)) / tick * tick;
        // What stands at the beginning of a tick, if nobody hits.
        let at = |level: Option<(u128, u128)>, moment: u128| {
            level.map_or(0, |(at, stood)| stood.saturating_sub((moment.max(at) - at) * limit))
        };
        // From a moment: until it is the turn of the charge, and whether there is a slot for it.
        let slot = |level: Option<(u128, u128)>, now: u128| {
            let begin = level.map_or(now, |(at, _)| now.max(at)) / tick * tick;
            let stands = at(level, begin);
            let (over, has_room) = match algorithm {
                Algorithm::Gcra => ((stands + cost).saturating_sub(room), stands + cost <= MOST * tick),
                _ => (stands, stands + cost <= room),
            };
            let turn = begin + over.div_ceil(tick * limit) * tick;
            (if over > 0 { turn.saturating_sub(now) } else { 0 }, has_room)
        };
        let fits = |level, now| matches!(slot(level, now), (wait, true) if wait <= max);
        let is_refused = !fits(*level, now);
        let delay = if is_refused { 0 } else { slot(*level, now).0 };
        if taken > 0 && (!is_refused || keeps_refused) {
            *level = Some((begin, (at(*level, begin) + cost).min(MOST * tick)));
        }
        let stands = at(*level, begin);
        let idle = begin + stands.div_ceil(tick * limit) * tick;
        // While the level sinks the wait shrinks, and then within each tick alike: if it does not fit in the first, it never does.
        let first = |from: u128, upto: u128| {
            let (mut low, mut high) = (from / 1_000, upto / 1_000);
            while low < high {
                let middle = low.midpoint(high);
                if fits(*level, middle * 1_000) { high = middle } else { low = middle + 1 }
            }
            (low < upto / 1_000).then_some(low * 1_000)
        };
        let retry = || first(now, idle).or_else(|| first(now.max(idle), idle + tick));
        let retry = is_refused.then(retry).flatten();
        Told {
            is_refused,
            remaining: small(room.saturating_sub(stands) / window),
            reset: if stands == 0 { Micros::ZERO } else { micros(idle.saturating_sub(now).min(TEN_YEARS)) },
            retry: retry.map(|moment| micros((moment - now).min(TEN_YEARS))),
            delay: micros(delay),
        }
    }
}

fn windows(counts: &mut BTreeMap<u128, u128>, asked: Asked) -> Told {
    let Asked { now, window, limit, taken, given_back, keeps_refused, .. } = asked;
    // A clock that steps back stays in the last window that was counted.
    let number = (now / window).max(counts.last_key_value().map_or(0, |(last, _)| *last));
    let used = counts.get(&number).copied().unwrap_or(0);
    let is_refused = given_back == 0 && used + taken > limit;
    let is_kept = !is_refused || keeps_refused;
    let after = if is_kept { (used + taken).saturating_sub(given_back) } else { used };
    if is_kept && (taken > 0 || (given_back > 0 && !counts.is_empty())) {
        counts.insert(number, after);
    }
    let reset = micros((number + 1) * window - now);
    let retry = (is_refused && taken <= limit).then_some(reset);
    Told { is_refused, remaining: small(limit.saturating_sub(after)), reset, retry, delay: Micros::ZERO }
}

fn level_of(level: &mut Option<(u128, u128)>, asked: Asked) -> Told {
    let Asked { now, window, tick, limit, burst, taken, given_back, keeps_refused } = asked;
    let (at, stood) = level.unwrap_or((0, 0));
    let cut = (now / tick * tick).max(at);
    let found = stood.saturating_sub((cut - at) * limit);
    let room = burst * window;
    let wanted = found + taken * window;
    let is_refused = given_back == 0 && wanted > room;
    let is_kept = !is_refused || (keeps_refused && limit > 0);
    let after = if is_kept { wanted.saturating_sub(given_back * window).min(MOST * tick) } else { found };
    if is_kept && (taken > 0 || (given_back > 0 && level.is_some())) {
        *level = Some((cut, after));
    }
    let until_drained = |excess: u128| {
        let wait = (cut + excess.div_ceil(tick * limit) * tick).saturating_sub(now);
        micros(wait.min(TEN_YEARS))
    };
    // A refused charge that is kept has to wait for itself as well.
    let retry = (is_refused && limit > 0 && taken <= burst).then(|| until_drained(after + taken * window - room));
    let reset = if after == 0 || limit == 0 { Micros::ZERO } else { until_drained(after) };
    Told { is_refused, remaining: small(room.saturating_sub(after) / window), reset, retry, delay: Micros::ZERO }
}

fn sliding(counts: &mut BTreeMap<u128, u128>, asked: Asked) -> Told {
    let Asked { now, window, tick, limit, taken, given_back, keeps_refused, .. } = asked;
    // A clock that steps back waits at the beginning of the last window that was counted.
    let begin = counts.last_key_value().map_or(0, |(last, _)| last * window).max(now / tick * tick);
    // What counts of these windows at a moment: the share of the one before that is less than a window old.
    let estimate = |counts: &BTreeMap<u128, u128>, moment: u128| {
        let of = |number: u128| counts.get(&number).copied().unwrap_or(0);
        let number = moment / window;
        let old = if number == 0 { 0 } else { of(number - 1) };
        of(number) + old * (window - moment % window) / window
    };
    let number = begin / window;
    let is_refused = given_back == 0 && estimate(counts, begin) + taken > limit;
    let mut after = counts.clone();
    if (!is_refused || (keeps_refused && limit > 0)) && (taken > 0 || (given_back > 0 && !counts.is_empty())) {
        let current = after.entry(number).or_default();
        let beyond = given_back.saturating_sub(*current);
        *current = (*current + taken).saturating_sub(given_back).min(MOST);
        if let Some(old) = number.checked_sub(1).and_then(|old| after.get_mut(&old)) {
            *old = old.saturating_sub(beyond);
        }
    }
    *counts = after;
    let remaining = limit.saturating_sub(estimate(counts, begin));
    // The estimate only falls while nobody hits: the first tick at which it is low enough is found by halving.
    let first_at = |most: u128| {
        let (mut low, mut high) = (begin / tick, (begin + 2 * window) / tick + 1);
        while low < high {
            let middle = low.midpoint(high);
            if estimate(counts, middle * tick) <= most { high = middle } else { low = middle + 1 }
        }
        micros((low * tick).saturating_sub(now))
    };
    let is_idle = estimate(counts, begin) == 0;
    Told {
        is_refused,
        remaining: small(remaining),
        reset: if is_idle { Micros::ZERO } else { first_at(0) },
        retry: (is_refused && taken <= limit).then(|| first_at(limit - taken)),
        delay: Micros::ZERO,
    }
}

fn log(entries: &mut Vec<(u128, u128)>, asked: Asked) -> Told {
    let Asked { now, window, limit, taken, given_back, keeps_refused, .. } = asked;
    // A clock that steps back waits at the last moment at which hits came.
    let clock = entries.last().map_or(now, |(last, _)| now.max(*last));
    let live: Vec<(u128, u128)> = entries.iter().copied().filter(|(at, _)| at + window > clock).collect();
    let used: u128 = live.iter().map(|(_, hits)| hits).sum();
    let is_refused = given_back == 0 && used + taken > limit;
    let mut after = live;
    if !is_refused || (keeps_refused && limit > 0) {
        let taken = taken.min(MOST_LOGGED.0 - used);
        match after.last_mut() {
            Some((at, hits)) if *at == clock => *hits += taken,
            _ if taken > 0 => after.push((clock, taken)),
            _ => {}
        }
        let mut back = given_back;
        while let Some((_, hits)) = after.last_mut()
            && back > 0
        {
            let gone = back.min(*hits);
            (*hits, back) = (*hits - gone, back - gone);
            if *hits == 0 {
                after.pop();
            }
        }
        if after.len() > MOST_LOGGED.1 {
            let (_, hits) = after.remove(0);
            after[0].1 += hits;
        }
        if taken > 0 || given_back > 0 {
            *entries = after.clone();
        }
    }
    let used: u128 = after.iter().map(|(_, hits)| hits).sum();
    // When all but so many, the latest, are a window old.
    let until_left = |most: u128| {
        let mut left = used;
        let last = after.iter().find(|(_, hits)| {
            left -= hits;
            left <= most
        });
        micros(last.map_or(0, |(at, _)| at + window - now))
    };
    Told {
        is_refused,
        remaining: small(limit.saturating_sub(used)),
        reset: until_left(0),
        retry: (is_refused && taken <= limit).then(|| until_left(limit - taken)),
        delay: Micros::ZERO,
    }
}

fn micros(nanos: u128) -> Micros {
    assert!(nanos.is_multiple_of(1_000), "every moment is a whole microsecond");
    Micros::new(u64::try_from(nanos / 1_000).unwrap_or(u64::MAX))
}

fn small(number: u128) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
