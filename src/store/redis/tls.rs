//! TLS to Redis: whom to trust and which certificate to show, from files that may be replaced while the process runs.

use std::sync::Arc;

use arc_swap::ArcSwap;
use redis::{ClientTlsConfig, TlsCertificates};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::file::{Named, Unusable};

/// The TLS settings of the connections to one Redis, and the last good content of their files. Connections use that content and
/// never wait for a file system.
pub struct Tls {
    files: Files,
    any_hostname: bool,
    known: ArcSwap<Pem>,
}

/// The files that hold what TLS needs.
pub struct Files {
    /// The certificates of the authorities to trust, in place of the system's.
    pub authorities: Option<Named>,
    /// The certificate to show to Redis, and its key.
    pub client: Option<(Named, Named)>,
}

/// The content of these files.
#[derive(Default, PartialEq, Eq)]
struct Pem {
    authorities: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    /// Reads the files. With `any_hostname` the certificate of Redis may be for another name. Blocks while the file system does.
    ///
    /// # Errors
    /// When a file cannot be read or is not PEM of its kind.
    pub fn of_files(files: Files, any_hostname: bool) -> Result<Self, Unusable> {
        let known = ArcSwap::from_pointee(files.read()?);
        Ok(Self { files, any_hostname, known })
    }

    /// Whether there are files that may change.
    pub fn is_of_files(&self) -> bool {
        self.files.authorities.is_some() || self.files.client.is_some()
    }

    /// Whether the certificate of Redis may be for another name.
    pub fn takes_any_hostname(&self) -> bool {
        self.any_hostname
    }

    /// The certificates for a connection that is made now.
    pub fn certificates(&self) -> TlsCertificates {
        let Pem { authorities, client } = &**self.known.load();
        let client = client.clone();
        TlsCertificates {
            client_tls: client.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
            root_cert: authorities.clone(),
        }
    }

    /// Reads the files again; returns whether they differ from what is in use. A file that cannot be read or is not PEM changes
    /// nothing. Blocks while the file system does.
    ///
    /// # Errors
    /// When a file cannot be read or is not PEM of its kind.
    pub fn read_again(&self) -> Result<bool, Unusable> {
        let now = self.files.read()?;
        let is_changed = **self.known.load() != now;
        if is_changed {
            self.known.store(Arc::new(now));
        }
        Ok(is_changed)
    }
}

impl Files {
    fn read(&self) -> Result<Pem, Unusable> {
        let client = self.client.as_ref().map(|(certificate, key)| Ok((certificates(certificate)?, private_key(key)?)));
        Ok(Pem { authorities: self.authorities.as_ref().map(certificates).transpose()?, client: client.transpose()? })
    }
}

/// The content of a file with certificates. The error of the PEM parser is dropped: it quotes what it read.
fn certificates(file: &Named) -> Result<Vec<u8>, Unusable> {
    file.read("at least one certificate as PEM", |bytes| {
        let mut found = CertificateDer::pem_slice_iter(bytes).peekable();
        let is_pem = found.peek().is_some() && found.all(|certificate| certificate.is_ok());
        is_pem.then(|| bytes.to_vec())
    })
}

/// The content of a file with a private key.
fn private_key(file: &Named) -> Result<Vec<u8>, Unusable> {
    file.read("a private key as PEM", |bytes| PrivateKeyDer::from_pem_slice(bytes).is_ok().then(|| bytes.to_vec()))
}
