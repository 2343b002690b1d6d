//! The wall clock that dates hits.

use crate::model::{Clock, Micros};

/// The system's wall clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        #[expect(clippy::disallowed_methods, reason = "the one clock of the process")]
        let now = std::time::SystemTime::now();
        let since_epoch = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        since_epoch.into()
    }
}
