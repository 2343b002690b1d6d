//! Bounded queue of log lines before standard error, so that logging never waits for the reader.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::escape::escaped;

/// Maximum size of the queue: 1 MiB, some thousands of lines. Lines beyond that are dropped.
const MOST_BYTES: usize = 1 << 20;

/// Queue of log lines that are not yet written.
#[derive(Debug, Default)]
pub struct Lines {
    waiting: Mutex<QueuedLines>,
    changed: Condvar,
    dropped: AtomicU64,
    is_colored: bool,
}

#[derive(Debug, Default)]
struct QueuedLines {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    is_writing: bool,
}

impl Lines {
    /// Creates an empty queue. If `is_colored` is true, lines may contain the escape sequences of terminal colours.
    pub fn new(is_colored: bool) -> Self {
        Self { is_colored, ..Self::default() }
    }

    /// Queues a line with its hidden characters escaped. Drops and counts it if the queue is full.
    fn add(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let (text, end) = text.strip_suffix('\n').map_or((&*text, ""), |text| (text, "\n"));
        let line = [escaped(text, self.is_colored).as_bytes(), end.as_bytes()].concat();
        let mut waiting = self.waiting.lock();
        // A line longer than the whole queue is accepted if the queue is empty.
        if waiting.bytes > 0 && waiting.bytes + line.len() > MOST_BYTES {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line);
        self.changed.notify_all();
    }

    /// Writes the queued lines to `sink`. Never returns.
    pub fn write_to(&self, mut sink: impl Write) -> ! {
        loop {
            let line = self.next();
            // There is no other place to report the error.
            let _ = sink.write_all(&line);
        }
    }

    /// Waits for the next line and returns it. It counts as being written until the next call.
    fn next(&self) -> Vec<u8> {
        let mut waiting = self.waiting.lock();
        waiting.is_writing = false;
        self.changed.notify_all();
        self.changed.wait_while(&mut waiting, |waiting| waiting.lines.is_empty());
        let line = waiting.lines.pop_front().unwrap_or_default();
        waiting.bytes -= line.len();
        waiting.is_writing = true;
        line
    }

    /// Waits until all lines are written, for at most `bound`.
    pub fn flush(&self, bound: Duration) {
        let is_busy = |waiting: &mut QueuedLines| waiting.is_writing || !waiting.lines.is_empty();
        self.changed.wait_while_for(&mut self.waiting.lock(), is_busy, bound);
    }

    /// Returns the number of lines dropped because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Treats each write as one line.
impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_as_they_went_in() {
        let lines = Lines::default();
        for line in ["one\n", "two\n"] {
            (&lines).write_all(line.as_bytes()).unwrap();
        }
        assert_eq!((lines.next(), lines.next(), lines.dropped()), (b"one\n".to_vec(), b"two\n".to_vec(), 0));
    }

    #[test]
    fn a_line_shows_what_would_be_hidden_and_nothing_in_it_begins_a_line() {
        let line = "why: \u{202e}txt\u{2069}\r\u{1b}[2K\n2026-11-22 INFO all is well\n".as_bytes();
        let shown = |lines: Lines| {
            lines.add(line);
            String::from_utf8(lines.next()).unwrap()
        };
        let rest = "\n    2026-11-22 INFO all is well\n";
        assert_eq!(shown(Lines::new(false)), format!("why: \\u{{202e}}txt\\u{{2069}}\\r\\u{{1b}}[2K{rest}"));
        assert_eq!(shown(Lines::new(true)), format!("why: \\u{{202e}}txt\\u{{2069}}\\r\u{1b}[2K{rest}"));
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_counted_and_there_is_room_again_later() {
        let lines = Lines::default();
        let long = vec![b'x'; MOST_BYTES];
        lines.add(&long);
        lines.add(b"no room");
        assert_eq!(lines.dropped(), 1);
        assert_eq!(lines.next().len(), MOST_BYTES);
        lines.add(b"room");
        assert_eq!((lines.next(), lines.dropped()), (b"room".to_vec(), 1));
    }

    #[test]
    fn a_line_that_is_longer_than_all_room_is_written_where_nothing_waits() {
        let lines = Lines::default();
        lines.add(&vec![b'x'; MOST_BYTES + 1]);
        assert_eq!((lines.next().len(), lines.dropped()), (MOST_BYTES + 1, 0));
    }

    #[test]
    fn a_flush_waits_for_what_is_written_and_not_for_ever() {
        let lines = Lines::default();
        lines.add(b"stuck");
        let line = lines.next();
        // The line is still being written, so only the bound ends this call.
        lines.flush(Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| lines.next());
            lines.flush(Duration::from_secs(60));
            let is_writing = lines.waiting.lock().is_writing;
            lines.add(b"the end of the other thread");
            assert!(!is_writing, "{line:?} is written");
        });
    }
}
