//! The kinds of differences from the recorded answers, each under a name and with its reason.

use serde_json::{Value, json};
use tidegate::model::Role;

use super::{Difference, Scene, list, number, text};

/// A kind of difference that is meant.
pub struct Rule {
    pub name: &'static str,
    pub reason: Reason,
    /// Whether only a store outside the process gives rise to it.
    pub needs_redis: bool,
    /// Whether a difference is of this kind.
    pub recognises: fn(&Scene<'_>, &Difference) -> bool,
}

/// Why there may be differences of a kind.
pub enum Reason {
    /// The page for those who move here says this.
    Told(&'static str),
    /// The record is no more exact than that.
    Inexact(&'static str),
}

pub const RULES: &[Rule] = &[
    Rule {
        name: "an invalid request is answered with a code that says so",
        reason: Reason::Told("So are an empty domain and an empty descriptor list, where the reference says UNKNOWN."),
        needs_redis: false,
        recognises: is_invalid_request,
    },
    Rule {
        name: "a limit of 0 refuses a look",
        reason: Reason::Told("A limit of 0 refuses a look (`hits_addend: 0`) too"),
        needs_redis: false,
        recognises: is_look_at_0,
    },
    Rule {
        name: "hits that a limit of 0 refuses are not counted",
        reason: Reason::Told("Hits that a limit of 0 refuses are counted nowhere."),
        needs_redis: false,
        recognises: is_hits_at_0,
    },
    Rule {
        name: "a descriptor that no rule limits is no quota with room",
        reason: Reason::Told("under `QUOTA_MODE` a descriptor that no rule limits counts as a quota with room"),
        needs_redis: false,
        recognises: is_unmatched_quota,
    },
    Rule {
        name: "a shadow is no quota with room",
        reason: Reason::Told("Under `QUOTA_MODE` a rule that is only `shadow_mode` takes no part"),
        needs_redis: false,
        recognises: is_shadow_quota,
    },
    Rule {
        name: "a refusal that is remembered decides a request whole, and the store is not asked about the others",
        reason: Reason::Told(
            "a refusal that is remembered decides the request, and the store is not asked about the other descriptors",
        ),
        needs_redis: true,
        recognises: is_not_asked,
    },
    Rule {
        name: "hits that are refused from memory are counted a moment later",
        reason: Reason::Told("hits that a remembered refusal refuses are counted in Redis up to about a second later"),
        needs_redis: true,
        recognises: is_counted_later,
    },
    Rule {
        name: "the text of an override has one space between its words",
        reason: Reason::Inexact(
            "The reference writes one or two, by the hash of its binary (Go's protobuf text format).",
        ),
        needs_redis: false,
        recognises: is_space,
    },
    Rule {
        name: "the metadata of an override has a limit of 0 and the word of a week",
        reason: Reason::Told(
            "In the dynamic metadata of an override, the unit of a week is `WEEK` and a limit of 0 is written",
        ),
        needs_redis: false,
        recognises: is_text_of_override,
    },
    Rule {
        name: "keys of a rule's metadata are as spelled",
        reason: Reason::Told("The keys of a rule's metadata below the first level are as spelled in the file"),
        needs_redis: false,
        recognises: is_spelled_key,
    },
    Rule {
        name: "the reference decided up to a second after the recorded time",
        reason: Reason::Inexact("The record has the time at which the request was sent."),
        needs_redis: false,
        recognises: is_a_second,
    },
];

fn is_invalid_request(scene: &Scene<'_>, difference: &Difference) -> bool {
    // The texts of errors are free.
    matches!(difference.steps()[..], ["error" | "text"])
        && scene.reference["error"] == "UNKNOWN"
        && scene.tidegate["error"] == "INVALID_ARGUMENT"
}

fn is_look_at_0(scene: &Scene<'_>, difference: &Difference) -> bool {
    let is_look = |index: usize| {
        let [reference, tidegate] = scene.statuses(index);
        scene.hits(index) == 0 && reference["limit"][0] == 0 && reference["code"] == "OK" && is_over(tidegate)
    };
    match difference.steps()[..] {
        ["statuses", index, "code"] => is_look(position(index)),
        ["code"] => scene.tidegate["code"] == "OVER_LIMIT" && (0..scene.descriptors().len()).any(is_look),
        _ => false,
    }
}

fn is_hits_at_0(scene: &Scene<'_>, difference: &Difference) -> bool {
    let ["statuses", index, "code" | "remaining"] = difference.steps()[..] else { return false };
    let [reference, tidegate] = scene.statuses(position(index));
    let more = scene.hits_refused(position(index), |limit| limit == 0);
    if more == 0 || is_over(tidegate) || tidegate["limit"].is_null() {
        return false;
    }
    let left = number::<u64>(&tidegate["remaining"]).checked_sub(more);
    is_over(reference) == left.is_none() && reference["remaining"] == left.unwrap_or(0)
}

fn is_unmatched_quota(scene: &Scene<'_>, difference: &Difference) -> bool {
    // An unlimited descriptor has more left, and takes no part there either.
    let is_unmatched = |status: &Value| status["limit"].is_null() && status["remaining"] == 0;
    has_no_quota_with_room(scene, difference) && list(&scene.reference["statuses"]).iter().any(is_unmatched)
}

fn is_shadow_quota(scene: &Scene<'_>, difference: &Difference) -> bool {
    has_no_quota_with_room(scene, difference) && scene.roles().contains(&Some(Role::Shadow))
}

/// Whether it passes there under `QUOTA_MODE` although each limit refuses that is no shadow.
fn has_no_quota_with_room(scene: &Scene<'_>, difference: &Difference) -> bool {
    let is_mode_set = scene.round.variables().any(|variable| variable == ("QUOTA_MODE", "true"));
    if difference.steps() != ["code"] || difference.reference != "OK" || !is_mode_set {
        return false;
    }
    let statuses = list(&scene.reference["statuses"]).iter().zip(scene.roles());
    let quotas = statuses.filter(|(status, role)| !status["limit"].is_null() && *role != Some(Role::Shadow));
    let over: Vec<_> = quotas.map(|(status, _)| is_over(status)).collect();
    !over.is_empty() && !over.contains(&false)
}

fn is_not_asked(scene: &Scene<'_>, difference: &Difference) -> bool {
    let ["statuses", index, "limit" | "remaining" | "reset"] = difference.steps()[..] else { return false };
    let [reference, tidegate] = scene.statuses(position(index));
    let is_refused_by_another = list(&scene.tidegate["statuses"]).iter().any(is_over);
    scene.round.variables().any(|variable| variable == ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true"))
        && scene.tidegate["code"] == "OVER_LIMIT"
        && is_refused_by_another
        && reference["code"] == "OK"
        && *tidegate == json!({ "code": "OK", "limit": null, "remaining": 0, "reset": null })
}

fn is_counted_later(scene: &Scene<'_>, difference: &Difference) -> bool {
    let ["statuses", index, "code" | "remaining"] = difference.steps()[..] else { return false };
    let [reference, tidegate] = scene.statuses(position(index));
    let missing = scene.hits_refused(position(index), |limit| limit > 0);
    if scene.descriptors()[position(index)].get("limit").is_none() || is_over(tidegate) {
        return false;
    }
    let (left, left_there) = (number::<u64>(&tidegate["remaining"]), number::<u64>(&reference["remaining"]));
    let least = left.checked_sub(missing);
    (least.is_none() && is_over(reference)) || (least.unwrap_or(0)..left).contains(&left_there)
}

fn is_space(_: &Scene<'_>, difference: &Difference) -> bool {
    let ["metadata", "descriptors", _, "limit"] = difference.steps()[..] else { return false };
    text(&difference.reference).split_whitespace().eq(text(&difference.tidegate).split(' '))
}

fn is_text_of_override(_: &Scene<'_>, difference: &Difference) -> bool {
    let ["metadata", "descriptors", _, "limit"] = difference.steps()[..] else { return false };
    let written = text(&difference.reference).replace("unit:7", "unit:WEEK");
    let mut words: Vec<_> = written.split_whitespace().collect();
    if words.len() == 1 {
        words.insert(0, "requests_per_unit:0");
    }
    words.join(" ") == text(&difference.tidegate)
}

fn is_spelled_key(scene: &Scene<'_>, difference: &Difference) -> bool {
    let ["metadata", "metadata", _, .., "y" | "true"] = difference.steps()[..] else { return false };
    let (parent, _) = difference.place.rsplit_once('/').expect("it has steps");
    let there = |answer: &Value, key: &str| answer.pointer(&format!("{parent}/{key}")).cloned();
    let (reference, tidegate) = (scene.reference, scene.tidegate);
    there(reference, "true").is_some()
        && there(reference, "true") == there(tidegate, "y")
        && there(reference, "y").or(there(tidegate, "true")).is_none()
}

fn is_a_second(_: &Scene<'_>, difference: &Difference) -> bool {
    let seconds = |value: &Value| match difference.steps()[..] {
        ["statuses", _, "reset"] => value.as_f64(),
        ["headers", "2", "1"] => value.as_str()?.parse().ok(),
        _ => None,
    };
    let both = seconds(&difference.reference).zip(seconds(&difference.tidegate));
    both.is_some_and(|(reference, tidegate)| (reference + 1.0 - tidegate).abs() < 0.5)
}

fn is_over(status: &Value) -> bool {
    status["code"] == "OVER_LIMIT"
}

fn position(step: &str) -> usize {
    step.parse().expect("an index")
}
