//! Outcomes of TLS handshakes, their counts, and the log lines about refusals.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::{CertificateError, Error, InvalidMessage, PeerIncompatible};

use super::super::stream::HandshakeTooLarge;
use crate::telemetry::throttle::LogThrottle;

macro_rules! outcomes {
    ($($(#[$about:meta])+ $outcome:ident $name:literal $(warn $log:literal)?;)+) => {
        /// Outcome of a TLS handshake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum HandshakeOutcome {
            $($(#[$about])+ $outcome,)+
        }

        impl HandshakeOutcome {
            /// All outcomes, in the order of the metric's series.
            pub const ALL: [Self; [$(Self::$outcome),+].len()] = [$(Self::$outcome),+];

            /// Returns the value of the label `outcome`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$outcome => $name,)+ }
            }

            /// Returns the sentence of the log line at `warn`; `None` for outcomes that an operator need not know.
            const fn warning(self) -> Option<&'static str> {
                $($(if matches!(self, Self::$outcome) {
                    return Some($log);
                })?)+
                None
            }
        }
    };
}

outcomes! {
    /// Done, with certificates and a signature.
    Full "full";
    /// Done, with a ticket of an earlier connection.
    Resumed "resumed";
    /// The peer does not speak TLS.
    NotTls "not_tls" warn "peers did not speak TLS to a listener that serves TLS (GRPC_SERVER_USE_TLS, HTTP_SERVER_USE_TLS, DEBUG_SERVER_USE_TLS): in Envoy, set a transport_socket with UpstreamTlsContext for the cluster of Tidegate; probes and scrapes need the scheme HTTPS";
    /// The client offers no version of TLS that is allowed.
    Version "version" warn "clients were refused, because they offer no allowed version of TLS (GRPC_SERVER_TLS_MIN_VERSION)";
    /// The client does not offer the protocol of the listener by ALPN.
    Alpn "alpn" warn "clients were refused, because they do not offer by ALPN what the listener speaks: h2 for gRPC, http/1.1 for the others";
    /// The client and this listener have no cipher or key exchange in common.
    NothingInCommon "nothing_in_common" warn "clients were refused, because they have no cipher, key exchange or signature in common with this listener";
    /// The client has sent no certificate.
    NoCertificate "no_certificate" warn "clients were refused, because they sent no certificate (GRPC_CLIENT_TLS_CACERT, GRPC_CLIENT_AUTH)";
    /// The certificate of the client is of an authority that is not trusted.
    UnknownAuthority "unknown_authority" warn "clients were refused, because no trusted CA has signed their certificate (GRPC_CLIENT_TLS_CACERT)";
    /// The certificate of the client has expired, or is not valid yet.
    Expired "expired" warn "clients were refused, because their certificate has expired or is not valid yet";
    /// The certificate of the client is not for clients.
    Usage "usage" warn "clients were refused, because the extended key usage of their certificate does not allow clients";
    /// The certificate of the client has none of the allowed names.
    Name "name" warn "clients were refused, because their certificate has no name of GRPC_CLIENT_TLS_SAN";
    /// The certificate of the client is invalid in another way.
    BadCertificate "bad_certificate" warn "clients were refused, because their certificate is invalid";
    /// The client has refused this listener, mostly its certificate.
    RefusedByClient "refused_by_client" warn "clients refused this listener: mostly they do not trust the CA of its certificate, or expect another name";
    /// The handshake was not complete in time.
    TimedOut "timed_out";
    /// Ended for a later handshake, because too many were in progress.
    Crowded "crowded" warn "handshakes were ended, because 1,024 later ones were in progress: peers begin handshakes and do not finish them";
    /// The peer has sent more bytes than a handshake needs.
    TooLarge "too_large" warn "clients were refused, because they sent more than 32 KiB in their handshake";
    /// The peer has closed the connection.
    Closed "closed";
    /// Any other error.
    Failed "failed" warn "TLS handshakes failed";
}

/// Handshake that did not succeed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) outcome: HandshakeOutcome,
    pub(super) error: io::Error,
}

/// Counts of outcomes, and the throttles of their log lines.
#[derive(Debug)]
pub(super) struct Outcomes {
    counts: [AtomicU64; HandshakeOutcome::ALL.len()],
    warnings: [LogThrottle; HandshakeOutcome::ALL.len()],
}

impl Default for Outcomes {
    fn default() -> Self {
        Self { counts: Default::default(), warnings: HandshakeOutcome::ALL.map(|_| LogThrottle::new()) }
    }
}

impl Outcomes {
    /// Counts a handshake.
    pub(super) fn add(&self, outcome: HandshakeOutcome) {
        if let Some(count) = self.counts.get(outcome.number()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a handshake with `client` that did not succeed. Logs a rate-limited warning for outcomes that an operator
    /// should know. `listener` names the listener in it.
    pub(super) fn refuse(&self, failure: &Failure, listener: &'static str, client: Option<IpAddr>) {
        let Failure { outcome, error } = failure;
        self.add(*outcome);
        let Some(sentence) = outcome.warning() else { return };
        if let Some(count) = self.warnings.get(outcome.number()).and_then(LogThrottle::due) {
            let (outcome, client) = (outcome.name(), client.map(tracing::field::display));
            tracing::warn!(event = "tls.refused", listener, outcome, count, last_client = client, %error, "{sentence}");
        }
    }

    /// Returns the number of handshakes with this outcome.
    pub(super) fn count(&self, outcome: HandshakeOutcome) -> u64 {
        self.counts.get(outcome.number()).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

impl HandshakeOutcome {
    fn number(self) -> usize {
        Self::ALL.iter().position(|other| *other == self).unwrap_or(usize::MAX)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let cause = error.get_ref();
        let outcome = match cause.and_then(|cause| cause.downcast_ref::<Error>()) {
            Some(error) => of_tls(error),
            None if cause.is_some_and(|cause| cause.is::<HandshakeTooLarge>()) => HandshakeOutcome::TooLarge,
            None if error.kind() == ErrorKind::TimedOut => HandshakeOutcome::TimedOut,
            None if is_closed(error.kind()) => HandshakeOutcome::Closed,
            None => HandshakeOutcome::Failed,
        };
        Self { outcome, error }
    }
}

fn is_closed(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof)
}

fn of_tls(error: &Error) -> HandshakeOutcome {
    use HandshakeOutcome as Outcome;
    match error {
        Error::InvalidMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
            Outcome::NotTls
        }
        Error::NoApplicationProtocol => Outcome::Alpn,
        Error::NoCertificatesPresented => Outcome::NoCertificate,
        Error::AlertReceived(_) => Outcome::RefusedByClient,
        Error::PeerIncompatible(
            PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::ServerDoesNotSupportTls12Or13,
        ) => Outcome::Version,
        Error::PeerIncompatible(_) => Outcome::NothingInCommon,
        Error::InvalidCertificate(error) => match error {
            CertificateError::UnknownIssuer => Outcome::UnknownAuthority,
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => Outcome::Expired,
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Outcome::Usage,
            CertificateError::ApplicationVerificationFailure => Outcome::Name,
            _ => Outcome::BadCertificate,
        },
        _ => Outcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_that_the_peer_leaves_is_closed_and_another_error_of_the_connection_is_a_failure() {
        for (kind, expected) in [
            (ErrorKind::ConnectionReset, HandshakeOutcome::Closed),
            (ErrorKind::UnexpectedEof, HandshakeOutcome::Closed),
            (ErrorKind::TimedOut, HandshakeOutcome::TimedOut),
            (ErrorKind::InvalidData, HandshakeOutcome::Failed),
        ] {
            let Failure { outcome, .. } = io::Error::from(kind).into();
            assert!(outcome == expected, "{kind}");
        }
    }
}
