//! Certificates for TLS, made for the test.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::directory;

/// An authority that vouches for servers and clients.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    directory: TempDir,
}

/// A certificate with its key, as PEM files that live as long as the authority.
pub struct Issued {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// A new one, which nobody else trusts.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "an authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        let authority = Self { issuer: Issuer::new(params, key), directory: directory() };
        std::fs::write(authority.certificate(), certificate.pem()).expect("it is written");
        authority
    }

    /// Its own certificate, a PEM file.
    pub fn certificate(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// A certificate for a server of this name (a DNS name or an IP address), or for a client called so.
    pub fn issue(&self, name: &str) -> Issued {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("a name");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        let file = |kind: &str| self.directory.path().join(format!("{name}.{kind}.pem"));
        let issued = Issued { certificate: file("certificate"), key: file("key") };
        std::fs::write(&issued.certificate, signed.pem()).expect("it is written");
        std::fs::write(&issued.key, key.serialize_pem()).expect("it is written");
        issued
    }
}
