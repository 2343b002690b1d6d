//! HTTP/1.1 connections to `/check/DOMAIN` of the server of a load. Each has one call at a time.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Context, anyhow};
use axum::body::{Body, to_bytes};
use bytes::Bytes;
use clap::ArgMatches;
use http::{HeaderValue, Request, StatusCode, header};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tonic::Code;

use super::client::{CONNECTING, LARGEST_ANSWER};
use super::results::Ended;
use crate::cli::server;
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

/// Beginning of the text of an answer that no limit decided.
const UNDECIDED: &[u8] = b"The request was not decided";

/// Connections to the server at `address`, of which there are as many as calls in flight.
pub(super) struct HttpClient<'l> {
    address: &'l str,
    matches: &'l ArgMatches,
    timeout: Duration,
    head: http::request::Parts,
    /// Connections without a call.
    idle: RefCell<Vec<SendRequest<Body>>>,
}

impl<'l> HttpClient<'l> {
    /// Connects to the server at `address`, whose calls are about `domain`.
    ///
    /// # Errors
    /// If no server accepts a connection there, or the domain cannot be part of a URL.
    pub(super) async fn connect(
        address: &'l str,
        matches: &'l ArgMatches,
        timeout: Duration,
        domain: &str,
    ) -> anyhow::Result<Self> {
        let (sender, origin) = open(address, matches, timeout).await?;
        let host = origin.split_once("://").map_or(origin.as_str(), |(_, host)| host);
        let request = Request::post(format!("/check/{domain}"))
            .header(header::HOST, HeaderValue::try_from(host)?)
            .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(())
            .with_context(|| format!("--domain {domain}: it cannot be part of the path /check/DOMAIN"))?;
        let (head, ()) = request.into_parts();
        Ok(Self { address, matches, timeout, head, idle: RefCell::new(vec![sender]) })
    }

    /// Sends a body and returns the end of the call.
    ///
    /// # Errors
    /// If the connection ended before the answer.
    pub(super) async fn answer(&self, body: Bytes) -> anyhow::Result<Ended> {
        let mut sender = self.sender().await?;
        let request = Request::from_parts(self.head.clone(), Body::from(body));
        let (head, body) = sender.send_request(request).await?.into_parts();
        let text = to_bytes(Body::new(body), LARGEST_ANSWER).await?;
        self.idle.borrow_mut().push(sender);
        Ok(ended(head.status, &text))
    }

    /// Returns a connection without a call.
    async fn sender(&self) -> anyhow::Result<SendRequest<Body>> {
        loop {
            let Some(mut sender) = self.idle.borrow_mut().pop() else { break };
            if sender.ready().await.is_ok() {
                return Ok(sender);
            }
        }
        Ok(open(self.address, self.matches, self.timeout).await?.0)
    }
}

/// Opens a connection. Returns its handle and its origin, as in a URL.
async fn open(
    address: &str,
    matches: &ArgMatches,
    call_timeout: Duration,
) -> anyhow::Result<(SendRequest<Body>, String)> {
    let connecting = call_timeout.max(CONNECTING);
    let (stream, origin) = server::stream(address, matches, connecting, b"http/1.1").await?;
    let opened = timeout(connecting, handshake(TokioIo::new(stream))).await;
    let (sender, connection) = opened.map_err(|elapsed| anyhow!(server::unanswered(address, &elapsed, matches)))??;
    // Its calls report the end of the connection.
    tokio::spawn(async { drop(connection.await) });
    Ok((sender, origin))
}

/// Returns the end of a call with this answer. A refusal has the status of the rule file (`refusal_status`), which other answers may have
/// too; these say that nothing was decided.
fn ended(status: StatusCode, text: &[u8]) -> Ended {
    let answered = |outcome| {
        Ended::Answered(RateLimitResponse { overall_code: i32::from(outcome), ..RateLimitResponse::default() })
    };
    match status {
        StatusCode::SERVICE_UNAVAILABLE => Ended::Failed(Code::Unavailable),
        StatusCode::NOT_FOUND => Ended::Failed(Code::NotFound),
        StatusCode::FORBIDDEN if text.starts_with(UNDECIDED) => Ended::Failed(Code::PermissionDenied),
        status if text.starts_with(UNDECIDED) && !status.is_success() => Ended::Failed(Code::InvalidArgument),
        status if status.is_success() => answered(Outcome::Ok),
        status if status.is_client_error() => answered(Outcome::OverLimit),
        _ => Ended::Failed(Code::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_decision_unless_it_says_that_nothing_was_decided() {
        let of = |status: u16, text: &str| match ended(StatusCode::from_u16(status).expect("a status"), text.as_bytes())
        {
            Ended::Answered(answer) => Ok(answer.overall_code()),
            Ended::Failed(code) => Err(code),
            Ended::TimedOut | Ended::Disconnected => Err(Code::Cancelled),
        };
        assert_eq!((of(200, ""), of(204, "")), (Ok(Outcome::Ok), Ok(Outcome::Ok)));
        for status in [401, 403, 429] {
            assert_eq!(of(status, "{\"error\":\"rate_limited\"}"), Ok(Outcome::OverLimit), "{status}");
        }
        let undecided = "The request was not decided: `trusted_proxies` of the domain does not name this peer.\n";
        assert_eq!((of(403, undecided), of(404, undecided)), (Err(Code::PermissionDenied), Err(Code::NotFound)));
        assert_eq!((of(405, undecided), of(503, "")), (Err(Code::InvalidArgument), Err(Code::Unavailable)));
        assert_eq!((of(500, ""), of(302, "")), (Err(Code::Unknown), Err(Code::Unknown)));
    }
}
