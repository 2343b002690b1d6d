//! One connection to the server of a load, and a call on it.
//!
//! HTTP/2 without tonic: like Envoy, it sends headers and message of a call together, and no headers but the necessary ones. tonic's client
//! sends them in two writes, which the server reads in two parts.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::anyhow;
use bytes::Bytes;
use clap::ArgMatches;
use h2::client::{Builder, SendRequest};
use http::{HeaderMap, HeaderValue, header};
use prost::Message;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tonic::Code;

use super::results::Ended;
use crate::cli::server::{self, Stream};
use crate::proto::EXPLAIN;
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;

/// Method that is called.
const METHOD: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Least timeout of connecting: 5 s. That of a call may be much shorter.
pub(super) const CONNECTING: Duration = Duration::from_secs(5);
/// Flow-control windows for answers, 1 MiB for a call and 16 MiB for a connection: above what the calls in flight can fill, so that no answer
/// waits for the window.
const CALL_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 1 << 24;
/// Largest answer: 4 MiB, the default of gRPC clients.
pub(super) const LARGEST_ANSWER: usize = 4 << 20;
/// Bytes in front of a message of gRPC: its compression flag and its length.
const PREFIX_BYTES: usize = 5;

/// Connection to the server at `address`, which is opened again after it was lost.
pub(super) struct Client<'l> {
    address: &'l str,
    matches: &'l ArgMatches,
    timeout: Duration,
    sender: RefCell<SendRequest<Bytes>>,
    /// Held while the connection is opened again.
    reopening: Mutex<()>,
    head: http::Request<()>,
}

/// Properties that all calls share.
#[derive(Clone, Copy)]
pub(super) struct Calls {
    /// Longest wait for an answer.
    pub(super) timeout: Duration,
    /// True if the timeout is sent to the server.
    pub(super) has_deadline: bool,
    /// True if the server is asked what decided each call.
    pub(super) explains: bool,
}

impl<'l> Client<'l> {
    /// Connects to the server at `address`.
    ///
    /// # Errors
    /// If no server of HTTP/2 is there.
    pub(super) async fn connect(address: &'l str, matches: &'l ArgMatches, calls: Calls) -> anyhow::Result<Self> {
        let (sender, origin) = open(address, matches, calls.timeout).await?;
        let mut head = http::Request::post(format!("{origin}/{METHOD}")).body(())?;
        let headers = head.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        if calls.has_deadline {
            // gRPC allows eight digits, which the longest timeout has.
            headers.insert("grpc-timeout", HeaderValue::try_from(format!("{}u", calls.timeout.as_micros()))?);
        }
        if calls.explains {
            headers.insert(EXPLAIN, HeaderValue::from_static("1"));
        }
        let (sender, reopening) = (RefCell::new(sender), Mutex::new(()));
        Ok(Self { address, matches, timeout: calls.timeout, sender, reopening, head })
    }

    /// Sends a message and returns the end of the call.
    ///
    /// # Errors
    /// If the connection or the call was reset.
    pub(super) async fn answer(&self, message: Bytes) -> anyhow::Result<Ended> {
        let (response, mut sending) = self.sender().await?.send_request(self.head.clone(), false)?;
        sending.send_data(message, true)?;
        let (head, mut body) = response.await?.into_parts();
        let mut received = Bytes::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            body.flow_control().release_capacity(chunk.len())?;
            received = if received.is_empty() { chunk } else { [received, chunk].concat().into() };
            if received.len() > LARGEST_ANSWER {
                return Ok(Ended::Failed(Code::OutOfRange));
            }
        }
        let trailers = body.trailers().await?;
        let status = trailers.as_ref().and_then(code).or_else(|| code(&head.headers)).unwrap_or(Code::Unknown);
        if status != Code::Ok {
            return Ok(Ended::Failed(status));
        }
        let answer = received.get(PREFIX_BYTES..).and_then(|message| RateLimitResponse::decode(message).ok());
        Ok(answer.map_or(Ended::Failed(Code::Internal), Ended::Answered))
    }

    /// Returns a handle that takes a call.
    async fn sender(&self) -> anyhow::Result<SendRequest<Bytes>> {
        if let Ok(sender) = self.present().await {
            return Ok(sender);
        }
        let _first = self.reopening.lock().await;
        if let Ok(sender) = self.present().await {
            return Ok(sender);
        }
        let (sender, _) = open(self.address, self.matches, self.timeout).await?;
        self.sender.replace(sender.clone());
        Ok(sender.ready().await?)
    }

    async fn present(&self) -> Result<SendRequest<Bytes>, h2::Error> {
        let sender = self.sender.borrow().clone();
        sender.ready().await
    }
}

/// Opens a connection and waits until the server has answered on it. Returns its handle and its origin, as in a URL.
async fn open(
    address: &str,
    matches: &ArgMatches,
    call_timeout: Duration,
) -> anyhow::Result<(SendRequest<Bytes>, String)> {
    let connecting = call_timeout.max(CONNECTING);
    let (stream, origin) = server::stream(address, matches, connecting, b"h2").await?;
    match timeout(connecting, handshake(stream)).await {
        Ok(Ok(sender)) => Ok((sender, origin)),
        Ok(Err(error)) => Err(anyhow!(server::unanswered(address, &error, matches))),
        Err(elapsed) => Err(anyhow!(server::unanswered(address, &elapsed, matches))),
    }
}

async fn handshake(stream: Box<dyn Stream>) -> Result<SendRequest<Bytes>, h2::Error> {
    let mut builder = Builder::new();
    builder.initial_window_size(CALL_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    let (sender, mut connection) = builder.handshake(stream).await?;
    let pings = connection.ping_pong();
    // Its calls report the end of the connection.
    tokio::spawn(async { drop(connection.await) });
    if let Some(mut pings) = pings {
        pings.ping(h2::Ping::opaque()).await?;
    }
    Ok(sender)
}

/// Returns the status in headers or trailers.
fn code(headers: &HeaderMap) -> Option<Code> {
    headers.get("grpc-status").map(|status| Code::from_bytes(status.as_bytes()))
}
