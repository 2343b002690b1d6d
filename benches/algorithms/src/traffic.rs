//! When hits arrive: four kinds of traffic, each the same for every algorithm.

use fastrand::Rng;
use tidegate::model::Micros;

use crate::replay::START;

/// Of every random number.
pub const SEED: u64 = 14;

/// A kind of traffic against a limit per window.
pub struct Traffic {
    pub name: &'static str,
    pub says: &'static str,
    make: fn(&mut Rng, Shape) -> Vec<u64>,
}

#[derive(Clone, Copy)]
struct Shape {
    limit: u64,
    window: u64,
    windows: u64,
}

pub const ALL: [Traffic; 4] = [
    Traffic {
        name: "steady",
        says: "hits at random, one and a half limits per window",
        make: |rng, shape| random(rng, shape.limit * 3 / 2 * shape.windows, 0, shape.window * shape.windows),
    },
    Traffic {
        name: "bursty",
        says: "two bursts per window on average, begun at random, of 10 to 150 % of the limit within a sixtieth of a window",
        make: bursty,
    },
    Traffic {
        name: "straddling",
        says: "in every third window: a limit in its last sixtieth, another in the first sixtieth of the next, and another spread over the rest of that",
        make: straddling,
    },
    Traffic { name: "early", says: "a limit in the first sixtieth of every window, nothing in the rest", make: early },
];

impl Traffic {
    /// The moments of its hits, in order.
    pub fn arrivals(&self, limit: u32, window: Micros, windows: u64) -> Vec<Micros> {
        let mut rng = Rng::with_seed(SEED);
        let mut offsets = (self.make)(&mut rng, Shape { limit: limit.into(), window: window.get(), windows });
        offsets.sort_unstable();
        offsets.into_iter().map(|offset| Micros::new(START.get() + offset)).collect()
    }
}

fn random(rng: &mut Rng, hits: u64, from: u64, to: u64) -> Vec<u64> {
    (0..hits).map(|_| rng.u64(from..to)).collect()
}

fn spread(hits: u64, from: u64, to: u64) -> impl Iterator<Item = u64> {
    (0..hits).map(move |hit| from + (to - from) * hit / hits)
}

fn bursty(rng: &mut Rng, Shape { limit, window, windows }: Shape) -> Vec<u64> {
    let mut hits = Vec::new();
    for begin in random(rng, 2 * windows, 0, window * windows) {
        let size = rng.u64(limit / 10..=limit * 3 / 2);
        hits.extend(spread(size, begin, begin + window / 60));
    }
    hits
}

fn straddling(_: &mut Rng, Shape { limit, window, windows }: Shape) -> Vec<u64> {
    let short = window / 60;
    let borders = (1..windows).step_by(3).map(|border| border * window);
    let around = |border| {
        spread(limit, border - short, border).chain(spread(limit, border, border + short)).chain(spread(
            limit,
            border + short,
            border + window,
        ))
    };
    borders.flat_map(around).collect()
}

fn early(_: &mut Rng, Shape { limit, window, windows }: Shape) -> Vec<u64> {
    (0..windows).flat_map(|begin| spread(limit, begin * window, begin * window + window / 60)).collect()
}
