//! Ends of connections, by cause.

use std::error::Error;
use std::io::{self, ErrorKind};

use super::frames::FrameError;
use super::tally::EndCause;
use super::turn::State;

/// End of a connection.
#[derive(Debug)]
pub(super) enum Ending {
    /// Closed by the peer, or finished with every call answered.
    Closed,
    /// Ended by this cause.
    Ended(EndCause),
    /// Ended by this cause; the error has the details.
    Failed(EndCause, Box<dyn Error + Send + Sync>),
}

impl Ending {
    /// Returns the end of a connection whose future returned `ended`.
    pub(super) fn of(ended: hyper::Result<()>, state: &State) -> Self {
        let Err(error) = ended else {
            // HTTP/1 takes an error before its first request for an end.
            return if state.broken() == Some(FrameError::Tls) { Self::Ended(EndCause::Tls) } else { Self::Closed };
        };
        match (state.broken(), how(&error)) {
            (Some(FrameError::Trailers), _) => Self::Failed(EndCause::Trailers, error.into()),
            (Some(FrameError::Http1), _) => Self::Failed(EndCause::Http1, error.into()),
            (Some(FrameError::Tls), _) => Self::Failed(EndCause::Tls, error.into()),
            (Some(FrameError::PushPromise), _) => Self::Failed(EndCause::ProtocolError, error.into()),
            (Some(FrameError::LateHead), _) => Self::Failed(EndCause::LateHead, error.into()),
            // hyper starts the timeout of a request head at the answer before it, so this is an HTTP/1 connection that
            // was kept alive.
            (None, EndCause::LateHead) if state.is_at_rest() => Self::Closed,
            (None, how) => Self::Failed(how, error.into()),
        }
    }
}

/// Returns the cause of a connection's error.
fn how(error: &hyper::Error) -> EndCause {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(http2) = cause.downcast_ref::<h2::Error>() {
            return by_http2(http2);
        }
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return if io.kind() == ErrorKind::TimedOut { EndCause::Stalled } else { EndCause::Io };
        }
        source = cause.source();
    }
    match error.is_timeout() {
        // hyper names neither timeout. Only the one of the ping has a source.
        true if error.source().is_some() => EndCause::UnansweredPing,
        true => EndCause::LateHead,
        false if error.is_incomplete_message() => EndCause::Io,
        false => EndCause::Failed,
    }
}

fn by_http2(error: &h2::Error) -> EndCause {
    use h2::Reason;
    if error.is_remote() {
        return EndCause::PeerGoaway;
    }
    match error.reason() {
        // With calls in flight, hyper ends a connection with an unanswered ping in this way.
        Some(Reason::NO_ERROR) => EndCause::UnansweredPing,
        Some(Reason::PROTOCOL_ERROR) => EndCause::ProtocolError,
        Some(Reason::INTERNAL_ERROR) => EndCause::InternalError,
        Some(Reason::FLOW_CONTROL_ERROR) => EndCause::FlowControlError,
        Some(Reason::STREAM_CLOSED) => EndCause::StreamClosed,
        Some(Reason::FRAME_SIZE_ERROR) => EndCause::FrameSizeError,
        Some(Reason::COMPRESSION_ERROR) => EndCause::CompressionError,
        Some(Reason::ENHANCE_YOUR_CALM) => EndCause::EnhanceYourCalm,
        Some(_) => EndCause::OtherHttp2,
        None if error.is_io() => EndCause::Io,
        None => EndCause::OtherHttp2,
    }
}
