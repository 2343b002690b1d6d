//! The descriptors that are refused or asked about most at this instance, as JSON.

use std::cmp::Reverse;
use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use serde_json::{Value, json};

use super::access::Reader;
use super::{millis, page_for, unknown, wrong};
use crate::model::Path;
use crate::telemetry::records::Records;
use crate::telemetry::top::{Estimate, Heavy, Listed, Sampled, WINDOW};

/// Path of the route.
pub const PATH: &str = "/v1/top";
/// Maximum number of descriptors in an answer: 1,000.
const MOST: usize = 1_000;
/// Number of descriptors in an answer if the query says none: 100.
const DEFAULT: usize = 100;
/// Parameters of the query.
const EXPECTED: &str = "domain=NAME, rule=PATH, sort=refused or sort=asked, or most=N";

/// Returns the route.
pub fn routes(records: Arc<Records>) -> Router {
    Router::new().route(PATH, get(top).with_state(records))
}

/// Selection and order of the answer.
struct Selection {
    domain: Option<String>,
    rule: Option<String>,
    is_by_asked: bool,
    most: usize,
}

async fn top(
    State(records): State<Arc<Records>>,
    Extension(reader): Extension<Reader>,
    RawQuery(query): RawQuery,
) -> Response {
    let selection = match Selection::parse(query.as_deref().unwrap_or_default()) {
        Ok(selection) => selection,
        Err(why) => return wrong(why),
    };
    let Listed { heavy: mut found, mut unlisted } = records.top.select(|rule| selection.selects(rule));
    // What is certain of the refusals decides the order.
    found.sort_by_key(|heavy| {
        let (refused, asked) = (heavy.refused.least(), heavy.asked.estimate);
        Reverse(if selection.is_by_asked { (asked, refused) } else { (refused, asked) })
    });
    let left_out = found.iter().skip(selection.most).map(|heavy| heavy.refused.most);
    unlisted = left_out.fold(unlisted, u64::max);
    let shown: Vec<Value> = found.iter().take(selection.most).map(shown).collect();
    let page = json!({
        "window_ms": millis(WINDOW),
        "missed": records.top.missed(),
        "top": shown,
        "unlisted": { "refused": unlisted },
    });
    page_for(&reader, page)
}

impl Selection {
    fn parse(query: &str) -> Result<Self, String> {
        let mut selection = Self { domain: None, rule: None, is_by_asked: false, most: DEFAULT };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match (&*name, &*value) {
                ("domain", _) => selection.domain = Some(value.into_owned()),
                ("rule", _) => selection.rule = Some(value.into_owned()),
                ("sort", "refused") => selection.is_by_asked = false,
                ("sort", "asked") => selection.is_by_asked = true,
                ("sort", _) => return Err("sort is refused or asked".to_owned()),
                ("most", number) => {
                    let number = number.parse().ok().filter(|number| (1..=MOST).contains(number));
                    selection.most = number.ok_or_else(|| format!("most is a number from 1 to {MOST}"))?;
                }
                (other, _) => return Err(unknown(other, EXPECTED)),
            }
        }
        Ok(selection)
    }

    fn selects(&self, rule: &Path) -> bool {
        self.domain.as_deref().is_none_or(|domain| rule.domain() == domain)
            && self.rule.as_deref().is_none_or(|path| rule.to_string() == path)
    }
}

fn shown(heavy: &Heavy) -> Value {
    let Heavy { rule, entries, is_cut, refused, asked } = heavy;
    let entries: Vec<Value> = entries.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
    let Estimate { most, error } = refused;
    let Sampled { least, estimate } = asked;
    json!({
        "domain": rule.domain(),
        "rule": rule.to_string(),
        "entries": entries,
        "is_cut": is_cut,
        "refused": { "most": most, "error": error },
        "asked": { "least": least, "most": null, "estimate": estimate },
    })
}
