//! Files that are read again while the service runs.

use std::time::Duration;

use tokio::time::sleep;

use super::blocking;

/// Reads files every `every`, for ever, and gives each result to `apply`. Each read runs on a thread of its own, one at a time; `slow` is called
/// while it takes long, as by [`blocking`]. A read that panics, which the panic hook logs, has no result, and the next one follows.
pub async fn follow<T: Send + 'static>(
    every: Duration,
    read: impl Fn() -> T + Clone + Send + 'static,
    slow: impl Fn(Duration),
    mut apply: impl FnMut(T),
) {
    loop {
        sleep(every).await;
        if let Ok(read) = blocking(read.clone(), &slow).await {
            apply(read);
        }
    }
}

/// Results of reads that count when two in a row agree: a file may be in the middle of a write, or not be there for a moment.
#[derive(Debug)]
pub struct Settled<T> {
    in_force: T,
    last: Option<T>,
    /// True if the last read failed.
    was_wrong: bool,
}

/// Meaning of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum News<'a, T, E> {
    /// It differs from the read before, so the next one decides.
    Unsettled,
    /// The content in force.
    Same,
    /// Another content, which is in force from now on.
    Changed(&'a T),
    /// This read and the one before failed.
    Unusable(E),
}

impl<T: PartialEq> Settled<T> {
    /// Begins with the content that was read at the start.
    pub const fn new(in_force: T) -> Self {
        Self { in_force, last: None, was_wrong: false }
    }

    /// Returns the meaning of the next read.
    pub fn next<E>(&mut self, read: Result<T, E>) -> News<'_, T, E> {
        match read {
            Err(error) => {
                self.last = None;
                if std::mem::replace(&mut self.was_wrong, true) { News::Unusable(error) } else { News::Unsettled }
            }
            Ok(read) => {
                self.was_wrong = false;
                if read == self.in_force {
                    self.last = None;
                    return News::Same;
                }
                if self.last.as_ref() != Some(&read) {
                    self.last = Some(read);
                    return News::Unsettled;
                }
                self.in_force = read;
                self.last = None;
                News::Changed(&self.in_force)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_panic_in_one_read_does_not_end_the_reading() {
        let (count, (sender, mut results)) = (AtomicUsize::new(0), tokio::sync::mpsc::unbounded_channel());
        let count = std::sync::Arc::new(count);
        let read = move || match count.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("on purpose"),
            number => number,
        };
        let following = follow(Duration::from_millis(1), read, |_| {}, |read| sender.send(read).unwrap());
        tokio::select! {
            () = following => panic!("it goes on"),
            result = results.recv() => assert_eq!(result, Some(1)),
        }
    }

    #[test]
    fn a_read_counts_when_the_next_one_agrees() {
        let mut settled = Settled::new(1);
        for (read, expected) in [
            (Ok(1), News::Same),
            (Ok(2), News::Unsettled),
            (Ok(3), News::Unsettled),
            (Ok(3), News::Changed(&3)),
            (Ok(3), News::Same),
            (Err("gone"), News::Unsettled),
            (Err("gone"), News::Unusable("gone")),
            (Ok(4), News::Unsettled),
            (Err("gone"), News::Unsettled),
            (Ok(4), News::Unsettled),
            (Ok(3), News::Same),
            (Ok(4), News::Unsettled),
            (Ok(4), News::Changed(&4)),
        ] {
            assert_eq!(settled.next(read), expected, "{read:?}");
        }
    }
}
