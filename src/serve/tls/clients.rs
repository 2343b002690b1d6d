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
use x509_parser::prelude::{FromDer, X509Certificate, X509Version};

use super::InvalidTls;
use crate::model::PeerName;
use crate::model::peer_name::Presented;

/// Maximum number of intermediate certificates that a client may send: 4. webpki tries the orders in which they may follow each other,
/// which takes seconds for a few hundred small certificates; 4 have at most 64 orders.
const MOST_INTERMEDIATES: usize = 4;

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
    /// If a certificate cannot be read or is not that of an authority, or there is none.
    pub fn new(authorities: &[CertificateDer<'static>], names: Arc<[PeerName]>) -> Result<Self, InvalidTls> {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            if !is_authority(authority) {
                return Err(InvalidTls::NoAuthority);
            }
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
        let presented = names(certificate)?;
        Ok(presented.iter().any(|presented| self.names.iter().any(|name| name.is_of(&presented.as_presented()))))
    }
}

/// Returns the names in a certificate.
///
/// # Errors
/// If the certificate cannot be read.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Result<Box<[PeerName]>, Error> {
    let bad = || Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, certificate) = X509Certificate::from_der(certificate).map_err(|_| bad())?;
    let presented = certificate.subject_alternative_name().map_err(|_| bad())?;
    let presented = presented.iter().flat_map(|extension| &extension.value.general_names);
    Ok(presented.filter_map(name).map(PeerName::from).collect())
}

/// Returns true unless the certificate says that its owner may not issue others, as that of a client does. webpki trusts any certificate.
fn is_authority(certificate: &CertificateDer<'_>) -> bool {
    // One that cannot be read is reported by rustls.
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return true };
    // Certificates before version 3 do not say.
    certificate.version() != X509Version::V3 || certificate.is_ca()
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
        if intermediates.len() > MOST_INTERMEDIATES {
            return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
        }
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

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, Certificate, CertificateParams, IsCa, Issuer, KeyPair};

    use super::*;

    fn authority() -> (Certificate, Issuer<'static, KeyPair>) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap(), Issuer::new(params, key))
    }

    fn client(issuer: &Issuer<'_, KeyPair>) -> Certificate {
        let params = CertificateParams::new(vec!["envoy.edge".to_owned()]).unwrap();
        params.signed_by(&KeyPair::generate().unwrap(), issuer).unwrap()
    }

    #[test]
    fn a_certificate_that_may_not_issue_others_is_no_authority() {
        let (authority, issuer) = authority();
        let client = client(&issuer);
        assert!(Clients::new(&[authority.der().clone()], Arc::default()).is_ok());
        let refused = Clients::new(&[authority.der().clone(), client.der().clone()], Arc::default());
        assert!(matches!(refused, Err(InvalidTls::NoAuthority)));
    }

    #[test]
    fn a_client_with_many_intermediate_certificates_is_refused_before_they_are_tried() {
        let (authority, issuer) = authority();
        let clients = Clients::new(&[authority.der().clone()], Arc::default()).unwrap();
        let client = client(&issuer);
        let chain = |intermediates| {
            let mut chain = vec![client.der().clone()];
            chain.extend(std::iter::repeat_n(authority.der().clone(), intermediates));
            clients.verify(&chain)
        };
        assert_eq!(chain(MOST_INTERMEDIATES), Ok(()));
        assert!(chain(MOST_INTERMEDIATES + 1).is_err());
    }
}
