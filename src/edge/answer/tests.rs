//! Tests of the answers that clients get for decisions made by hand.

use std::sync::Arc;

use proptest::prelude::*;
use prost_types::Value;
use prost_types::value::Kind;

use super::*;
use crate::model::{
    About, Clock, Hidden, Path, Role, RuleId, Ruling, Series, Shown, Tightest, UsageWarning, Verdict, Wait, Window,
};
use crate::telemetry::decision_id::DecisionIds;

/// Clock that stands a quarter of a second after a whole one.
struct Standing;

const NOW: Micros = Micros::new(1_700_000_000_250_000);

impl Clock for Standing {
    fn now(&self) -> Micros {
        NOW
    }
}

/// Returns the rule at `keys` below the domain `edge`.
fn rule(keys: &[&str]) -> About {
    let path = keys.iter().fold(Arc::new(Path::of_domain("edge")), |above, key| {
        Arc::new(Path::below(&above, key, Some("any"), Shown::Word))
    });
    About { id: RuleId(0), path, message: None, is_exposed: true, metadata: None, series: Series::Rule }
}

fn quiet(keys: &[&str]) -> About {
    About { is_exposed: false, ..rule(keys) }
}

fn saying(message: &str, rule: About) -> About {
    About { message: Some(message.into()), ..rule }
}

fn admitted(remaining: u32, reset: Micros) -> Verdict {
    let (retry, delay) = (None, Micros::ZERO);
    Verdict {
        outcome: Outcome::Admitted,
        remaining,
        room: remaining,
        reset,
        retry,
        delay,
        provenance: Provenance::Store,
    }
}

fn refused(retry: Option<Micros>) -> Verdict {
    Verdict { outcome: Outcome::Refused, retry, ..admitted(0, Micros::from_secs(60)) }
}

fn unasked(outcome: Outcome, provenance: Provenance) -> Verdict {
    Verdict { outcome, provenance, ..admitted(0, Micros::ZERO) }
}

fn per_minute(limit: u32) -> Quota {
    Quota::new(limit, Window::of_unit(Unit::Minute))
}

fn limited<'a>(rule: &'a About, name: Option<&'a str>, quota: Quota, verdict: Verdict) -> Part<'a> {
    let tightest = Tightest { quota, name, role: Role::Enforce, verdict };
    Part { rule: Some(rule), finding: Finding::Limited(tightest), metadata: None }
}

fn with_role(role: Role, part: Part<'_>) -> Part<'_> {
    match part.finding {
        Finding::Limited(tightest) => Part { finding: Finding::Limited(Tightest { role, ..tightest }), ..part },
        _ => part,
    }
}

fn decision<'a>(outcome: Outcome, retry: Option<Micros>, parts: impl IntoIterator<Item = Part<'a>>) -> Decision<'a> {
    Decision {
        outcome,
        domain: Some("edge"),
        answers: Vec::new(),
        parts: parts.into_iter().collect(),
        ruling: None,
        retry,
        unavailable_for: None,
        wait: Wait::default(),
        warnings: Vec::new(),
        known_good: None,
        hidden: Vec::new(),
        is_refusal_shadowed: false,
        is_too_large: false,
        generation: 3,
    }
}

/// Returns a decision that `rule` refuses before anything is charged.
fn denied(rule: &About) -> Decision<'_> {
    let part = Part { rule: Some(rule), finding: Finding::Denied, metadata: None };
    let ruling = Some(Ruling { is_denied: true, rule });
    Decision { ruling, ..decision(Outcome::Refused, None, [part, Part::UNMATCHED]) }
}

fn unavailable(rule: &About) -> Decision<'_> {
    let retry = Some(Micros::from_millis(250));
    let verdict = Verdict { retry, ..unasked(Outcome::Refused, Provenance::Closed) };
    let part = limited(rule, None, per_minute(5), verdict);
    Decision { unavailable_for: retry, ..decision(Outcome::Refused, retry, [part]) }
}

fn request(descriptors: &[&[(&str, &str)]]) -> Request {
    let entry = |(key, value): &(&str, &str)| Entry::new(key.as_bytes().to_vec(), value.as_bytes().to_vec());
    let descriptor = |entries: &&[(&str, &str)]| Descriptor {
        entries: entries.iter().map(entry).collect(),
        ..Descriptor::default()
    };
    Request::new("edge".into(), descriptors.iter().map(descriptor).collect(), 0).unwrap()
}

fn answer(answers: &Answers, decision: &Decision<'_>) -> RateLimitResponse {
    answers.respond(&request(&[&[("user", "alice")]]), decision).unwrap()
}

fn styled(headers: Headers) -> Answers {
    Answers { headers, ..Answers::default() }
}

fn names() -> HeaderNames {
    HeaderNames::new("L".into(), "R".into(), "T".into()).unwrap()
}

fn styles() -> [Headers; 5] {
    [
        Headers::Off,
        Headers::Three(names()),
        Headers::Reference(names()),
        Headers::XRateLimit(Arc::new(Standing)),
        Headers::Ietf,
    ]
}

/// Returns the headers for the client, one per line.
fn lines(answer: &RateLimitResponse) -> Vec<String> {
    answer.response_headers_to_add.iter().map(|header| format!("{}: {}", header.key, header.value)).collect()
}

/// Returns the headers of each style. Both styles together are the one after the other, with one Retry-After.
fn told(decision: &Decision<'_>) -> [Vec<String>; 5] {
    let of = |style| lines(&answer(&styled(style), decision));
    let each = styles().map(of);
    let is_own = |line: &&String| line.starts_with("X-RateLimit-");
    let both: Vec<String> = each[3].iter().filter(is_own).chain(&each[4]).cloned().collect();
    assert_eq!(of(Headers::XRateLimitAndIetf(Arc::new(Standing))), both);
    each
}

fn body(refusal_body: RefusalBody, decision: &Decision<'_>) -> String {
    let answer = answer(&Answers { refusal_body, ..Answers::default() }, decision);
    String::from_utf8(answer.raw_body).unwrap()
}

/// Returns the body as JSON, with its names in order.
fn json(decision: &Decision<'_>) -> String {
    let body = body(RefusalBody::Json, decision);
    assert!(!body.contains('\n'), "{body}");
    serde_json::from_str::<serde_json::Value>(&body).unwrap().to_string()
}

fn plain(value: &Value) -> String {
    match value.kind.as_ref().unwrap() {
        Kind::NumberValue(number) => number.to_string(),
        Kind::StringValue(text) => text.clone(),
        Kind::BoolValue(flag) => flag.to_string(),
        Kind::NullValue(_) => "null".to_owned(),
        Kind::ListValue(list) => list.values.iter().map(plain).collect::<Vec<_>>().join(" "),
        Kind::StructValue(object) => {
            let fields = object.fields.iter().map(|(name, value)| format!("{name}={}", plain(value)));
            fields.collect::<Vec<_>>().join(" ")
        }
    }
}

/// Returns the field `decision` of the metadata.
fn decided(decision: &Decision<'_>) -> String {
    let answer = answer(&Answers { decision_metadata: true, ..Answers::default() }, decision);
    plain(&answer.dynamic_metadata.unwrap().fields["decision"])
}

#[test]
fn an_admitted_client_is_told_what_is_left_in_the_style_that_was_chosen() {
    let (user, path) = (rule(&["plan", "user"]), rule(&["path"]));
    let decision = decision(
        Outcome::Admitted,
        None,
        [
            limited(&user, Some("per-user"), per_minute(100), admitted(20, Micros::from_millis(41_001))),
            limited(
                &path,
                None,
                Quota::new(9, Window::of_length(Micros::from_millis(1_500)).unwrap()),
                admitted(8, Micros::new(1)),
            ),
        ],
    );
    assert_eq!(
        told(&decision),
        [
            vec![],
            vec!["L: 9", "R: 8", "T: 1"],
            vec!["L: 9", "R: 8", "T: 1"],
            vec!["X-RateLimit-Limit: 9", "X-RateLimit-Remaining: 8", "X-RateLimit-Reset: 1700000001"],
            vec![
                r#"RateLimit-Policy: "per-user";q=100;w=60, "path";q=9"#,
                r#"RateLimit: "per-user";r=20;t=42, "path";r=8;t=1"#,
            ],
        ]
    );
}

#[test]
fn a_refused_client_is_told_when_to_come_back_but_not_by_the_references_own_setting() {
    let user = rule(&["plan", "user"]);
    let wait = Some(Micros::from_millis(11_001));
    let decision = decision(Outcome::Refused, wait, [limited(&user, None, per_minute(100), refused(wait))]);
    assert_eq!(
        told(&decision),
        [
            vec![],
            vec!["L: 100", "R: 0", "T: 12"],
            vec!["L: 100", "R: 0", "T: 12", "retry-after: 12"],
            vec![
                "X-RateLimit-Limit: 100",
                "X-RateLimit-Remaining: 0",
                "X-RateLimit-Reset: 1700000012",
                "retry-after: 12"
            ],
            vec![
                r#"RateLimit-Policy: "plan.user";q=100;w=60"#,
                r#"RateLimit: "plan.user";r=0;t=12"#,
                "retry-after: 12",
            ],
        ]
    );
    let at_once = Decision { retry: Some(Micros::ZERO), ..decision };
    assert!(told(&at_once)[2].contains(&"retry-after: 1".to_owned()), "never less than a second");
}

#[test]
fn the_end_of_a_window_is_the_same_second_however_long_the_answer_took() {
    let user = rule(&["user"]);
    let moment = |reset: u64| {
        let part = limited(&user, None, per_minute(5), admitted(4, Micros::new(reset)));
        let [_, _, _, x_ratelimit, _] = told(&decision(Outcome::Admitted, None, [part]));
        x_ratelimit[2].clone()
    };
    // The clock is a quarter of a second past, and the verdict is up to 20 ms old.
    assert_eq!(moment(29_750_000), "X-RateLimit-Reset: 1700000030");
    assert_eq!(moment(29_770_000), "X-RateLimit-Reset: 1700000030");
    assert_eq!(moment(29_770_001), "X-RateLimit-Reset: 1700000031");
}

#[test]
fn a_client_whose_request_never_fits_is_not_told_to_come_back() {
    let user = rule(&["user"]);
    let decision = decision(Outcome::Refused, None, [limited(&user, None, per_minute(2), refused(None))]);
    for lines in told(&decision) {
        assert!(!lines.iter().any(|line| line.starts_with("retry-after")), "{lines:?}");
    }
    assert_eq!(told(&decision)[4][1], r#"RateLimit: "user";r=0;t=60"#);
    assert_eq!(
        json(&decision),
        r#"{"error":"rate_limited","limit":2,"message":"This request is too large for its limit: 2 per minute are allowed.","window":"1m"}"#
    );
}

#[test]
fn a_client_whose_request_never_fits_is_not_told_that_something_is_left() {
    let user = rule(&["user"]);
    let room = Verdict { remaining: 3, room: 3, reset: Micros::ZERO, ..refused(None) };
    let part = |verdict| limited(&user, None, per_minute(5), verdict);
    let never = decision(Outcome::Refused, None, [part(room)]);
    let status = &answer(&Answers::default(), &never).statuses[0];
    assert_eq!((status.code(), status.limit_remaining), (Code::OverLimit, 0));
    let lines = told(&never);
    assert_eq!((lines[1][1].as_str(), lines[3][1].as_str()), ("R: 0", "X-RateLimit-Remaining: 0"));
    assert_eq!(lines[4][1], r#"RateLimit: "user";r=0"#);
    let soon = decision(Outcome::Refused, None, [part(Verdict { reset: Micros::from_secs(1), ..room })]);
    assert_eq!(told(&soon)[4][1], r#"RateLimit: "user";r=0;t=1"#);
    // One that fits later leaves what it does not take.
    let later = decision(Outcome::Refused, None, [part(Verdict { retry: Some(Micros::from_secs(2)), ..room })]);
    assert_eq!(told(&later)[4][1], r#"RateLimit: "user";r=3;t=2"#);
}

#[test]
fn of_several_that_refuse_the_client_is_told_of_the_one_that_keeps_it_waiting() {
    let (day, minute, never) = (rule(&["day"]), rule(&["minute"]), rule(&["never"]));
    let secs = |secs| Some(Micros::from_secs(secs));
    let daily = limited(&day, None, Quota::new(1, Window::of_unit(Unit::Day)), refused(secs(3_000)));
    let minutely = limited(&minute, None, per_minute(10), refused(secs(12)));
    let both = decision(Outcome::Refused, secs(3_000), [daily.clone(), minutely.clone()]);
    let [_, three, reference, x_ratelimit, _] = told(&both);
    assert_eq!(three, ["L: 10", "R: 0", "T: 12"], "the reference takes the last");
    assert_eq!(reference, ["L: 10", "R: 0", "T: 12", "retry-after: 3000"]);
    assert_eq!(x_ratelimit[0], "X-RateLimit-Limit: 1");
    assert_eq!(x_ratelimit[2..], ["X-RateLimit-Reset: 1700003001", "retry-after: 3000"]);
    assert_eq!(
        json(&both),
        r#"{"error":"rate_limited","limit":1,"message":"Too many requests: 1 per day is allowed. Try again in 3000 seconds.","retry_after":3000,"window":"1d"}"#
    );
    let unfit = limited(&never, None, per_minute(7), refused(None));
    let never = decision(Outcome::Refused, None, [daily.clone(), unfit, minutely.clone()]);
    assert!(json(&never).contains(r#""limit":7,"#), "{}", json(&never));
    // Quotas refuse together, so the first with room lets the request pass.
    let quotas = [with_role(Role::Quota, daily), with_role(Role::Quota, minutely)];
    let quotas = decision(Outcome::Refused, secs(12), quotas);
    assert!(json(&quotas).contains(r#""limit":10,"#), "{}", json(&quotas));
    assert_eq!(told(&quotas)[3][2], "X-RateLimit-Reset: 1700000013");
}

#[test]
fn a_limit_that_only_watches_is_never_why_a_request_is_refused() {
    let (watched, user) = (rule(&["watched"]), rule(&["user"]));
    let wait = Some(Micros::from_secs(12));
    let shadow = with_role(Role::Shadow, limited(&watched, None, per_minute(1), refused(Some(Micros::from_secs(50)))));
    let decision = decision(Outcome::Refused, wait, [shadow, limited(&user, None, per_minute(100), refused(wait))]);
    assert!(json(&decision).contains(r#""limit":100,"#), "{}", json(&decision));
    assert_eq!(decided(&decision), "generation=3 outcome=refused provenance=store rule=edge.user_any");
}

#[test]
fn two_limits_of_one_name_are_two_items() {
    let (user, sent) = (rule(&["user"]), rule(&["user"]));
    let part = |rule, name| limited(rule, name, per_minute(5), admitted(4, Micros::from_secs(1)));
    let overridden = Part { rule: None, ..part(&sent, None) };
    let decision = decision(
        Outcome::Admitted,
        None,
        [
            part(&user, None),
            part(&user, Some("user-2")),
            part(&sent, None),
            part(&sent, Some("")),
            overridden,
            part(&user, Some("a\"\r\nset-cookie: x\\é")),
        ],
    );
    let [_, _, _, _, ietf] = told(&decision);
    let items: Vec<_> = ietf[1].trim_start_matches("RateLimit: ").split(", ").collect();
    let named: Vec<_> = items.iter().filter_map(|item| item.strip_suffix(";r=4;t=1")).collect();
    assert_eq!(
        named,
        [r#""user""#, r#""user-2""#, r#""user-3""#, r#""user-4""#, r#""override""#, r#""a___set-cookie: x__""#]
    );
    assert_eq!(ietf[0].matches(";q=5;w=60").count(), 6);
}

#[test]
fn a_header_lists_no_more_than_it_can_hold() {
    let long = "n".repeat(1_000);
    let user = rule(&["user"]);
    let part = || limited(&user, Some(&long), per_minute(u32::MAX), admitted(u32::MAX, Micros::YEAR));
    let decision = decision(Outcome::Admitted, None, (0..40).map(|_| part()));
    let [_, _, _, _, ietf] = told(&decision);
    assert_eq!(ietf.iter().map(|line| line.matches("\"n").count()).collect::<Vec<_>>(), [16, 16]);
    assert!(ietf.iter().map(String::len).sum::<usize>() < 4 << 10);
}

#[test]
fn what_was_not_counted_is_in_no_header() {
    let user = rule(&["user"]);
    let open = limited(&user, None, per_minute(5), unasked(Outcome::Admitted, Provenance::Open));
    let unlimited = Part { finding: Finding::Unlimited, ..open.clone() };
    for lines in told(&decision(Outcome::Admitted, None, [open, unlimited, Part::UNMATCHED])) {
        assert!(lines.is_empty(), "{lines:?}");
    }
}

#[test]
fn a_quiet_rule_is_in_no_header_no_body_and_no_status_but_its_code() {
    let (secret, user) = (quiet(&["secret"]), rule(&["user"]));
    let hidden = || limited(&secret, Some("hidden"), per_minute(7), refused(Some(Micros::from_secs(12))));
    let alone = decision(Outcome::Refused, None, [hidden()]);
    for lines in told(&alone) {
        assert!(lines.is_empty(), "{lines:?}");
    }
    let answer = answer(&Answers::default(), &alone);
    let bare = DescriptorStatus { code: Code::OverLimit.into(), ..DescriptorStatus::default() };
    assert_eq!((answer.overall_code(), answer.statuses), (Code::OverLimit, vec![bare]));
    assert_eq!(json(&alone), r#"{"error":"rate_limited","message":"Too many requests."}"#);
    assert_eq!(body(RefusalBody::Text, &alone), "Too many requests.");
    assert_eq!(body(RefusalBody::Own, &alone), "");

    let beside = limited(&user, None, per_minute(100), admitted(99, Micros::from_secs(60)));
    let beside = decision(Outcome::Refused, None, [beside, hidden()]);
    let [_, three, _, _, ietf] = told(&beside);
    assert_eq!(three, ["L: 100", "R: 99", "T: 60"]);
    assert_eq!(ietf, [r#"RateLimit-Policy: "user";q=100;w=60"#, r#"RateLimit: "user";r=99;t=60"#]);
    assert_eq!(json(&beside), r#"{"error":"rate_limited","message":"Too many requests."}"#);

    let unlimited = Part { rule: Some(&secret), finding: Finding::Unlimited, metadata: None };
    assert_eq!(status(&unlimited), DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() });
    let (secret, denying) = (saying("Ask for more.", quiet(&["secret"])), quiet(&["blocked"]));
    let refusing = limited(&secret, None, per_minute(7), refused(None));
    let speaking = decision(Outcome::Refused, None, [refusing]);
    assert_eq!(json(&speaking), r#"{"error":"rate_limited","message":"Ask for more."}"#);
    assert_eq!(body(RefusalBody::Own, &speaking), "Ask for more.");
    assert_eq!(json(&denied(&denying)), r#"{"error":"rate_limited","message":"Too many requests."}"#);
}

#[test]
fn a_denied_client_is_told_of_no_limit() {
    let blocked = rule(&["country"]);
    let decision = denied(&blocked);
    for lines in told(&decision) {
        assert!(lines.is_empty(), "{lines:?}");
    }
    let answer = answer(&Answers::default(), &decision);
    let codes: Vec<_> = answer.statuses.iter().map(|status| (status.code(), &status.current_limit)).collect();
    assert_eq!((answer.overall_code(), codes), (Code::OverLimit, vec![(Code::OverLimit, &None), (Code::Ok, &None)]));
    assert_eq!(json(&decision), r#"{"error":"denied","message":"This request is not allowed."}"#);
    assert_eq!(body(RefusalBody::Text, &decision), "This request is not allowed.");
    assert_eq!(body(RefusalBody::Own, &decision), "");
    let blocked = saying("Not from there.\r\nSorry.\0", rule(&["country"]));
    let decision = denied(&blocked);
    assert_eq!(json(&decision), r#"{"error":"denied","message":"Not from there.  Sorry. "}"#);
    assert_eq!(body(RefusalBody::Own, &decision), "Not from there.  Sorry. ");
}

#[test]
fn a_refusal_is_said_in_the_words_of_its_rule_or_in_plain_ones() {
    let user = rule(&["user"]);
    let wait = Some(Micros::from_millis(500));
    let part = |rule| limited(rule, None, per_minute(100), refused(wait));
    let plain = decision(Outcome::Refused, wait, [part(&user)]);
    assert_eq!(
        json(&plain),
        r#"{"error":"rate_limited","limit":100,"message":"Too many requests: 100 per minute are allowed. Try again in 1 second.","retry_after":1,"window":"1m"}"#
    );
    let sentence = "Too many requests: 100 per minute are allowed. Try again in 1 second.";
    assert_eq!(body(RefusalBody::Text, &plain), sentence);
    assert_eq!(body(RefusalBody::Own, &plain), "");
    let user = saying("Zu schnell, „bitte“ warten.", rule(&["user"]));
    let own = decision(Outcome::Refused, wait, [part(&user)]);
    assert_eq!(
        json(&own),
        r#"{"error":"rate_limited","limit":100,"message":"Zu schnell, „bitte“ warten.","retry_after":1,"window":"1m"}"#
    );
    for refusal_body in [RefusalBody::Text, RefusalBody::Own] {
        let answer = answer(&Answers { refusal_body, ..Answers::default() }, &own);
        assert_eq!(answer.raw_body, "Zu schnell, „bitte“ warten.".as_bytes());
        assert_eq!(lines(&answer), ["content-type: text/plain; charset=utf-8"]);
    }
    let json = Answers { refusal_body: RefusalBody::Json, ..Answers::default() };
    assert_eq!(lines(&answer(&json, &own)), ["content-type: application/json"]);
    let passed = decision(Outcome::Admitted, None, [limited(&user, None, per_minute(1), admitted(0, Micros::ZERO))]);
    let passed = answer(&json, &passed);
    assert_eq!((lines(&passed), passed.raw_body.as_slice()), (vec![], &b""[..]), "who passes reads nothing");
}

#[test]
fn a_refusal_names_a_burst_that_differs_from_the_limit() {
    let user = rule(&["user"]);
    let said = |quota| {
        let part = limited(&user, None, quota, refused(Some(Micros::from_secs(1))));
        body(RefusalBody::Text, &decision(Outcome::Refused, None, [part]))
    };
    assert_eq!(said(per_minute(100).with_burst(20)), "Too many requests: 20 at once, 100 per minute are allowed.");
    assert_eq!(said(per_minute(1).with_burst(3)), "Too many requests: 3 at once, 1 per minute are allowed.");
    assert_eq!(said(per_minute(1)), "Too many requests: 1 per minute is allowed.");
}

#[test]
fn that_nobody_could_be_asked_is_told_in_every_style() {
    let user = rule(&["user"]);
    let decision = unavailable(&user);
    for lines in told(&decision) {
        assert_eq!(lines, ["retry-after: 1", "content-type: application/json"]);
    }
    assert_eq!(body(RefusalBody::Own, &decision), "{\"error\":\"rate_limiter_unavailable\"}\n");
    assert_eq!(
        json(&decision),
        r#"{"error":"rate_limiter_unavailable","message":"The rate limiter is unavailable. Try again in 1 second.","retry_after":1}"#
    );
    assert_eq!(body(RefusalBody::Text, &decision), "The rate limiter is unavailable. Try again in 1 second.");
}

#[test]
fn a_client_near_its_limit_is_warned_whatever_the_style() {
    let (user, secret) = (rule(&["user"]), quiet(&["secret"]));
    let part = limited(&user, None, per_minute(100), admitted(20, Micros::from_secs(42)));
    let warning =
        |rule, name| UsageWarning { rule, name, capacity: 100, verdict: admitted(20, Micros::from_millis(41_500)) };
    let warnings = vec![warning(&user, Some("per-user")), warning(&secret, Some("hidden")), warning(&user, None)];
    let warned = Decision { warnings, ..decision(Outcome::Admitted, None, [part]) };
    for lines in told(&warned) {
        let last = lines.last().unwrap();
        assert_eq!(last, r#"x-ratelimit-warning: "per-user";r=20;q=100;t=42, "user";r=20;q=100;t=42"#);
    }
    let quiet = Decision { warnings: vec![warning(&secret, None)], ..warned.clone() };
    assert_eq!(told(&quiet)[0], [""; 0]);
    assert_eq!(told(&Decision { outcome: Outcome::Refused, ..warned })[0], [""; 0], "a refused one knows");
}

/// Checks that in every style the headers describe one descriptor: of refusing quotas, the one with the shortest wait.
#[test]
fn three_headers_describe_one_limit_of_several_quotas() {
    let (long, short, free) = (rule(&["long"]), rule(&["short"]), rule(&["free"]));
    let wait = |seconds| Verdict { reset: Micros::from_secs(seconds), ..refused(Some(Micros::from_secs(seconds))) };
    let quota = |rule, limit, verdict| with_role(Role::Quota, limited(rule, None, per_minute(limit), verdict));
    let [long, short] = [quota(&long, 7, wait(500)), quota(&short, 8, wait(20))];
    let room = quota(&free, 9, admitted(3, Micros::from_secs(90)));
    let triple = |lines: &[String]| -> Vec<u64> {
        lines.iter().take(3).map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    for parts in [[long.clone(), short.clone()], [short.clone(), long.clone()]] {
        let refused = decision(Outcome::Refused, Some(Micros::from_secs(20)), parts.clone());
        let [_, three, reference, x_rate_limit, _] = told(&refused);
        assert_eq!(triple(&x_rate_limit)[..2], [8, 0]);
        assert!(triple(&x_rate_limit)[2].abs_diff(NOW.ceil_secs() + 20) <= 1, "{x_rate_limit:?}");
        for lines in [three, reference] {
            assert!([vec![7, 0, 500], vec![8, 0, 20]].contains(&triple(&lines)), "{lines:?}");
        }
    }
    let admitted = decision(Outcome::Admitted, None, [long, room]);
    let [_, three, _, x_rate_limit, _] = told(&admitted);
    assert_eq!(triple(&three), [7, 0, 500], "the least remaining");
    assert_eq!(triple(&x_rate_limit)[..2], [7, 0]);
}

#[test]
fn envoy_is_asked_to_wait_whole_milliseconds_and_only_for_who_passes() {
    let delay = |outcome, header| {
        let wait = Wait { header, ..Wait::default() };
        let answer = answer(&Answers::default(), &Decision { wait, ..decision(outcome, None, []) });
        assert_eq!(lines(&answer), [""; 0]);
        let headers = answer.request_headers_to_add;
        headers.iter().map(|header| format!("{}: {}", header.key, header.value)).collect::<Vec<_>>()
    };
    assert_eq!(delay(Outcome::Admitted, Micros::new(250_001)), ["x-envoy-fault-delay-request: 251"]);
    assert_eq!(delay(Outcome::Admitted, Micros::new(1)), ["x-envoy-fault-delay-request: 1"]);
    assert_eq!(delay(Outcome::Admitted, Micros::ZERO), [""; 0]);
    assert_eq!(delay(Outcome::Refused, Micros::new(250_001)), [""; 0]);
}

#[test]
fn metadata_says_how_it_was_decided_and_by_which_rule() {
    let (user, path) = (rule(&["plan", "user"]), rule(&["path"]));
    let wait = Some(Micros::from_secs(1));
    let part = |rule, name, verdict| limited(rule, name, per_minute(9), verdict);
    let room = |left| admitted(left, Micros::ZERO);
    let passed = decision(Outcome::Admitted, None, [part(&user, None, room(5)), part(&path, Some("p"), room(4))]);
    assert_eq!(decided(&passed), "generation=3 limit=p outcome=admitted provenance=store rule=edge.path_any");
    let refusing = [part(&user, None, room(5)), part(&path, None, refused(wait)), part(&user, None, refused(wait))];
    let stopped = decision(Outcome::Refused, wait, refusing);
    assert_eq!(decided(&stopped), "generation=3 outcome=refused provenance=store rule=edge.path_any");
    let exhausted = with_role(Role::Quota, part(&user, Some("q"), refused(wait)));
    let quotas = decision(Outcome::Refused, wait, [exhausted.clone(), part(&path, None, refused(wait))]);
    assert_eq!(decided(&quotas), "generation=3 outcome=refused provenance=store rule=edge.path_any");
    let quotas = decision(Outcome::Refused, wait, [exhausted]);
    assert_eq!(decided(&quotas), "generation=3 limit=q outcome=refused provenance=store rule=edge.plan_any.user_any");
    assert_eq!(decided(&denied(&path)), "generation=3 outcome=denied provenance=rule rule=edge.path_any");
    let watched = Decision { outcome: Outcome::Admitted, ..denied(&path) };
    assert_eq!(decided(&watched), "generation=3 outcome=admitted provenance=rule rule=edge.path_any");
    let exempt = Decision {
        ruling: Some(Ruling { is_denied: false, rule: &path }),
        ..decision(Outcome::Admitted, None, [Part::UNMATCHED])
    };
    assert_eq!(decided(&exempt), "generation=3 outcome=exempt provenance=rule rule=edge.path_any");
    assert_eq!(decided(&unavailable(&path)), "generation=3 outcome=unavailable provenance=closed rule=edge.path_any");
    for provenance in [Provenance::Open, Provenance::Local, Provenance::Error] {
        let unchecked = part(&path, None, unasked(Outcome::Admitted, provenance));
        let name = provenance.name();
        let expected = format!("generation=3 outcome=admitted provenance={name} rule=edge.path_any");
        assert_eq!(decided(&decision(Outcome::Admitted, None, [unchecked])), expected);
    }
    let free = decision(Outcome::Admitted, None, [Part::UNMATCHED]);
    assert_eq!(decided(&free), "generation=3 outcome=admitted provenance=none");
    assert_eq!(answer(&Answers::default(), &passed).dynamic_metadata, None, "unless it is asked for");
}

/// Returns the id in the header for the client, and the id in the metadata.
fn ids(answer: &RateLimitResponse) -> (Option<&str>, String) {
    let header = answer.response_headers_to_add.iter().find(|header| header.key == "x-tidegate-decision-id");
    let decision = &answer.dynamic_metadata.as_ref().unwrap().fields["decision"];
    let Some(Kind::StructValue(decision)) = &decision.kind else { panic!("{decision:?}") };
    (header.map(|header| &*header.value), plain(&decision.fields["id"]))
}

#[test]
fn a_refused_client_gets_the_id_of_the_metadata_if_that_is_asked_for_and_an_admitted_one_never() {
    let user = rule(&["user"]);
    let records = Records::new(Arc::new(Standing), Micros::from_secs(60), Some(DecisionIds::new([7; 32], [1; 6])));
    let json = Answers {
        refusal_body: RefusalBody::Json,
        decision_metadata: true,
        decision_id_header: true,
        records: Some(Arc::new(records)),
        ..Answers::default()
    };
    let text = Answers { refusal_body: RefusalBody::Text, ..json.clone() };
    let own = Answers { refusal_body: RefusalBody::Own, ..json.clone() };
    let refusal = limited(&user, None, per_minute(5), refused(Some(Micros::from_secs(1))));
    let over = decision(Outcome::Refused, Some(Micros::from_secs(1)), [refusal.clone()]);
    for (answers, decision, is_in_body) in [
        (&json, &over, true),
        (&json, &denied(&user), true),
        (&json, &unavailable(&user), true),
        (&own, &unavailable(&user), true),
        (&own, &over, false),
        (&text, &over, false),
    ] {
        let answer = answer(answers, decision);
        let (header, id) = ids(&answer);
        assert_eq!(header, Some(&*id), "it is the same id");
        let body = String::from_utf8(answer.raw_body.clone()).unwrap();
        assert_eq!(body.contains(&format!("\"decision_id\":\"{id}\"")), is_in_body, "{body}");
        assert!(is_in_body || !body.contains(&id), "{body}");
    }
    let shadowed = Decision { is_refusal_shadowed: true, ..decision(Outcome::Admitted, None, [refusal]) };
    for admitted in [decision(Outcome::Admitted, None, [Part::UNMATCHED]), shadowed] {
        assert_eq!(ids(&answer(&json, &admitted)).0, None);
    }
    let off = answer(&Answers { decision_id_header: false, ..json.clone() }, &over);
    assert_eq!((ids(&off).0, String::from_utf8_lossy(&off.raw_body).contains("decision_id")), (None, false));
    let alone = answer(&Answers { decision_metadata: false, ..json }, &over);
    assert!(lines(&alone).iter().any(|line| line.starts_with("x-tidegate-decision-id: ")), "without metadata too");
}

#[test]
fn a_hidden_value_is_shown_as_its_digest() {
    let asked = request(&[&[("plan", "free"), ("key", "s3cret")], &[("key", "s3cret"), ("user", "alice")]]);
    let hide = |descriptor, entry| Hidden { descriptor, entry, digest: "d1gest".to_owned() };
    let hidden = vec![hide(0, 1), hide(1, 0)];
    let decision = Decision { hidden, ..decision(Outcome::Admitted, None, [Part::UNMATCHED, Part::UNMATCHED]) };
    let answers = Answers { dynamic_metadata: true, decision_metadata: true, ..Answers::default() };
    let answer = answers.respond(&asked, &decision).unwrap();
    let metadata = answer.dynamic_metadata.unwrap();
    assert_eq!(plain(&metadata.fields["descriptors"]), "entries=plan=free key=d1gest entries=key=d1gest user=alice");
    assert!(!format!("{metadata:?}").contains("s3cret"));
}

#[test]
fn a_limits_name_cannot_break_the_header_that_envoy_makes_of_it() {
    assert_eq!(quotable("per-user burst"), "per-user burst");
    assert_eq!(quotable("a\"\r\nset-cookie: x\\é"), "a___set-cookie: x__");
}

/// Generates text of any characters, especially those that end a header.
fn any_text() -> impl Strategy<Value = String> {
    let character =
        prop_oneof![2 => any::<char>(), 1 => prop::sample::select(vec!['\r', '\n', '\0', '"', '\\', '\x7f', ',', ';'])];
    prop::collection::vec(character, 0..12).prop_map(String::from_iter)
}

proptest! {
    #[test]
    fn no_header_holds_a_byte_that_could_end_it(
        keys in prop::collection::vec(any_text(), 0..3),
        name in prop::option::of(any_text()),
        message in any_text(),
        values in (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>()),
        is_refused in any::<bool>(),
        refusal_body in prop::sample::select(vec![RefusalBody::Own, RefusalBody::Json, RefusalBody::Text]),
    ) {
        let rule = saying(&message, rule(&keys.iter().map(String::as_str).collect::<Vec<_>>()));
        let (limit, remaining, wait, reset) = values;
        let wait = Some(Micros::new(wait));
        let outcome = Outcome::admitted_if(!is_refused);
        let verdict = Verdict { outcome, retry: wait.filter(|_| is_refused), ..admitted(remaining, Micros::new(reset)) };
        let part = || limited(&rule, name.as_deref(), per_minute(limit), verdict);
        let warning = UsageWarning { rule: &rule, name: name.as_deref(), capacity: limit, verdict };
        let decision = Decision {
            warnings: vec![warning; 2],
            wait: Wait { header: Micros::new(reset), hold: Micros::ZERO },
            ..decision(outcome, wait.filter(|_| is_refused), [part(), part()])
        };
        for headers in styles() {
            let answer = answer(&Answers { headers, refusal_body, ..Answers::default() }, &decision);
            for header in answer.response_headers_to_add.iter().chain(&answer.request_headers_to_add) {
                prop_assert!(header.value.bytes().all(|byte| (0x20..=0x7e).contains(&byte)), "{:?}", header);
                prop_assert!(!header.value.is_empty());
            }
            let body = String::from_utf8(answer.raw_body).unwrap();
            prop_assert!(!body.contains(['\r', '\n', '\0']), "{:?}", body);
            if is_refused && refusal_body == RefusalBody::Json {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&body).is_ok(), "{}", body);
            }
        }
    }
}
