//! Several limits in one `rate_limits` are one decision, whatever `charging` says.

use tidegate::algorithm::Algorithm;
use tidegate::model::{Descriptor, Outcome, Role};

use crate::world::{World, descriptor, request};

/// A small limit and a large one of these algorithms.
fn two(charging: &str, small: &str, large: &str) -> World {
    World::new(&format!(
        "domain: d
charging: {charging}
descriptors:
  - key: user
    rate_limits:
      - {{ {small} }}
      - {{ {large} }}
  - {{ key: beside, rate_limit: {{ unit: day, requests_per_unit: 100 }} }}
"
    ))
}

/// The remaining hits of each limit, in the order of the rule.
fn left(world: &World, entries: &str) -> Vec<u32> {
    let look = Descriptor { hits_addend: Some(0), ..descriptor(entries) };
    world.ask(&request([look])).answers.iter().map(|answer| answer.verdict.remaining).collect()
}

#[test]
fn a_hit_that_one_limit_of_a_list_refuses_spends_nothing_in_the_others() {
    for charging in ["each", "all_or_nothing"] {
        for (small, _) in Algorithm::ALL {
            for (large, _) in Algorithm::ALL {
                let world = two(
                    charging,
                    &format!("unit: hour, requests_per_unit: 3, algorithm: {small}"),
                    &format!("unit: day, requests_per_unit: 1000, algorithm: {large}"),
                );
                for _ in 0..3 {
                    world.hit("user=a", 1);
                }
                for _ in 0..50 {
                    world.hit("user=a", 1).refused(0);
                }
                assert_eq!(left(&world, "user=a"), [0, 997], "{charging}: {small} and {large}");
            }
        }
    }
}

#[test]
fn a_client_that_goes_on_after_refusals_gets_its_whole_day() {
    let world = two(
        "each",
        "unit: second, requests_per_unit: 10, algorithm: gcra",
        "unit: day, requests_per_unit: 1000, algorithm: fixed_window",
    );
    let mut admitted = 0;
    for _ in 0..500 * 60 {
        admitted += u32::from(!world.hit("user=a", 1).refused);
        world.clock.advance("2ms");
    }
    // The burst of 10, and 10 a second.
    assert_eq!((admitted, left(&world, "user=a")[1]), (609, 391));
}

#[test]
fn a_refusal_outside_the_list_does_not_bind_it_and_one_limit_counts_as_in_the_reference() {
    let world = World::new(
        "domain: d
descriptors:
  - key: user
    rate_limits: [{ unit: hour, requests_per_unit: 5 }, { unit: day, requests_per_unit: 9 }]
  - key: other
    rate_limits: [{ unit: hour, requests_per_unit: 2 }, { unit: day, requests_per_unit: 9 }]
  - { key: single, rate_limit: { unit: day, requests_per_unit: 3 } }
  - { key: full, rate_limit: { unit: day, requests_per_unit: 0 } }
",
    );
    for _ in 0..3 {
        let asked = ["user=a", "other=a", "single=a", "full=a"].map(descriptor);
        assert!(world.ask(&request(asked)).outcome.is_refused());
    }
    assert_eq!((left(&world, "user=a"), left(&world, "other=a")), (vec![2, 6], vec![0, 7]));
    // The reference records what it refuses, also where another limit refuses the request.
    assert_eq!(left(&world, "single=a"), [0]);
    let asked = Descriptor { hits_addend: Some(5), ..descriptor("user=b") };
    world.one(Descriptor { hits_addend: Some(2), ..descriptor("user=b") });
    world.one(asked).refused(3);
    assert_eq!(left(&world, "user=b"), [3, 7]);
}

#[test]
fn a_limit_in_shadow_mode_holds_back_nobody_and_is_charged_alone() {
    let world = World::new(
        "domain: d
descriptors:
  - key: user
    rate_limits:
      - { unit: hour, requests_per_unit: 1, shadow_mode: true }
      - { unit: day, requests_per_unit: 4 }
      - { unit: week, requests_per_unit: 9 }
  - key: pair
    rate_limits:
      - { unit: hour, requests_per_unit: 9, shadow_mode: true, algorithm: gcra }
      - { unit: day, requests_per_unit: 1 }
  - key: watched
    shadow_mode: true
    rate_limits: [{ unit: hour, requests_per_unit: 1 }, { unit: day, requests_per_unit: 9 }]
",
    );
    for _ in 0..4 {
        assert!(!world.hit("user=a", 1).refused, "the limit in shadow mode is used up");
    }
    world.hit("user=a", 1).refused(0);
    assert_eq!(left(&world, "user=a"), [0, 0, 5]);
    // The only enforced limit is alone, as in the reference. The other counts what it sees.
    for _ in 0..3 {
        world.hit("pair=a", 1);
        world.hit("watched=a", 1);
    }
    assert_eq!((left(&world, "pair=a"), left(&world, "watched=a")), (vec![6, 0], vec![0, 6]));
}

#[test]
fn a_limit_with_count_refused_keeps_its_hits_also_when_another_refuses() {
    for (algorithm, _) in Algorithm::ALL {
        let world = two(
            "each",
            &format!("unit: hour, requests_per_unit: 2, algorithm: {algorithm}"),
            &format!("unit: day, requests_per_unit: 9, algorithm: {algorithm}, count_refused: true"),
        );
        for _ in 0..5 {
            world.hit("user=a", 1);
        }
        assert_eq!(left(&world, "user=a"), [0, 4], "{algorithm}");
        let world = two(
            "each",
            &format!("unit: hour, requests_per_unit: 2, algorithm: {algorithm}, count_refused: true"),
            &format!("unit: day, requests_per_unit: 9, algorithm: {algorithm}"),
        );
        for _ in 0..5 {
            world.hit("user=a", 1);
        }
        assert_eq!(left(&world, "user=a"), [0, 7], "{algorithm}");
    }
}

#[test]
fn a_quota_with_several_limits_spends_nothing_when_one_of_them_refuses() {
    let world = World::new(
        "domain: d
descriptors:
  - key: user
    quota_mode: true
    rate_limits: [{ unit: hour, requests_per_unit: 2 }, { unit: day, requests_per_unit: 9 }]
  - { key: team, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 5 } }
",
    );
    for number in 1..=8 {
        let decision = world.ask(&request([descriptor("user=a"), descriptor("team=a")]));
        assert_eq!(decision.outcome.is_refused(), number > 5, "the team's quota has room for five");
    }
    assert_eq!((left(&world, "user=a"), left(&world, "team=a")), (vec![0, 7], vec![0]));
}

#[test]
fn lists_and_all_or_nothing_limits_in_one_request_keep_their_own_rules() {
    let world = World::new(
        "domain: d
charging: all_or_nothing
descriptors:
  - { key: global, rate_limit: { unit: day, requests_per_unit: 100 } }
  - key: user
    charging: each
    rate_limits: [{ unit: hour, requests_per_unit: 2 }, { unit: day, requests_per_unit: 9 }]
  - key: other
    charging: each
    rate_limits: [{ unit: hour, requests_per_unit: 4 }, { unit: day, requests_per_unit: 9 }]
",
    );
    for number in 1..=5 {
        let asked = request(["global=1", "user=a", "other=a"].map(descriptor));
        let decision = world.ask(&asked);
        assert_eq!(decision.outcome, if number > 2 { Outcome::Refused } else { Outcome::Admitted });
        assert!(decision.answers.iter().all(|answer| answer.role == Role::Enforce));
    }
    assert_eq!(left(&world, "global=1"), [98], "a refused request spends nothing there");
    assert_eq!((left(&world, "user=a"), left(&world, "other=a")), (vec![0, 7], vec![0, 5]), "lists decide alone");
}
