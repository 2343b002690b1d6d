//! Counts tokens: a bucket of `burst` of them is filled evenly, `limit` per window, and every hit takes one out.
//! From Turner, "New directions in communications (or which way to the information age?)", 1986.
//! Remembers what `meter` remembers, the tokens that are missing: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `sliding_window` where no window may see more than the limit, a full bucket's burst included.

use super::meter::{Meter, NoSlots};

/// A bucket of tokens: the level of a [`Meter`] is what is missing from it.
pub type TokenBucket = Meter<NoSlots>;
