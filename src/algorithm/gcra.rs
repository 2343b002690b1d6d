//! Counts as the generic cell rate algorithm does: hits evenly spaced, and a burst ahead of time.
//! From ITU-T I.371; told as redis-cell tells it (limit, remaining, retry after, reset after).
//! Remembers what `meter` remembers: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `fixed_window` for quotas that start anew with the hour or the day.

/// Hits evenly spaced: in whole ticks, the theoretical arrival time of the next is the level of a [`Meter`].
///
/// [`Meter`]: super::meter::Meter
pub type Gcra = super::meter::Meter;
