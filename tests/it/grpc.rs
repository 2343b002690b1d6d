//! Clients over gRPC, and what they ask for.

use std::net::SocketAddr;

use bytes::Bytes;
use prost::Message as _;
use tidegate::edge::message::Message;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::Channel;

use crate::support::in_time;

/// A client of the service.
pub type Client = RateLimitServiceClient<Channel>;

/// A client on a connection of its own.
pub async fn client(at: SocketAddr) -> Client {
    let connected = RateLimitServiceClient::connect(format!("http://{at}"));
    in_time("the server is there", connected).await.expect("it takes connections")
}

/// A descriptor with these entries.
pub fn descriptor<K: AsRef<[u8]>, V: AsRef<[u8]>>(entries: &[(K, V)]) -> RateLimitDescriptor {
    let bytes = Bytes::copy_from_slice;
    let entries = entries.iter().map(|(key, value)| Entry { key: bytes(key.as_ref()), value: bytes(value.as_ref()) });
    RateLimitDescriptor { entries: entries.collect(), ..RateLimitDescriptor::default() }
}

/// A request for these descriptors.
pub fn request(domain: &str, descriptors: impl IntoIterator<Item = RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: domain.to_owned(), descriptors: descriptors.into_iter().collect(), hits_addend: 0 }
}

/// The message of a request.
#[expect(clippy::needless_pass_by_value, reason = "it is mapped over calls")]
pub fn message(request: RateLimitRequest) -> Message {
    Message::of(request.encode_to_vec().into(), || 100)
}

/// A request for one descriptor with one entry.
pub fn one(domain: &str, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> RateLimitRequest {
    request(domain, [descriptor(&[(key, value)])])
}
