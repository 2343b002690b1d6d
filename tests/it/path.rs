//! Rules, requests and time, and the decisions that follow.

use tidegate::algorithm::Algorithm;
use tidegate::model::{Descriptor, Micros, Outcome, Override, Role};
use tidegate::rulefile::{File, Options, load};

use crate::world::{Answer, HandClock, NOON, World, descriptor, file, futures, limiter, micros, request};

mod groups;
mod limits;

#[test]
fn several_limits_on_one_descriptor_hold_together_and_the_tightest_is_shown() {
    let world = World::new(
        "domain: d
descriptors:
  - key: user
    rate_limits:
      - { unit: second, requests_per_unit: 2 }
      - { unit: day, requests_per_unit: 5, algorithm: gcra }
",
    );
    let first = world.hit("user=a", 1);
    first.admitted(1);
    assert_eq!(first.limit, Some(2), "1 of 2 is less than 4 of 5");
    world.hit("user=a", 1).admitted(0);
    assert_eq!(world.hit("user=a", 1).limit, Some(2), "the one that refuses is shown");
    world.clock.advance("1s");
    // The refused third hit spent nothing of the day.
    let fourth = world.hit("user=a", 1);
    fourth.admitted(2);
    assert_eq!(fourth.limit, Some(5));
    world.hit("user=a", 1).admitted(0);
    world.clock.advance("1s");
    world.hit("user=a", 1).admitted(0);
    let last = world.hit("user=a", 1);
    last.refused(0);
    assert_eq!(last.limit, Some(5));
}

#[test]
fn all_or_nothing_spends_nothing_in_any_tier_when_one_refuses() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - key: global
    rate_limit: { unit: day, requests_per_unit: 100 }
  - key: user
    rate_limit: { unit: day, requests_per_unit: 2, algorithm: gcra }
",
    );
    for left in [99, 98] {
        let (refused, answers) = world.all(["global=1", "user=a"]);
        assert!(!refused);
        answers[0].admitted(left);
    }
    for _ in 0..50 {
        let (refused, answers) = world.all(["global=1", "user=a"]);
        assert!(refused);
        answers[0].admitted(98);
        answers[1].refused(0);
    }
    world.look("global=1").admitted(98);
}

#[test]
fn a_descriptor_sent_twice_is_charged_twice_or_not_at_all() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 3 } }]
",
    );
    let (refused, answers) = world.all(["k=1", "k=1"]);
    assert!(!refused);
    assert_eq!(answers.iter().map(|answer| answer.remaining).collect::<Vec<_>>(), [2, 1]);
    let (refused, answers) = world.all(["k=1", "k=1"]);
    assert!(refused);
    answers[0].admitted(1);
    answers[1].refused(1);
    world.look("k=1").admitted(1);
}

#[test]
fn a_limit_that_counts_refused_charges_bites_after_a_peek() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - key: tokens
    rate_limit: { unit: hour, requests_per_unit: 10, count_refused: true }
  - key: other
    rate_limit: { unit: hour, requests_per_unit: 1 }
",
    );
    world.look("tokens=a").admitted(10);
    world.hit("tokens=a", 25).refused(0);
    world.look("tokens=a").refused(0);
    // Its charge stays even when it is another descriptor that refuses the request.
    world.hit("other=1", 1).admitted(0);
    let (refused, _) = world.all(["tokens=b", "other=1"]);
    assert!(refused);
    world.look("tokens=b").admitted(9);
}

#[test]
fn a_rule_may_be_charged_otherwise_than_its_domain() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - key: audit
    charging: each
    rate_limit: { unit: day, requests_per_unit: 100 }
  - key: global
    rate_limit: { unit: day, requests_per_unit: 100 }
  - key: user
    rate_limit: { unit: day, requests_per_unit: 1 }
",
    );
    let _ = world.all(["audit=1", "global=1", "user=a"]);
    let (refused, answers) = world.all(["audit=1", "global=1", "user=a"]);
    assert!(refused);
    answers[0].admitted(98);
    answers[1].admitted(99);
}

#[test]
fn a_shadow_never_blocks_the_others_under_all_or_nothing() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - key: soft
    shadow_mode: true
    rate_limit: { unit: day, requests_per_unit: 1 }
  - key: hard
    rate_limit: { unit: day, requests_per_unit: 9 }
",
    );
    for left in [8, 7, 6] {
        let (refused, answers) = world.all(["soft=1", "hard=1"]);
        assert!(!refused);
        answers[1].admitted(left);
    }
}

#[test]
fn a_limit_in_shadow_mode_watches_beside_the_enforced_ones() {
    // The tighter limit has the algorithm and the window of the enforced one, and a counter of its own.
    let world = World::new(
        "domain: d
descriptors:
  - key: k
    rate_limits:
      - { unit: day, requests_per_unit: 2, shadow_mode: true, name: tighter }
      - { unit: day, requests_per_unit: 4, name: enforced }
",
    );
    for left in [3, 2, 1, 0] {
        world.hit("k=1", 1).admitted(left);
    }
    let asked = world.ask(&request([descriptor("k=1")]));
    assert_eq!(asked.outcome, Outcome::Refused);
    let seen: Vec<_> = asked.answers.iter().map(|answer| (answer.limit, answer.role, answer.verdict.outcome)).collect();
    let (tighter, enforced) = (Some("tighter"), Some("enforced"));
    assert_eq!(seen, [(tighter, Role::Shadow, Outcome::Refused), (enforced, Role::Enforce, Outcome::Refused)]);
    // A limit that the request sends counts as the first enforced limit does.
    world.overridden("k=1", 20, 4).admitted(14);
}

#[test]
fn a_limit_in_shadow_mode_gives_the_quotas_of_its_rule_no_room() {
    let world = World::new(
        "domain: d
descriptors:
  - key: k
    quota_mode: true
    rate_limits:
      - { unit: day, requests_per_unit: 9, shadow_mode: true }
      - { unit: day, requests_per_unit: 1 }
",
    );
    world.hit("k=1", 1).admitted(0);
    world.hit("k=1", 1).refused(0);
}

#[test]
fn a_refusal_of_a_known_good_caller_is_noted() {
    let rules = "domain: d
entries: { ip: { as: ip } }
known_good:
  - { key: ip, cidr: [10.0.0.0/8] }
  - { key: api_key, value: \"partner-*\" }
descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: watched, rate_limits: [{ unit: day, requests_per_unit: 0, shadow_mode: true }] }
  - { key: bad, deny: true }
";
    let world = World::new(rules);
    let noted = |asked: &[&str]| {
        let request = request(asked.iter().map(|entries| descriptor(entries)));
        let decision = world.ask(&request);
        (decision.outcome, decision.known_good.map(str::to_owned))
    };
    let (admitted, refused) = (Outcome::Admitted, Outcome::Refused);
    assert_eq!(noted(&["user=1", "ip=10.1.1.1"]), (admitted, None), "it is no refusal");
    assert_eq!(noted(&["user=1", "ip=10.1.1.1"]), (refused, Some("ip".to_owned())));
    assert_eq!(noted(&["user=1", "ip=[::ffff:10.1.1.1]:80"]), (refused, Some("ip".to_owned())));
    assert_eq!(noted(&["user=1", "ip=192.0.2.1"]), (refused, None));
    assert_eq!(noted(&["user=1,api_key=partner-7", "user=1"]), (refused, Some("api_key".to_owned())));
    assert_eq!(noted(&["bad=1", "api_key=partner-7"]), (refused, Some("api_key".to_owned())));
    assert_eq!(noted(&["watched=1,api_key=partner-7", "watched=1"]), (admitted, Some("api_key".to_owned())));
    let world = World::with(rules, Options { shadow_mode: true, ..Options::default() });
    let asked = request([descriptor("bad=1"), descriptor("api_key=partner-7")]);
    assert_eq!(world.ask(&asked).known_good, Some("api_key"));
}

#[test]
fn an_override_counts_as_the_rules_first_limit_does() {
    let world = World::new(
        "domain: d
descriptors: [{ key: k, rate_limit: { unit: minute, requests_per_unit: 5, algorithm: gcra, burst: 10 } }]
",
    );
    world.hit("k=1", 10).admitted(0);
    // Its burst is its own number: 10 of 20 are used.
    world.overridden("k=1", 20, 2).admitted(9);
    // Where no rule matches it is a fixed window.
    let answer = world.overridden("nobody=1", 20, 2);
    answer.admitted(19);
    assert_eq!(answer.reset, Micros::from_secs(60));
}

#[test]
fn an_override_counts_refused_charges_where_the_rules_first_limit_does() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 10, count_refused: true } }]
",
    );
    let limit = Override::new(5, 4, 1).ok();
    let charge = |hits| world.one(Descriptor { limit, hits_addend: Some(hits), ..descriptor("k=1") });
    charge(25).refused(0);
    charge(0).refused(0);
}

#[test]
fn an_override_without_a_rule_is_charged_as_its_domain_says() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 1 } }]
",
    );
    let overridden = Descriptor { limit: Override::new(5, 4, 1).ok(), ..descriptor("nobody=1") };
    let asked = request([overridden, descriptor("user=a")]);
    assert!(!world.ask(&asked).outcome.is_refused());
    assert!(world.ask(&asked).outcome.is_refused());
    world.overridden("nobody=1", 5, 4).admitted(3);
}

#[test]
fn of_a_wildcard_in_a_key_and_one_in_a_value_the_earlier_in_the_file_answers() {
    let items = [("\"us*\"", 1), ("user, value: \"al*\"", 2)];
    for order in [items, [items[1], items[0]]] {
        let item =
            |(item, limit)| format!("  - {{ key: {item}, rate_limit: {{ unit: day, requests_per_unit: {limit} }} }}\n");
        let world = World::new(&format!("domain: d\ndescriptors:\n{}", order.map(item).concat()));
        assert_eq!(world.look("user=alice").limit, Some(order[0].1), "{order:?}");
    }
}

#[test]
fn hits_are_given_back_but_never_above_the_limit() {
    for (algorithm, _) in Algorithm::ALL {
        let world = World::new(&format!(
            "domain: d\ndescriptors: [{{ key: k, rate_limit: {{ unit: day, requests_per_unit: 10, algorithm: {algorithm} }} }}]\n"
        ));
        world.hit("k=1", 7).admitted(3);
        world.refund("k=1", 2).admitted(5);
        world.refund("k=1", 100).admitted(10);
        world.hit("k=1", 10).admitted(0);
        world.refund("k=never-seen", 5).admitted(10);
        assert_eq!(counters(&world), 1, "a refund creates no counter");
    }
}

#[test]
fn hits_are_given_back_to_a_counter_above_its_limit() {
    for (algorithm, charging) in Algorithm::ALL.iter().flat_map(|(name, _)| [(name, "each"), (name, "all_or_nothing")])
    {
        let rules = |limit: u32| {
            format!(
                "domain: d\ncharging: {charging}\ndescriptors: [{{ key: k, rate_limit: {{ unit: day, requests_per_unit: {limit}, algorithm: {algorithm} }} }}]\n"
            )
        };
        let mut world = World::new(&rules(100));
        world.hit("k=1", 80).admitted(20);
        world.reload(&rules(50));
        world.look("k=1").refused(0);
        world.refund("k=1", 40).admitted(10);
        world.look("k=1").admitted(10);
    }
}

#[test]
fn a_look_creates_nothing() {
    let world = World::new("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 10 } }]\n");
    for value in 0..100 {
        world.look(&format!("k={value}")).admitted(10);
    }
    assert_eq!(counters(&world), 0);
}

#[test]
fn a_limit_of_zero_refuses_hits_and_looks_without_a_counter_and_an_override_counts_from_then_on() {
    for (algorithm, _) in Algorithm::ALL {
        let world = World::new(&format!(
            "domain: d\ndescriptors: [{{ key: k, rate_limit: {{ unit: hour, requests_per_unit: 0, algorithm: {algorithm} }} }}]\n"
        ));
        let refused = world.hit("k=1", 1);
        refused.refused(0);
        assert_eq!(refused.retry, None, "waiting does not help");
        let look = world.look("k=1");
        look.refused(0);
        assert_eq!(look.retry, None, "waiting does not help");
        world.refund("k=1", 3).admitted(0);
        assert_eq!(counters(&world), 0);
        // What was refused at 0 is not counted.
        world.overridden("k=1", 5, 3).admitted(4);
        assert_eq!(counters(&world), 1);
    }
}

#[test]
fn windows_may_have_any_length_from_a_millisecond_to_a_year() {
    let world = World::new(
        "domain: d
descriptors:
  - key: quarter
    rate_limit: { window: 250ms, requests_per_unit: 1 }
  - key: fifteen
    rate_limit: { unit: minute, unit_multiplier: 15, requests_per_unit: 1 }
",
    );
    world.hit("quarter=1", 1).admitted(0);
    world.hit("quarter=1", 1).refused(0);
    world.clock.advance("250ms");
    world.hit("quarter=1", 1).admitted(0);
    world.hit("fifteen=1", 1).admitted(0);
    world.clock.advance("14m");
    let answer = world.hit("fifteen=1", 1);
    answer.refused(0);
    assert_eq!(answer.retry, Some(micros("59s750ms")));
    world.clock.advance("1m");
    world.hit("fifteen=1", 1).admitted(0);
}

#[test]
fn a_clock_that_steps_back_forgets_no_hits() {
    for algorithm in ["fixed_window", "gcra"] {
        let world = World::new(&format!(
            "domain: d\ndescriptors: [{{ key: k, rate_limit: {{ unit: minute, requests_per_unit: 5, algorithm: {algorithm} }} }}]\n"
        ));
        world.hit("k=1", 5).admitted(0);
        world.clock.back("10m");
        world.hit("k=1", 1).refused(0);
        world.clock.advance("10m");
        world.hit("k=1", 1).refused(0);
        world.clock.advance("1m");
        world.hit("k=1", 1).admitted(4);
    }
}

#[test]
fn a_quota_refuses_only_when_every_quota_of_the_request_does() {
    let rules = "domain: d
charging: all_or_nothing
descriptors:
  - { key: a, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: b, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: c, rate_limit: { unit: day, requests_per_unit: 9 } }
";
    let world = World::new(rules);
    for left in [8, 7] {
        let (refused, answers) = world.all(["a=1", "b=1", "c=1"]);
        assert!(!refused);
        answers[2].admitted(left);
    }
    let (refused, answers) = world.all(["a=1", "b=1", "c=1"]);
    assert!(refused);
    answers[2].admitted(7);
}

#[test]
fn under_global_quota_mode_a_descriptor_without_a_rule_rescues_nobody() {
    let options = Options { quota_mode: true, ..Options::default() };
    let world =
        World::with("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 1 } }]\n", options);
    world.hit("k=1", 1).admitted(0);
    let (refused, _) = world.all(["k=1", "nobody=1"]);
    assert!(refused, "a client that adds a descriptor is not freed by it");
}

#[test]
fn global_shadow_mode_shows_refusals_and_refuses_nothing() {
    let options = Options { shadow_mode: true, ..Options::default() };
    let world =
        World::with("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 1 } }]\n", options);
    world.hit("k=1", 1).admitted(0);
    let (refused, answers) = world.all(["k=1"]);
    assert!(!refused);
    assert!(answers[0].refused);
}

#[test]
fn limits_that_replace_each_other_both_stay() {
    let world = World::new(
        "domain: d
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 1, name: la, replaces: [{ name: lb }] } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 1, name: lb, replaces: [{ name: la }] } }
",
    );
    let _ = world.all(["a=1", "b=1"]);
    let (refused, _) = world.all(["a=1", "b=1"]);
    assert!(refused);
}

#[test]
fn limits_that_replace_each_other_in_a_longer_circle_all_stay() {
    let world = World::new(
        "domain: d
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 1, name: la, replaces: [{ name: lb }] } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 1, name: lb, replaces: [{ name: lc }] } }
  - { key: c, rate_limit: { unit: day, requests_per_unit: 1, name: lc, replaces: [{ name: la }, { name: outside }] } }
  - { key: o, rate_limit: { unit: day, requests_per_unit: 1, name: outside } }
",
    );
    let (_, answers) = world.all(["a=1", "b=1", "c=1", "o=1"]);
    assert_eq!(answers.iter().map(|answer| answer.limit).collect::<Vec<_>>(), [Some(1), Some(1), Some(1), None]);
    let (refused, _) = world.all(["a=1", "b=1", "c=1"]);
    assert!(refused);
}

#[test]
fn a_circle_of_replacements_counts_only_among_the_limits_that_a_request_meets() {
    let world = World::new(
        "domain: d
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 4, name: n4 } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 3, name: n3, replaces: [{ name: n4 }] } }
  - { key: c, rate_limit: { unit: day, requests_per_unit: 2, name: n4, replaces: [{ name: n3 }] } }
",
    );
    let limits = |descriptors: &[&str]| -> Vec<_> {
        let descriptors = descriptors.iter().map(|entries| descriptor(entries));
        let decision = world.ask(&request(descriptors));
        decision.parts.iter().map(|part| Answer::part(false, &part.finding).limit).collect()
    };
    assert_eq!(limits(&["a=1", "b=1"]), [None, Some(3)], "nothing that is met replaces n3");
    assert_eq!(limits(&["a=1", "c=1"]), [Some(4), Some(2)]);
    assert_eq!(limits(&["b=1", "c=1"]), [Some(3), Some(2)], "each replaces the other");
    assert_eq!(limits(&["a=1", "b=1", "c=1"]), [Some(4), Some(3), Some(2)]);
}

#[test]
fn a_circle_in_one_domain_changes_nothing_in_another() {
    let one = file(
        "one.yaml",
        "domain: one
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 1, name: la, replaces: [{ name: lb }] } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 1, name: lb, replaces: [{ name: la }] } }
",
    );
    let other = file(
        "other.yaml",
        "domain: other
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 1, name: la, replaces: [{ name: lb }] } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 1, name: lb } }
",
    );
    let loaded = load(&[one, other], Options::default()).expect("rules");
    let warned: Vec<_> = loaded.warnings.iter().map(|warning| &*warning.file).collect();
    assert_eq!(warned, ["one.yaml", "one.yaml"]);
}

#[test]
fn what_a_domain_says_holds_for_all_of_its_files_and_may_not_differ() {
    use tidegate::model::Charging;
    let merging = Options { merge_domains: true, ..Options::default() };
    let quiet = file("b.yaml", "domain: d\ndescriptors: [{ key: b, rate_limit: { unit: day } }]\n");
    let says = |name, charging| file(name, &format!("domain: d\ncharging: {charging}\n"));
    for files in [[quiet.clone(), says("c.yaml", "all_or_nothing")], [says("a.yaml", "all_or_nothing"), quiet]] {
        let loaded = load(&files, merging).expect("rules");
        assert!(loaded.rules.rules().iter().all(|rule| rule.charging() == Charging::AllOrNothing));
    }
    let invalid = load(&[says("a.yaml", "each"), says("b.yaml", "all_or_nothing")], merging).expect_err("they differ");
    assert!(invalid.to_string().contains("b.yaml:1:9: error: `charging` has another value"), "{invalid}");
}

#[test]
fn a_colocated_domain_keeps_all_its_counters_in_one_slot() {
    let merging = Options { merge_domains: true, ..Options::default() };
    let rules = "descriptors:
  - key: user
    rate_limits: [{ unit: day, requests_per_unit: 5 }, { unit: second, requests_per_unit: 5, algorithm: gcra }]
  - { key: path, value: /static/*, share_threshold: true, rate_limit: { unit: day, requests_per_unit: 5 } }
";
    let keys = |files: &[File]| {
        let loaded = load(files, merging).expect("rules");
        let overridden = Descriptor { limit: Override::new(1, 4, 1).ok(), ..descriptor("plan=free") };
        let request = request([descriptor("user=}a{"), descriptor("path=/static/a"), overridden]);
        let charges = loaded.rules.find(&request).charges;
        charges.iter().map(|charge| charge.key.to_string()).collect::<Vec<_>>()
    };
    let spread = keys(&[file("a.yaml", &format!("domain: d\n{rules}"))]);
    assert_eq!(spread[0], "{d|user=%7Da%7B}fixed_window:1d");
    let colocated = [
        "{d}|user=%7Da%7B}fixed_window:1d",
        "{d}|user=%7Da%7B}gcra:1s",
        "{d}|path~/static/*}fixed_window:1d",
        "{d}|plan=free}fixed_window:1d",
    ];
    // One file of a domain speaks for all of them.
    let (quiet, says) = (format!("domain: d\n{rules}"), "domain: d\ncolocate: domain\n");
    assert_eq!(keys(&[file("a.yaml", &quiet), file("b.yaml", says)]), colocated);
    assert_eq!(keys(&[file("a.yaml", says), file("b.yaml", &quiet)]), colocated);
}

#[test]
fn under_global_quota_mode_a_shadowed_rule_rescues_nobody() {
    let options = Options { quota_mode: true, ..Options::default() };
    let world = World::with(
        "domain: d
descriptors:
  - { key: k, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: soft, shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 1 } }
",
        options,
    );
    world.hit("k=1", 1).admitted(0);
    let (refused, _) = world.all(["k=1", "soft=1"]);
    assert!(refused);
}

#[test]
fn hits_given_back_in_a_refused_request_are_given_back() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - { key: a, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 0 } }
",
    );
    world.hit("a=1", 8).admitted(2);
    let back = Descriptor { hits_addend: Some(5), is_negative_hits: true, ..descriptor("a=1") };
    assert!(world.ask(&request([back, descriptor("b=1")])).outcome.is_refused());
    world.look("a=1").admitted(7);
}

#[test]
fn the_tightest_limit_has_the_least_share_of_what_it_can_hold() {
    let world = World::new(
        "domain: d
descriptors:
  - key: k
    rate_limits:
      - { unit: second, requests_per_unit: 10, algorithm: gcra, burst: 100 }
      - { unit: day, requests_per_unit: 160 }
",
    );
    assert_eq!(world.hit("k=1", 80).limit, Some(10), "20 of 100 are less than 80 of 160");
}

#[test]
fn an_example_is_refused_when_it_says_so() {
    let example = |rules: &str, options: Options| {
        let rules = load(&[file("r", rules)], options).expect("rules").rules;
        rules.example().map(|example| (example.entries, example.limit))
    };
    let rules = "domain: d
descriptors:
  - { key: k, value: demo }
  - { key: k, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: b, rate_limit: { unit: day, requests_per_unit: 2, algorithm: gcra, burst: 5 } }
";
    let entry = |key: &str| vec![(key.to_owned(), "demo".to_owned())];
    assert_eq!(example(rules, Options::default()), Some((entry("b"), 5)), "k=demo is free");
    assert_eq!(example(rules, Options { shadow_mode: true, ..Options::default() }), None);
}

#[test]
fn one_limit_of_several_can_be_replaced() {
    let world = World::new(
        "domain: d
descriptors:
  - key: user
    rate_limits:
      - { unit: second, requests_per_unit: 1, name: calm }
      - { unit: day, requests_per_unit: 9 }
  - { key: boost, rate_limit: { unit: second, requests_per_unit: 5, replaces: [{ name: calm }] } }
",
    );
    for left in [8, 7] {
        let (refused, answers) = world.all(["user=a", "boost=1"]);
        assert!(!refused);
        answers[0].admitted(left);
    }
}

#[test]
fn what_a_client_sends_never_reaches_another_clients_counter() {
    let world = World::new(
        "domain: d
descriptors:
  - key: a
    rate_limit: { unit: day, requests_per_unit: 1 }
  - key: a_b
    rate_limit: { unit: day, requests_per_unit: 1000 }
  - key: p
    value: g*
    share_threshold: true
    rate_limit: { unit: day, requests_per_unit: 2 }
",
    );
    // In the reference the value `b` would meet the rule `a_b` and its thousand.
    assert_eq!(world.hit("a=b", 1).limit, Some(1));
    world.hit("a=b", 1).refused(0);
    world.hit("p=g1", 1).admitted(1);
    world.hit("p=g*", 1).admitted(0);
    world.hit("p=g2", 1).refused(0);
}

#[test]
fn memory_is_bounded_and_swept() {
    let world =
        World::new("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: second, requests_per_unit: 1 } }]\n");
    for value in 0..10_000 {
        world.hit(&format!("k={value}"), 1).admitted(0);
    }
    assert_eq!(counters(&world), 10_000);
    world.clock.advance("1s");
    world.store.sweep();
    assert_eq!(counters(&world), 0);
}

#[test]
fn when_the_store_is_full_idle_counters_go_first_and_nobody_is_refused() {
    use std::sync::Arc;
    use tidegate::store::memory::Memory;

    let store = Arc::new(Memory::new(HandClock::at(NOON), 6_400));
    let rules = "domain: d
descriptors:
  - { key: long, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: short, rate_limit: { unit: second, requests_per_unit: 1 } }
";
    let limiter = limiter(rules, Options::default(), &store);
    let is_refused = |entries: String| {
        let request = request([descriptor(&entries)]);
        futures(limiter.decide(&request, None)).outcome.is_refused()
    };
    for value in 0..1_000 {
        assert!(!is_refused(format!("long={value}")));
    }
    for value in 0..50_000 {
        assert!(!is_refused(format!("short={value}")), "a full store refuses nobody");
    }
    assert!(store.counters() <= 6_400);
    // All are used up: a flood of short counters evicts short counters, and nearly all of the thousand long ones are still there.
    let kept = (0..1_000).filter(|value| is_refused(format!("long={value}"))).count();
    assert!(kept >= 950, "{kept} of 1,000 long counters are still there");
}

#[test]
fn when_the_store_is_full_an_idle_counter_goes_before_a_little_used_one() {
    use std::sync::Arc;
    use tidegate::store::memory::Memory;

    let clock = HandClock::at(NOON);
    let store = Arc::new(Memory::new(Arc::clone(&clock) as Arc<_>, 6_400));
    let rules = "domain: d
descriptors:
  - { key: long, rate_limit: { unit: year, requests_per_unit: 1000000 } }
  - { key: short, rate_limit: { unit: second, requests_per_unit: 1 } }
";
    let limiter = limiter(rules, Options::default(), &store);
    let ask = |entries: String| {
        let request = request([descriptor(&entries)]);
        let decision = futures(limiter.decide(&request, None));
        (decision.outcome.is_refused(), decision.answers[0].verdict.remaining)
    };
    for value in 0..1_000 {
        assert_eq!(ask(format!("long={value}")), (false, 999_999));
    }
    // In each second a quarter of the store: when it is full, the rest of it are idle, though fully used once.
    for value in 0..50_000 {
        if value % 1_600 == 0 {
            clock.advance("1s");
        }
        assert!(!ask(format!("short={value}")).0);
    }
    let kept = (0..1_000).filter(|value| ask(format!("long={value}")) == (false, 999_998)).count();
    // Of 48,000 samples of eight a few hold no idle counter.
    assert!(kept >= 950, "{kept} of 1,000 long counters are still there");
    assert!(store.evicted() <= 50, "{} counters were forgotten before they were idle", store.evicted());
}

fn counters(world: &World) -> usize {
    world.store.counters()
}
