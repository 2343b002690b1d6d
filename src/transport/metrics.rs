//! The page of metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::telemetry::Telemetry;
use crate::telemetry::page::CONTENT_TYPE;

/// How many times as long as it took to make is a page given to whoever asks: 20 times, so that those who ask again and again
/// cost at most a twentieth of a core.
const AS_LONG: u32 = 20;

/// Makes pages, one at a time, beside the threads that answer calls.
struct Pages {
    telemetry: Arc<Telemetry>,
    /// The last one, and until when it is given.
    last: Mutex<Option<(Bytes, Instant)>>,
}

/// The page, at this path.
pub fn routes(path: &str, telemetry: Arc<Telemetry>) -> Router {
    let pages = Arc::new(Pages { telemetry, last: Mutex::default() });
    Router::new().route(path, get(page)).with_state(pages)
}

async fn page(State(pages): State<Arc<Pages>>) -> Response {
    let mut last = pages.last.lock().await;
    let fresh = last.as_ref().filter(|(_, until)| Instant::now() < *until).map(|(page, _)| page.clone());
    if let Some(page) = fresh {
        return ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response();
    }
    let telemetry = Arc::clone(&pages.telemetry);
    let made = tokio::task::spawn_blocking(move || {
        let began = Instant::now();
        (Bytes::from(telemetry.page()), began.elapsed())
    });
    let Ok((page, took)) = made.await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    *last = Some((page.clone(), Instant::now() + (took * AS_LONG).min(Duration::from_secs(1))));
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response()
}
