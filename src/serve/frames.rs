//! Reader of the heads of a peer's HTTP/2 frames. It bounds the header fields that h2 keeps and that count for no call.
//!
//! A field takes one byte on the wire and up to 90 in memory. The fields of a call are read and reduced when it begins
//! (`head`). The fields of a head that never ends, and of trailers, stay in h2: they belong to no call yet, and a call
//! that waits for room does not read them.

use std::mem;

use thiserror::Error;
use tokio::time::{Duration, Instant};

use super::authority::AuthorityRepair;

/// Maximum bytes of trailers: 64. No gRPC request has trailers (gRPC over HTTP/2, Requests), so no client needs more.
const MOST_TRAILER_BYTES: usize = 64;
/// Time in which a head that has begun must end: 5 s. Ordinary heads arrive in one piece.
const HEAD_ALLOWED: Duration = Duration::from_secs(5);
/// Maximum memory in bytes that one byte of a head takes in h2: 90. 7,500 fields of one byte took 680 KB.
const HEAD_BYTE_COST: usize = 90;

/// Text that a client sends before its first frame (RFC 9113, 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of the head of a frame: length, type, flags and stream (RFC 9113, 4.1).
const FRAME_HEAD_BYTES: usize = 9;
/// Type of the frames that carry a body (RFC 9113, 6.1).
const DATA: u8 = 0;
/// Types of the frames that carry fields, and the flag of the last one of a head (RFC 9113, 6.2 and 6.10).
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// Type of a frame with fields that clients must not send (RFC 9113, 8.4).
const PUSH_PROMISE: u8 = 5;
/// Answer to the PING that h2 sends with the first of the two GOAWAY frames of a graceful shutdown (RFC 9113, 6.7; h2's
/// `frame::Ping::SHUTDOWN`).
pub(super) const SHUTDOWN_PONG: [u8; 17] = [0, 0, 8, 6, 1, 0, 0, 0, 0, 0x0b, 0x7b, 0xa2, 0xf0, 0x8b, 0x9b, 0xfe, 0x54];
/// Position of the type in a frame, and a type that has no meaning and is skipped (RFC 9113, 4.1 and 5.5).
const TYPE_AT: usize = 3;
const NO_TYPE: u8 = 0xff;

/// Position in the sequence of frames after the bytes that were read so far.
#[derive(Debug)]
pub(super) struct FrameReader {
    /// Bytes of the preface that were read; all of them before the first frame.
    preface_bytes: usize,
    /// Bytes of a frame's payload to skip.
    missing: usize,
    head: [u8; FRAME_HEAD_BYTES],
    head_bytes: usize,
    /// `None` while the payload has no fields; true if it has the last fields of a head.
    fields: Option<IsLast>,
    /// Highest stream so far. Fields of a stream that is not higher are trailers.
    last_stream: u32,
    begun: Option<BegunHead>,
    /// True while the payload is data of a body.
    is_data: bool,
    /// Bytes that are not data of a body, since the last [`FrameReader::take_around`].
    around: usize,
    /// `None` on TCP, where no client sends a path as authority.
    authority: Option<Box<AuthorityRepair>>,
    /// True if [`SHUTDOWN_PONG`] was taken out, until [`FrameReader::take_shutdown_pong`].
    has_shutdown_pong: bool,
}

type IsLast = bool;

/// Fields whose end has not arrived.
#[derive(Clone, Copy, Debug)]
struct BegunHead {
    bytes: usize,
    is_trailers: bool,
    since: Instant,
}

/// Error for which the connection of a peer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum FrameError {
    /// Trailers of more than 64 bytes, which no gRPC request has.
    #[error("a request has trailers of more than 64 bytes")]
    Trailers,
    /// A head that began and did not end in time.
    #[error("the head of a request did not end within 5 s")]
    LateHead,
    /// A frame that clients must not send.
    #[error("a client sent PUSH_PROMISE")]
    PushPromise,
    /// A request of HTTP/1 in place of the preface.
    #[error("a client spoke HTTP/1")]
    Http1,
    /// TLS on a connection in plaintext.
    #[error("a client spoke TLS to a plaintext listener")]
    Tls,
}

impl FrameReader {
    /// Creates the state for a peer that has sent nothing yet.
    pub(super) fn new() -> Self {
        let (head, head_bytes) = ([0; FRAME_HEAD_BYTES], 0);
        Self {
            preface_bytes: 0,
            missing: 0,
            head,
            head_bytes,
            fields: None,
            last_stream: 0,
            begun: None,
            is_data: false,
            around: 0,
            authority: None,
            has_shutdown_pong: false,
        }
    }

    /// Repairs the authority of each call, as clients send it on a Unix socket.
    pub(super) fn repairing_authority(self) -> Self {
        Self { authority: Some(Box::new(AuthorityRepair::new())), ..self }
    }

    /// Returns the memory in bytes that h2 may take for a head whose end has not arrived.
    pub(super) fn begun_bytes(&self) -> usize {
        self.begun.map_or(0, |begun| begun.bytes.saturating_mul(HEAD_BYTE_COST))
    }

    /// Returns the time until which the begun head must end.
    pub(super) fn due(&self) -> Option<Instant> {
        self.begun.map(|begun| begun.since + HEAD_ALLOWED)
    }

    /// Returns the bytes since the last call that were not data of a body.
    pub(super) fn take_around(&mut self) -> usize {
        mem::take(&mut self.around)
    }

    /// Returns true if the bytes since the last call had [`SHUTDOWN_PONG`], which was taken out of them.
    pub(super) fn take_shutdown_pong(&mut self) -> bool {
        mem::take(&mut self.has_shutdown_pong)
    }

    /// Returns true if the next byte begins a frame.
    pub(super) fn is_between_frames(&self) -> bool {
        self.missing == 0 && self.head_bytes == 0
    }

    /// Reads the next bytes, repairs what h2 would refuse ([`FrameReader::repairing_authority`]), and takes out [`SHUTDOWN_PONG`],
    /// unless a read ends within it.
    ///
    /// # Errors
    /// Returns an error if the peer sends trailers that are too long, or a frame that it must not send.
    pub(super) fn pass(&mut self, bytes: &mut [u8]) -> Result<(), FrameError> {
        let mut bytes = self.pass_preface(bytes)?;
        while !bytes.is_empty() {
            if self.missing > 0 {
                let passed = self.missing.min(bytes.len());
                self.missing -= passed;
                let (payload, rest) = bytes.split_at_mut(passed);
                if let (Some(authority), Some(_)) = (&mut self.authority, self.fields) {
                    authority.repair(payload);
                }
                bytes = rest;
                self.around += if self.is_data { 0 } else { passed };
                self.pass_fields(passed)?;
            } else {
                if self.head_bytes == 0 && bytes.starts_with(&SHUTDOWN_PONG) {
                    bytes[TYPE_AT] = NO_TYPE;
                    self.has_shutdown_pong = true;
                }
                let wanted = (FRAME_HEAD_BYTES - self.head_bytes).min(bytes.len());
                let (read, rest) = bytes.split_at_mut(wanted);
                self.head[self.head_bytes..][..wanted].copy_from_slice(read);
                self.head_bytes += wanted;
                self.around += wanted;
                bytes = rest;
                if self.head_bytes == FRAME_HEAD_BYTES {
                    self.head_bytes = 0;
                    self.begin()?;
                    self.pass_fields(0)?;
                }
            }
        }
        Ok(())
    }

    /// Compares `bytes` with the rest of the preface. Returns the bytes after it. h2 reports bytes that are no text.
    fn pass_preface<'b>(&mut self, bytes: &'b mut [u8]) -> Result<&'b mut [u8], FrameError> {
        let expected = PREFACE.get(self.preface_bytes..).unwrap_or_default();
        // The name of a method: upper-case letters. At least `P`, the beginning of the preface, is in `bytes` or was before.
        let is_method = self.preface_bytes > 0 || bytes.first().is_some_and(u8::is_ascii_uppercase);
        let (read, rest) = bytes.split_at_mut(expected.len().min(bytes.len()));
        let is_preface = expected.starts_with(read);
        if !is_preface && is_method {
            return Err(FrameError::Http1);
        }
        self.preface_bytes += read.len();
        self.around += read.len();
        Ok(rest)
    }

    /// Begins the payload of the frame whose head was read.
    fn begin(&mut self) -> Result<(), FrameError> {
        let [a, b, c, kind, flags, stream @ ..] = self.head;
        self.missing = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        self.is_data = kind == DATA;
        self.fields = matches!(kind, HEADERS | CONTINUATION).then_some(flags & END_HEADERS != 0);
        if kind == HEADERS {
            let stream = u32::from_be_bytes(stream) & u32::MAX >> 1;
            let is_trailers = stream <= self.last_stream;
            self.last_stream = self.last_stream.max(stream);
            self.begun = Some(BegunHead { bytes: 0, is_trailers, since: Instant::now() });
        }
        match (&mut self.authority, kind) {
            (Some(authority), HEADERS) => authority.begin(flags, self.missing),
            (Some(authority), CONTINUATION) => authority.go_on(self.missing),
            _ => {}
        }
        if kind == PUSH_PROMISE { Err(FrameError::PushPromise) } else { Ok(()) }
    }

    /// Counts `passed` bytes of a payload, if it has fields.
    fn pass_fields(&mut self, passed: usize) -> Result<(), FrameError> {
        let (Some(is_last), Some(begun)) = (self.fields, &mut self.begun) else { return Ok(()) };
        begun.bytes += passed;
        if begun.is_trailers && begun.bytes > MOST_TRAILER_BYTES {
            return Err(FrameError::Trailers);
        }
        if self.missing == 0 {
            self.fields = None;
            if is_last {
                self.begun = None;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).expect("it is short").to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], &vec![0x84; payload]].concat()
    }

    /// Passes a preface and the frames `sent`, in parts of `cut` bytes.
    fn passed(sent: &[Vec<u8>], cut: usize) -> Result<FrameReader, FrameError> {
        let mut frames = FrameReader::new();
        let mut bytes = [PREFACE, &sent.concat()].concat();
        bytes.chunks_mut(cut).try_for_each(|part| frames.pass(part))?;
        Ok(frames)
    }

    #[test]
    fn a_head_takes_memory_until_it_ends_however_it_is_cut() {
        let begun = [frame(HEADERS, 0, 1, 7_000), frame(CONTINUATION, 0, 1, 500), frame(CONTINUATION, 0, 1, 0)];
        let ended = [&begun[..], &[frame(CONTINUATION, END_HEADERS, 1, 3), frame(DATA, 1, 1, 9)]].concat();
        for cut in [1, 2, 7, 9, 10, 8_192] {
            let frames = passed(&begun, cut).expect("no trailers");
            assert_eq!((frames.begun_bytes(), frames.due().is_some()), (7_500 * HEAD_BYTE_COST, true), "{cut}");
            let mut frames = passed(&ended, cut).expect("no trailers");
            assert_eq!((frames.begun_bytes(), frames.due()), (0, None), "{cut}");
            let [read, data] = [PREFACE.len() + ended.concat().len(), 9];
            assert_eq!([frames.take_around(), frames.take_around()], [read - data, 0], "{cut}");
        }
        let part = passed(&[frame(HEADERS, END_HEADERS, 1, 100)], 50).expect("no trailers");
        assert_eq!(part.due(), None);
        let mut part = part;
        part.pass(&mut frame(HEADERS, END_HEADERS, 3, 100)[..59]).expect("no trailers");
        assert_eq!(part.begun_bytes(), 50 * HEAD_BYTE_COST);
    }

    #[test]
    fn a_request_of_http1_is_recognised_however_it_is_cut() {
        for method in ["GET", "POST", "PUT", "PRI", "PRINT", "OPTIONS"] {
            let request = format!("{method} /json HTTP/1.1\r\nhost: tidegate\r\n\r\n");
            for cut in [1, 2, 7, 8_192] {
                let mut frames = FrameReader::new();
                let read = request.clone().into_bytes().chunks_mut(cut).try_for_each(|part| frames.pass(part));
                assert_eq!(read, Err(FrameError::Http1), "{method} {cut}");
            }
        }
        let mut whole = FrameReader::new();
        assert_eq!((whole.pass(&mut PREFACE.to_vec()), whole.take_around()), (Ok(()), PREFACE.len()));
    }

    #[test]
    fn long_trailers_are_an_error_and_short_ones_and_heads_are_not() {
        let [first, second] = [1, 3].map(|stream| frame(HEADERS, END_HEADERS, stream, 8_000));
        let calls = [first, second, frame(DATA, 0, 3, 500), frame(HEADERS, END_HEADERS, 3, MOST_TRAILER_BYTES)];
        let long = [
            [&calls[..], &[frame(HEADERS, END_HEADERS, 1, MOST_TRAILER_BYTES + 1)]].concat(),
            [&calls[..], &[frame(HEADERS, 0, 1, MOST_TRAILER_BYTES), frame(CONTINUATION, 0, 1, 1)]].concat(),
        ];
        for cut in [1, 2, 7, 9, 10, 8_192] {
            assert!(passed(&calls, cut).is_ok());
            for long in &long {
                assert_eq!(passed(long, cut).map(drop), Err(FrameError::Trailers), "{cut}");
            }
            let pushed = [frame(PUSH_PROMISE, 0, 1, 9)];
            assert_eq!(passed(&pushed, cut).map(drop), Err(FrameError::PushPromise), "{cut}");
        }
    }
}
