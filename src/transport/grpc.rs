//! The gRPC listener's services: `ShouldRateLimit`, health and reflection.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body;
use tonic::service::Routes;
use tonic::{Request as Wire, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::Service;

use super::wire::Answers;
use crate::limiter::Limiter;
use crate::model::Request;
use crate::proto::DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer, SERVICE_NAME,
};
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// The largest message that is read: 4 MiB, gRPC's default and the reference's. It is the only bound on a request.
pub const LARGEST_MESSAGE: usize = 4 << 20;
/// The names under which health is asked for: the server as a whole, the reference's name, and the service's own.
const HEALTH_NAMES: [&str; 3] = ["", "ratelimit", SERVICE_NAME];

/// Answers `ShouldRateLimit`.
#[derive(Clone)]
pub struct Edge {
    limiter: Arc<Limiter>,
    answers: Arc<Answers>,
}

impl Edge {
    /// An edge that asks this limiter and answers so.
    pub fn new(limiter: Arc<Limiter>, answers: Arc<Answers>) -> Self {
        Self { limiter, answers }
    }

    /// Decides one request of the wire.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for what the caller's configuration got wrong.
    pub async fn decide(&self, wire: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        let request = Request::try_from(wire).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let decision = self.limiter.decide(&request).await;
        Ok(self.answers.respond(&request, &decision))
    }
}

#[tonic::async_trait]
impl RateLimitService for Edge {
    async fn should_rate_limit(&self, wire: Wire<RateLimitRequest>) -> Result<Response<RateLimitResponse>, Status> {
        self.decide(wire.into_inner()).await.map(Response::new)
    }
}

/// Every service of the gRPC listener. The busy one is asked without going through a router.
#[derive(Clone)]
pub struct Services {
    decisions: RateLimitServiceServer<Edge>,
    others: Routes,
}

/// What tells callers whether this instance wants requests.
#[derive(Clone)]
pub struct Health(HealthReporter);

impl Health {
    /// Says so under every name.
    pub async fn set_serving(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in HEALTH_NAMES {
            self.0.set_service_status(name, status).await;
        }
    }
}

impl Services {
    /// The services, and the handle on their health, which begins as not serving.
    ///
    /// # Errors
    /// When the descriptors of `proto/` do not suit reflection: a fault of the build.
    pub async fn new(edge: Edge) -> Result<(Self, Health), tonic_reflection::server::Error> {
        let (reporter, health_service) = tonic_health::server::health_reporter();
        let health = Health(reporter);
        health.set_serving(false).await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let others = Routes::new(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .prepare();
        let decisions = RateLimitServiceServer::new(edge).max_decoding_message_size(LARGEST_MESSAGE);
        Ok((Self { decisions, others }, health))
    }
}

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<tonic::body::Body>, Infallible>> + Send>>;

impl<B> Service<http::Request<B>> for Services
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Answer {
        let is_decision = request.uri().path().strip_prefix('/').is_some_and(|path| path.starts_with(SERVICE_NAME));
        if is_decision { Service::call(&mut self.decisions, request) } else { Box::pin(self.others.call(request)) }
    }
}
