//! Tests of the counts of hand-made decisions.

use super::page::Page;
use super::series::{MOST_OF_VALUES, Rules};
use super::split::{Split, near};
use super::*;
use crate::model::{
    Charging, Descriptor, Entry, Finding, Hidden, Hits, Origin, Part, Path, Provenance, Quota, Role, RuleId, Ruling,
    Series, Shown, Tightest, Unit, Verdict, Window,
};

mod records;
mod tap;

fn about(id: u32, levels: &[(&str, Option<&str>, Shown)], series: Series) -> About {
    let domain = Arc::new(Path::of_domain("edge"));
    let below = |above: Arc<Path>, (key, value, shown): &(&str, Option<&str>, Shown)| {
        Arc::new(Path::below(&above, key, *value, *shown))
    };
    let path = levels.iter().fold(domain, below);
    About { id: RuleId(id), path, message: None, is_exposed: true, metadata: None, series }
}

/// A rule at one key, with one series.
fn plain(id: u32, key: &str) -> About {
    about(id, &[(key, None, Shown::Word)], Series::Rule)
}

fn verdict(outcome: Outcome, remaining: u32, provenance: Provenance) -> Verdict {
    let (reset, retry, delay) = (Micros::ZERO, None, Micros::ZERO);
    Verdict { outcome, remaining, room: remaining, reset, retry, delay, provenance }
}

/// Returns a charge of `hits` on a limit with `before` hits used, as an algorithm answers it.
fn asked(rule: Option<&About>, limit: u32, before: u32, hits: u32) -> Answered<'_> {
    charged(rule, limit, before, hits, Charging::Each)
}

fn charged(rule: Option<&About>, limit: u32, before: u32, hits: u32, charging: Charging) -> Answered<'_> {
    let (room, is_admitted) = (limit.saturating_sub(before), before + hits <= limit);
    let remaining = match (is_admitted, charging) {
        (true, _) => room - hits,
        // Refused hits stay on the counter.
        (false, Charging::Each) => 0,
        (false, Charging::AllOrNothing | Charging::Group(_)) => room,
    };
    let verdict = Verdict { room, ..verdict(Outcome::admitted_if(is_admitted), remaining, Provenance::Store) };
    let hits = Hits::take(hits.into());
    let (algorithm, role) = ("fixed_window", Role::Enforce);
    let quota = Quota::new(limit, Window::of_unit(Unit::Minute));
    Answered { descriptor: 0, rule, hits, capacity: limit, quota, algorithm, limit: None, role, verdict }
}

/// Returns the part of a descriptor with one limit.
fn part<'a>(answer: &Answered<'a>) -> Part<'a> {
    let quota = Quota::new(answer.capacity, Window::of_unit(Unit::Minute));
    let tightest = Tightest { quota, name: None, role: answer.role, verdict: answer.verdict };
    Part { rule: answer.rule, finding: Finding::Limited(tightest), metadata: None }
}

fn decision<'a>(answers: &[Answered<'a>]) -> Decision<'a> {
    let is_refused = answers.iter().any(|answer| answer.verdict.outcome.is_refused());
    Decision {
        outcome: Outcome::admitted_if(!is_refused),
        domain: Some("edge"),
        parts: answers.iter().map(part).collect(),
        answers: answers.to_vec(),
        ruling: None,
        retry: None,
        unavailable_for: None,
        wait: Wait::default(),
        warnings: Vec::new(),
        known_good: None,
        hidden: Vec::new(),
        is_refusal_shadowed: false,
        is_too_large: false,
        generation: 1,
    }
}

fn request(entries: &[(&str, &str)]) -> Request {
    let entries = entries.iter().map(|(key, value)| Entry::new(key.as_bytes().to_vec(), value.as_bytes().to_vec()));
    let descriptor = Descriptor { entries: entries.collect(), ..Descriptor::default() };
    Request::new("edge".to_owned(), vec![descriptor], 0).unwrap()
}

fn page(rules: &Rules) -> String {
    let mut page = Page::default();
    rules.write_to(&mut page);
    page.into_text()
}

fn count(rules: &Rules, request: &Request, decision: &Decision<'_>) {
    rules.count(request, decision, decision.deciding());
}

fn loaded(abouts: &[&About]) -> Rules {
    let rules = Rules::new(0.8);
    rules.replace(1, &["edge"], abouts.iter().copied());
    rules
}

fn split(limit: u32, before: u32, hits: u32) -> (u64, u64, u64) {
    let of = |charging| {
        let Split { within, near, over } = Split::of(&charged(None, limit, before, hits, charging), 0.8);
        (within, near, over)
    };
    // The split is the same for both kinds of charging, although only one keeps refused hits on the counter.
    assert_eq!(of(Charging::Each), of(Charging::AllOrNothing), "{before} and {hits} of {limit}");
    of(Charging::Each)
}

#[test]
fn a_refusal_of_a_known_good_caller_is_counted_by_whether_it_is_enforced() {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    for outcome in [Outcome::Refused, Outcome::Refused, Outcome::Admitted] {
        telemetry.observe(
            &request(&[("api_key", "1")]),
            &Decision { outcome, known_good: Some("api_key"), ..decision(&[]) },
            None,
        );
    }
    let page = telemetry.page();
    for (mode, count) in [("enforced", 2), ("shadow", 1)] {
        let line = format!(
            "\ntidegate_known_good_refusals_total{{domain=\"edge\",key=\"api_key\",mode=\"{mode}\"}} {count}\n"
        );
        assert!(page.contains(&line), "{page}");
    }
}

#[test]
fn a_request_of_an_unknown_domain_is_counted_once() {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    telemetry.observe(&request(&[("k", "v")]), &Decision { domain: None, ..decision(&[]) }, None);
    assert!(telemetry.page().contains("\ntidegate_unknown_domain_requests_total 1\n"), "{}", telemetry.page());
}

/// Examples from the reference, and each boundary of its arithmetic.
#[test]
fn hits_that_straddle_a_border_are_split_as_the_reference_splits_them() {
    assert_eq!(split(20, 15, 7), (0, 4, 2), "from below near to over");
    assert_eq!(split(8, 5, 2), (2, 1, 0), "from below near to near");
    assert_eq!(split(20, 0, 16), (16, 0, 0), "up to near");
    assert_eq!(split(20, 16, 4), (4, 4, 0), "all of them near");
    assert_eq!(split(20, 18, 5), (0, 2, 3), "from near to over");
    assert_eq!(split(20, 20, 3), (0, 0, 3), "all of them over");
    assert_eq!(split(20, 0, 30), (0, 4, 10), "from nothing to over");
}

/// The product 0.7 x 90 is 63 in 32 bits and slightly less in 64.
#[test]
fn what_is_near_is_computed_in_32_bits() {
    assert_eq!(near(7, 0.8), 5);
    assert_eq!(near(90, 0.7), 63);
    assert_eq!(near(u32::MAX, 1.0), 1 << 32);
}

#[test]
fn a_charge_that_was_spared_counts_where_its_counter_is() {
    let spared = |remaining| {
        let asked = asked(None, 20, 15, 3);
        Split::of(&Answered { verdict: Verdict { remaining, ..asked.verdict }, ..asked }, 0.8)
    };
    assert_eq!(spared(5), Split { within: 3, near: 0, over: 0 });
    assert_eq!(spared(3), Split { within: 3, near: 1, over: 0 });
    assert_eq!(spared(20), Split { within: 3, near: 0, over: 0 });
}

#[test]
fn what_the_policy_answers_is_asked_for_and_neither_within_nor_over() {
    let rule = plain(0, "user");
    let rules = loaded(&[&rule]);
    let open = verdict(Outcome::Admitted, 0, Provenance::Open);
    count(&rules, &request(&[]), &decision(&[Answered { verdict: open, ..asked(Some(&rule), 5, 0, 2) }]));
    let text = page(&rules);
    assert!(text.contains("total_hits{domain=\"edge\",key1=\"user\"} 2\n"), "{text}");
    for none in ["within_limit", "over_limit", "near_limit"] {
        assert!(text.contains(&format!("{none}{{domain=\"edge\",key1=\"user\"}} 0\n")), "{text}");
    }
}

#[test]
fn a_shadow_that_is_over_counts_in_its_own_metric_too() {
    let rule = plain(0, "user");
    let rules = loaded(&[&rule]);
    let watching = Answered { role: Role::Shadow, ..asked(Some(&rule), 5, 4, 3) };
    count(&rules, &request(&[]), &decision(&[watching]));
    let text = page(&rules);
    assert!(text.contains("shadow_mode{domain=\"edge\",key1=\"user\"} 2\n"), "{text}");
    assert!(text.contains("over_limit{domain=\"edge\",key1=\"user\"} 2\n"), "{text}");
}

#[test]
fn levels_below_the_second_are_in_no_label_of_the_reference_and_addresses_have_no_dots() {
    let levels = [
        ("plan", Some("free"), Shown::Word),
        ("address", Some("10.0.0.1:80"), Shown::Word),
        ("version", Some("1.2"), Shown::Word),
    ];
    let (rule, upper) = (about(0, &levels, Series::Rule), about(1, &levels[..2], Series::Rule));
    let rules = loaded(&[&rule, &upper]);
    count(&rules, &request(&[]), &decision(&[asked(Some(&rule), 5, 0, 1)]));
    count(&rules, &request(&[]), &decision(&[asked(Some(&upper), 5, 0, 2)]));
    let text = page(&rules);
    let labels = "{domain=\"edge\",key1=\"plan_free\",key2=\"address_10_0_0_1_80\"} 3\n";
    assert!(text.contains(&format!("ratelimit_service_rate_limit_total_hits{labels}")), "{text}");
    assert!(text.contains("rule=\"plan_free.address_10_0_0_1_80.version_1.2\",outcome=\"admitted\""), "{text}");
}

#[test]
fn values_show_where_a_rule_asks_for_them_and_digests_where_they_are_sensitive() {
    let levels = [("tenant", None, Shown::Value), ("path", None, Shown::Word), ("v", Some("a*"), Shown::Pattern)];
    let (some, all) = (about(0, &levels, Series::Values), about(1, &levels, Series::Detailed));
    let rules = loaded(&[&some, &all]);
    let request = request(&[("tenant", "acme"), ("path", "/x"), ("v", "ab")]);
    let of = |rule| decision(&[asked(Some(rule), 5, 0, 1)]);
    count(&rules, &request, &of(&some));
    count(&rules, &request, &of(&all));
    let hidden = vec![Hidden { descriptor: 0, entry: 0, digest: "sha".to_owned() }];
    count(&rules, &request, &Decision { hidden, ..of(&some) });
    let text = page(&rules);
    for rule in ["tenant_acme.path.v_a*", "tenant_acme.path_/x.v_a*", "tenant_sha.path.v_a*"] {
        assert!(text.contains(&format!("rule=\"{rule}\",outcome=\"admitted\",provenance=\"store\"}} 1\n")), "{text}");
    }
}

#[test]
fn a_client_that_makes_up_values_makes_a_bounded_number_of_series() {
    let rule = about(0, &[("tenant", None, Shown::Value)], Series::Values);
    let other = plain(1, "user");
    let rules = loaded(&[&rule, &other]);
    for tenant in 0..2 * MOST_OF_VALUES {
        let long = format!("{tenant:0>300}");
        count(&rules, &request(&[("tenant", &long)]), &decision(&[asked(Some(&rule), 5, 0, 1)]));
        let short = tenant.to_string();
        count(&rules, &request(&[("tenant", &short)]), &decision(&[asked(Some(&rule), 5, 0, 1)]));
    }
    count(&rules, &request(&[]), &decision(&[asked(Some(&other), 5, 0, 1)]));
    let text = page(&rules);
    let series = text.lines().filter(|line| line.starts_with("ratelimit_service_rate_limit_total_hits{")).count();
    assert_eq!(series, MOST_OF_VALUES + 2, "those, the others together, and the rule beside");
    let left_out = "decisions_total{domain=\"edge\",rule=\"tenant\",value=\"other\",outcome=\"admitted\",provenance=\"store\"} 1001\n";
    assert!(text.contains(left_out), "what is left out of a rule is counted together: {text}");
    assert!(text.lines().all(|line| line.len() < 400), "no value is long");
    let together = "total_hits{domain=\"edge\",key1=\"tenant\"} 1001\n";
    assert!(text.contains(together), "{text}");
    rules.replace(2, &["edge"], [&rule].into_iter());
    assert!(page(&rules).contains(together), "it goes on where the rule stays");
    rules.replace(3, &["edge"], [&other].into_iter());
    assert!(!page(&rules).contains("tenant"), "and not where it is gone");
}

#[test]
fn what_is_gone_is_told_of_no_more_though_some_requests_are_still_decided_by_it() {
    let (first, second) = (plain(0, "first"), plain(0, "second"));
    let rules = loaded(&[&first]);
    let of = |rule, generation| Decision { generation, ..decision(&[asked(Some(rule), 5, 0, 1)]) };
    count(&rules, &request(&[]), &of(&first, 1));
    rules.replace(2, &["edge"], [&second].into_iter());
    count(&rules, &request(&[]), &of(&first, 1));
    count(&rules, &request(&[]), &of(&second, 2));
    rules.replace(3, &["edge"], [&second].into_iter());
    count(&rules, &request(&[]), &of(&first, 1));
    count(&rules, &request(&[]), &of(&second, 2));
    let text = page(&rules);
    assert!(!text.contains("first"), "{text}");
    assert!(text.contains("total_hits{domain=\"edge\",key1=\"second\"} 2\n"), "{text}");
}

#[test]
fn counts_go_on_where_a_rule_stays() {
    let (first, again) = (plain(0, "user"), plain(1, "user"));
    let rules = loaded(&[&first]);
    count(&rules, &request(&[]), &decision(&[asked(Some(&first), 5, 0, 1)]));
    rules.replace(2, &["edge"], [&plain(0, "new"), &again].into_iter());
    count(&rules, &request(&[]), &Decision { generation: 2, ..decision(&[asked(Some(&again), 5, 1, 1)]) });
    assert!(page(&rules).contains("total_hits{domain=\"edge\",key1=\"user\"} 2\n"), "{}", page(&rules));
}

#[test]
fn what_no_rule_answers_is_counted_for_its_domain() {
    let rules = loaded(&[]);
    let nothing = decision(&[]);
    count(&rules, &request(&[]), &nothing);
    let text = page(&rules);
    assert!(text.contains("decisions_total{domain=\"edge\",outcome=\"admitted\",provenance=\"none\"} 1\n"), "{text}");
    count(&rules, &request(&[]), &Decision { domain: None, ..nothing });
    assert_eq!(page(&rules), text, "a domain that no file has makes no series");
}

#[test]
fn what_clients_values_made_goes_on_where_its_rule_stays() {
    let rule = about(0, &[("tenant", None, Shown::Value)], Series::Values);
    let rules = loaded(&[&rule]);
    let acme = request(&[("tenant", "acme")]);
    let of = |generation| Decision { generation, ..decision(&[asked(Some(&rule), 5, 0, 1)]) };
    count(&rules, &acme, &of(1));
    rules.replace(2, &["edge"], [&rule].into_iter());
    count(&rules, &acme, &of(2));
    assert!(page(&rules).contains("total_hits{domain=\"edge\",key1=\"tenant_acme\"} 2\n"), "{}", page(&rules));
    rules.replace(3, &["edge"], [&plain(0, "user")].into_iter());
    assert!(!page(&rules).contains("acme"), "{}", page(&rules));
}

#[test]
fn values_that_print_the_same_are_one_series() {
    let rule = about(0, &[("tenant", None, Shown::Value)], Series::Values);
    let rules = loaded(&[&rule]);
    for tenant in ["a:b", "a|b", "a\nb", "a_b"] {
        count(&rules, &request(&[("tenant", tenant)]), &decision(&[asked(Some(&rule), 5, 0, 1)]));
    }
    let text = page(&rules);
    assert!(text.contains("total_hits{domain=\"edge\",key1=\"tenant_a_b\"} 4\n"), "{text}");
}

#[test]
fn who_refuses_is_the_limit_that_made_the_request_fail() {
    let (quota, enforced) = (plain(0, "quota"), plain(1, "enforced"));
    let over = |rule, role| Answered { role, ..asked(Some(rule), 5, 5, 1) };
    let refused = decision(&[over(&quota, Role::Quota), over(&enforced, Role::Enforce)]);
    assert_eq!(refused.deciding().rule.map(|rule| rule.id), Some(enforced.id));
    let quotas = decision(&[over(&quota, Role::Quota)]);
    assert_eq!(quotas.deciding().rule.map(|rule| rule.id), Some(quota.id));
    let metrics = decision(&[over(&quota, Role::Shadow), over(&enforced, Role::Enforce)]);
    assert_eq!(metrics.deciding().rule.map(|rule| rule.id), Some(enforced.id));
    let slow = Verdict { delay: Micros::from_secs(2), ..asked(None, 5, 0, 1).verdict };
    let answers = [asked(Some(&quota), 5, 0, 1), Answered { verdict: slow, ..asked(Some(&enforced), 5, 0, 1) }];
    let wait = Wait { hold: Micros::from_secs(2), ..Wait::default() };
    let unseated = Decision { outcome: Outcome::Refused, wait, ..decision(&answers) };
    assert_eq!(unseated.deciding().rule.map(|rule| rule.id), Some(enforced.id), "it found no room to wait in");
    let ruled = Decision { ruling: Some(Ruling { is_denied: true, rule: &quota }), ..decision(&[]) };
    assert_eq!(ruled.deciding().origin, Origin::Rule);
    assert_eq!(decision(&[]).deciding().origin, Origin::Nothing);
}

#[test]
fn origins_are_counted_where_their_words_stand() {
    for (index, origin) in Origin::ALL.into_iter().enumerate() {
        assert_eq!(origin as usize, index);
    }
}

#[test]
fn whatever_a_policy_answers_is_an_error_of_the_store_and_what_is_only_watched_is_told() {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    let unasked = verdict(Outcome::Admitted, 0, Provenance::Open);
    let open = decision(&[Answered { verdict: unasked, ..asked(None, 5, 0, 1) }]);
    telemetry.observe(&request(&[]), &open, None);
    telemetry.observe(
        &request(&[]),
        &Decision { is_refusal_shadowed: true, ..decision(&[asked(None, 5, 0, 1)]) },
        None,
    );
    let text = telemetry.page();
    assert!(text.contains("should_rate_limit_error{err_type=\"redis_error\"} 1\n"), "{text}");
    assert!(text.contains("ratelimit_service_global_shadow_mode 1\n"), "{text}");
}

#[test]
fn a_request_that_the_store_did_not_answer_is_one_error_however_many_limits_it_has() {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    let open = Answered { verdict: verdict(Outcome::Admitted, 0, Provenance::Open), ..asked(None, 5, 0, 1) };
    telemetry.observe(&request(&[]), &decision(&[open, open, open]), None);
    let text = telemetry.page();
    assert!(text.contains("should_rate_limit_error{err_type=\"redis_error\"} 1\n"), "{text}");
}

#[test]
fn only_an_admitted_request_is_a_delayed_one() {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    let wait = Wait { header: Micros::from_secs(1), hold: Micros::from_secs(2) };
    let held = Decision { wait, ..decision(&[asked(None, 5, 0, 1)]) };
    telemetry.observe(&request(&[]), &held, None);
    // Refused, because there was no room to hold the call.
    telemetry.observe(&request(&[]), &Decision { outcome: Outcome::Refused, ..held }, None);
    let text = telemetry.page();
    for delivery in ["header", "hold"] {
        assert!(text.contains(&format!("delayed_requests_total{{delivery=\"{delivery}\"}} 1\n")), "{text}");
    }
}

#[test]
fn what_an_instances_own_part_admits_is_within_the_limit() {
    let rule = plain(0, "user");
    let rules = loaded(&[&rule]);
    let counted = asked(Some(&rule), 5, 1, 2);
    let local = Answered { verdict: Verdict { provenance: Provenance::Local, ..counted.verdict }, ..counted };
    count(&rules, &request(&[]), &decision(&[local]));
    let text = page(&rules);
    assert!(text.contains("within_limit{domain=\"edge\",key1=\"user\"} 2\n"), "{text}");
}

#[test]
fn statsd_gets_the_full_name_of_a_rule_and_its_last_hits_after_it_is_removed() {
    let (user, deep) = (plain(0, "user"), plain(1, "plan.user"));
    let telemetry = Telemetry::new(0.8, Micros::ZERO).with_statsd();
    telemetry.rules_loaded(1, &["edge"], [&user, &deep].into_iter(), Micros::ZERO);
    let taken = || {
        let taken = telemetry.named_hits().into_iter().map(|hits| (hits.name(), hits.take()[0].1));
        let mut taken: Vec<_> = taken.filter(|(_, total)| *total > 0).collect();
        taken.sort();
        taken
    };
    telemetry.observe(&request(&[]), &decision(&[asked(Some(&user), 5, 0, 3)]), None);
    assert_eq!(taken(), [("edge.user".to_owned(), 3)]);
    assert_eq!(taken(), []);
    telemetry.observe(&request(&[]), &decision(&[asked(Some(&user), 5, 3, 2), asked(Some(&deep), 5, 0, 1)]), None);
    telemetry.rules_loaded(2, &["edge"], std::iter::empty(), Micros::ZERO);
    assert_eq!(taken(), [("edge.plan.user".to_owned(), 1), ("edge.user".to_owned(), 2)]);
    assert_eq!(taken(), []);
}
