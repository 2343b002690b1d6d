//! Own rules of an overlay decide as a service of their own beside that of the source would.

use std::sync::Arc;

use proptest::prelude::*;
use tidegate::model::{Clock, Decision, Descriptor, Micros, Request};
use tidegate::rulefile::{Documents, Options, Overlay};
use tidegate::rules::RuleSet;
use tidegate::store::memory::Memory;

use crate::world::{HandClock, Limiter, NOON, descriptor, file, futures, guard, load, request};

/// The items of a tree, each with one of the actions below or none.
const ITEMS: [&str; 5] = ["key: user", "key: user, value: a", "key: path, value: \"/x*\"", "key: path", "key: plan"];
const ACTIONS: [&str; 7] = [
    "rate_limit: { unit: minute, requests_per_unit: 3 }",
    "rate_limit: { unit: minute, requests_per_unit: 2, algorithm: gcra }",
    "rate_limit: { unit: hour, requests_per_unit: 4, algorithm: sliding_window }",
    "rate_limits: [{ unit: minute, requests_per_unit: 1 }, { unit: hour, requests_per_unit: 5 }]",
    "shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 }",
    "rate_limit: { unlimited: true }",
    "share_threshold: SHARED, rate_limit: { unit: minute, requests_per_unit: 3 }",
];
const RARE: [&str; 2] = ["deny: true", "exempt: true"];
const ENTRIES: [&str; 8] =
    ["user=a", "user=b", "path=/x1", "path=/x2", "path=/y", "plan=free,user=a", "plan=free,user=b", "plan=free"];

type Tree = Vec<Option<String>>;

/// Returns the `descriptors` of a tree.
fn written(tree: &Tree) -> String {
    let items = ITEMS.iter().zip(tree).filter_map(|(item, action)| {
        let action = action.as_ref()?.replace("SHARED", if item.contains('*') { "true" } else { "false" });
        let below = "descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 2 } }]";
        let is_final = RARE.contains(&action.as_str());
        Some(match item.contains("plan") && !is_final {
            true => format!("  - {{ {item}, {action}, {below} }}\n"),
            false => format!("  - {{ {item}, {action} }}\n"),
        })
    });
    let items: String = items.collect();
    if items.is_empty() { String::new() } else { format!("descriptors:\n{items}") }
}

fn tree() -> impl Strategy<Value = Tree> {
    let action = prop_oneof![
        3 => Just(None),
        9 => prop::sample::select(&ACTIONS[..]).prop_map(|action| Some(action.to_owned())),
        1 => prop::sample::select(&RARE[..]).prop_map(|action| Some(action.to_owned())),
    ];
    prop::collection::vec(action, ITEMS.len())
}

/// A request: its descriptors with their hits, and the pause before it in seconds.
type Asked = (Vec<(&'static str, u64)>, u64);

fn asked() -> impl Strategy<Value = Asked> {
    let descriptor = (prop::sample::select(&ENTRIES[..]), prop_oneof![4 => Just(1_u64), 1 => 0..4_u64]);
    (prop::collection::vec(descriptor, 1..4), prop_oneof![3 => Just(0), 1 => 1..90_u64])
}

/// A service with counters of its own, whose time is that of the test.
struct Service(Limiter);

impl Service {
    fn new(rules: RuleSet, clock: &Arc<HandClock>) -> Self {
        let store = Memory::new(Arc::clone(clock) as Arc<dyn Clock>, 100_000);
        Self(Limiter::new(rules, Arc::new(guard(Arc::new(store), 1))))
    }

    fn ask(&self, request: &Request) -> Decision<'_> {
        futures(self.0.decide(request, None))
    }
}

fn rules(tree: &Tree) -> RuleSet {
    load(&[file("rules.yaml", &format!("domain: d\n{}", written(tree)))], Options::default())
        .expect("valid rules")
        .rules
}

fn over(source: &Tree, overlay: &str) -> RuleSet {
    let overlay = Overlay::new(Documents::parse(vec![file("overlay.yaml", overlay)]), &Options::default());
    let source = Documents::parse(vec![file("rules.yaml", &format!("domain: d\n{}", written(source)))]);
    overlay.expect("a valid overlay").compile(Some(source), &Options::default()).expect("valid rules").0.rules
}

/// Returns the answers for each charge: descriptor, capacity and verdict.
fn answers(decision: &Decision<'_>) -> Vec<(usize, u32, String)> {
    let answers = decision.answers.iter();
    answers.map(|answer| (answer.descriptor, answer.capacity, format!("{:?}", answer.verdict))).collect()
}

/// Returns the ruling for the request, or no answer of either if one of the two decides it before anything is charged.
fn combined(request: &Request, source: &Service, own: &Service) -> (bool, Vec<(usize, u32, String)>) {
    let services = [source, own];
    let rulings = services.map(|service| service.0.rules().find(request).ruling.map(|ruling| ruling.is_denied));
    if rulings.contains(&Some(true)) {
        return (true, Vec::new());
    }
    if rulings.contains(&Some(false)) {
        return (false, Vec::new());
    }
    let [one, other] = services.map(|service| service.ask(request));
    let mut all = [answers(&one), answers(&other)].concat();
    all.sort_by_key(|(descriptor, ..)| *descriptor);
    (one.outcome.is_refused() || other.outcome.is_refused(), all)
}

fn sent((descriptors, _): &Asked) -> Request {
    let with_hits = |(entries, hits): &(&str, u64)| Descriptor { hits_addend: Some(*hits), ..descriptor(entries) };
    request(descriptors.iter().map(with_hits))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn an_overlay_of_own_rules_answers_as_two_services_do(
        (source, own) in (tree(), tree()),
        history in prop::collection::vec(asked(), 1..40),
        pattern in prop::sample::select(&["d", "\"*\""][..]),
    ) {
        let clock = HandClock::at(NOON);
        let overlay = match written(&own) {
            items if items.is_empty() => "empty_overlay: true\n".to_owned(),
            items => format!("overlay: {pattern}\n{items}"),
        };
        let both = Service::new(over(&source, &overlay), &clock);
        let (one, other) = (Service::new(rules(&source), &clock), Service::new(rules(&own), &clock));
        for asked in history {
            clock.advance(&format!("{}s", asked.1));
            let request = sent(&asked);
            let expected = combined(&request, &one, &other);
            let decision = both.ask(&request);
            prop_assert_eq!((decision.outcome.is_refused(), answers(&decision)), expected, "{:?}", asked);
            // The statuses refuse if and only if the request is refused.
            let shown = decision.parts.iter().any(|part| part.outcome().is_refused());
            prop_assert_eq!(shown, decision.outcome.is_refused());
        }
    }

    #[test]
    fn an_empty_overlay_changes_no_answer(
        source in tree(),
        history in prop::collection::vec(asked(), 1..40),
    ) {
        let clock = HandClock::at(NOON);
        let laid = Service::new(over(&source, "empty_overlay: true\n"), &clock);
        let alone = Service::new(rules(&source), &clock);
        for asked in history {
            clock.advance(&format!("{}s", asked.1));
            let request = sent(&asked);
            prop_assert_eq!(format!("{:?}", laid.ask(&request)), format!("{:?}", alone.ask(&request)));
        }
    }
}

#[test]
fn a_refused_request_spends_nothing_in_either_tree_under_all_or_nothing() {
    let source = "domain: d\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 9 } }]\n";
    let own = "overlay: d\ncharging: all_or_nothing
descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 2 } }]\n";
    let overlay = Overlay::new(Documents::parse(vec![file("overlay.yaml", own)]), &Options::default()).expect("valid");
    let source = Documents::parse(vec![file("rules.yaml", source)]);
    let rules = overlay.compile(Some(source), &Options::default()).expect("valid rules").0.rules;
    let service = Service::new(rules, &HandClock::at(Micros::ZERO));
    let ask = |hits| answers(&service.ask(&sent(&(vec![("user=a", hits)], 0))));
    for _ in 0..2 {
        assert_eq!(ask(3).len(), 2);
    }
    let spent = ask(0);
    assert!(spent[0].2.contains("remaining: 9") && spent[1].2.contains("remaining: 2"), "{spent:?}");
}
