//! The most hits that a limit admits in an interval.

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::Micros;

/// How many ticks of the limit have begun.
pub fn ticks(limit: &Limit, now: Micros) -> u128 {
    u128::from(now.get() / limit.quota().tick().get())
}

/// The most hits that any interval admits, from a moment to another.
pub fn bound(limit: &Limit, from: Micros, to: Micros) -> u128 {
    let quota = limit.quota();
    match limit.algorithm() {
        Algorithm::FixedWindow => {
            let window = quota.window().length().get();
            u128::from(quota.limit()) * u128::from(to.get() / window - from.get() / window + 1)
        }
        // Each window its limit, less what is left of the one before, where that was full.
        Algorithm::SlidingWindow => {
            let window = quota.window().length().get();
            let windows = u128::from(to.get() / window - from.get() / window + 1);
            let elapsed = u128::from(to.get() % window / quota.tick().get());
            let (limit, ticks) = (u128::from(quota.limit()), u128::from(quota.ticks()));
            limit * windows - if windows > 1 { limit * (ticks - elapsed) / ticks } else { 0 }
        }
        // The limit in any window's length, wherever it begins.
        Algorithm::SlidingLog => {
            u128::from(quota.limit()) * u128::from((to.get() - from.get()) / quota.window().length().get() + 1)
        }
        Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => {
            let drained = (ticks(limit, to) - ticks(limit, from)) * u128::from(quota.limit());
            u128::from(quota.burst()) + drained / u128::from(quota.ticks())
        }
    }
}
