//! Connections to a receiver of OTLP: gRPC or HTTP, in plaintext or over TLS.

use std::time::Duration;

use anyhow::Context;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_http::hyper::HyperClient;
use rustls::{ClientConfig, RootCertStore};
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

use super::authorities::system_authorities;
use crate::dial::TcpTimeouts;
use crate::dial::grpc::GrpcServer;
use crate::dial::tls::{Tls, TlsFiles};

/// Port of an https URL without one.
const HTTPS: u16 = 443;
/// Times after which a silent receiver is given up, as for a control plane.
const TIMEOUTS: TcpTimeouts =
    TcpTimeouts { keepalive: Duration::from_secs(20), unacknowledged: Duration::from_secs(60) };

/// Returns a channel to `endpoint` that connects at its first call, within `timeout`. `tls` are the files for an https URL, read here.
///
/// # Errors
/// If the URL is invalid, or a file cannot be used; the message names the variable of that file.
pub(super) fn channel(endpoint: &str, timeout: Duration, tls: Option<&TlsFiles>) -> anyhow::Result<Channel> {
    let Some(files) = tls else {
        return Ok(Endpoint::from_shared(endpoint.to_owned())?.connect_timeout(timeout).connect_lazy());
    };
    let url: Uri = endpoint.parse()?;
    let host = url.host().context("the URL has no host")?.trim_matches(['[', ']']).to_owned();
    let tls = Some((config(files)?, host.clone()));
    let server = GrpcServer { host, port: url.port_u16().unwrap_or(HTTPS), tls, timeouts: TIMEOUTS };
    Ok(server.lazy(|endpoint| endpoint.connect_timeout(timeout))?)
}

/// Returns a client for requests over HTTP, each within `timeout`. `tls` are the files for an https URL, read here.
///
/// # Errors
/// If a file cannot be used; the message names its variable.
pub(super) fn http(
    timeout: Duration,
    tls: Option<&TlsFiles>,
) -> anyhow::Result<HyperClient<HttpsConnector<HttpConnector>>> {
    let builder = HttpsConnectorBuilder::new();
    let connector = match tls {
        Some(files) => builder.with_tls_config(config(files)?).https_only().enable_http1().build(),
        None => builder.with_tls_config(without_authorities()?).https_or_http().enable_http1().build(),
    };
    Ok(HyperClient::new(connector, timeout, None))
}

/// Returns the TLS settings that `files` give.
fn config(files: &TlsFiles) -> anyhow::Result<ClientConfig> {
    if files.authorities.is_none() {
        system_authorities()?;
    }
    let config = Tls::of_files(files.clone())?.config();
    config.map_err(|error| match (&files.client, &files.authorities) {
        (Some((_, key)), _) => key.unusable(format!("with the certificate beside it: {error}")).into(),
        (None, Some(authorities)) => authorities.unusable(error.to_string()).into(),
        (None, None) => error.into(),
    })
}

/// Returns TLS settings that trust nobody, for a URL in plaintext.
fn without_authorities() -> anyhow::Result<ClientConfig> {
    let provider = rustls::crypto::ring::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into()).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}
