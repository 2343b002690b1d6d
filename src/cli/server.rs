//! Connection of `tidegate call` and `tidegate bench` to a server: TCP, TLS or a Unix socket.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::iter;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use rustls::{AlertDescription, CertificateError, ClientConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::dial::grpc::{GrpcServer, over_socket, with_causes};
use crate::dial::tls::{Tls, TlsFiles};
use crate::dial::{self, TcpTimeouts};
use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};
use crate::model::Micros;

/// Beginning of the address of a Unix socket.
const UNIX: &str = "unix:";

/// Connection to a server.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Place of a server.
enum Place {
    Socket(PathBuf),
    Tcp { host: String, port: u16 },
}

/// Returns the argument for the address of the server.
pub(super) fn address() -> Arg {
    Arg::new("address")
        .long("address")
        .default_value("127.0.0.1:8081")
        .help("Host and gRPC port of a ShouldRateLimit server, or unix:PATH")
}

/// Returns the argument for a duration above 0.
pub(super) fn duration(name: &'static str, default: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("DURATION").default_value(default).value_parser(|text: &str| {
        let duration = Micros::parse(text).filter(|duration| *duration > Micros::ZERO);
        duration.ok_or("write a duration above 0, such as 250ms")
    })
}

/// Returns the arguments about TLS. Each of them means TLS.
pub(super) fn arguments() -> [Arg; 5] {
    let file = |name: &'static str| Arg::new(name).long(name).value_name("FILE").value_parser(value_parser!(PathBuf));
    [
        Arg::new("tls").long("tls").action(ArgAction::SetTrue).help("Connect over TLS, and trust the system's CAs"),
        file("ca").help("Connect over TLS, and trust the CA certificates in this PEM file only"),
        file("cert").requires("key").help("Connect over TLS with the client certificate in this PEM file"),
        file("key").requires("cert").help("Private key of --cert, a PEM file"),
        Arg::new("server-name")
            .long("server-name")
            .value_name("NAME")
            .help("Connect over TLS to a server whose certificate is for this name [default: the host of --address; required for unix:PATH]"),
    ]
}

/// Connects to the server at `address` within `timeout`, which also applies to each call.
///
/// # Errors
/// If the address is none, a file cannot be used, or no server accepts the connection.
pub(super) async fn connect(address: &str, matches: &ArgMatches, timeout: Duration) -> anyhow::Result<Channel> {
    let with = |endpoint: Endpoint| endpoint.connect_timeout(timeout).timeout(timeout);
    let connected = match place(address)? {
        Place::Socket(path) => match tls(matches, None)? {
            None => with(Endpoint::from_shared(address.to_owned())?).connect().await,
            Some((config, name)) => over_socket(path, config, name, with).await,
        },
        Place::Tcp { host, port } => {
            let tls = tls(matches, Some(&host))?;
            let timeouts = TcpTimeouts { keepalive: timeout, unacknowledged: timeout };
            GrpcServer { host, port, tls, timeouts }.connect(with).await
        }
    };
    connected.map_err(|error| not_connected(address, &error, matches))
}

/// Opens a connection to the server at `address` within `timeout`, for the protocol `alpn` (`h2` or `http/1.1`). Returns it and its origin, as
/// in a URL.
///
/// # Errors
/// As [`connect`].
pub(super) async fn stream(
    address: &str,
    matches: &ArgMatches,
    timeout: Duration,
    alpn: &[u8],
) -> anyhow::Result<(Box<dyn Stream>, String)> {
    let place = place(address)?;
    let host = match &place {
        Place::Socket(_) => None,
        Place::Tcp { host, .. } => Some(&**host),
    };
    let tls = tls(matches, host)?.map(|(mut config, name)| {
        config.alpn_protocols = vec![alpn.to_vec()];
        (config, name)
    });
    let scheme = if tls.is_some() { "https" } else { "http" };
    let opened = tokio::time::timeout(timeout, open(&place, tls, timeout)).await;
    let opened = opened.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
    let stream = opened.map_err(|error| not_connected(address, &error, matches))?;
    let authority = match &place {
        // A socket has no host.
        Place::Socket(_) => "localhost".to_owned(),
        Place::Tcp { host, port } => dial::authority(host, *port),
    };
    Ok((stream, format!("{scheme}://{authority}")))
}

async fn open(place: &Place, tls: Option<(ClientConfig, String)>, timeout: Duration) -> io::Result<Box<dyn Stream>> {
    let timeouts = TcpTimeouts { keepalive: timeout, unacknowledged: timeout };
    Ok(match (place, tls) {
        (Place::Socket(path), None) => Box::new(UnixStream::connect(path).await?),
        (Place::Socket(path), Some((config, name))) => Box::new(dial::socket_tls(path, config, &name).await?),
        (Place::Tcp { host, port }, None) => Box::new(dial::tcp(host, *port, timeouts).await?),
        (Place::Tcp { host, port }, Some((config, name))) => {
            Box::new(dial::tls(host, *port, timeouts, config, &name).await?)
        }
    })
}

/// Parses an address.
fn place(address: &str) -> anyhow::Result<Place> {
    if let Some(path) = address.strip_prefix(UNIX) {
        ensure!(!path.is_empty(), "'{address}' has no path: write unix:PATH");
        return Ok(Place::Socket(path.into()));
    }
    for (scheme, advice) in [("http://", ""), ("https://", ", and set --tls or --ca for TLS")] {
        ensure!(!address.starts_with(scheme), "'{address}' has a scheme: write HOST:PORT, without {scheme}{advice}");
    }
    let (host, port) = address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host, port.parse().ok()?)))
        .with_context(not_an_address(address))?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    ensure!(!host.is_empty(), not_an_address(address)());
    Ok(Place::Tcp { host, port })
}

/// Returns the error of a connection that no server accepts.
fn not_connected(address: &str, error: &(dyn Error + 'static), matches: &ArgMatches) -> anyhow::Error {
    let how = if is_tls(matches) { " over TLS" } else { "" };
    anyhow::anyhow!(
        "no ShouldRateLimit server answers at {address}{how}: {}{}",
        with_causes(error),
        advice(address, error, matches).unwrap_or("; start one with `tidegate serve`, or set --address HOST:PORT")
    )
}

/// Returns the TLS settings, and the name that the certificate of the server must have; `None` for plaintext. Without `--server-name`
/// it is `host`, which a Unix socket does not have.
fn tls(matches: &ArgMatches, host: Option<&str>) -> anyhow::Result<Option<(ClientConfig, String)>> {
    if !is_tls(matches) {
        return Ok(None);
    }
    let name = matches.get_one::<String>("server-name").map(String::as_str).or(host);
    let name = name.context("a Unix socket has no host: set --server-name to a name of the server's certificate")?;
    let files = TlsFiles {
        authorities: named(matches, "--ca", MAX_CERTIFICATES),
        client: named(matches, "--cert", MAX_CERTIFICATES).zip(named(matches, "--key", MAX_SECRET)),
        any_hostname: false,
    };
    let config = Tls::of_files(files)?.config().context("--ca, --cert and --key cannot be used together")?;
    Ok(Some((config, name.to_owned())))
}

/// Returns the text for a call that failed: the answer of the server, or the reason why there is none.
pub(super) fn failed(address: &str, status: &Status, matches: &ArgMatches) -> String {
    match status.source() {
        None => format!("{address} answered with the error {:?}: {}", status.code(), status.message()),
        Some(error) => unanswered(address, error, matches),
    }
}

/// Returns the text for a connection on which the server did not answer.
pub(super) fn unanswered(address: &str, error: &(dyn Error + 'static), matches: &ArgMatches) -> String {
    // With TLS 1.3 the server refuses a client after the handshake, and the error has no more than its text.
    let advice = advice(address, error, matches).unwrap_or(match (is_tls(matches), matches.contains_id("cert")) {
        (true, true) => "; the server may refuse the certificate in --cert: its log says why (tls.refused)",
        (true, false) => "; if the server asks for a client certificate, set --cert and --key",
        (false, _) if address.starts_with(UNIX) => {
            "; if it speaks TLS, set --tls or --ca, and --server-name to a name of its certificate"
        }
        (false, _) => "; if it speaks TLS, set --tls or --ca, and if this is its HTTP port, set that of gRPC",
    });
    format!("{address} did not answer: {}{advice}", with_causes(error))
}

/// Returns what to do about `error`, if its causes say it.
fn advice(address: &str, error: &(dyn Error + 'static), matches: &ArgMatches) -> Option<&'static str> {
    let has_certificate = matches.contains_id("cert");
    iter::successors(Some(error), |error| cause(*error)).find_map(|error| {
        match (error.downcast_ref(), error.downcast_ref::<io::Error>()) {
            (Some(error), _) => of_tls(error, has_certificate),
            (None, Some(error)) => of_system(address, error.kind()),
            (None, None) => None,
        }
    })
}

/// Returns the cause of an error. An error within an [`io::Error`] is one too.
fn cause<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(within) => Some(within),
        None => error.source(),
    }
}

fn of_tls(error: &rustls::Error, has_certificate: bool) -> Option<&'static str> {
    Some(match error {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "; set --ca to the CA that issued the certificate of the server"
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; set --server-name to a name of the certificate, or --address to another host",
        rustls::Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "; renew the certificate of the server"
        }
        rustls::Error::InvalidMessage(_) => {
            "; it does not speak TLS there: leave out --tls, --ca, --cert and --server-name, or set the port of gRPC"
        }
        rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
            "; it does not speak gRPC there: set --address to the gRPC port"
        }
        rustls::Error::AlertReceived(AlertDescription::UnknownCA) => {
            "; --cert is not of a CA that the server accepts for clients (GRPC_CLIENT_TLS_CACERT)"
        }
        rustls::Error::AlertReceived(_) if has_certificate => {
            "; the server refuses the certificate in --cert: its log line tls.refused says why"
        }
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => "; set --cert and --key",
        _ => return None,
    })
}

fn of_system(address: &str, kind: ErrorKind) -> Option<&'static str> {
    match (address.starts_with(UNIX), kind) {
        (true, ErrorKind::PermissionDenied) => {
            Some("; the user of this command may not write to the socket: GRPC_UDS_MODE of the server says who may")
        }
        (true, ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            Some("; no server serves this socket: start one with GRPC_UDS set to the path")
        }
        _ => None,
    }
}

fn is_tls(matches: &ArgMatches) -> bool {
    matches.get_flag("tls") || ["ca", "cert", "server-name"].into_iter().any(|name| matches.contains_id(name))
}

fn not_an_address(address: &str) -> impl Fn() -> String {
    move || format!("'{address}' is not an address: write HOST:PORT or unix:PATH")
}

/// Returns the file that `argument` names.
fn named(matches: &ArgMatches, argument: &'static str, most: usize) -> Option<Named> {
    let path = matches.get_one::<PathBuf>(argument.trim_start_matches('-'))?;
    Some(Named::new(argument, path.clone(), most))
}
