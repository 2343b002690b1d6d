//! Certificates for TLS, made for the test.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::directory;

/// An authority that vouches for servers and clients.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    directory: TempDir,
    issued: AtomicU32,
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
        let (params, key) = params();
        let certificate = params.self_signed(&key).expect("a certificate");
        Self::of(params, key, &certificate)
    }

    fn of(params: CertificateParams, key: KeyPair, certificate: &Certificate) -> Self {
        let issuer = Issuer::new(params, key);
        let authority = Self { issuer, directory: directory(), issued: AtomicU32::new(0) };
        std::fs::write(authority.certificate(), certificate.pem()).expect("it is written");
        authority
    }

    /// Its own certificate, a PEM file.
    pub fn certificate(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// A certificate for a server of this name (a DNS name or an IP address), or for a client called so.
    pub fn issue(&self, name: &str) -> Issued {
        self.issue_as(name, |_| {})
    }

    /// The same after a change of its content.
    pub fn issue_as(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let key = KeyPair::generate().expect("a key");
        self.issue_for(&key, &key.serialize_pem(), name, change)
    }

    /// The same for this key, whose file has this text.
    pub fn issue_for(
        &self,
        key: &KeyPair,
        pem: &str,
        name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Issued {
        let mut params = CertificateParams::new([name.to_owned()]).expect("a name");
        change(&mut params);
        let signed = params.signed_by(key, &self.issuer).expect("a certificate");
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        let file = |kind: &str| self.directory.path().join(format!("{name}.{number}.{kind}.pem"));
        let issued = Issued { certificate: file("certificate"), key: file("key") };
        std::fs::write(&issued.certificate, signed.pem()).expect("it is written");
        std::fs::write(&issued.key, pem).expect("it is written");
        issued
    }

    /// An authority below this one. Its certificates need its own in their files.
    pub fn below(&self) -> Self {
        let (params, key) = params();
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Self::of(params, key, &certificate)
    }
}

/// What an authority is made of.
fn params() -> (CertificateParams, KeyPair) {
    let mut params = CertificateParams::default();
    // A name of its own, because a chain is followed by names.
    static AUTHORITIES: AtomicU32 = AtomicU32::new(0);
    let name = format!("authority {} of a test", AUTHORITIES.fetch_add(1, Ordering::Relaxed));
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    (params, KeyPair::generate().expect("a key"))
}
