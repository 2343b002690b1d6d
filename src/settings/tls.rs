//! Files of a client's TLS, from the variables that name them.

use super::InvalidSetting;
use crate::dial::tls::TlsFiles;
use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};

/// A variable and its value.
pub(super) type Variable<'a> = (&'static str, &'a str);

/// Variables that name the files of a client's TLS. An empty value names none.
pub(super) struct TlsVariables<'a> {
    pub(super) authorities: Variable<'a>,
    pub(super) certificate: Variable<'a>,
    pub(super) key: Variable<'a>,
}

impl TlsVariables<'_> {
    /// Returns an error for a certificate without its key, or a key without its certificate.
    pub(super) fn half_a_client(&self) -> Option<InvalidSetting> {
        let (variable, takes) = match (self.certificate, self.key) {
            ((variable, ""), (_, key)) if !key.is_empty() => {
                (variable, "the file with the certificate of the client's key, which is set")
            }
            ((_, certificate), (variable, "")) if !certificate.is_empty() => {
                (variable, "the file with the key of the client's certificate, which is set")
            }
            _ => return None,
        };
        Some(InvalidSetting::Value { variable, found: String::new(), takes })
    }

    /// Returns the files.
    pub(super) fn files(&self, any_hostname: bool) -> TlsFiles {
        let named =
            |(variable, text): Variable<'_>, most| (!text.is_empty()).then(|| Named::new(variable, text.into(), most));
        let certificate = named(self.certificate, MAX_CERTIFICATES);
        TlsFiles {
            authorities: named(self.authorities, MAX_CERTIFICATES),
            client: certificate.zip(named(self.key, MAX_SECRET)),
            any_hostname,
        }
    }
}
