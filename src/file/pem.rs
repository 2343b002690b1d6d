//! Certificates and keys in PEM files.

use std::fmt;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use super::{Named, Unusable};

/// Certificates of a file, at least one.
pub type Certificates = Vec<CertificateDer<'static>>;

/// Period in which all certificates of a file are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    from: ASN1Time,
    until: ASN1Time,
}

/// Reads the certificates in `file`. Errors never quote the file, and neither do those of [`private_key`].
///
/// # Errors
/// If the file cannot be read, or has anything but certificates as PEM, or none.
pub fn certificates(file: &Named) -> Result<Certificates, Unusable> {
    file.read("at least one certificate as PEM", |bytes| {
        let found: Certificates = CertificateDer::pem_slice_iter(bytes).collect::<Result<_, _>>().ok()?;
        (!found.is_empty()).then_some(found)
    })
}

/// Reads the private key in `file`.
///
/// # Errors
/// If the file cannot be read, or has no private key as PEM.
pub fn private_key(file: &Named) -> Result<PrivateKeyDer<'static>, Unusable> {
    file.read("a private key as PEM, without a passphrase", |bytes| PrivateKeyDer::from_pem_slice(bytes).ok())
}

impl Validity {
    /// Returns the period in which all `certificates` are valid; `None` if one is not a certificate or there is none.
    pub fn of(certificates: &[CertificateDer<'_>]) -> Option<Self> {
        let each = certificates.iter().map(|certificate| {
            let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
            let validity = certificate.validity();
            Some(Self { from: validity.not_before, until: validity.not_after })
        });
        let each: Vec<_> = each.collect::<Option<_>>()?;
        each.into_iter().reduce(|all, one| Self { from: all.from.max(one.from), until: all.until.min(one.until) })
    }

    /// Returns the end of the period, in seconds since 1970.
    pub fn ends_at(&self) -> u64 {
        u64::try_from(self.until.timestamp()).unwrap_or(0)
    }

    /// Returns true if `now`, in seconds since 1970, is in the period.
    pub fn contains(&self, now: u64) -> bool {
        i64::try_from(now).is_ok_and(|now| (self.from.timestamp()..=self.until.timestamp()).contains(&now))
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from {} to {}", self.from, self.until)
    }
}
