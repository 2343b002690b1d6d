//! Waiting instead of being refused.

use super::time::Micros;

/// What is asked of a request whose charge comes too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// It reserves a slot and waits for it, `max` at most; beyond that it is refused.
    Slot {
        /// The longest wait.
        max: Micros,
    },
    /// It waits the longer the more hits over the limit it is, and is never refused.
    Growing {
        /// The wait for each hit over the limit.
        step: Micros,
        /// The longest wait.
        max: Micros,
    },
}

impl Delay {
    /// The longest that may be asked for: 5 min, Envoy's default `stream_idle_timeout`, after which it ends the request.
    pub const LONGEST: Micros = Micros::from_secs(300);

    /// The longest wait.
    pub const fn max(self) -> Micros {
        match self {
            Self::Slot { max } | Self::Growing { max, .. } => max,
        }
    }
}

/// Who makes a request wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// Envoy's fault filter, told by a request header.
    #[default]
    Header,
    /// Tidegate, which answers later.
    Hold,
}

impl Delivery {
    /// Each, with its word in a rule file.
    pub const ALL: [(&'static str, Self); 2] = [("header", Self::Header), ("hold", Self::Hold)];

    /// Its word in a rule file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Hold => "hold",
        }
    }
}
