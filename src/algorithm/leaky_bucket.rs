//! Counts a queue: a bucket that holds `burst` hits and leaks evenly, `limit` per window; what does not fit is refused.
//! From Turner, "New directions in communications (or which way to the information age?)", 1986.
//! Remembers what `meter` remembers, the hits that have not leaked yet: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `sliding_window` where no window may see more than the limit, a bucket that fills at once included.

/// A bucket that leaks: what stands in it is the level of a [`Meter`].
///
/// [`Meter`]: super::meter::Meter
pub type LeakyBucket = super::meter::Meter;
