//! The example of plans, as it stands: each limit to its last hit, in the real binary.

use std::time::{SystemTime, UNIX_EPOCH};

use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, rate_limit::Unit};

use crate::grpc;
use crate::support::{Tidegate, repository};

const RULES: &str = "examples/plans/rules.yaml";

/// What is asked of one server, one after the other: descriptors, and what each of them costs.
type Calls<'c> = &'c [(&'c [&'c str], u64)];

/// The status of a descriptor: admitted or not, the limit that is shown with its window, and what is left of it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    is_admitted: bool,
    limit: Option<(u32, u32, Unit)>,
    name: String,
    remaining: u32,
}

/// The statuses of all calls, from a server that has counted nothing before, within one window of every limit.
///
/// Every window of the rules that stands on the clock ends with a minute. Where one ends meanwhile, other calls are made.
async fn ask(calls: Calls<'_>) -> Vec<Vec<Seen>> {
    loop {
        let minute = minute();
        let seen = ask_once(calls).await;
        if minute == self::minute() {
            return seen;
        }
    }
}

fn minute() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() / 60
}

async fn ask_once(calls: Calls<'_>) -> Vec<Vec<Seen>> {
    let tidegate = Tidegate::start(&repository(RULES), &[]).await;
    let mut client = grpc::client(tidegate.grpc).await;
    let mut seen = Vec::new();
    for (descriptors, hits) in calls {
        let descriptors = descriptors.iter().map(|text| descriptor(text, *hits)).collect();
        let request = RateLimitRequest { domain: "shop".to_owned(), descriptors, hits_addend: 0 };
        let answer = client.should_rate_limit(request).await.expect("an answer").into_inner();
        let is_refused = answer.statuses.iter().any(|status| status.code() == Code::OverLimit);
        assert_eq!(answer.overall_code() == Code::OverLimit, is_refused, "{answer:?}");
        let statuses = answer.statuses.into_iter().map(|status| {
            let limit = status.current_limit.as_ref();
            Seen {
                is_admitted: status.code() == Code::Ok,
                limit: limit.map(|of| (of.requests_per_unit, of.unit_multiplier.unwrap_or(1), of.unit())),
                name: limit.map_or_else(String::new, |limit| limit.name.clone()),
                remaining: status.limit_remaining,
            }
        });
        seen.push(statuses.collect());
    }
    seen
}

/// `key=value,key=value` at this cost.
fn descriptor(text: &str, hits: u64) -> RateLimitDescriptor {
    let entries: Vec<_> = text.split(',').filter_map(|entry| entry.split_once('=')).collect();
    RateLimitDescriptor { hits_addend: Some(hits), ..grpc::descriptor(&entries) }
}

/// Admitted, with so many left of the limit of this name.
fn admitted(name: &str, limit: u32, window: (u32, Unit), remaining: u32) -> Seen {
    Seen { is_admitted: true, limit: Some((limit, window.0, window.1)), name: name.to_owned(), remaining }
}

fn refused(name: &str, limit: u32, window: (u32, Unit), remaining: u32) -> Seen {
    Seen { is_admitted: false, ..admitted(name, limit, window, remaining) }
}

const HOUR: (u32, Unit) = (1, Unit::Hour);
const DAY: (u32, Unit) = (1, Unit::Day);
const MINUTE: (u32, Unit) = (1, Unit::Minute);
const QUARTER: (u32, Unit) = (15, Unit::Minute);

/// A limit admits all of its hits at once or one after the other, and not one more; another user has them all.
async fn holds(descriptor: &str, other: &str, name: &str, limit: u32, window: (u32, Unit)) {
    let (one, other) = (&[descriptor][..], &[other][..]);
    let calls = [(one, u64::from(limit) - 1), (one, 1), (one, 1), (other, u64::from(limit) + 1), (other, limit.into())];
    let expected = [
        admitted(name, limit, window, 1),
        admitted(name, limit, window, 0),
        refused(name, limit, window, 0),
        // It never fits.
        refused(name, limit, window, 0),
        admitted(name, limit, window, 0),
    ];
    assert_eq!(ask(&calls).await, expected.map(|seen| vec![seen]), "{descriptor}");
}

#[tokio::test]
async fn each_user_has_the_hits_of_the_plan_in_an_hour_and_not_one_more() {
    for (plan, limit) in [("free", 100), ("basic", 1_000), ("premium", 10_000)] {
        holds(&format!("plan={plan},user=ann"), &format!("plan={plan},user=ben"), plan, limit, HOUR).await;
    }
}

#[tokio::test]
async fn a_user_of_an_unknown_plan_or_of_none_has_ten_hits_in_an_hour() {
    holds("plan=gold,user=ann", "plan=gold,user=ben", "other-plan", 10, HOUR).await;
    holds("plan=,user=ann", "plan=,user=ben", "other-plan", 10, HOUR).await;
    holds("plan=premium2,user=ann", "plan=pre,user=ann", "other-plan", 10, HOUR).await;
    holds("user=ann", "user=ben", "no-plan", 10, HOUR).await;
}

#[tokio::test]
async fn a_plan_is_the_same_in_capital_letters() {
    let calls: Calls<'_> = &[
        (&["plan=FREE,user=ann"], 60),
        (&["plan=Free,user=ann"], 40),
        (&["plan=free,user=ann"], 1),
        (&["plan=PREMIUM,user=ann"], 1),
        (&["plan=free,user=ANN"], 1),
    ];
    let expected = [
        admitted("free", 100, HOUR, 40),
        admitted("free", 100, HOUR, 0),
        refused("free", 100, HOUR, 0),
        admitted("premium", 10_000, HOUR, 9_999),
        admitted("free", 100, HOUR, 99),
    ];
    assert_eq!(ask(calls).await, expected.map(|seen| vec![seen]));
}

#[tokio::test]
async fn a_user_searches_a_hundred_times_in_a_minute_however_the_path_is_spelled() {
    holds("path=/api/search,user=ann", "path=/api/search,user=ben", "search", 100, MINUTE).await;
    let calls: Calls<'_> = &[
        (&["path=/api/search?q=tides,user=ann"], 50),
        (&["path=//api/./%73earch,user=ann"], 50),
        (&["path=/api/search?q=,user=ann"], 1),
        (&["path=/api/other,user=ann"], 1_000),
    ];
    let not_limited = Seen { is_admitted: true, limit: None, name: String::new(), remaining: 0 };
    let expected = [
        admitted("search", 100, MINUTE, 50),
        admitted("search", 100, MINUTE, 0),
        refused("search", 100, MINUTE, 0),
        not_limited,
    ];
    assert_eq!(ask(calls).await, expected.map(|seen| vec![seen]));
}

#[tokio::test]
async fn an_address_logs_in_five_times_in_a_quarter_of_an_hour() {
    holds("path=/login,remote_address=192.0.2.1", "path=/login,remote_address=192.0.2.2", "login", 5, QUARTER).await;
    let of_one_client: Calls<'_> = &[
        (&["path=/login,remote_address=2001:db8::1"], 3),
        (&["path=/login?again,remote_address=2001:db8::2:1"], 2),
        (&["path=/login,remote_address=2001:db8::ffff"], 1),
        (&["path=/login,remote_address=2001:db8:0:1::1"], 1),
    ];
    let expected = [
        admitted("login", 5, QUARTER, 2),
        admitted("login", 5, QUARTER, 0),
        refused("login", 5, QUARTER, 0),
        admitted("login", 5, QUARTER, 4),
    ];
    assert_eq!(ask(of_one_client).await, expected.map(|seen| vec![seen]));
}

/// What is refused is counted too, so a hundred tries are used up while there is room for one in the quarter.
#[tokio::test]
async fn an_address_that_tries_a_hundred_times_in_an_hour_is_shut_out_even_where_the_quarter_has_room() {
    let login: &[&str] = &[LOGIN];
    let calls = [(login, 96), (login, 1), (login, 1), (login, 1), (login, 1), (login, 1)];
    let seen = ask(&calls).await;
    let first = refused("login", 5, QUARTER, 0);
    assert_eq!(seen[0], [first], "96 at once do not fit into the quarter");
    let attempts = |remaining| vec![admitted("login-attempts", 100, HOUR, remaining)];
    assert_eq!(seen[1..5], [attempts(3), attempts(2), attempts(1), attempts(0)]);
    assert_eq!(seen[5], [refused("login-attempts", 100, HOUR, 0)], "the quarter has room for one");
}

#[tokio::test]
async fn all_users_together_have_ten_million_hits_in_a_day() {
    let tier: &[&str] = &["tier=global"];
    let calls = [(tier, 10_000_000), (tier, 1), (&["tier=other"], 1)];
    let seen = ask(&calls).await;
    assert_eq!(seen[0], [admitted("global", 10_000_000, DAY, 0)]);
    assert_eq!(seen[1], [refused("global", 10_000_000, DAY, 0)]);
    assert!(seen[2][0].is_admitted && seen[2][0].limit.is_none(), "{:?}", seen[2]);
}

const LOGIN: &str = "path=/login,remote_address=192.0.2.1";
const TIERS: [&str; 4] = ["tier=global", "plan=free,user=ann", "path=/api/search,user=ann", LOGIN];

/// What each tier has, and what a full request has left of it.
fn left(hits: [u32; 4]) -> Vec<Seen> {
    let [global, plan, search, login] = hits;
    vec![
        admitted("global", 10_000_000, DAY, 10_000_000 - global),
        admitted("free", 100, HOUR, 100 - plan),
        admitted("search", 100, MINUTE, 100 - search),
        admitted("login", 5, QUARTER, 5 - login),
    ]
}

#[tokio::test]
async fn what_one_tier_refuses_costs_the_others_nothing() {
    for (full, limit) in [10_000_000, 100, 100, 5].into_iter().enumerate() {
        let calls = [(&TIERS[full..=full], u64::from(limit)), (&TIERS[..], 1), (&TIERS[..], 1), (&TIERS[..], 0)];
        let seen = ask(&calls).await;
        assert!(seen[0][0].is_admitted, "{seen:?}");
        for statuses in &seen[1..3] {
            let refusing: Vec<_> = (0..4).filter(|tier| !statuses[*tier].is_admitted).collect();
            assert_eq!(refusing, [full], "{statuses:?}");
        }
        let mut hits = [0; 4];
        hits[full] = limit;
        let mut expected = left(hits);
        if TIERS[full] != LOGIN {
            // These alone count what is refused: a try is a try.
            expected[3] = admitted("login-attempts", 100, HOUR, 98);
        }
        let shown = |seen: &[Seen]| seen.iter().map(|seen| (seen.name.clone(), seen.remaining)).collect::<Vec<_>>();
        assert_eq!(shown(&seen[3]), shown(&expected));
    }
}

#[tokio::test]
async fn an_admitted_request_is_counted_in_every_tier_at_once() {
    let seen = ask(&[(&TIERS[..], 1), (&TIERS[..], 2)]).await;
    assert_eq!(seen, [left([1; 4]), left([3; 4])]);
}

#[test]
fn the_page_shows_what_the_files_say() {
    let read = |path: &str| std::fs::read_to_string(repository(path)).expect("it reads");
    let (page, envoy) = (read("examples/plans/README.md"), read("examples/plans/envoy.yaml"));
    let from = envoy.find("              rate_limits:\n").expect("the descriptors");
    let to = envoy.find("              routes:\n").expect("what follows them");
    let shown: String = envoy[from..to].lines().map(|line| format!("{}\n", line.get(14..).unwrap_or(""))).collect();
    assert!(page.contains(&format!("```yaml\n{shown}```")), "the page and envoy.yaml send different descriptors");

    let asked = "explain --domain shop -d plan=PREMIUM,user=ann examples/plans/rules.yaml";
    let mut explain = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
    explain.args(asked.split(' ')).current_dir(repository("")).env_clear();
    let told = explain.output().expect("it runs").stdout;
    let told = format!("$ target/release/tidegate {asked}\n{}```", String::from_utf8_lossy(&told));
    assert!(page.contains(&told), "the page does not say\n{told}");
}
