//! Ends of connections, by cause.

use std::error::Error;
use std::io::{self, ErrorKind};

use super::frames::FrameError;
use super::socket::State;
use super::tally::How;

/// End of a connection.
#[derive(Debug)]
pub(super) enum Ending {
    /// Closed by the peer, or finished with every call answered.
    Closed,
    /// Ended by this cause.
    Ended(How),
    /// Ended by this cause; the error has the details.
    Failed(How, Box<dyn Error + Send + Sync>),
}

impl Ending {
    /// Returns the end of a connection whose future returned `ended`.
    pub(super) fn of(ended: hyper::Result<()>, state: &State) -> Self {
        let Err(error) = ended else { return Self::Closed };
        match (state.broken(), how(&error)) {
            (Some(FrameError::Trailers), _) => Self::Failed(How::Trailers, error.into()),
            (Some(FrameError::Http1), _) => Self::Failed(How::Http1, error.into()),
            (Some(FrameError::PushPromise), _) => Self::Failed(How::ProtocolError, error.into()),
            (Some(FrameError::LateHead), _) => Self::Failed(How::LateHead, error.into()),
            // hyper starts the timeout of a request head at the answer before it, so this is an HTTP/1 connection that
            // was kept alive.
            (None, How::LateHead) if state.is_at_rest() => Self::Closed,
            (None, how) => Self::Failed(how, error.into()),
        }
    }
}

/// Returns the cause of a connection's error.
fn how(error: &hyper::Error) -> How {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(http2) = cause.downcast_ref::<h2::Error>() {
            return by_http2(http2);
        }
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return if io.kind() == ErrorKind::TimedOut { How::Stalled } else { How::Io };
        }
        source = cause.source();
    }
    match error.is_timeout() {
        // hyper names neither timeout. Only the one of the ping has a source.
        true if error.source().is_some() => How::UnansweredPing,
        true => How::LateHead,
        false if error.is_incomplete_message() => How::Io,
        false => How::Failed,
    }
}

fn by_http2(error: &h2::Error) -> How {
    use h2::Reason;
    if error.is_remote() {
        return How::PeerGoaway;
    }
    match error.reason() {
        // With calls in flight, hyper ends a connection with an unanswered ping in this way.
        Some(Reason::NO_ERROR) => How::UnansweredPing,
        Some(Reason::PROTOCOL_ERROR) => How::ProtocolError,
        Some(Reason::INTERNAL_ERROR) => How::InternalError,
        Some(Reason::FLOW_CONTROL_ERROR) => How::FlowControlError,
        Some(Reason::STREAM_CLOSED) => How::StreamClosed,
        Some(Reason::FRAME_SIZE_ERROR) => How::FrameSizeError,
        Some(Reason::COMPRESSION_ERROR) => How::CompressionError,
        Some(Reason::ENHANCE_YOUR_CALM) => How::EnhanceYourCalm,
        Some(_) => How::OtherHttp2,
        None if error.is_io() => How::Io,
        None => How::OtherHttp2,
    }
}
