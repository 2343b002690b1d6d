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
use tokio::time::{Instant, sleep_until};

use crate::telemetry::Telemetry;
use crate::telemetry::page::CONTENT_TYPE;

/// How many times as long as it took to make is the rest before the next: 20 times, so that those who ask again and again cost
/// a twentieth of a core.
const REST: u32 = 20;
/// How long it is at most: 1 s, a tenth of what a scraper waits for by default.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// Makes pages, one at a time, beside the threads that answer calls.
struct Pages {
    telemetry: Arc<Telemetry>,
    last: Mutex<Option<Last>>,
}

/// The last page.
struct Last {
    page: Bytes,
    began: Instant,
    rested: Instant,
}

/// The page, at this path.
pub fn routes(path: &str, telemetry: Arc<Telemetry>) -> Router {
    let pages = Arc::new(Pages { telemetry, last: Mutex::default() });
    Router::new().route(path, get(page)).with_state(pages)
}

async fn page(State(pages): State<Arc<Pages>>) -> Response {
    let asked = Instant::now();
    let mut last = pages.last.lock().await;
    // Nobody is given what was made before he asked.
    if let Some(Last { page, .. }) = last.as_ref().filter(|last| last.began >= asked) {
        return ([(header::CONTENT_TYPE, CONTENT_TYPE)], page.clone()).into_response();
    }
    if let Some(Last { rested, .. }) = *last {
        sleep_until(rested).await;
    }
    let (telemetry, began) = (Arc::clone(&pages.telemetry), Instant::now());
    let made = tokio::task::spawn_blocking(move || Bytes::from(telemetry.page()));
    let Ok(page) = made.await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let rested = Instant::now() + (began.elapsed() * REST).min(LONGEST_REST);
    *last = Some(Last { page: page.clone(), began, rested });
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response()
}
