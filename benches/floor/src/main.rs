//! floor ADDRESS [WORKERS]: a ShouldRateLimit server that decides nothing.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod pb {
    tonic::include_proto!("envoy.service.ratelimit.v3");
}
use pb::rate_limit_response::{DescriptorStatus, RateLimit};
use pb::rate_limit_service_server::{RateLimitService, RateLimitServiceServer};
use pb::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

struct Floor;

#[tonic::async_trait]
impl RateLimitService for Floor {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
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

fn main() {
    let address = std::env::args().nth(1).expect("an address").parse().expect("an address");
    let workers = std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(2);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().expect("a runtime");
    runtime.block_on(async move {
        let mut server = tonic::transport::Server::builder().tcp_nodelay(true);
        server.add_service(RateLimitServiceServer::new(Floor)).serve(address).await.expect("it serves");
    });
}
