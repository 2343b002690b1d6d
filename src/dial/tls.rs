//! TLS settings of a client: trusted authorities and the client certificate, from files that may be replaced while the process runs.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use rustls_native_certs::load_native_certs;

use crate::file::pem::{Certificates, Validity, certificates, private_key};
use crate::file::{Named, Unusable};

/// TLS settings of the connections to one server, and the last good content of their files. Connections use that content and do
/// not wait for these files. The system's authorities are loaded for each connection.
pub struct Tls {
    files: TlsFiles,
    known: ArcSwap<Content>,
}

/// Files that TLS needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities to trust, in place of the system's.
    pub authorities: Option<Named>,
    /// Client certificate and its key.
    pub client: Option<(Named, Named)>,
    /// True if the certificate of the server may be for another host name.
    pub any_hostname: bool,
}

/// Content of these files.
#[derive(PartialEq, Eq)]
struct Content {
    authorities: Option<Certificates>,
    client: Option<(Certificates, PrivateKeyDer<'static>)>,
}

/// Trusts a certificate of the authorities for any name.
#[derive(Debug)]
struct AnyHostname(Arc<WebPkiServerVerifier>);

impl Tls {
    /// Reads the files. Blocks while the file system does.
    ///
    /// # Errors
    /// If a file cannot be read or is not PEM of its kind.
    pub fn of_files(files: TlsFiles) -> Result<Self, Unusable> {
        let known = ArcSwap::from_pointee(files.read()?);
        Ok(Self { files, known })
    }

    /// Returns true if there are files that may change.
    pub fn is_of_files(&self) -> bool {
        self.files.authorities.is_some() || self.files.client.is_some()
    }

    /// Returns the TLS settings for a new connection.
    ///
    /// # Errors
    /// If a certificate cannot be used, or the key is not that of the certificate.
    pub fn config(&self) -> io::Result<ClientConfig> {
        let Content { authorities, client } = &**self.known.load();
        let roots = Arc::new(roots(authorities.as_deref())?);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let config = config.map_err(io::Error::other)?;
        let config = if self.files.any_hostname {
            let verifier =
                WebPkiServerVerifier::builder_with_provider(roots, provider).build().map_err(io::Error::other)?;
            config.dangerous().with_custom_certificate_verifier(Arc::new(AnyHostname(verifier)))
        } else {
            config.with_root_certificates(roots)
        };
        let Some((certificate, key)) = client else { return Ok(config.with_no_client_auth()) };
        config.with_client_auth_cert(certificate.clone(), key.clone_key()).map_err(io::Error::other)
    }

    /// Returns the time until which the client certificate is valid, in seconds since 1970; `None` without one.
    pub fn client_expiry(&self) -> Option<u64> {
        let known = self.known.load();
        Validity::of(&known.client.as_ref()?.0).map(|validity| validity.ends_at())
    }

    /// Reads the files again. Returns true if they differ from the content in use. A file that cannot be read or is not PEM
    /// changes nothing. Blocks while the file system does.
    ///
    /// # Errors
    /// If a file cannot be read or is not PEM of its kind.
    pub fn read_again(&self) -> Result<bool, Unusable> {
        let now = self.files.read()?;
        let is_changed = **self.known.load() != now;
        if is_changed {
            self.known.store(Arc::new(now));
        }
        Ok(is_changed)
    }
}

impl TlsFiles {
    fn read(&self) -> Result<Content, Unusable> {
        let client = self.client.as_ref().map(|(certificate, key)| Ok((certificates(certificate)?, private_key(key)?)));
        Ok(Content {
            authorities: self.authorities.as_ref().map(certificates).transpose()?,
            client: client.transpose()?,
        })
    }
}

impl ServerCertVerifier for AnyHostname {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The name is verified last, so everything else is valid.
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Returns the authorities to trust: those in `authorities`, or the system's, of which one that cannot be used is left out.
fn roots(authorities: Option<&[CertificateDer<'static>]>) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    if let Some(authorities) = authorities {
        for certificate in authorities {
            roots.add(certificate.clone()).map_err(io::Error::other)?;
        }
        return Ok(roots);
    }
    let mut found = load_native_certs();
    if let Some(error) = found.errors.pop() {
        return Err(io::Error::other(error));
    }
    roots.add_parsable_certificates(found.certs);
    Ok(roots)
}
