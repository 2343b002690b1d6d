//! Counts of a listener's connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! endings {
    ($($(#[$about:meta])+ $how:ident $name:literal $(warn $log:literal)?;)+) => {
        /// Cause of an abnormal end of a connection.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EndCause {
            $($(#[$about])+ $how,)+
        }

        impl EndCause {
            /// All causes, in the order of the metric's series.
            pub const ALL: [Self; [$(Self::$how),+].len()] = [$(Self::$how),+];

            /// Returns the value of the label `how`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$how => $name,)+ }
            }

            /// Returns the sentence of the log line at `warn`; `None` for causes that an operator need not know.
            pub(super) const fn warning(self) -> Option<&'static str> {
                $($(if matches!(self, Self::$how) {
                    return Some($log);
                })?)+
                None
            }
        }
    };
}

endings! {
    /// Closed at once because all slots were taken.
    Refused "refused" warn "connections were closed at once: as many are open as there is room for";
    /// Not accepted, mostly for lack of file descriptors.
    NotAccepted "not_accepted";
    /// Dropped because the peer sent no HTTP/2 preface in time, or nothing at all.
    Unopened "unopened";
    /// Ended without a TLS handshake; the metric of handshakes has the cause.
    Handshake "handshake";
    /// Ended because the certificate of the client is no longer accepted.
    Revoked "revoked" warn "connections were ended, because the certificates of their clients are no longer accepted (the CA certificates of clients have changed)";
    /// Dropped because the head of a request was not complete in time.
    LateHead "late_head";
    /// Dropped because the peer spoke HTTP/1 where only HTTP/2 is served.
    Http1 "http1" warn "peers spoke HTTP/1 to the gRPC port, which needs HTTP/2, and got no answer: in Envoy set http2_protocol_options (typed_extension_protocol_options) for the cluster of Tidegate; callers without HTTP/2 use /json on the HTTP port";
    /// Dropped because the peer spoke TLS where plaintext is served.
    Tls "tls" warn "peers spoke TLS to a plaintext listener, and got no answer: set GRPC_SERVER_USE_TLS (HTTP_SERVER_USE_TLS, DEBUG_SERVER_USE_TLS) so that Tidegate speaks TLS, or remove the transport_socket with UpstreamTlsContext from the cluster of Tidegate in Envoy; in a mesh, its sidecar must end the TLS";
    /// Dropped because a request had trailers of more than 64 bytes. gRPC requests have none.
    Trailers "trailers" warn "connections were dropped, because their requests had trailers of more than 64 bytes";
    /// Closed without a call in flight, because more connections were open than their memory allows.
    Idle "idle" warn "idle connections were closed: more were open than GRPC_MAX_IDLE_CONNECTIONS, or than fit on the HTTP listener";
    /// Dropped with calls in flight, or because the peer did not let it finish in time.
    Cut "cut" warn "connections were cut, because their calls did not end in time";
    /// Dropped because the peer took no byte for too long while there was something to write.
    Stalled "stalled" warn "connections were dropped, because their peers stopped reading";
    /// Dropped because the peer did not answer an HTTP/2 ping.
    UnansweredPing "unanswered_ping" warn "connections were dropped, because their peers did not answer a ping";
    /// Ended by an error of the socket, or by a peer that left in the middle of a message.
    Io "io";
    /// Ended by a GOAWAY from the peer that carries an error.
    PeerGoaway "peer_goaway" warn "peers ended their connections with an HTTP/2 error";
    /// Ended by us with `PROTOCOL_ERROR`, also for bytes that are not HTTP/2.
    ProtocolError "protocol_error" warn "connections were ended with the HTTP/2 error PROTOCOL_ERROR";
    /// Ended by us with `INTERNAL_ERROR`.
    InternalError "internal_error" warn "connections were ended with the HTTP/2 error INTERNAL_ERROR";
    /// Ended by us with `FLOW_CONTROL_ERROR`.
    FlowControlError "flow_control_error" warn "connections were ended with the HTTP/2 error FLOW_CONTROL_ERROR";
    /// Ended by us with `STREAM_CLOSED`.
    StreamClosed "stream_closed" warn "connections were ended with the HTTP/2 error STREAM_CLOSED";
    /// Ended by us with `FRAME_SIZE_ERROR`.
    FrameSizeError "frame_size_error" warn "connections were ended with the HTTP/2 error FRAME_SIZE_ERROR";
    /// Ended by us with `COMPRESSION_ERROR`.
    CompressionError "compression_error" warn "connections were ended with the HTTP/2 error COMPRESSION_ERROR";
    /// Ended by us with `ENHANCE_YOUR_CALM`: too many resets, control frames or tiny frames.
    EnhanceYourCalm "enhance_your_calm" warn "connections were ended with the HTTP/2 error ENHANCE_YOUR_CALM";
    /// Ended by us with another HTTP/2 error.
    OtherHttp2 "other_http2_error" warn "connections were ended with a rare HTTP/2 error; the level debug names it";
    /// Ended by any other error, or by a panic.
    Failed "failed";
}

/// Counts of one listener's connections since it started.
#[derive(Debug, Default)]
pub struct Tally {
    pub(super) accepted: AtomicU64,
    pub(super) ended: AtomicU64,
    hows: [AtomicU64; EndCause::ALL.len()],
}

/// Snapshot of a [`Tally`]. Each value is a number of connections since the start, except `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Connections open now.
    pub open: u64,
    /// Connections that were accepted and served.
    pub accepted: u64,
    hows: [u64; EndCause::ALL.len()],
}

impl Tally {
    /// Adds `connections` that ended abnormally by the cause `how`.
    pub(super) fn end(&self, how: EndCause, connections: u64) {
        if let Some(count) = how.number().and_then(|number| self.hows.get(number)) {
            count.fetch_add(connections, Ordering::Relaxed);
        }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> ConnectionCounts {
        let ended = self.ended.load(Ordering::Acquire);
        let accepted = self.accepted.load(Ordering::Relaxed);
        let hows = std::array::from_fn(|number| self.hows.get(number).map_or(0, |how| how.load(Ordering::Relaxed)));
        ConnectionCounts { open: accepted.saturating_sub(ended), accepted, hows }
    }
}

impl ConnectionCounts {
    /// Returns the number of connections that ended by the cause `how`.
    pub fn ended(&self, how: EndCause) -> u64 {
        how.number().and_then(|number| self.hows.get(number)).copied().unwrap_or(0)
    }
}

impl EndCause {
    /// Returns the time between two log lines: 1 min where a peer speaks another protocol, else 10 s.
    pub(super) const fn log_interval(self) -> Duration {
        Duration::from_secs(if matches!(self, Self::Http1 | Self::Tls) { 60 } else { 10 })
    }

    /// Returns the index in [`EndCause::ALL`].
    pub(super) fn number(self) -> Option<usize> {
        Self::ALL.iter().position(|other| *other == self)
    }
}
