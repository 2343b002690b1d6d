//! The source for rules of a control plane: Envoy's aggregated discovery service, state of the world.
//!
//! Each response is the complete set of rules. It is acknowledged once its rules are in force, or refused with all reasons; then, and
//! while there is no stream, the last good rules stay.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use prost_types::Struct;
use prost_types::value::Kind;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use self::resource::{TYPE_URL, documents};
use super::{RuleSink, RuleSource};
use crate::file::apart;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::google::rpc;

mod resource;

/// Time for a connection to the control plane, DNS included: 10 s. grpc-go allows 20 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time of a connection after which TCP probes the peer: 30 s, and then each 10 s. No HTTP/2 PING is sent: a server of grpc-go
/// ends connections with more than one PING in 5 minutes.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of unanswered TCP probes after which the connection ends: 3, so a dead peer is noticed after a minute.
const KEEPALIVE_RETRIES: u32 = 3;
/// Requests that may wait to be sent: 4. Each response is answered by one before the next response is read.
const MOST_REQUESTS: usize = 4;
/// First wait before a version is refused again: 1 s. A control plane answers a refusal at once with the same rules.
const REFUSE_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait before a version is refused again: 8 s. Until then the control plane does not send corrected rules.
const REFUSE_AGAIN_MOST: Duration = Duration::from_secs(8);

/// Parameters of the stream to a control plane.
#[derive(Clone, Debug)]
pub struct ControlPlane {
    /// Host and port.
    pub server: String,
    /// ID of this node.
    pub node_id: String,
    /// Metadata of this node.
    pub node_metadata: Vec<(String, String)>,
    /// First wait before a new connection.
    pub backoff_initial: Duration,
    /// Longest wait before a new connection.
    pub backoff_max: Duration,
    /// Factor by which the wait grows.
    pub backoff_growth: f64,
    /// True if the wait varies at random.
    pub has_jitter: bool,
    /// Maximum size of a response in bytes.
    pub max_message: usize,
}

/// The rules of one control plane.
#[derive(Debug)]
pub struct XdsSource {
    plane: ControlPlane,
    /// True after the first response that could be decoded.
    answered: watch::Sender<bool>,
    /// Version that was refused last, and how many times in a row.
    refused: Option<(String, u32)>,
}

/// Reason for the end of a stream.
#[derive(Debug, Error)]
enum StreamEnd {
    /// There is no connection.
    #[error("no connection: {}", with_sources(.0))]
    Connect(#[from] tonic::transport::Error),
    /// The control plane or the network ended the stream.
    #[error("the stream ended: {}", .0.message())]
    Ended(#[from] Status),
    /// A response is larger than allowed.
    #[error(
        "a response is larger than {most} bytes, so its rules are not used: raise XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES ({found})"
    )]
    TooLarge {
        /// Maximum size in bytes.
        most: usize,
        /// Description by the gRPC library, with the size.
        found: String,
    },
    /// The control plane closed the stream without an error.
    #[error("the control plane closed the stream")]
    Closed,
    /// The rule compiler panicked.
    #[error("loading the rules panicked, which is a bug: {0}")]
    Panicked(String),
}

impl XdsSource {
    /// Creates the source. It connects when it is followed.
    pub fn new(plane: ControlPlane) -> Self {
        Self { plane, answered: watch::Sender::new(false), refused: None }
    }

    /// Returns a receiver that turns true after the first response that could be decoded.
    pub fn answered(&self) -> watch::Receiver<bool> {
        self.answered.subscribe()
    }

    fn node(&self) -> Node {
        let text = |(name, value): &(String, String)| {
            (name.clone(), prost_types::Value { kind: Some(Kind::StringValue(value.clone())) })
        };
        let metadata = Struct { fields: self.plane.node_metadata.iter().map(text).collect() };
        Node { id: self.plane.node_id.clone(), metadata: Some(metadata), ..Node::default() }
    }

    /// Runs one stream to its end. Sets `is_answered` once a response has arrived.
    async fn stream(&mut self, sink: &Arc<dyn RuleSink>, is_answered: &mut bool) -> Result<(), StreamEnd> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.plane.server))?
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_keepalive(Some(KEEPALIVE))
            .tcp_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .tcp_keepalive_retries(Some(KEEPALIVE_RETRIES));
        let channel = endpoint.connect().await?;
        let most = self.plane.max_message;
        let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(most);
        let (requests, queue) = mpsc::channel(MOST_REQUESTS);
        // A version of an earlier stream means nothing to a control plane that has started again.
        let mut request =
            DiscoveryRequest { node: Some(self.node()), type_url: TYPE_URL.to_owned(), ..DiscoveryRequest::default() };
        let send = async |request: &DiscoveryRequest| requests.send(request.clone()).await;
        let queue = stream::unfold(queue, async |mut queue| queue.recv().await.map(|request| (request, queue)));
        let _ = send(&request).await;
        let ended = |status: Status| match status.code() {
            Code::OutOfRange => StreamEnd::TooLarge { most, found: status.message().to_owned() },
            _ => StreamEnd::Ended(status),
        };
        let mut responses = client.stream_aggregated_resources(queue).await.map_err(ended)?.into_inner();
        tracing::info!(event = "xds.connected", "the control plane {} answers", self.plane.server);
        while let Some(response) = responses.message().await.map_err(ended)? {
            *is_answered = true;
            let (version, nonce) = (response.version_info.clone(), response.nonce.clone());
            request.error_detail = match self.take(response, sink).await? {
                Ok(()) => {
                    self.refused = None;
                    request.version_info.clone_from(&version);
                    tracing::info!(event = "xds.acknowledged", version, "rules of the control plane are in force");
                    None
                }
                Err(reasons) => {
                    self.wait_to_refuse(&version).await;
                    Some(rpc::Status { message: reasons, ..rpc::Status::default() })
                }
            };
            request.response_nonce = nonce;
            if send(&request).await.is_err() {
                break;
            }
        }
        Err(StreamEnd::Closed)
    }

    /// Puts the rules of `response` in force. The inner error has all reasons why they are not.
    async fn take(
        &self,
        response: DiscoveryResponse,
        sink: &Arc<dyn RuleSink>,
    ) -> Result<Result<(), String>, StreamEnd> {
        let receiver = Arc::clone(sink);
        let load = move || match documents(&response.resources) {
            Err(undecodable) => {
                let undecodable = undecodable.to_string();
                receiver.unreadable(&undecodable);
                (false, Err(undecodable))
            }
            Ok(documents) => (true, receiver.offer(documents).map(drop).map_err(|invalid| invalid.to_string())),
        };
        let (is_decoded, taken) = apart(load, |passed| sink.is_slow(passed)).await.map_err(|error| {
            sink.ended(Some(&error.to_string()));
            StreamEnd::Panicked(error.to_string())
        })?;
        sink.ended(None);
        if is_decoded {
            self.answered.send_replace(true);
        }
        Ok(taken)
    }

    /// Returns at once for a version that was not refused before, else after a wait that grows.
    async fn wait_to_refuse(&mut self, version: &str) {
        let times = match &mut self.refused {
            Some((refused, times)) if refused == version => {
                *times = times.saturating_add(1);
                *times
            }
            refused => {
                *refused = Some((version.to_owned(), 0));
                return;
            }
        };
        let factor = 1_u32.checked_shl(times - 1).unwrap_or(u32::MAX);
        tokio::time::sleep(REFUSE_AGAIN.saturating_mul(factor).min(REFUSE_AGAIN_MOST)).await;
    }
}

impl RuleSource for XdsSource {
    async fn follow(mut self, sink: Arc<dyn RuleSink>) {
        let mut failures = 0_i32;
        loop {
            let mut is_answered = false;
            let Err(end) = self.stream(&sink, &mut is_answered).await else { continue };
            failures = if is_answered { 0 } else { failures.saturating_add(1) };
            let wait = wait(&self.plane, failures);
            tracing::warn!(
                event = "xds.disconnected",
                "no stream from the control plane {}, so the rules in force stay; next attempt in {wait:.1?}: {end}",
                self.plane.server
            );
            tokio::time::sleep(wait).await;
        }
    }
}

/// Returns the wait before the next connection, after `failures` attempts in a row without a response.
fn wait(plane: &ControlPlane, failures: i32) -> Duration {
    let growth = plane.backoff_growth.max(2.0).powi(failures.saturating_sub(1).max(0));
    let seconds = (plane.backoff_initial.as_secs_f64() * growth).min(plane.backoff_max.as_secs_f64());
    let wait = Duration::try_from_secs_f64(seconds).unwrap_or(plane.backoff_max);
    if !plane.has_jitter {
        return wait;
    }
    let half = wait / 2;
    let micros = u64::try_from(half.as_micros()).unwrap_or(u64::MAX).saturating_add(1);
    half + Duration::from_micros(RandomState::new().hash_one(0) % micros)
}

/// Returns the text of an error and of its causes: the gRPC library's own text is only "transport error".
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_from_the_first_to_the_longest() {
        let plane = ControlPlane {
            server: String::new(),
            node_id: String::new(),
            node_metadata: Vec::new(),
            backoff_initial: Duration::from_secs(1),
            backoff_max: Duration::from_secs(10),
            backoff_growth: 0.5,
            has_jitter: false,
            max_message: 1,
        };
        assert_eq!(
            [0, 1, 2, 3, 4, 5, i32::MAX].map(|failures| wait(&plane, failures).as_secs()),
            [1, 1, 2, 4, 8, 10, 10]
        );
        let plane = ControlPlane { has_jitter: true, ..plane };
        for _ in 0..100 {
            let wait = wait(&plane, 5);
            assert!(wait >= Duration::from_secs(5) && wait <= Duration::from_secs(10), "{wait:?}");
        }
    }
}
