//! Rate limit of the log lines about denials, for each caller by itself.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Denial;
use crate::telemetry::throttle::LogThrottle;

/// Maximum number of callers that have lines of their own: 64. An operator has fewer gateways, and 64 lines in 10 s are few.
const MOST_CALLERS: NonZeroUsize = NonZeroUsize::new(64).unwrap();
/// Allows one line per caller and kind of denial in an interval, so that the denials of one caller do not hide those of another. While the
/// table is full, all other callers share one line per kind.
pub(super) struct DenialLines {
    callers: Mutex<LruCache<Box<str>, CallerLines>>,
    others: Throttles,
    /// Interval between two lines. A caller without a denial for as long makes room for another one: its next line would be allowed at
    /// once anyway.
    every: Duration,
}

/// Line that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DueLine {
    /// Denials since the line before.
    pub(super) count: u64,
    /// True if the denials may be those of several callers.
    pub(super) is_shared: bool,
}

type Throttles = [LogThrottle; Denial::ALL.len()];

struct CallerLines {
    throttles: Throttles,
    last_denial: Instant,
}

impl DenialLines {
    pub(super) fn new(every: Duration) -> Self {
        Self { callers: Mutex::new(LruCache::new(MOST_CALLERS)), others: throttles(every), every }
    }

    /// Counts a denial of `caller`. Returns the line that is due.
    pub(super) fn due(&self, caller: &str, denial: Denial) -> Option<DueLine> {
        let now = Instant::now();
        let mut callers = self.callers.lock();
        if !callers.contains(caller) && has_room(&callers, now, self.every) {
            callers.put(caller.into(), CallerLines { throttles: throttles(self.every), last_denial: now });
        }
        if let Some(lines) = callers.get_mut(caller) {
            lines.last_denial = now;
            return lines.throttles[denial as usize].due().map(|count| DueLine { count, is_shared: false });
        }
        drop(callers);
        self.others[denial as usize].due().map(|count| DueLine { count, is_shared: true })
    }
}

impl fmt::Debug for DenialLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DenialLines").finish_non_exhaustive()
    }
}

/// Returns true if another caller has a place, which may be that of the caller with the oldest last denial.
fn has_room(callers: &LruCache<Box<str>, CallerLines>, now: Instant, idle: Duration) -> bool {
    callers.len() < callers.cap().get()
        || callers.peek_lru().is_some_and(|(_, lines)| now.saturating_duration_since(lines.last_denial) >= idle)
}

fn throttles(every: Duration) -> Throttles {
    Denial::ALL.map(|_| LogThrottle::every(every))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(10);

    fn own(count: u64) -> Option<DueLine> {
        Some(DueLine { count, is_shared: false })
    }

    #[tokio::test(start_paused = true)]
    async fn a_noisy_caller_hides_no_other_caller_and_no_other_kind() {
        let lines = DenialLines::new(IDLE);
        assert_eq!(lines.due("stranger", Denial::Domain), own(1));
        assert_eq!((0..1_000).find_map(|_| lines.due("stranger", Denial::Domain)), None);
        assert_eq!(lines.due("gateway", Denial::Domain), own(1));
        assert_eq!(lines.due("stranger", Denial::Refund), own(1));
        tokio::time::advance(IDLE).await;
        assert_eq!(lines.due("stranger", Denial::Domain), own(1_001));
        assert_eq!(lines.due("gateway", Denial::Domain), own(1));
    }

    #[tokio::test(start_paused = true)]
    async fn callers_beyond_the_most_share_a_line_until_one_of_the_others_is_idle() {
        let lines = DenialLines::new(IDLE);
        for number in 0..MOST_CALLERS.get() {
            assert_eq!(lines.due(&number.to_string(), Denial::Domain), own(1));
        }
        assert_eq!(lines.due("gateway", Denial::Domain), Some(DueLine { count: 1, is_shared: true }));
        assert_eq!(lines.due("billing", Denial::Domain), None);
        tokio::time::advance(IDLE).await;
        // Caller 0 is not idle, so the next one makes room.
        assert_eq!(lines.due("0", Denial::Domain), own(1));
        assert_eq!(lines.due("gateway", Denial::Domain), own(1));
        assert_eq!(lines.due("0", Denial::Domain), None);
        assert_eq!(lines.callers.lock().len(), MOST_CALLERS.get());
    }
}
