//! Bounds on the replies of a server. Follows requests and replies on the wire, and refuses a reply that is larger than its
//! request allows, or that no request expects, before the parser sees it.
//!
//! The parser keeps a reply until it is complete, without a bound of its own. Requests are followed too because only they tell
//! which reply is next: a call whose caller has gone away is still answered, or was never sent.

use std::collections::VecDeque;

use smallvec::SmallVec;
use thiserror::Error;

use super::script;
use crate::telemetry::servers::BadReply;

#[cfg(test)]
mod tests;

/// Maximum reply to a request that is no charge: 64 KiB. The largest of Redis 7.0 are those to `INFO memory` (1.4 KB) and to
/// `ROLE` (50 bytes for each replica).
const LARGEST: usize = 64 << 10;
/// Maximum reply to a request about a cluster: 8 MiB. `CLUSTER SLOTS` with a line for each of 16,384 slots takes 4.1 MB with
/// three nodes per line (250 bytes a line, Redis 7.0).
const LARGEST_MAP: usize = 8 << 20;
/// Maximum error in place of a reply of the script: 1 KiB. The longest of Redis 7.0 is `MISCONF`, 347 bytes; a `MOVED` with a
/// host name of 253 bytes takes 280.
const LARGEST_ERROR: usize = 1 << 10;
/// Minimum bytes of a reply per value, on average: 8. A value takes 56 bytes of memory and at least 3 on the wire; the shortest
/// lines of `CLUSTER SLOTS` have 11 for each value.
const BYTES_PER_VALUE: usize = 8;
/// Maximum nesting of arrays and maps: 8, twice that of any expected reply (`CLUSTER SLOTS` and `HELLO`: 4).
const DEEPEST: usize = 8;
/// Maximum bytes that are kept of a request's name: those of `EVALSHA` and `CLUSTER`, and one more.
const NAME: usize = 8;
/// Beginning of a call of the script, after the number of its texts: `EVALSHA`, and the length of a hash.
const SCRIPT_CALL: &[u8] = b"$7\r\nEVALSHA\r\n$40\r\n";
/// Bytes of a hash and the end of its line.
const HASH_LINE: usize = 42;

/// The reason for which a reply is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidReply {
    /// It is larger than its request allows, or announces that it will be.
    #[error("a reply larger than its request allows")]
    TooLarge,
    /// It is not what any version of Redis sends.
    #[error("bytes that are no reply of Redis")]
    Malformed,
    /// Every request was answered before it.
    #[error("a reply that nothing had asked for")]
    Unasked,
}

/// The requests and replies of one connection.
#[derive(Debug, Default)]
pub struct ReplyStream {
    requests: ReplyFrames,
    replies: ReplyFrames,
    /// The requests without a complete reply, in order.
    asked: VecDeque<RequestKind>,
}

/// Kind of a request, which bounds its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    /// A call of the script with charges of `packed_bytes` bytes.
    Script { packed_bytes: u32 },
    /// A request for the map or the state of the cluster.
    Map,
    /// Any other request.
    Other,
}

/// Maximum size of a reply.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Bytes on the wire.
    bytes: usize,
    /// Values in arrays and maps.
    values: usize,
}

/// Follows a stream of values of the Redis protocol (RESP 2 and 3): parses their headers and skips their content.
#[derive(Debug, Default)]
struct ReplyFrames {
    place: ReplyPosition,
    /// Number of values still to come in each array or map around the present one.
    open: SmallVec<[usize; DEEPEST]>,
    frame: Frame,
}

/// State of the outermost value that is being read.
#[derive(Clone, Debug, Default)]
struct Frame {
    /// Bytes that have arrived, and bytes that its headers announce.
    bytes: usize,
    /// Values in it, including those that its headers announce.
    values: usize,
    /// Number of texts so far.
    texts: usize,
    /// First bytes of the first text.
    name: SmallVec<[u8; NAME]>,
    /// Length of the last text in bytes.
    last_bytes: usize,
}

/// Position of the next byte.
#[derive(Clone, Copy, Debug, Default)]
enum ReplyPosition {
    /// Start of a new value.
    #[default]
    Begin,
    /// In a line without a length.
    Line { last: u8 },
    /// In a line with a length.
    Length { kind: u8, length: usize, is_negative: bool, last: u8 },
    /// In content. Bytes still to come, including the end of its line.
    Content(usize),
}

impl InvalidReply {
    /// Returns the reason for the metrics.
    pub const fn reason(self) -> BadReply {
        match self {
            Self::TooLarge => BadReply::TooLarge,
            Self::Malformed => BadReply::Malformed,
            Self::Unasked => BadReply::Unasked,
        }
    }
}

impl ReplyStream {
    /// Notes bytes that were sent.
    pub fn sent(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // Nearly every write has whole requests.
            let whole = if self.requests.is_at_begin() { whole_request(bytes) } else { None };
            if let Some((request, size)) = whole {
                self.asked.push_back(request);
                split(&mut bytes, size);
                continue;
            }
            // Our own requests are well formed.
            let Ok(Some(request)) = self.requests.read(&mut bytes, Limits::NONE) else { return };
            self.asked.push_back(RequestKind::of(&request.name, request.last_bytes));
        }
    }

    /// Checks bytes that were received.
    ///
    /// # Errors
    /// If no Redis server would have sent them. The connection must not be used any more.
    pub fn received(&mut self, mut bytes: &[u8]) -> Result<(), InvalidReply> {
        while !bytes.is_empty() {
            let limits = self.asked.front().ok_or(InvalidReply::Unasked)?.limits();
            // Nearly every reply of the script is one text in one read.
            let whole = if self.replies.is_at_begin() { whole_text(bytes) } else { None };
            let is_answered = match whole.filter(|&(_, size)| size <= limits.bytes) {
                Some((_, size)) => !split(&mut bytes, size).is_empty(),
                None => self.replies.read(&mut bytes, limits)?.is_some(),
            };
            if is_answered {
                self.asked.pop_front();
            }
        }
        Ok(())
    }
}

impl RequestKind {
    /// Returns the kind of the request `name` whose last argument has `last_bytes` bytes.
    fn of(name: &[u8], last_bytes: usize) -> Self {
        match name {
            b"EVALSHA" | b"EVAL" => Self::Script { packed_bytes: u32::try_from(last_bytes).unwrap_or(u32::MAX) },
            b"CLUSTER" => Self::Map,
            _ => Self::Other,
        }
    }

    fn limits(self) -> Limits {
        let (bytes, values) = match self {
            Self::Script { packed_bytes } => {
                (script::largest_reply(usize::try_from(packed_bytes).unwrap_or(usize::MAX)) + LARGEST_ERROR, 0)
            }
            Self::Map => (LARGEST_MAP, LARGEST_MAP / BYTES_PER_VALUE),
            Self::Other => (LARGEST, LARGEST / BYTES_PER_VALUE),
        };
        Limits { bytes, values }
    }
}

impl Limits {
    const NONE: Self = Self { bytes: usize::MAX, values: usize::MAX };
}

impl ReplyFrames {
    /// Returns true between two outermost values.
    fn is_at_begin(&self) -> bool {
        self.frame.bytes == 0
    }

    /// Reads up to the end of the outermost value or of `bytes`. Returns the value if it is complete.
    fn read(&mut self, bytes: &mut &[u8], limits: Limits) -> Result<Option<Frame>, InvalidReply> {
        while !bytes.is_empty() {
            let is_value_whole = self.step(bytes)?;
            if self.frame.bytes > limits.bytes || self.frame.values > limits.values {
                return Err(InvalidReply::TooLarge);
            }
            if self.open.len() > DEEPEST {
                return Err(InvalidReply::Malformed);
            }
            if is_value_whole && self.is_whole() {
                return Ok(Some(std::mem::take(&mut self.frame)));
            }
        }
        Ok(None)
    }

    /// Reads the next piece. Returns true if it completes a value without elements.
    fn step(&mut self, bytes: &mut &[u8]) -> Result<bool, InvalidReply> {
        match self.place {
            ReplyPosition::Begin => {
                let kind = self.next(bytes);
                self.place = match kind {
                    b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => ReplyPosition::Line { last: 0 },
                    b'$' | b'!' | b'=' | b'*' | b'~' | b'%' => {
                        if let Some((length, line)) = whole_length(bytes) {
                            self.frame.bytes += split(bytes, line).len();
                            return self.announced(kind, length, false);
                        }
                        ReplyPosition::Length { kind, length: 0, is_negative: false, last: 0 }
                    }
                    // Servers send pushes and attributes only on request.
                    _ => return Err(InvalidReply::Malformed),
                };
                Ok(false)
            }
            ReplyPosition::Line { last } => {
                let line = match memchr::memchr(b'\n', bytes) {
                    Some(end) => split(bytes, end + 1),
                    None => split(bytes, bytes.len()),
                };
                self.frame.bytes += line.len();
                match *line {
                    [.., b'\r', b'\n'] => self.place = ReplyPosition::Begin,
                    [b'\n'] if last == b'\r' => self.place = ReplyPosition::Begin,
                    // The parser would read on and find another end of the reply.
                    [.., b'\n'] => return Err(InvalidReply::Malformed),
                    [.., last] => self.place = ReplyPosition::Line { last },
                    [] => {}
                }
                Ok(matches!(self.place, ReplyPosition::Begin))
            }
            ReplyPosition::Length { kind, length, is_negative, last } => {
                let byte = self.next(bytes);
                let (length, is_negative) = match (last, byte) {
                    (0, b'-') => (length, true),
                    (0 | b'-' | b'0'..=b'9', b'0'..=b'9') => {
                        (length.saturating_mul(10).saturating_add(usize::from(byte - b'0')), is_negative)
                    }
                    (b'0'..=b'9', b'\r') => (length, is_negative),
                    (b'\r', b'\n') => return self.announced(kind, length, is_negative),
                    _ => return Err(InvalidReply::Malformed),
                };
                self.place = ReplyPosition::Length { kind, length, is_negative, last: byte };
                Ok(false)
            }
            ReplyPosition::Content(left) => {
                let content = split(bytes, left.min(bytes.len()));
                if self.frame.texts == 1 {
                    let room = NAME.min(self.frame.last_bytes) - self.frame.name.len();
                    self.frame.name.extend_from_slice(&content[..room.min(content.len())]);
                }
                let left = left - content.len();
                self.place = if left == 0 { ReplyPosition::Begin } else { ReplyPosition::Content(left) };
                Ok(left == 0)
            }
        }
    }

    /// Handles the length of a value. Returns true if that completes the value.
    fn announced(&mut self, kind: u8, length: usize, is_negative: bool) -> Result<bool, InvalidReply> {
        const END: usize = b"\r\n".len();
        self.place = ReplyPosition::Begin;
        match kind {
            // Null in RESP 2.
            b'$' | b'*' if is_negative => Ok(true),
            _ if is_negative => Err(InvalidReply::Malformed),
            b'*' | b'~' | b'%' => {
                let values = if kind == b'%' { length.saturating_mul(2) } else { length };
                self.frame.values = self.frame.values.saturating_add(values);
                if values > 0 {
                    self.open.push(values);
                }
                Ok(values == 0)
            }
            _ => {
                let content = length.saturating_add(END);
                self.frame.bytes = self.frame.bytes.saturating_add(content);
                self.frame.texts += 1;
                self.frame.last_bytes = length;
                self.place = ReplyPosition::Content(content);
                Ok(false)
            }
        }
    }

    /// Notes that a value is complete. Returns true if the outermost value is complete with it.
    fn is_whole(&mut self) -> bool {
        while let Some(left) = self.open.last_mut() {
            *left -= 1;
            if *left > 0 {
                return false;
            }
            self.open.pop();
        }
        true
    }

    fn next(&mut self, bytes: &mut &[u8]) -> u8 {
        self.frame.bytes += 1;
        split(bytes, 1)[0]
    }
}

/// Returns the kind and the size of the request at the beginning of `bytes`. Returns `None` unless it is there as a whole, an array of
/// texts as all requests are.
fn whole_request(bytes: &[u8]) -> Option<(RequestKind, usize)> {
    let (mut count, line) = whole_length(bytes.strip_prefix(b"*")?)?;
    let mut end = 1 + line;
    let (mut name, mut last_bytes) = (None, 0);
    // Nearly every request is a call of the script.
    if count > 2 && bytes.get(end..)?.starts_with(SCRIPT_CALL) {
        (count, end, name) = (count - 2, end + SCRIPT_CALL.len() + HASH_LINE, Some(&b"EVALSHA"[..]));
    }
    for _ in 0..count {
        let (text, size) = whole_text(bytes.get(end..)?)?;
        end += size;
        name.get_or_insert(text);
        last_bytes = text.len();
    }
    Some((RequestKind::of(name?, last_bytes), end))
}

/// Returns the text at the beginning of `bytes` and its size with its header. Returns `None` unless it is there as a whole.
fn whole_text(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let (length, line) = whole_length(bytes.strip_prefix(b"$")?)?;
    let begin = 1 + line;
    let size = begin + length + b"\r\n".len();
    (size <= bytes.len()).then(|| (&bytes[begin..begin + length], size))
}

/// Parses a length of up to four digits. Returns the length and the size of the line in bytes. Returns `None` if the line is
/// longer, negative, incomplete or malformed: then it is read byte by byte.
#[inline(always)]
fn whole_length(bytes: &[u8]) -> Option<(usize, usize)> {
    // One comparison for each number of digits costs less than a loop, and every request comes here several times.
    match *bytes {
        [a, b'\r', b'\n', ..] => length_of([a]),
        [a, b, b'\r', b'\n', ..] => length_of([a, b]),
        [a, b, c, b'\r', b'\n', ..] => length_of([a, b, c]),
        [a, b, c, d, b'\r', b'\n', ..] => length_of([a, b, c, d]),
        _ => None,
    }
}

fn length_of<const N: usize>(digits: [u8; N]) -> Option<(usize, usize)> {
    let mut length = 0;
    for digit in digits.map(|byte| byte.wrapping_sub(b'0')) {
        if digit > 9 {
            return None;
        }
        length = length * 10 + usize::from(digit);
    }
    Some((length, N + b"\r\n".len()))
}

/// Removes the first `length` bytes, which must be there, and returns them.
fn split<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(length);
    *bytes = rest;
    taken
}
