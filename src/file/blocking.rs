//! Reading on a thread of its own, so that a file system that does not answer blocks nothing else.

use std::pin::pin;
use std::time::Duration;

use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, timeout_at};

/// The time after which a read is reported as slow: 10 s. A million list entries are read and compiled within 2 s.
const SLOW: Duration = Duration::from_secs(10);
/// The time between two reports of one slow read: 1 minute.
const SLOW_AGAIN: Duration = Duration::from_secs(60);

/// Runs `read` on a thread for blocking work and waits for its result. While it runs, `slow` is called after 10 s and then every
/// minute, with the time that has passed. Dropping the future does not end the read.
///
/// # Errors
/// If `read` panics.
pub async fn blocking<T: Send + 'static>(
    read: impl FnOnce() -> T + Send + 'static,
    mut slow: impl FnMut(Duration),
) -> Result<T, JoinError> {
    let began = Instant::now();
    let mut reading = pin!(spawn_blocking(read));
    let mut due = began + SLOW;
    loop {
        if let Ok(read) = timeout_at(due, &mut reading).await {
            return read;
        }
        slow(began.elapsed());
        due += SLOW_AGAIN;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_slow_read_is_reported_after_ten_seconds_and_every_minute_and_its_result_still_counts() {
        let (go_on, waits) = mpsc::channel();
        let mut reported = Vec::new();
        let reading = blocking(move || waits.recv().unwrap(), |passed| reported.push(passed.as_secs()));
        let clock = async {
            for _ in 0..1_400 {
                // The clock does not move by itself while a blocking task runs.
                tokio::time::advance(Duration::from_millis(100)).await;
            }
            go_on.send("read").unwrap();
        };
        let (read, ()) = tokio::join!(reading, clock);
        assert_eq!(read.unwrap(), "read");
        assert_eq!(reported, [10, 70, 130]);
    }

    #[tokio::test]
    async fn a_read_that_panics_is_an_error() {
        assert!(blocking(|| -> () { panic!("on purpose") }, |_| {}).await.is_err());
    }
}
