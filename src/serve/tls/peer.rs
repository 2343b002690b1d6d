//! The client of an open connection, whose certificate may stop being accepted.

use std::future::pending;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::sleep;

use super::clients::names;
use super::{Clients, Current, same};
use crate::model::PeerName;

/// Time over which open connections verify their clients again after a change: 10 s, each at a random moment. 10,000
/// connections take about a tenth of a core meanwhile.
const VERIFY_WITHIN_MS: u64 = 10_000;

/// Maximum number of names of a client that can give it rights: 100, the most in a certificate of the large public CAs. Each is compared
/// with up to 1,000 names in the file of callers, which takes 2.4 ms of a worker.
const MAX_NAMES: usize = 100;

/// The client of a connection.
pub struct Peer(Option<Box<Verified>>);

/// A client that was verified.
struct Verified {
    chain: Box<[CertificateDer<'static>]>,
    /// The verifier that accepted it last.
    by: Arc<Clients>,
    current: watch::Receiver<Current>,
    is_refused: bool,
}

impl Peer {
    /// Creates a client that needs no certificate.
    pub(in crate::serve) const fn anyone() -> Self {
        Self(None)
    }

    /// Creates a client whose certificate `by` has accepted.
    pub(super) fn verified(
        chain: &[CertificateDer<'static>],
        by: Arc<Clients>,
        current: watch::Receiver<Current>,
    ) -> Self {
        Self(Some(Box::new(Verified { chain: chain.into(), by, current, is_refused: false })))
    }

    /// Returns the first names in the certificate of the client, up to [`MAX_NAMES`]; `None` if it needs none.
    pub(in crate::serve) fn names(&self) -> Option<Box<[PeerName]>> {
        let verified = self.0.as_ref()?;
        // rustls has read it.
        let names = verified.chain.first().and_then(|certificate| names(certificate).ok()).unwrap_or_default();
        Some(names.into_iter().take(MAX_NAMES).collect())
    }

    /// Waits until the certificate of the client is no longer accepted.
    pub(in crate::serve) async fn refused(&mut self) {
        match &mut self.0 {
            None => pending().await,
            // Boxed, so that a connection in plaintext has no space for it.
            Some(verified) => Box::pin(verified.refused()).await,
        }
    }

    /// Returns true after the certificate of the client was refused.
    pub(in crate::serve) fn is_refused(&self) -> bool {
        self.0.as_ref().is_some_and(|verified| verified.is_refused)
    }
}

impl Verified {
    /// May be dropped and called again at any time.
    async fn refused(&mut self) {
        while !self.is_refused {
            let by = Some(&self.by);
            if self.current.wait_for(|current| !same(current.clients.as_ref(), by)).await.is_err() {
                // The listener is gone. Its stop ends the connection.
                return pending().await;
            }
            sleep(Duration::from_millis(RandomState::new().build_hasher().finish() % VERIFY_WITHIN_MS)).await;
            let Some(now) = self.current.borrow().clients.clone() else { return pending().await };
            self.is_refused = now.verify(&self.chain).is_err();
            self.by = now;
        }
    }
}
