//! Delays: a request waits instead of being refused.

use thiserror::Error;

use super::time::Micros;

/// Wait of a request whose charge comes too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delay {
    /// The request reserves a slot and waits for it, at most `max`. Beyond that it is refused.
    Slot {
        /// Longest wait.
        max: Micros,
    },
    /// The request waits `step` for each hit over the limit, at most `max`, and is never refused.
    Growing {
        /// Wait for each hit over the limit.
        step: Micros,
        /// Longest wait.
        max: Micros,
    },
}

impl Delay {
    /// Maximum of the longest wait: 5 min. It is Envoy's default `stream_idle_timeout`, after which Envoy ends the request.
    pub const LONGEST: Micros = Micros::from_secs(300);

    /// Returns the longest wait.
    pub const fn max(self) -> Micros {
        match self {
            Self::Slot { max } | Self::Growing { max, .. } => max,
        }
    }

    /// Checks that the longest wait and the step are within their bounds.
    ///
    /// # Errors
    /// [`InvalidDelay::Max`] and [`InvalidDelay::Step`].
    pub fn check(self) -> Result<(), InvalidDelay> {
        let max = self.max();
        if max == Micros::ZERO || max > Self::LONGEST {
            return Err(InvalidDelay::Max { found: max });
        }
        match self {
            Self::Growing { step, .. } if step == Micros::ZERO || step > max => {
                Err(InvalidDelay::Step { found: step, max })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of hits over the limit at which a growing delay reaches its longest wait; 0 for a slot.
    pub const fn hits_over(self) -> u64 {
        match self {
            Self::Growing { step, max } if step.get() > 0 => max.get().div_ceil(step.get()),
            _ => 0,
        }
    }
}

/// Reason why a limit cannot have a delay.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidDelay {
    /// The algorithm has no slots.
    #[error(
        "{algorithm} has no slots to wait for: choose `gcra` or `leaky_bucket`, or a growing delay like `delay: {{step: 100ms, max: 5s, beyond: admit}}`"
    )]
    NoSlots {
        /// Name of the algorithm.
        algorithm: &'static str,
    },
    /// The longest wait is zero or too long.
    #[error("the longest wait {found} is out of range: it must be from {} to {}", Micros::new(1), Delay::LONGEST)]
    Max {
        /// Longest wait of the rule.
        found: Micros,
    },
    /// The step is zero or more than the longest wait.
    #[error("the step {found} is out of range: it must be from {} to the longest wait, {max}", Micros::new(1))]
    Step {
        /// Step of the rule.
        found: Micros,
        /// Longest wait of the rule.
        max: Micros,
    },
    /// The delay would need more hits on the counter than it can hold.
    #[error(
        "this delay reaches its longest wait {over} hits above the limit of {capacity}, but a counter holds at most {most} hits: write a larger `step`"
    )]
    Over {
        /// Maximum number of hits that the limit admits at once.
        capacity: u32,
        /// Number of hits above the limit at which the delay stops growing.
        over: u64,
        /// Maximum number of hits on a counter.
        most: u32,
    },
}

/// Place where a request waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// In Envoy's fault filter, which reads the wait from a request header.
    #[default]
    Header,
    /// In Tidegate, which answers later.
    Hold,
}

impl Delivery {
    /// All variants, each with its word in a rule file.
    pub const ALL: [(&'static str, Self); 2] = [("header", Self::Header), ("hold", Self::Hold)];

    /// Returns its word in a rule file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Hold => "hold",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Delay, InvalidDelay};
    use crate::model::Micros;

    #[test]
    fn a_delay_that_nobody_can_wait_is_refused_with_what_can_be_asked_for() {
        let told = |delay: Delay| delay.check().map_err(|invalid| invalid.to_string());
        let (longest, none) = (Delay::LONGEST, Micros::ZERO);
        let more = longest.saturating_add(Micros::new(1));
        let growing = |step, max| Delay::Growing { step, max };
        for valid in [Delay::Slot { max: longest }, growing(Micros::new(1), longest), growing(longest, longest)] {
            assert_eq!(told(valid), Ok(()));
        }
        for max in [none, more] {
            for delay in [Delay::Slot { max }, growing(Micros::new(1), max)] {
                assert_eq!(delay.check(), Err(InvalidDelay::Max { found: max }));
            }
        }
        for step in [none, more] {
            let invalid = InvalidDelay::Step { found: step, max: longest };
            assert_eq!(growing(step, longest).check(), Err(invalid));
        }
        let text = "the longest wait 0s is out of range: it must be from 1us to 5m";
        assert_eq!(told(Delay::Slot { max: none }), Err(text.to_owned()));
        let text = "the step 0s is out of range: it must be from 1us to the longest wait, 2s";
        assert_eq!(told(growing(none, Micros::from_secs(2))), Err(text.to_owned()));
    }

    #[test]
    fn a_delay_has_grown_to_its_longest_after_as_many_steps_as_that_takes() {
        let over = |step, max| Delay::Growing { step: Micros::new(step), max: Micros::new(max) }.hits_over();
        assert_eq!([over(10, 10), over(10, 11), over(10, 20), over(1, 20)], [1, 2, 2, 20]);
    }
}
