//! floor ADDRESS [WORKERS] [http]: a ShouldRateLimit server that decides nothing, or one of HTTP/1.1 that answers 200.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod pb {
    tonic::include_proto!("envoy.service.ratelimit.v3");
}
use std::net::SocketAddr;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use pb::rate_limit_response::{DescriptorStatus, RateLimit};
use pb::rate_limit_service_server::{RateLimitService, RateLimitServiceServer};
use pb::{RateLimitRequest, RateLimitResponse};
use tokio::net::TcpListener;
use tonic::{Response, Status};

struct Floor;

#[tonic::async_trait]
impl RateLimitService for Floor {
    async fn should_rate_limit(
        &self,
        request: tonic::Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let status = |_: &_| DescriptorStatus {
            code: 1,
            current_limit: Some(RateLimit { name: String::new(), requests_per_unit: 100, unit: 2 }),
            limit_remaining: 99,
            duration_until_reset: Some(prost_types::Duration { seconds: 30, nanos: 0 }),
        };
        let statuses = request.into_inner().descriptors.iter().map(status).collect();
        Ok(Response::new(RateLimitResponse { overall_code: 1, statuses }))
    }
}

/// Answers each request with 200 and nothing else, after its body.
async fn answer(request: hyper::Request<Incoming>) -> Result<hyper::Response<Empty<Bytes>>, hyper::Error> {
    request.into_body().collect().await?;
    Ok(hyper::Response::new(Empty::new()))
}

async fn http(address: SocketAddr) {
    let listener = TcpListener::bind(address).await.expect("it listens");
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("it is TCP");
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer)));
    }
}

fn main() {
    let address = std::env::args().nth(1).expect("an address").parse().expect("an address");
    let workers = std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(2);
    let is_http = std::env::args().nth(3).is_some_and(|protocol| protocol == "http");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().expect("a runtime");
    runtime.block_on(async move {
        if is_http {
            return http(address).await;
        }
        let mut server = tonic::transport::Server::builder().tcp_nodelay(true);
        server.add_service(RateLimitServiceServer::new(Floor)).serve(address).await.expect("it serves");
    });
}
