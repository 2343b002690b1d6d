//! Connections to debug listeners: in plaintext, or over TLS with a token.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use axum::body::{Body, to_bytes};
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use clap::{Arg, ArgMatches, value_parser};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{CertificateError, ClientConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{CUT, MOST, printable};
use crate::app;
use crate::dial::tls::{Tls, TlsFiles};
use crate::dial::{self, TcpTimeouts};
use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};

/// Variable with the secret of a token.
const VARIABLE: &str = "TIDEGATE_TOKEN";
/// Beginning of the name of an instance over TLS.
const OVER_TLS: &str = "https://";
/// Times after which a silent instance is given up while its decisions are followed: a probe each 10 s, and 20 s without an
/// acknowledgement. Answers that end are waited for as long as the command says.
const TIMEOUTS: TcpTimeouts =
    TcpTimeouts { keepalive: Duration::from_secs(10), unacknowledged: Duration::from_secs(20) };
/// Error if nothing accepts the connection, or speaks HTTP.
const NO_LISTENER: &str = "no debug listener answers there";

/// Name of an instance on the command line: `HOST:PORT` or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Instance {
    /// Host and port.
    pub(super) authority: String,
    is_tls: bool,
}

/// Error of an instance that answers with an error.
#[derive(Debug, Error)]
#[error("it answered {status}: {text:.1000}{advice}")]
struct Declined {
    status: StatusCode,
    text: String,
    advice: &'static str,
}

/// Returns true if the instance would answer the same request with the same error again, such as for a token that was removed.
pub(in crate::cli) fn is_declined(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(|declined: &Declined| declined.status.is_client_error())
}

/// Access to instances: the token, and the TLS settings.
#[derive(Debug)]
pub(in crate::cli) struct Client {
    /// Value of the Authorization header.
    token: Option<HeaderValue>,
    /// `None` if no instance is named over TLS.
    tls: Option<ClientConfig>,
}

impl Instance {
    /// Parses a name.
    ///
    /// # Errors
    /// If it has no host or no port.
    pub(in crate::cli) fn parse(name: &str) -> anyhow::Result<Self> {
        let (is_tls, authority) = match name.strip_prefix(OVER_TLS) {
            Some(rest) => (true, rest),
            None => (false, name.strip_prefix("http://").unwrap_or(name)),
        };
        let authority = authority.trim_end_matches('/');
        let is_authority =
            authority.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        ensure!(
            is_authority && !authority.contains('/'),
            "'{name}' is not the address of a debug listener: write HOST:PORT, or https://HOST:PORT"
        );
        Ok(Self { authority: authority.to_owned(), is_tls })
    }

    /// Returns the host without brackets: the name that the certificate must have.
    fn host(&self) -> &str {
        let host = self.authority.rsplit_once(':').map_or(&*self.authority, |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// Returns the arguments for the token and for TLS.
pub(super) fn arguments() -> [Arg; 2] {
    let file = |name: &'static str| Arg::new(name).long(name).value_name("FILE").value_parser(value_parser!(PathBuf));
    [
        file("token-file").help("File with the secret of a token of ADMIN_TOKEN_FILE, for instances over https:// [env: TIDEGATE_TOKEN, the secret itself]"),
        file("ca").help("Trust the CA certificates in this PEM file only, for instances over https:// [default: the system's CAs]"),
    ]
}

impl Client {
    /// Returns the client of a command, which has `names` of instances.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub(super) fn of<'n>(matches: &ArgMatches, mut names: impl Iterator<Item = &'n String>) -> anyhow::Result<Self> {
        let is_tls = names.any(|name| name.starts_with(OVER_TLS));
        ensure!(
            is_tls || !matches.contains_id("ca"),
            "--ca is for instances over TLS: write --instance https://HOST:PORT"
        );
        Ok(Self { token: token(matches)?, tls: is_tls.then(|| tls(matches)).transpose()? })
    }

    /// Sends a request to an `address` of `instance`. Returns the body of the answer.
    ///
    /// # Errors
    /// If nobody answers, or with an error, whose text is then told.
    pub(in crate::cli) async fn open(
        &self,
        instance: &Instance,
        address: SocketAddr,
        path: &str,
    ) -> anyhow::Result<Body> {
        let (ip, port) = (address.ip().to_string(), address.port());
        let response = match self.tls.as_ref().filter(|_| instance.is_tls) {
            Some(config) => {
                let request = request(self.token.as_ref(), &instance.authority, path)?;
                let stream = dial::tls(&ip, port, TIMEOUTS, config.clone(), instance.host()).await;
                exchange(stream.map_err(|error| anyhow!("{NO_LISTENER}: {error}{}", advice(&error)))?, request).await?
            }
            None => {
                ensure!(
                    self.token.is_none() || address.ip().is_loopback(),
                    "a token is sent over TLS only: write {OVER_TLS}{}",
                    instance.authority
                );
                // The address and not the name: the listener refuses other names. On this machine it needs no token, and the port may be somebody else's.
                let request = request(None, &address.to_string(), path)?;
                let stream = dial::tcp(&ip, port, TIMEOUTS).await.context(NO_LISTENER)?;
                exchange(stream, request).await?
            }
        };
        let (status, body) = (response.status(), Body::new(response.into_body()));
        if status.is_success() {
            return Ok(body);
        }
        let text = to_bytes(body, MOST).await.context(CUT)?;
        let advice = match (status, &self.token) {
            (StatusCode::UNAUTHORIZED, None) => "; set --token-file, or the variable TIDEGATE_TOKEN",
            _ => "",
        };
        bail!(Declined { status, text: printable(String::from_utf8_lossy(&text).trim()), advice })
    }
}

fn request(token: Option<&HeaderValue>, host: &str, path: &str) -> anyhow::Result<Request<Body>> {
    let mut request = Request::get(path).header(header::HOST, host);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, token);
    }
    Ok(request.body(Body::empty())?)
}

/// Sends `request` over a new connection, which lives as long as the body of the answer.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Body>,
) -> anyhow::Result<Response<Incoming>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context(NO_LISTENER)?;
    tokio::spawn(connection);
    sender
        .send_request(request)
        .await
        .context("no debug listener answers there; if it speaks TLS, write https://HOST:PORT")
}

/// Returns the value of the Authorization header, of the file or of the variable.
fn token(matches: &ArgMatches) -> anyhow::Result<Option<HeaderValue>> {
    let expected = "the secret of a token alone, on one line, as it stands behind NAME:RIGHT: in ADMIN_TOKEN_FILE";
    if let Some(path) = matches.get_one::<PathBuf>("token-file") {
        let file = Named::new("--token-file", path.clone(), MAX_SECRET);
        return Ok(Some(file.read(expected, |bytes| bearer(std::str::from_utf8(bytes).ok()?))?));
    }
    let Some(secret) = app::environment(VARIABLE).filter(|secret| !secret.is_empty()) else { return Ok(None) };
    Ok(Some(bearer(&secret).with_context(|| format!("{VARIABLE}: expected {expected}"))?))
}

fn bearer(secret: &str) -> Option<HeaderValue> {
    let secret = secret.trim();
    let is_secret = |c: char| c.is_ascii_alphanumeric() || "+/-_=".contains(c);
    if secret.is_empty() || !secret.chars().all(is_secret) {
        return None;
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {secret}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn tls(matches: &ArgMatches) -> anyhow::Result<ClientConfig> {
    let authorities = matches.get_one::<PathBuf>("ca").map(|path| Named::new("--ca", path.clone(), MAX_CERTIFICATES));
    let files = TlsFiles { authorities, client: None, any_hostname: false };
    Tls::of_files(files)?.config().context("--ca cannot be used")
}

/// Returns what to do about an error of TLS.
fn advice(error: &std::io::Error) -> &'static str {
    match error.get_ref().and_then(|error| error.downcast_ref()) {
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "; set --ca to the CA that issued its certificate"
        }
        Some(rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => "; write its name as in its certificate",
        Some(rustls::Error::InvalidMessage(_)) => "; if it speaks plaintext, write HOST:PORT without https://",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_has_a_host_and_a_port_and_may_be_over_tls() {
        let parsed =
            |name: &str| Instance::parse(name).map(|found| (found.is_tls, found.host().to_owned(), found.authority));
        let expected = |is_tls, host: &str, authority: &str| (is_tls, host.to_owned(), authority.to_owned());
        assert_eq!(parsed("a.b:6070").unwrap(), expected(false, "a.b", "a.b:6070"));
        assert_eq!(parsed("http://a.b:6070").unwrap(), expected(false, "a.b", "a.b:6070"));
        assert_eq!(parsed("https://a.b:6070/").unwrap(), expected(true, "a.b", "a.b:6070"));
        assert_eq!(parsed("https://[::1]:6070").unwrap(), expected(true, "::1", "[::1]:6070"));
        for name in ["a.b", "https://a.b", ":6070", "a.b:x", "https://a.b:6070/v1", "ftp://a.b:6070", ""] {
            assert!(Instance::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_secret_stands_alone_and_is_not_shown() {
        assert_eq!(bearer("q83vEjRW+/-_=\n").unwrap(), "Bearer q83vEjRW+/-_=");
        assert!(!format!("{:?}", bearer("q83vEjRW").unwrap()).contains("q83v"));
        for text in ["", " \n", "ann:read:q83v", "one\ntwo", "a b"] {
            assert_eq!(bearer(text), None, "{text:?}");
        }
    }
}
