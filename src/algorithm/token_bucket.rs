//! Counts tokens: a bucket of `burst` tokens is filled evenly, `limit` per window, and every hit takes one token.
//! From Turner, "New directions in communications (or which way to the information age?)", 1986.
//! Remembers the state of `meter`, the missing tokens: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `sliding_window` if no window may have more than the limit, even when the bucket is full.

use super::meter::{Meter, NoSlots};

/// A bucket of tokens. The level of a [`Meter`] is the number of missing tokens.
pub type TokenBucket = Meter<NoSlots>;
