//! The last refusals of this instance as JSON.

use std::sync::Arc;

use axum::extract::{Path as UrlPath, RawQuery, State};
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use serde_json::{Value, json};

use super::access::Reader;
use super::{add_entry, millis, page_for, unknown, wrong};
use crate::model::Micros;
use crate::telemetry::decision_id::{DecisionId, Meaning};
use crate::telemetry::recent::{MOST_OF_RULE, RecentRefusals, Refusal, RefusalFilter, ShownDescriptor};
use crate::telemetry::records::Records;

/// Path of the route.
pub const PATH: &str = "/v1/refusals";
/// Path of one refusal, by the id of the decision.
const OF_ID: &str = "/v1/refusals/{id}";
/// Maximum number of refusals in an answer, and of shadow refusals: 1,000, about a megabyte.
const MOST: usize = 1_000;
/// Parameters of the query.
const EXPECTED: &str = "domain=NAME, rule=PATH, or entry=KEY=VALUE, which can be repeated";

/// Returns the route.
pub fn routes(records: Arc<Records>) -> Router {
    let one = get(of_id).with_state(Arc::clone(&records));
    Router::new().route(PATH, get(refusals).with_state(records)).route(OF_ID, one)
}

async fn refusals(
    State(records): State<Arc<Records>>,
    Extension(reader): Extension<Reader>,
    RawQuery(query): RawQuery,
) -> Response {
    let filter = match filter(query.as_deref().unwrap_or_default()) {
        Ok(filter) => filter,
        Err(why) => return wrong(why),
    };
    let recent = &records.recent;
    let (found, now) = select(recent, &filter, &reader);
    let left_out: usize = [false, true].map(|is_shadow| of(&found, is_shadow).skip(MOST).count()).iter().sum();
    let page = json!({
        "now_ms": millis(now),
        "kept_for_ms": millis(recent.keep()),
        "most_of_rule": MOST_OF_RULE,
        "left_out": left_out,
        "missed": recent.missed(),
        "refusals": shown(&found, false),
        "shadow_refusals": shown(&found, true),
    });
    page_for(&reader, page)
}

/// Returns the refusals that `filter` selects, and the time. For a reader who sees masks, an entry is compared by its mask, so that
/// an address cannot be found among those of its network.
fn select(recent: &RecentRefusals, filter: &RefusalFilter, reader: &Reader) -> (Vec<Refusal>, Micros) {
    let Some(mask) = reader.masks() else { return recent.select(filter) };
    let (mut found, now) = recent.select(&RefusalFilter { entries: Vec::new(), ..filter.clone() });
    found.retain(|refusal| {
        filter.has_entries(refusal, |key, own, value| {
            let own = mask.masked(key, own);
            own == value || own == mask.masked(key, value)
        })
    });
    (found, now)
}

/// Returns the refusal that the id of a decision belongs to.
async fn of_id(
    State(records): State<Arc<Records>>,
    Extension(reader): Extension<Reader>,
    UrlPath(id): UrlPath<String>,
) -> Response {
    let id: DecisionId = match id.parse() {
        Ok(id) => id,
        Err(why) => return wrong(why.to_string()),
    };
    let made = records.made(id);
    let (part, is_refused) = match made.map(|made| made.meaning) {
        Some(Meaning::Refused(part)) => (Some(part), true),
        Some(Meaning::AdmittedByShadow(part)) => (Some(part), false),
        Some(Meaning::Admitted) | None => (None, false),
    };
    let (found, now) = records.recent.of_digest(part);
    let page = json!({
        "now_ms": millis(now),
        "kept_for_ms": millis(records.recent.keep()),
        "most_of_rule": MOST_OF_RULE,
        "is_of_this_instance": made.is_some(),
        "decided_ms": made.map(|made| millis(made.at)),
        "is_refused": is_refused,
        "is_admitted_by_shadow": part.is_some() && !is_refused,
        "refusals": shown(&found, false),
        "shadow_refusals": shown(&found, true),
    });
    page_for(&reader, page)
}

/// Parses a query.
fn filter(query: &str) -> Result<RefusalFilter, String> {
    let mut filter = RefusalFilter::default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "domain" => filter.domain = Some(value.into_owned()),
            "rule" => filter.rule = Some(value.into_owned()),
            "entry" => add_entry(&mut filter.entries, &value)?,
            other => return Err(unknown(other, EXPECTED)),
        }
    }
    Ok(filter)
}

/// Returns the shadow refusals, or the others.
fn of(found: &[Refusal], is_shadow: bool) -> impl Iterator<Item = &Refusal> {
    found.iter().filter(move |refusal| refusal.is_shadow == is_shadow)
}

fn shown(found: &[Refusal], is_shadow: bool) -> Vec<Value> {
    of(found, is_shadow).take(MOST).map(refusal).collect()
}

fn refusal(refusal: &Refusal) -> Value {
    let Refusal { domain, rule, limit, quota, refused, descriptors, is_cut, described, first, last, count, .. } =
        refusal;
    let descriptor = |descriptor: &ShownDescriptor| -> Vec<Value> {
        descriptor.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect()
    };
    json!({
        "domain": domain,
        "rule": rule.as_ref().map(ToString::to_string),
        "limit": limit,
        "quota": quota.map(|quota| format!("{quota:#}")),
        "is_sent": refusal.is_sent,
        "refused": refused,
        "descriptors": descriptors.iter().map(descriptor).collect::<Vec<_>>(),
        "is_cut": is_cut,
        "described_ms": millis(*described),
        "first_ms": millis(*first),
        "last_ms": millis(last.at),
        "count": count,
        "hits": last.hits,
        "room": last.room,
        "remaining": last.remaining,
        "retry_ms": last.retry.map(|retry| retry.get().div_ceil(1_000)),
        "provenance": if refusal.is_without_room { "no_room" } else { last.origin.name() },
        "generation": refusal.generation,
    })
}
