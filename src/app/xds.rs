//! The control plane on the debug page.

use std::fmt::Write;
use std::sync::Arc;

use tokio::time::Instant;

use crate::admin::Description;
use crate::settings::Settings;
use crate::source::xds::status::{Answered, StreamState, XdsStatus};

/// Returns the description of the rule source for the debug page: that of the stream if `status` is given, else nothing.
pub(super) fn description(settings: &Settings, status: Option<Arc<XdsStatus>>) -> Description {
    let plane = settings.source.plane.as_ref().map(|plane| plane.authority());
    Arc::new(move || match (&plane, &status) {
        (Some(plane), Some(status)) => text(plane, &status.get()),
        _ => String::new(),
    })
}

fn text(plane: &str, state: &StreamState) -> String {
    let ago = |at: Instant| at.elapsed().as_secs();
    let mut text = match &state.next_attempt {
        _ if state.is_connected => format!("control plane {plane}: connected\n"),
        None => format!("control plane {plane}: connecting for the first time\n"),
        Some((at, why)) => {
            let wait = at.saturating_duration_since(Instant::now()).as_secs();
            format!("control plane {plane}: not connected, next attempt in {wait} s: {why}\n")
        }
    };
    let answer = |answered: &Answered| format!("version {:?}, {} s ago", answered.version, ago(answered.at));
    if let Some(last) = &state.last_acknowledged {
        let _ = writeln!(text, "last acknowledged: {}; {} in total", answer(last), state.acknowledged);
    }
    if let Some(last) = &state.last_refused {
        let _ =
            writeln!(text, "last refused: {}; {} in total:\n{}", answer(last), state.refused, last.reasons.trim_end());
    }
    if let Some(age) = state.age_of_restored() {
        let _ = writeln!(text, "the rules in force are from STATE_DIR and {} s old", age.as_secs());
    }
    if let Some(until) = state.held_until {
        let wait = until.saturating_duration_since(Instant::now()).as_secs();
        let _ = writeln!(text, "the control plane has sent an empty set; the rules in force stay for {wait} s more");
    }
    text
}
