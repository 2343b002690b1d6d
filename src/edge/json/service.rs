//! The service of the HTTP listener: `/check` without a router, and the routes of the other pages.

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use futures_util::future::BoxFuture;
use tower::Service;

use super::HttpEdge;
use super::check::{self, PREFIX};

/// Service of the HTTP listener. A check is answered without the router, which would add a tenth to its instructions.
#[derive(Clone)]
pub struct HttpService {
    check: Arc<HttpEdge>,
    routes: Router,
}

impl HttpService {
    pub(super) fn new(check: HttpEdge, routes: Router) -> Self {
        Self { check: Arc::new(check), routes }
    }
}

impl<B> Service<Request<B>> for HttpService
where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    /// Returns that it is ready, as it always is.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request.uri().path().starts_with(PREFIX) {
            return Box::pin(check::check(Arc::clone(&self.check), request.map(Body::new)));
        }
        Box::pin(self.routes.call(request))
    }
}
