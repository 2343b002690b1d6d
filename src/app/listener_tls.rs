//! Files of the listeners' TLS: read at the start, and again while the service runs.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::pki_types::PrivateKeyDer;

use crate::file::pem::{Certificates, Validity, certificates, private_key};
use crate::file::{Unusable, follow};
use crate::model::Clock;
use crate::serve::tls::InvalidTls;
use crate::serve::{Alpn, Clients, Identity, ListenerTls};
use crate::settings::ListenerTlsSettings;
use crate::store::clock::SystemClock;
use crate::telemetry::throttle::LogThrottle;

/// Interval between two reads of the files: 1 s.
const EVERY: Duration = Duration::from_secs(1);

/// TLS of the gRPC listener, of the last good content of its files.
pub(super) struct ListenerFiles {
    settings: ListenerTlsSettings,
    content: Content,
    identity: Identity,
    clients: Option<Arc<Clients>>,
    expiry: Arc<Expiry>,
}

/// TLS of the listeners, which follows its files.
#[derive(Clone)]
pub(super) struct Tls {
    /// The gRPC listener, which may verify clients.
    pub(super) grpc: Arc<ListenerTls>,
    /// The HTTP and debug listeners, which verify none; `None` if both are in plaintext.
    pub(super) others: Option<Arc<ListenerTls>>,
}

/// Times until which the certificates in use are valid, in seconds since 1970; 0 for none.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    /// Certificate of the listener.
    pub(super) certificate: AtomicU64,
    /// Authorities of clients.
    pub(super) authorities: AtomicU64,
}

impl Tls {
    /// As [`ListenerTls::replace`], on all listeners.
    fn replace(&self, identity: &Identity, clients: &Option<Arc<Clients>>) -> Result<(), InvalidTls> {
        if let Some(others) = &self.others {
            others.replace(identity, None)?;
        }
        self.grpc.replace(identity, clients.clone())
    }
}

/// Content of the files.
struct Content {
    chain: Certificates,
    key: PrivateKeyDer<'static>,
    /// Certificates of all authorities of clients.
    authorities: Certificates,
}

/// Result of reading the files: the certificate with its key, and the authorities.
type FilesRead = (Result<(Certificates, PrivateKeyDer<'static>), Vec<Unusable>>, Result<Certificates, Vec<Unusable>>);

impl ListenerFiles {
    /// Reads the files. Warns about a certificate that is not valid at present, and takes it all the same. Blocks while the
    /// file system does.
    ///
    /// # Errors
    /// All files that cannot be used, with variable, path and reason.
    pub(super) fn read(settings: &ListenerTlsSettings) -> anyhow::Result<Self> {
        let (mut wrong, settings) = (Vec::new(), settings.clone());
        let mut unless_wrong = |problems: Vec<Unusable>| wrong.extend(problems);
        let (pair, authorities) = read(&settings);
        let pair = pair.map_err(&mut unless_wrong).ok().and_then(|(chain, key)| {
            let identity = identity(&settings, &chain, &key).map_err(|problem| unless_wrong(vec![problem]));
            Some((chain, key, identity.ok()?))
        });
        let authorities = authorities.map_err(&mut unless_wrong).ok();
        let clients = authorities.as_ref().map(|authorities| clients(&settings, authorities));
        let (Some((chain, key, identity)), Some(authorities), Some(clients)) = (pair, authorities, clients) else {
            let wrong: Vec<_> = wrong.iter().map(ToString::to_string).collect();
            anyhow::bail!("{}", wrong.join("\n"));
        };
        if let Some(validity) = Validity::of(&chain).filter(|validity| !validity.contains(now())) {
            tracing::warn!(event = "tls.invalid_certificate", %validity, "the certificate of the gRPC listener is not valid now, so clients refuse it; it is used until its files change");
        }
        let content = Content { chain, key, authorities };
        let files = Self { settings, content, identity, clients: clients?, expiry: Arc::default() };
        files.note_expiry();
        Ok(files)
    }

    /// Returns the times until which the certificates in use are valid.
    pub(super) fn expiry(&self) -> Arc<Expiry> {
        Arc::clone(&self.expiry)
    }

    /// Starts the threads for handshakes, of a service with `workers` workers.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub(super) fn start(&self, workers: NonZeroUsize) -> Result<Tls, InvalidTls> {
        let start =
            |clients, alpn, workers| ListenerTls::start(&self.identity, clients, self.settings.is_tls13, alpn, workers);
        let are_others_too = self.settings.is_http_too || self.settings.is_debug_too;
        Ok(Tls {
            grpc: start(self.clients.clone(), Alpn::H2, workers)?,
            others: are_others_too.then(|| start(None, Alpn::Http1, NonZeroUsize::MIN)).transpose()?,
        })
    }

    /// Reads the files every second, for ever, and gives `tls` what has changed. What cannot be used changes nothing.
    pub(super) async fn follow(mut self, tls: Tls) {
        let (complaints, mut was_wrong, settings) = (LogThrottle::new(), false, self.settings.clone());
        let apply = |read| {
            let wrong = self.take(read, &tls);
            // A certificate and its key are seldom written at the same moment, so a mismatch counts the second time.
            if was_wrong && !wrong.is_empty() && complaints.is_due() {
                let wrong = wrong.join("; ");
                tracing::warn!(event = "tls.unusable", error = %wrong, "TLS files of the gRPC listener have changed and cannot be used; the last good ones stay in use");
            }
            was_wrong = !wrong.is_empty();
        };
        let slow = |passed: Duration| {
            tracing::warn!(
                event = "tls.slow",
                seconds = passed.as_secs(),
                "still reading the TLS files of the gRPC listener: their file system may be stuck; the last content stays in use"
            );
        };
        follow(EVERY, move || read(&settings), slow, apply).await;
    }

    /// Gives `tls` what has changed in the files. Returns what cannot be used.
    fn take(&mut self, (pair, authorities): FilesRead, tls: &Tls) -> Vec<String> {
        let mut wrong = Vec::new();
        let texts = |problems: Vec<Unusable>| problems.iter().map(ToString::to_string).collect::<Vec<_>>();
        let pair =
            pair.map_err(texts).and_then(|pair| self.changed_pair(pair).map_err(|error| vec![error.to_string()]));
        let pair = pair.unwrap_or_else(|texts| {
            wrong.extend(texts);
            None
        });
        let authorities = authorities
            .map_err(texts)
            .and_then(|authorities| self.changed_authorities(authorities).map_err(|error| vec![error.to_string()]));
        let authorities = authorities.unwrap_or_else(|texts| {
            wrong.extend(texts);
            None
        });
        if pair.is_none() && authorities.is_none() {
            return wrong;
        }
        let identity = pair.as_ref().map_or(&self.identity, |(.., identity)| identity);
        let clients = authorities.as_ref().map_or(&self.clients, |(_, clients)| clients);
        if let Err(error) = tls.replace(identity, clients) {
            wrong.push(error.to_string());
            return wrong;
        }
        if let Some((chain, key, identity)) = pair {
            (self.content.chain, self.content.key, self.identity) = (chain, key, identity);
            tracing::warn!(
                event = "tls.certificate.changed",
                "the certificate of the gRPC listener has changed; new connections use it"
            );
        }
        if let Some((authorities, clients)) = authorities {
            (self.content.authorities, self.clients) = (authorities, clients);
            tracing::warn!(
                event = "tls.authorities.changed",
                "the CA certificates of clients have changed; connections of clients that they do not accept end within a minute"
            );
        }
        self.note_expiry();
        wrong
    }

    /// Returns a certificate and key that differ from those in use, and their identity.
    ///
    /// # Errors
    /// If they do not belong together, or the certificate is not valid at present.
    fn changed_pair(
        &self,
        (chain, key): (Certificates, PrivateKeyDer<'static>),
    ) -> Result<Option<(Certificates, PrivateKeyDer<'static>, Identity)>, Unusable> {
        if (&chain, &key) == (&self.content.chain, &self.content.key) {
            return Ok(None);
        }
        let identity = identity(&self.settings, &chain, &key)?;
        // An intermediate certificate that has expired may be one that clients do not need.
        let first = chain.get(..1).unwrap_or_default();
        if let Some(validity) = Validity::of(first).filter(|validity| !validity.contains(now())) {
            let why = format!("it is valid {validity}: expected a certificate that is valid now");
            return Err(self.settings.certificate.unusable(why));
        }
        Ok(Some((chain, key, identity)))
    }

    /// Returns authorities of clients that differ from those in use, and their verifier.
    ///
    /// # Errors
    /// If they cannot be used.
    fn changed_authorities(
        &self,
        authorities: Certificates,
    ) -> anyhow::Result<Option<(Certificates, Option<Arc<Clients>>)>> {
        if authorities == self.content.authorities {
            return Ok(None);
        }
        let clients = clients(&self.settings, &authorities)?;
        Ok(Some((authorities, clients)))
    }

    fn note_expiry(&self) {
        let ends_at = |certificates: &Certificates| Validity::of(certificates).map_or(0, |validity| validity.ends_at());
        self.expiry.certificate.store(ends_at(&self.content.chain), Ordering::Relaxed);
        self.expiry.authorities.store(ends_at(&self.content.authorities), Ordering::Relaxed);
    }
}

fn read(settings: &ListenerTlsSettings) -> FilesRead {
    let pair = match (certificates(&settings.certificate), private_key(&settings.key)) {
        (Ok(chain), Ok(key)) => Ok((chain, key)),
        (chain, key) => Err(chain.err().into_iter().chain(key.err()).collect()),
    };
    let (mut authorities, mut wrong) = (Vec::new(), Vec::new());
    for file in &settings.authorities {
        // Each file is tried alone, so that the error names it.
        let read = certificates(file).and_then(|found| match Clients::new(&found, Arc::default()) {
            Ok(_) => Ok(found),
            Err(error) => Err(file.unusable(format!("expected CA certificates: {error}"))),
        });
        match read {
            Ok(found) => authorities.extend(found),
            Err(problem) => wrong.push(problem),
        }
    }
    (pair, if wrong.is_empty() { Ok(authorities) } else { Err(wrong) })
}

fn identity(
    settings: &ListenerTlsSettings,
    chain: &Certificates,
    key: &PrivateKeyDer<'static>,
) -> Result<Identity, Unusable> {
    Identity::new(chain.clone(), key.clone_key()).map_err(|error| {
        settings.key.unusable(match error {
            InvalidTls::Rustls(rustls::Error::InconsistentKeys(_)) => {
                "it is the key of another certificate: expected that of the first certificate in GRPC_SERVER_TLS_CERT"
                    .to_owned()
            }
            error => format!("expected an RSA key of 2048 to 8192 bits, a P-256 or P-384 key, or an Ed25519 key, and its certificate: {error}"),
        })
    })
}

fn clients(settings: &ListenerTlsSettings, authorities: &Certificates) -> anyhow::Result<Option<Arc<Clients>>> {
    if settings.authorities.is_empty() {
        return Ok(None);
    }
    Ok(Some(Arc::new(Clients::new(authorities, Arc::clone(&settings.names))?)))
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemClock.now().get() / 1_000_000
}
