//! HTTP route of the metrics page.

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

/// Pause before the next page, as a multiple of the time that the last page took: 20, so that repeated requests cost a
/// twentieth of a core.
const REST: u32 = 20;
/// Maximum of that pause: 1 s, a tenth of a scraper's default timeout.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// Renders pages, one at a time, outside of the threads that answer calls.
struct Pages {
    telemetry: Arc<Telemetry>,
    last: Arc<Mutex<Option<Last>>>,
}

/// Last page, the start of its rendering, and the end of the pause after it.
struct Last {
    page: Bytes,
    began: Instant,
    rested: Instant,
}

/// Returns the route of the page at `path`.
pub fn routes(path: &str, telemetry: Arc<Telemetry>) -> Router {
    let pages = Arc::new(Pages { telemetry, last: Arc::default() });
    Router::new().route(path, get(page)).with_state(pages)
}

async fn page(State(pages): State<Arc<Pages>>) -> Response {
    let asked = Instant::now();
    let mut last = Arc::clone(&pages.last).lock_owned().await;
    // A request never gets a page whose rendering began before the request arrived.
    if let Some(Last { page, .. }) = last.as_ref().filter(|last| last.began >= asked) {
        return ([(header::CONTENT_TYPE, CONTENT_TYPE)], page.clone()).into_response();
    }
    if let Some(Last { rested, .. }) = *last {
        sleep_until(rested).await;
    }
    let telemetry = Arc::clone(&pages.telemetry);
    // The task keeps the lock, so that a client that asks and goes away starts no second page in parallel.
    let made = tokio::task::spawn_blocking(move || {
        let began = Instant::now();
        let page = Bytes::from(telemetry.page());
        let rested = Instant::now() + (began.elapsed() * REST).min(LONGEST_REST);
        *last = Some(Last { page: page.clone(), began, rested });
        page
    });
    match made.await {
        Ok(page) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tokio::time::timeout;
    use tower::ServiceExt;

    use super::*;
    use crate::model::Micros;

    #[tokio::test]
    async fn who_asks_and_goes_away_starts_no_second_page_beside_the_first() {
        let telemetry = Arc::new(Telemetry::new(0.8, Micros::ZERO));
        let (begin, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = parking_lot::Mutex::new(held);
        telemetry.also(move |_| {
            begin.send(()).unwrap();
            let _ = held.lock().recv();
        });
        let pages = routes("/metrics", telemetry);
        let ask = || pages.clone().oneshot(Request::get("/metrics").body(Body::empty()).unwrap());
        let first = tokio::spawn(ask());
        begun.recv().await.unwrap();
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let second = tokio::spawn(ask());
        assert!(timeout(Duration::from_millis(50), begun.recv()).await.is_err(), "the first is still being made");
        release.send(()).unwrap();
        begun.recv().await.unwrap();
        release.send(()).unwrap();
        assert_eq!(second.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}
