//! Verification of client certificates.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::InvalidTls;
use crate::model::PeerName;
use crate::model::peer_name::Presented;

/// Clients that a listener accepts: those with a certificate of one of its authorities, and with one of its names if it
/// has names.
///
/// The certificate may be used for clients if its extended key usage says so or if it has none, as Envoy Gateway's. Its
/// common name is not read.
#[derive(Debug)]
pub struct Clients {
    verifier: Arc<dyn ClientCertVerifier>,
    names: Arc<[PeerName]>,
}

impl Clients {
    /// Creates the verifier of `authorities` and `names`. Without names, every certificate of the authorities is accepted.
    ///
    /// # Errors
    /// If a certificate cannot be that of an authority, or there is none.
    pub fn new(authorities: &[CertificateDer<'static>], names: Arc<[PeerName]>) -> Result<Self, InvalidTls> {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority.clone())?;
        }
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
        Ok(Self { verifier: builder.build()?, names })
    }

    /// Returns an error unless `chain`, with the certificate of a client first, is accepted at present.
    pub(super) fn verify(&self, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        let (certificate, intermediates) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.verify_client_cert(certificate, intermediates, UnixTime::now()).map(|_| ())
    }

    fn has_name(&self, certificate: &CertificateDer<'_>) -> Result<bool, Error> {
        let bad = || Error::InvalidCertificate(CertificateError::BadEncoding);
        let (_, certificate) = X509Certificate::from_der(certificate).map_err(|_| bad())?;
        let presented = certificate.subject_alternative_name().map_err(|_| bad())?;
        let presented = presented.iter().flat_map(|extension| &extension.value.general_names);
        Ok(presented.filter_map(name).any(|presented| self.names.iter().any(|name| name.is_of(&presented))))
    }
}

/// Returns a name of a certificate; `None` for other kinds than DNS names, addresses and URIs.
fn name<'a>(name: &GeneralName<'a>) -> Option<Presented<'a>> {
    match *name {
        GeneralName::DNSName(name) => Some(Presented::Dns(name)),
        GeneralName::URI(name) => Some(Presented::Uri(name)),
        GeneralName::IPAddress(bytes) => {
            let version_4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            version_4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok().map(Presented::Ip)
        }
        _ => None,
    }
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
        if self.names.is_empty() || self.has_name(end_entity)? {
            Ok(verified)
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
