//! Lines on their way to standard error: a bounded queue, so that whoever logs never waits for whoever reads.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::escape::escaped;

/// The most bytes that wait to be written: 1 MiB, some thousands of lines. What comes beyond that is dropped.
const MOST_BYTES: usize = 1 << 20;

/// Lines that wait to be written.
#[derive(Debug, Default)]
pub struct Lines {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    dropped: AtomicU64,
    is_colored: bool,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    is_writing: bool,
}

impl Lines {
    /// No line yet. Where `is_colored`, lines may hold the escape sequences of a terminal's colours.
    pub fn new(is_colored: bool) -> Self {
        Self { is_colored, ..Self::default() }
    }

    /// Adds a line, with its hidden characters escaped, unless there is no room.
    fn add(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let (text, end) = text.strip_suffix('\n').map_or((&*text, ""), |text| (text, "\n"));
        let line = [escaped(text, self.is_colored).as_bytes(), end.as_bytes()].concat();
        let mut waiting = self.waiting.lock();
        // A line that alone is too long has room where nothing else waits.
        if waiting.bytes > 0 && waiting.bytes + line.len() > MOST_BYTES {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line);
        self.changed.notify_all();
    }

    /// Writes them one by one, for as long as the process lasts.
    pub fn write_to(&self, mut sink: impl Write) -> ! {
        loop {
            let line = self.next();
            // There is nobody left to complain to.
            let _ = sink.write_all(&line);
        }
    }

    /// The next line; until the one after it is asked for, it counts as being written.
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

    /// Waits until all are written, but no longer than this.
    pub fn flush(&self, bound: Duration) {
        let is_busy = |waiting: &mut Waiting| waiting.is_writing || !waiting.lines.is_empty();
        self.changed.wait_while_for(&mut self.waiting.lock(), is_busy, bound);
    }

    /// How many were dropped for want of room.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Each write is a line.
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
        // It is still being written: only the bound ends this.
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
