//! The certificate authorities of the system.

use std::path::PathBuf;

use super::environment;
use crate::file::{MAX_CERTIFICATES, Named};

/// Checks the file that `SSL_CERT_FILE` names in place of the system's authorities: the TLS libraries read it without a
/// size limit.
///
/// # Errors
/// If it is not a regular file, is too large, or is not readable.
pub(super) fn system_authorities() -> anyhow::Result<()> {
    let Some(path) = environment("SSL_CERT_FILE").filter(|path| !path.is_empty()) else { return Ok(()) };
    let file = Named::new("SSL_CERT_FILE", PathBuf::from(path), MAX_CERTIFICATES);
    Ok(file.read("certificates as PEM", |_| Some(()))?)
}
