//! The page of metrics.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;

use crate::telemetry::Telemetry;
use crate::telemetry::page::CONTENT_TYPE;

/// The page, at this path.
pub fn routes(path: &str, telemetry: Arc<Telemetry>) -> Router {
    Router::new().route(path, get(page)).with_state(telemetry)
}

async fn page(State(telemetry): State<Arc<Telemetry>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], telemetry.page())
}
