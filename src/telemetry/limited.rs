//! Counts of calls that hit a bound of this process, by cause.

use super::metrics::CALLS_LIMITED;
use super::page::Page;
use super::throttle::LogThrottle;

macro_rules! causes {
    ($($(#[$about:meta])+ $cause:ident $name:literal, $log:literal;)+) => {
        /// The bound that a call hit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Cause {
            $($(#[$about])+ $cause,)+
        }

        impl Cause {
            /// All causes, in the order of the metric's series.
            pub const ALL: [Self; [$(Self::$cause),+].len()] = [$(Self::$cause),+];

            /// Returns the value of the label `cause`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$cause => $name,)+ }
            }

            /// Returns the sentence of the log line.
            const fn log(self) -> &'static str {
                match self { $(Self::$cause => $log,)+ }
            }
        }
    };
}

// One line adds a cause: its name here, the value of the label, and the sentence of the log line.
causes! {
    /// A request above the bound: its domain alone decided.
    TooLarge "too_large", "requests had more than 1,000 charges, 10,000 entries or 1 MiB, so their domains alone decided";
    /// A body of `/json` larger than the maximum.
    JsonTooLarge "json_too_large", "bodies of /json were larger than JSON_MAX_BODY";
    /// A request body that was not complete in time.
    LateBody "late_body", "request bodies were not complete 10 s after their head";
    /// An answer that the peer did not read in time.
    StalledAnswer "stalled_answer", "answers were dropped, because their callers did not read them";
    /// Calls of a connection that is read slowly for a while, because the calls of all connections hold too much memory.
    WaitedForMemory "waited_for_memory", "connections were read slowly, because the calls of all of them hold too much memory";
    /// A request over HTTP beyond those that may be in flight.
    Crowded "crowded", "requests over HTTP were refused, because as many were in flight as there are connections for";
}

/// Counts of calls that hit a bound, by cause. All threads may count at once; clones of the `Arc` share the counts.
#[derive(Debug, Default)]
pub struct LimitedCalls {
    causes: [LogThrottle; Cause::ALL.len()],
}

impl LimitedCalls {
    /// Counts one call, and writes a log line at most every 10 s for each cause.
    pub fn count(&self, cause: Cause) {
        if let Some(count) = self.causes[cause as usize].due() {
            tracing::warn!(
                event = "calls.limited",
                cause = cause.name(),
                count,
                "calls reached a bound: {}",
                cause.log()
            );
        }
    }

    /// Returns the number of calls so far.
    pub fn calls(&self, cause: Cause) -> u64 {
        self.causes[cause as usize].events()
    }

    /// Adds the metric to a page, with a series for each cause.
    pub(super) fn write_to(&self, page: &mut Page) {
        page.family(&CALLS_LIMITED, |family| {
            Cause::ALL.into_iter().for_each(|cause| family.sample(&[cause.name()], self.calls(cause)));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_counted_by_its_cause_alone() {
        let limited = LimitedCalls::default();
        limited.count(Cause::LateBody);
        limited.count(Cause::LateBody);
        limited.count(Cause::TooLarge);
        let counts = Cause::ALL.map(|cause| limited.calls(cause));
        assert_eq!(counts.iter().sum::<u64>(), 3);
        assert_eq!((limited.calls(Cause::LateBody), limited.calls(Cause::TooLarge)), (2, 1));
    }
}
