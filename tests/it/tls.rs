//! TLS on the gRPC listener: who is let in, certificates that change under load, and peers that begin handshakes only.

use std::any::Any;
use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, KeyPair};
use tempfile::{NamedTempFile, TempDir};

use crate::redis::certificates::{Authority, Issued};
use crate::support::{Tidegate, eventually, repository, rule_file};

pub mod client;
mod clients;
mod flood;
mod gateway;
mod handshakes;
mod many;
mod others;
mod rights;
mod rotation;
mod start;

/// A server with certificates of its own, in a directory of its own.
pub struct Secured {
    pub tidegate: Tidegate,
    /// The authority of the server's certificate, and of its clients' if they need one.
    pub authority: Authority,
    /// The files of the server: `tls.crt`, `tls.key`, `ca.crt`.
    pub directory: TempDir,
    _rules: Box<dyn Any + Send + Sync>,
}

/// Clients need a certificate of the authority.
pub const MUTUAL: (&str, &str) = ("GRPC_CLIENT_TLS_CACERT", "ca.crt");

impl Secured {
    /// Starts a server with these variables. Values that name a file of its directory become paths.
    pub async fn start(variables: &[(&str, &str)]) -> Self {
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        Self::start_as(authority, &own, variables).await
    }

    /// The same with these rules.
    pub async fn start_with(rules: &str, variables: &[(&str, &str)]) -> Self {
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        Self::start_of(rule_file(rules), authority, &own, variables).await
    }

    /// The same with this certificate and key.
    pub async fn start_as(authority: Authority, own: &Issued, variables: &[(&str, &str)]) -> Self {
        Self::start_of(rules(), authority, own, variables).await
    }

    /// The same with the rules in this file or directory.
    pub async fn start_of(
        rules: impl AsRef<Path> + Send + Sync + 'static,
        authority: Authority,
        own: &Issued,
        variables: &[(&str, &str)],
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let file = |name: &str| directory.path().join(name);
        fs::copy(&own.certificate, file("tls.crt")).expect("it is copied");
        fs::copy(&own.key, file("tls.key")).expect("it is copied");
        fs::copy(authority.certificate(), file("ca.crt")).expect("it is copied");
        let given = variables_of(&directory, variables);
        let given: Vec<_> = given.iter().map(|(name, value)| (&**name, &**value)).collect();
        let tidegate = Tidegate::start(rules.as_ref(), &given).await;
        Self { tidegate, authority, directory, _rules: Box::new(rules) }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A client that trusts the server and has no certificate.
    pub fn client(&self) -> client::Client {
        client::Client::of(&self.authority)
    }

    /// Waits until the log has this text.
    pub async fn logs(&self, text: &str) {
        eventually(text, async || self.tidegate.log().contains(text).then_some(())).await;
    }

    /// The value of a series on the page of metrics.
    pub async fn metric(&self, series: &str) -> u64 {
        self.tidegate.metric(series).await
    }

    /// Waits until so many handshakes had this outcome.
    pub async fn counts(&self, outcome: &str, handshakes: u64) {
        let series = format!("tidegate_tls_handshakes_total{{outcome=\"{outcome}\"}}");
        eventually("they are counted", async || (self.metric(&series).await == handshakes).then_some(())).await;
    }
}

/// Rules that admit everything.
pub fn rules() -> NamedTempFile {
    rule_file(
        "domain: edge\ndescriptors:\n  - key: user\n    rate_limit: { unit: week, requests_per_unit: 4000000000 }\n",
    )
}

/// A certificate for the key in the file `key` of `tests/golden/keys`, whose own file is a copy of `file` there.
pub fn of_file(
    authority: &Authority,
    key: &str,
    file: &str,
    name: &str,
    change: impl FnOnce(&mut CertificateParams),
) -> Issued {
    let read = |name: &str| fs::read_to_string(repository("tests/golden/keys").join(name)).expect("it reads");
    let pair = KeyPair::from_pem(&read(key)).expect("a key");
    authority.issue_for(&pair, &read(file), name, change)
}

/// The variables of a server with its files in `directory`, and these.
pub fn variables_of(directory: &TempDir, more: &[(&str, &str)]) -> Vec<(String, String)> {
    let own =
        [("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", "tls.crt"), ("GRPC_SERVER_TLS_KEY", "tls.key")];
    let value = |text: &str| match text {
        "tls.crt" | "tls.key" | "ca.crt" => directory.path().join(text).display().to_string(),
        text => text.to_owned(),
    };
    own.iter().chain(more).map(|(name, text)| ((*name).to_owned(), value(text))).collect()
}
