//! One stream from the control plane.

use std::future::pending;

use futures_util::stream;
use http::HeaderMap;
use http::uri::PathAndQuery;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tonic::client::Grpc;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status, Streaming};

use super::connect::{NotConnected, connect};
use super::plane::ControlPlane;
use super::status::XdsStatus;
use super::weight::{Received, Responses};
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;

/// Path of the method that opens a stream.
const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";

/// Reason for the end of a stream.
#[derive(Debug, Error)]
pub(super) enum StreamEnd {
    /// There is no connection.
    #[error("no connection: {0}")]
    Connect(#[from] NotConnected),
    /// The control plane or the network ended the stream.
    #[error("the stream ended: {}", .0.message())]
    Ended(Status),
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

/// Event of a stream.
pub(super) enum Event {
    /// A response has arrived, or the stream has ended.
    Received(Result<Option<Received>, Status>),
    /// The wait before a refusal is over.
    RefusalDue,
    /// Another input of the load has changed.
    OtherInput,
}

impl StreamEnd {
    /// Returns the end that `status` describes. Responses have at most `most` bytes.
    pub(super) fn of(status: Status, most: usize) -> Self {
        match status.code() {
            Code::OutOfRange => Self::TooLarge { most, found: status.message().to_owned() },
            _ => Self::Ended(status),
        }
    }
}

/// Opens a stream and sends `first`. `queue` receives what is sent to `requests`.
pub(super) async fn open(
    (plane, status): (&ControlPlane, &XdsStatus),
    requests: &mpsc::Sender<DiscoveryRequest>,
    first: &DiscoveryRequest,
    queue: mpsc::Receiver<DiscoveryRequest>,
) -> Result<Streaming<Received>, StreamEnd> {
    let channel = connect(plane, status).await?;
    let mut client = Grpc::new(channel).max_decoding_message_size(plane.max_message);
    let _ = requests.send(first.clone()).await;
    let queue = stream::unfold(queue, async |mut queue| queue.recv().await.map(|request| (request, queue)));
    let mut call = Request::new(queue);
    let headers: HeaderMap = plane.headers.iter().cloned().collect();
    *call.metadata_mut() = MetadataMap::from_headers(headers);
    client.ready().await.map_err(|error| StreamEnd::Ended(Status::unknown(error.to_string())))?;
    let opened = client.streaming(call, PathAndQuery::from_static(METHOD), Responses(plane.max_message)).await;
    Ok(opened.map_err(|status| StreamEnd::of(status, plane.max_message))?.into_inner())
}

/// Waits for the next response, which is read after `rest`, for the time at which a refusal is due, or for a change of another input if one is given.
pub(super) async fn next(
    responses: &mut Streaming<Received>,
    rest: Instant,
    due: Option<Instant>,
    other_input: Option<&mut watch::Receiver<()>>,
) -> Event {
    let due = async {
        match due {
            Some(due) => sleep_until(due).await,
            None => pending().await,
        }
    };
    let changed = async {
        match other_input {
            // The sender lives as long as the sink.
            Some(other_input) => drop(other_input.changed().await),
            None => pending().await,
        }
    };
    let received = async {
        sleep_until(rest).await;
        responses.message().await
    };
    tokio::select! {
        biased;
        received = received => Event::Received(received),
        () = due => Event::RefusalDue,
        () = changed => Event::OtherInput,
    }
}
