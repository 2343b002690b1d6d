//! Decisions of this instance as they are made: one line of JSON each, or server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::stream;
use serde_json::Value;
use tokio::sync::watch;

use super::access::Reader;
use super::mask::Mask;
use super::{add_entry, unknown, wrong};
use crate::model::{Origin, Outcome};
use crate::telemetry::records::Records;
use crate::telemetry::tap::TapFilter;

/// Path of the route.
pub const PATH: &str = "/v1/decisions";
/// Maximum number of decisions a second if the query says none: 100, more than a person reads.
const DEFAULT_RATE: u64 = 100;
/// Maximum number of decisions a second: 10,000.
const MOST_RATE: u64 = 10_000;
/// Line that shows that the instance still answers, where it has no decision to send.
const ALIVE_LINE: &[u8] = b"\n";
/// The same as a comment of server-sent events.
const ALIVE_EVENT: &[u8] = b": \n\n";
/// Name of the outcome of a request that passes only because of a shadow mode. Such a request is `admitted` too.
const WOULD_BE_REFUSED: &str = "would_be_refused";
/// Parameters of the query.
const EXPECTED: &str = "domain=NAME, rule=PATH, outcome=admitted, refused, failed or would_be_refused, provenance=NAME, rate=N, or entry=KEY=VALUE, which can be repeated";

/// Returns the route. Streams end with the signal `stopped`.
pub fn routes(records: Arc<Records>, stopped: watch::Receiver<bool>) -> Router {
    Router::new().route(PATH, get(decisions).with_state((records, stopped)))
}

type Tapped = (Arc<Records>, watch::Receiver<bool>);

async fn decisions(
    State((records, stopped)): State<Tapped>,
    Extension(reader): Extension<Reader>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Response {
    let (filter, rate) = match parsed(query.as_deref().unwrap_or_default()) {
        Ok(parsed) => parsed,
        Err(why) => return wrong(why),
    };
    let asks_for_address = filter.entries.iter().any(|(_, value)| Mask::hides_address(value));
    if reader.masks().is_some() && asks_for_address {
        return wrong("a token with the right read sees networks only, so it cannot ask for one address".to_owned());
    }
    let accepted = headers.get(header::ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or_default();
    let is_event_stream = accepted.contains("text/event-stream");
    let Some(listening) = records.tap.listen(filter, rate) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "8 listeners are connected, which is the maximum: stop one\n")
            .into_response();
    };
    let lines = stream::unfold((listening, stopped, reader), move |(mut listening, mut stopped, reader)| async move {
        let line = tokio::select! {
            biased;
            () = reader.is_revoked() => return None,
            _ = stopped.wait_for(|is_stopped| *is_stopped) => return None,
            line = listening.next() => line?,
        };
        let shown = match (line.is_empty(), is_event_stream) {
            (true, true) => Bytes::from_static(ALIVE_EVENT),
            (true, false) => Bytes::from_static(ALIVE_LINE),
            (false, true) => event(&masked(&reader, line)),
            (false, false) => masked(&reader, line),
        };
        Some((Ok::<_, Infallible>(shown), (listening, stopped, reader)))
    });
    let content_type = if is_event_stream { "text/event-stream" } else { "application/x-ndjson" };
    ([(header::CONTENT_TYPE, content_type)], Body::from_stream(lines)).into_response()
}

/// Returns a line of JSON with the values of clients as `reader` may see them.
fn masked(reader: &Reader, line: Bytes) -> Bytes {
    let Some(mask) = reader.masks() else { return line };
    // The line is JSON of this process. One that could not be read would be left out, not shown.
    let mut page: Value = serde_json::from_slice(&line).unwrap_or_default();
    mask.apply(&mut page);
    format!("{page}\n").into()
}

fn event(line: &Bytes) -> Bytes {
    [b"data: ", &**line, b"\n"].concat().into()
}

fn parsed(query: &str) -> Result<(TapFilter, u64), String> {
    let (mut filter, mut rate) = (TapFilter::default(), DEFAULT_RATE);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "domain" => filter.domain = Some(value.into_owned()),
            "rule" => filter.rule = Some(value.into_owned()),
            "outcome" if value == WOULD_BE_REFUSED => filter.is_shadow_refusal = true,
            "outcome" => {
                let outcome = Outcome::ALL.into_iter().find(|outcome| outcome.name() == value);
                filter.outcome = Some(outcome.ok_or("outcome is admitted, refused, failed or would_be_refused")?);
            }
            "provenance" => {
                let names = Origin::ALL.map(Origin::name);
                let name = names.iter().find(|name| **name == value);
                let expected = || format!("provenance is one of {}", names.join(", "));
                filter.provenance = Some((*name.ok_or_else(expected)?).to_owned());
            }
            "rate" => {
                let number = value.parse().ok().filter(|rate| (1..=MOST_RATE).contains(rate));
                rate =
                    number.ok_or_else(|| format!("rate is a number of decisions a second, from 1 to {MOST_RATE}"))?;
            }
            "entry" => add_entry(&mut filter.entries, &value)?,
            other => return Err(unknown(other, EXPECTED)),
        }
    }
    Ok((filter, rate))
}
