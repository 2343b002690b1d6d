//! TLS of a listener: certificates and client verification that change while it serves, and the handshakes.
//!
//! ```text
//! accept ──> worker: waits ──> handshake thread: rustls ──> worker: connection over the stream
//! ```
//!
//! A handshake takes up to a millisecond of one core for its signature, and a peer can begin one without being known. So
//! handshakes have threads of their own, and a flood of them does not delay calls on open connections
//! (`docs/decisions/0043`).

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::crypto::ring::{Ticketer, default_provider};
use rustls::server::{NoServerSessionStorage, ProducesTickets, ServerConfig};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{DEFAULT_VERSIONS, SupportedProtocolVersion, version};
use tokio::sync::watch;

use super::workers::{WorkerSlots, Workers};

mod clients;
mod handshake;
mod outcome;
mod peer;
mod waiting;

pub use clients::Clients;
pub(super) use handshake::Accepted;
pub use outcome::HandshakeOutcome;
use outcome::Outcomes;
pub(super) use peer::Peer;
use waiting::Waiting;

/// Maximum bytes that a peer may send in its handshake: 32 KiB. Certificate chains of clients have 2 to 10 KB.
pub const HANDSHAKE_BYTES: usize = 32 << 10;
/// Bytes of answers that TLS holds for a peer that does not read: 16 KiB, one record. rustls' default is 64 KiB.
pub const UNREAD_BYTES: usize = 16 << 10;
/// Maximum number of handshakes that wait for their peers: 1,024, which hold at most 43 MiB. With one more, the one that began first
/// ends: a client needs a few round trips, and a peer that holds its handshake open has had longer than that.
pub const MOST_HANDSHAKES: usize = 1_024;
/// Maximum time until a thread begins a handshake: 1 s. What waits longer ends unsigned, so that a thread that cannot keep up signs for
/// peers that still have time to answer.
pub const LONGEST_QUEUE: Duration = Duration::from_secs(1);
/// Worker threads for each thread that does handshakes: 4.
const WORKERS_PER_THREAD: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);

/// Versions of TLS without 1.2.
const ONLY_TLS13: &[&SupportedProtocolVersion] = &[&version::TLS13];

/// Protocol over TLS, which the client offers by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    /// HTTP/2 for gRPC, which a client has to offer.
    H2,
    /// HTTP/1.1, which a client may also leave unsaid.
    Http1,
}

impl Alpn {
    /// Returns the name in log lines of the listeners that speak it.
    const fn listener(self) -> &'static str {
        match self {
            Self::H2 => "grpc",
            Self::Http1 => "http or debug",
        }
    }
}

/// Reason why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum InvalidTls {
    /// The certificate and key, or the authorities, cannot be used.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
    /// A certificate among the authorities is that of a client or server.
    #[error("a certificate is not that of an authority: its basic constraints do not allow it to issue others")]
    NoAuthority,
    /// The authorities of clients cannot be used.
    #[error(transparent)]
    Clients(#[from] rustls::server::VerifierBuilderError),
    /// The system has no thread left for handshakes.
    #[error(transparent)]
    Threads(#[from] io::Error),
}

/// Certificate of a listener with its chain and key, which belong together.
#[derive(Clone, Debug)]
pub struct Identity(Arc<CertifiedKey>);

/// TLS of a listener.
pub struct ListenerTls {
    alpn: Alpn,
    versions: &'static [&'static SupportedProtocolVersion],
    /// Encrypts tickets of sessions. It stays the same when the certificate changes.
    ticketer: Arc<dyn ProducesTickets>,
    current: watch::Sender<Current>,
    slots: WorkerSlots,
    /// Ends the threads when it is dropped.
    _threads: Workers,
    waiting: Arc<Mutex<Waiting>>,
    outcomes: Outcomes,
}

/// TLS settings that the next handshake uses.
#[derive(Clone)]
struct Current {
    config: Arc<ServerConfig>,
    clients: Option<Arc<Clients>>,
}

impl Alpn {
    const fn name(self) -> &'static [u8] {
        match self {
            Self::H2 => b"h2",
            Self::Http1 => b"http/1.1",
        }
    }
}

impl Identity {
    /// Creates an identity of a certificate, those of intermediate authorities, and the key of the first.
    ///
    /// # Errors
    /// If the key is of an unknown kind, or is not the key of the first certificate.
    pub fn new(
        chain: Vec<rustls::pki_types::CertificateDer<'static>>,
        key: rustls::pki_types::PrivateKeyDer<'static>,
    ) -> Result<Self, InvalidTls> {
        Ok(Self(Arc::new(CertifiedKey::from_der(chain, key, &default_provider())?)))
    }
}

impl ListenerTls {
    /// Starts the threads for handshakes of connections that speak `alpn`. With `clients`, a client needs a certificate that they
    /// accept. `is_tls13` refuses TLS 1.2.
    ///
    /// # Errors
    /// If the system has no thread left, or no random bytes.
    pub fn start(
        identity: &Identity,
        clients: Option<Arc<Clients>>,
        is_tls13: bool,
        alpn: Alpn,
        workers: NonZeroUsize,
    ) -> Result<Arc<Self>, InvalidTls> {
        let versions = if is_tls13 { ONLY_TLS13 } else { DEFAULT_VERSIONS };
        let threads = Workers::start_as("handshakes", workers.div_ceil(WORKERS_PER_THREAD))?;
        let ticketer = Ticketer::new()?;
        let config = config(identity, clients.as_ref(), versions, alpn, &ticketer)?;
        let current = watch::Sender::new(Current { config: Arc::new(config), clients });
        let (slots, waiting) = (threads.slots(), Arc::default());
        let outcomes = Outcomes::default();
        Ok(Arc::new(Self { alpn, versions, ticketer, current, slots, _threads: threads, waiting, outcomes }))
    }

    /// Uses `identity` and `clients` for each handshake from now on. If `clients` is another verifier than before, open
    /// connections end unless it accepts their certificates too.
    ///
    /// # Errors
    /// If rustls does not accept the versions of TLS, which it did at the start. Then nothing changes.
    pub fn replace(&self, identity: &Identity, clients: Option<Arc<Clients>>) -> Result<(), InvalidTls> {
        let config = config(identity, clients.as_ref(), self.versions, self.alpn, &self.ticketer)?;
        self.current.send_replace(Current { config: Arc::new(config), clients });
        Ok(())
    }

    /// Returns the number of handshakes with this outcome since the start.
    pub fn count(&self, outcome: HandshakeOutcome) -> u64 {
        self.outcomes.count(outcome)
    }
}

fn same(one: Option<&Arc<Clients>>, other: Option<&Arc<Clients>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    }
}

fn config(
    identity: &Identity,
    clients: Option<&Arc<Clients>>,
    versions: &[&'static SupportedProtocolVersion],
    alpn: Alpn,
    ticketer: &Arc<dyn ProducesTickets>,
) -> Result<ServerConfig, rustls::Error> {
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider())).with_protocol_versions(versions)?;
    let builder = match clients {
        Some(clients) => builder.with_client_cert_verifier(Arc::clone(clients) as _),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&identity.0))));
    config.alpn_protocols = vec![alpn.name().to_vec()];
    // Sessions are in their tickets, so clients cannot fill a store of them.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    // A resumed session would not look at the certificate of the client again, and would have a new ticket, without end.
    if clients.is_none() {
        config.ticketer = Arc::clone(ticketer);
    } else {
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}
