//! `tidegate why`, over several instances, and who may read the refusals that it shows.

use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitResponse;

use super::{call_with, over, path, rule_file, tidegate};
use crate::grpc;
use crate::http::{self, Answer};
use crate::redis::Single;
use crate::support::{Tidegate, eventually};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

const RULES: &str = "domain: edge
entries: { api_key: { sensitive: true } }
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 1, name: yearly } }
  - { key: api_key, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: country, value: xx, deny: true }
";

fn call(server: &Tidegate, times: &str, descriptors: &[&str]) {
    call_with(server, "edge", times, descriptors);
}

fn why(instances: &[SocketAddr], more: &[&str]) -> (Option<i32>, String, String) {
    over(instances, &[&["why"], more].concat())
}

#[tokio::test]
async fn refusals_of_all_instances_are_explained_together_and_a_missing_instance_is_named() {
    let redis = Single::start(&[]).await;
    let (rules, url) = (rule_file(RULES), redis.address().to_string());
    let secret = rule_file(SECRET);
    let variables = [("REDIS_URL", url.as_str()), ("KEY_SECRET_FILE", path(&secret))];
    let one = Tidegate::start(rules.path(), &variables).await;
    let mut other = Tidegate::start(rules.path(), &variables).await;
    let both = [one.debug, other.debug];
    call(&one, "5", &["user=42", "country=de"]);
    call(&other, "3", &["user=42"]);
    call(&other, "2", &[r"user=a\,b", "country=\u{202e}de"]);
    call(&one, "2", &["country=xx"]);

    let (code, told, _) = why(&both, &["--domain", "edge", "-d", "user=42"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.starts_with("edge  user=42\n  refused 7 times from "), "{told}");
    assert!(told.contains("by rule edge.user, 1 per year, limit yearly: "), "{told}");
    assert!(told.contains(&format!("{} (4)", one.debug)) && told.contains(&format!("{} (3)", other.debug)), "{told}");
    assert!(told.contains("  this limit has room again in ") && !told.contains("a\\,b"), "{told}");

    let (_, told, _) = why(&both, &[]);
    let first: Vec<&str> = told.lines().filter(|line| line.starts_with("edge")).collect();
    assert_eq!(
        first,
        ["edge  user=42", "edge  country=xx", r"edge  user=a\,b"],
        "the most often refused first: {told}"
    );
    assert!(told.contains(r"in the same request: country=\\u{202e}de"), "{told}");
    assert!(told.contains("by rule edge.country_xx: the rule denies the request"), "{told}");
    let (code, told, _) = why(&both, &["-d", "user=43"]);
    assert_eq!(code, Some(1));
    assert!(told.contains("the last 128 refused descriptors of each rule, for 15m"), "{told}");
    assert!(!told.contains("What is left now"), "it takes a domain: {told}");
    call(&one, "1", &["user=43"]);
    let (_, told, _) = why(&both, &["--domain", "edge", "-d", "user=43"]);
    let (_, left) = told.split_once("What is left now:\n").unwrap_or_else(|| panic!("{told}"));
    assert_eq!(left.matches("rule edge.user, limit yearly: 1 of 1 used in the last ").count(), 2, "{told}");
    let (code, told, errors) = why(&both, &["--domain", "egde", "-d", "user=42"]);
    assert_eq!(code, Some(1));
    assert!(told.contains("A descriptor with these entries was refused in other domains: edge.\n"), "{told}");
    assert!(errors.contains("tidegate top --unmatched"), "{errors}");

    // One that is gone, and one that accepts connections and never answers.
    other.kill();
    other.ended().await;
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let three = [one.debug, other.debug, silent.local_addr().expect("an address")];
    let began = Instant::now();
    let (code, told, errors) = why(&three, &["-d", "user=42", "--timeout", "500ms"]);
    assert!(began.elapsed().as_secs() < 30, "it waits for each at the same time");
    assert_eq!(code, Some(0), "{errors}");
    assert!(told.contains("refused 4 times") && told.contains("Not all instances answered"), "{told}");
    assert!(errors.contains(&format!("{} is missing below: no debug listener", other.debug)), "{errors}");
    assert!(errors.contains(&format!("{} is missing below: no answer within 500ms", three[2])), "{errors}");
    let (code, _, errors) = why(&three[1..], &["--timeout", "500ms"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("no instance answered: set --instance"), "{errors}");
}

#[tokio::test]
async fn refusals_are_read_on_this_machine_only_never_by_a_web_page_and_without_sensitive_values() {
    let rules = rule_file(RULES);
    let secret = rule_file(SECRET);
    let secret = ("KEY_SECRET_FILE", path(&secret));
    let server = Tidegate::start(rules.path(), &[secret]).await;
    call(&server, "2", &["api_key=canary-1234", "user=ann"]);
    let page = http::get(server.debug, "/v1/refusals").await;
    assert!(page.status == 200 && page.contains("\"rule\":\"edge.api_key\""), "{page}");
    assert!(!page.contains("canary"), "{page}");
    for (headers, why) in [
        ("host: localhost\r\norigin: http://localhost\r\n", "web page"),
        ("host: localhost\r\nsec-fetch-site: cross-site\r\nsec-fetch-dest: image\r\n", "web page"),
        ("host: evil.example\r\n", "neither an address nor localhost"),
    ] {
        let page = http::get(server.debug, "/v1/refusals").lines(headers).await;
        assert!(page.status == 403 && page.contains(why), "{page}");
    }
    let page = http::get(server.debug, "/v1/refusals?who=42").await;
    assert!(page.status == 400 && page.contains("there is no parameter who"), "{page}");
    let page = http::get(server.debug, "/v1/refusals?entry=user").await;
    assert!(page.status == 400 && page.contains("entry=KEY=VALUE"), "{page}");
    let page = http::post(server.debug, "/v1/refusals", "").await;
    assert_eq!(page.status, 405, "{page}");

    let open = Tidegate::start(rules.path(), &[secret, ("DEBUG_HOST", "0.0.0.0")]).await;
    let at = SocketAddr::from(([127, 0, 0, 1], open.debug.port()));
    call(&open, "2", &["user=ann"]);
    let ask = async |path: &str| http::get(at, path).header("host", "tidegate").await;
    let page = ask("/v1/refusals").await;
    assert!(page.status == 403 && page.contains("DEBUG_HOST") && !page.contains("ann"), "{page}");
    assert!(ask("/rlconfig").await.status == 200);
}

#[tokio::test]
async fn refusals_stay_known_after_a_reload() {
    let (rules, secret) = (rule_file(RULES), rule_file(SECRET));
    let server = Tidegate::start(rules.path(), &[("KEY_SECRET_FILE", path(&secret))]).await;
    call(&server, "2", &["user=42"]);
    std::fs::write(path(&rules), RULES.replace("requests_per_unit: 1,", "requests_per_unit: 2,"))
        .expect("it is written");
    eventually("the new rules are in force", async || {
        http::get(server.debug, "/rlconfig").await.contains("requests_per_unit=2").then_some(())
    })
    .await;
    call(&server, "3", &["user=42"]);
    let (_, told, _) = why(&[server.debug], &["-d", "user=42"]);
    assert!(told.contains("1 per year") && told.contains("2 per year"), "{told}");
}

#[tokio::test]
async fn why_tells_how_much_was_asked_for_and_who_set_the_limit() {
    let rules = rule_file(
        "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 5 } }
  - { key: job, rate_limit: { unit: year, requests_per_unit: 5, algorithm: token_bucket } }
",
    );
    let server = Tidegate::start(rules.path(), &[]).await;
    let call = |arguments: &[&str]| {
        let address = server.grpc.to_string();
        let fixed = ["call", "--address", &address, "--domain", "edge"];
        tidegate(&[&fixed[..], arguments].concat()).status.code()
    };
    assert_eq!(call(&["-d", "user=ann", "--hits", "9"]), Some(1));
    assert_eq!(call(&["-d", "user=bob", "--limit", "0/minute"]), Some(1));
    assert_eq!(call(&["-d", "job=one", "--hits", "3"]), Some(0));
    assert_eq!(call(&["-d", "job=one", "--hits", "4"]), Some(1));
    for (descriptor, reason) in [
        ("user=ann", "the request asked for 9 hits, and the limit never allows as much\n"),
        (
            "user=bob",
            "0 per minute: the request asked for 1 hit, and the limit never allows as much (a limit that the request sent)\n",
        ),
        ("job=one", "the request asked for 4 hits, and 2 were left\n  this limit has room for 4 hits again in "),
    ] {
        let (_, told, _) = why(&[server.debug], &["-d", descriptor]);
        assert!(told.contains(reason), "{descriptor}: {told}");
    }
}

#[tokio::test]
async fn an_id_leads_to_the_time_of_its_request_and_what_else_was_in_a_request_is_said_with_its_time() {
    let rules = rule_file(RULES);
    let secret = rule_file(SECRET);
    let server =
        Tidegate::start(rules.path(), &[("KEY_SECRET_FILE", path(&secret)), ("DECISION_METADATA", "true")]).await;
    call(&server, "2", &["user=ann", "country=de"]);
    let id = eventually("another second", async || {
        let id = decided(&server, "ann").await;
        let (_, told, _) = why(&[server.debug], &[&id]);
        // Descriptors are copied once a second. Those of this request are the user alone.
        (!told.contains("country=de")).then_some(id)
    })
    .await;
    call(&server, "1", &["user=ann", "country=fr"]);
    let (_, told, _) = why(&[server.debug], &[&id]);
    assert!(told.contains(" refused this request at ") && told.contains(" UTC. It is one of these:\n"), "{told}");
    assert!(!told.contains("in the same request: "), "it is not said of several requests: {told}");
}

/// The id of the decision on a user, as the dynamic metadata of the answer has it.
async fn decided(server: &Tidegate, user: &str) -> String {
    let (_, _, id) = called(server, user).await;
    id
}

/// The id in the dynamic metadata of an answer.
fn id_in_metadata(answer: &RateLimitResponse) -> String {
    let metadata = format!("{:?}", answer.dynamic_metadata.as_ref().expect("it is asked for"));
    let (_, id) =
        metadata.split_once("\"id\": Value { kind: Some(StringValue(\"").unwrap_or_else(|| panic!("{metadata}"));
    id.split_once('"').expect("it ends").0.to_owned()
}

#[tokio::test]
async fn the_id_of_a_decision_leads_to_its_refusal_at_the_instance_that_made_it() {
    let rules = rule_file(RULES);
    let secret = rule_file(SECRET);
    let variables = [("KEY_SECRET_FILE", path(&secret)), ("DECISION_METADATA", "true")];
    let one = Tidegate::start(rules.path(), &variables).await;
    let mut other = Tidegate::start(rules.path(), &variables).await;
    let both = [one.debug, other.debug];
    let admitted = decided(&one, "ann").await;
    let refused = decided(&one, "ann").await;
    decided(&other, "bob").await;
    let of_other = decided(&other, "bob").await;
    let ids =
        [(&refused, &one, "user=ann"), (&of_other, &other, "user=bob"), (&refused.to_uppercase(), &one, "user=ann")];
    for (id, server, user) in ids {
        let (code, told, _) = why(&both, &[id]);
        assert_eq!(code, Some(0), "{told}");
        let (decided, told) = told.split_once('\n').unwrap_or_else(|| panic!("{told}"));
        assert!(decided.starts_with(&format!("{} refused this request at ", server.debug)), "{decided}");
        assert!(decided.ends_with(" UTC:"), "{decided}");
        assert!(told.starts_with(&format!("edge  {user}\n  refused once")), "{told}");
        assert!(told.contains("by rule edge.user, 1 per year, limit yearly"), "{told}");
        assert_eq!(told.matches("  by rule").count(), 1, "{told}");
    }
    let (code, told, _) = why(&both, &[&admitted]);
    assert_eq!((code, told.contains(&format!("{} admitted this request at ", one.debug))), (Some(1), true), "{told}");
    other.kill();
    other.ended().await;
    let (code, told, errors) = why(&both, &[&of_other, "--timeout", "500ms"]);
    assert_eq!((code, told.contains("No instance that answered has made the decision")), (Some(1), true), "{told}");
    assert!(errors.contains("is missing below"), "{errors}");
    let (code, _, errors) = why(&both[..1], &["user=ann"]);
    assert!(code == Some(2) && errors.contains("write --descriptor user=ann"), "{errors}");
    let (code, _, errors) = why(&both[..1], &["42"]);
    assert!(code == Some(2) && errors.contains("26 digits and letters"), "{errors}");
    assert!(errors.contains("write --descriptor KEY=42") && !errors.contains("answered"), "{errors}");
}

#[tokio::test]
async fn what_a_shadow_mode_admits_is_told_as_what_would_have_been_refused() {
    let rules = rule_file(
        "domain: edge
descriptors:
  - key: user
    rate_limits:
      - { unit: year, requests_per_unit: 3, name: yearly }
      - { unit: year, requests_per_unit: 1, shadow_mode: true, name: tighter }
  - { key: path, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }
",
    );
    let one = Tidegate::start(rules.path(), &[("DECISION_METADATA", "true")]).await;
    let enforced = rule_file(RULES);
    let secret = rule_file(SECRET);
    let variables = [("SHADOW_MODE", "true"), ("KEY_SECRET_FILE", path(&secret))];
    let other = Tidegate::start(enforced.path(), &variables).await;
    let admitted = decided(&one, "ann").await;
    let spared = decided(&one, "ann").await;
    for _ in 0..3 {
        decided(&one, "ann").await;
    }
    call(&one, "2", &["path=/", "country=de"]);
    call(&other, "3", &["user=bob"]);
    call(&other, "1", &["country=xx"]);

    let (code, told, _) = why(&[one.debug, other.debug], &[]);
    assert_eq!(code, Some(0), "{told}");
    let heads: Vec<&str> = told.lines().filter(|line| line.starts_with("edge")).collect();
    let expected = ["edge  user=ann", "edge  user=ann", "edge  user=bob", "edge  country=xx", "edge  path=/"];
    assert_eq!(heads[..3], expected[..3], "refusals come first: {told}");
    assert_eq!(heads.len(), 5, "{told}");
    assert!(expected[3..].iter().all(|head| heads[3..].contains(head)), "{told}");
    assert!(told.starts_with("edge  user=ann\n  refused 2 times from "), "{told}");
    for (times, by) in [
        ("4 times from ", "rule edge.user, 1 per year, limit tighter: "),
        ("2 times from ", "rule edge.user, 1 per year, limit yearly: "),
        ("once, at ", "rule edge.country_xx: the rule denies the request\n"),
        ("once, at ", "rule edge.path, 1 per year: its counter is used up\n"),
    ] {
        let told =
            told.split("edge  ").find(|part| part.contains(&format!("  by {by}"))).unwrap_or_else(|| panic!("{told}"));
        assert!(told.contains(&format!("  would have been refused {times}")), "{told}");
        assert!(told.contains("  shadow mode: this refused nothing\n"), "{told}");
    }
    let (code, told, _) = why(&[one.debug], &["--rule", "edge.path"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("in the same request: country=de"), "{told}");

    let (code, told, _) = why(&[one.debug], &[&spared]);
    assert_eq!(code, Some(0), "{told}");
    assert!(
        told.contains(" admitted this request at ") && told.contains(" because of a shadow mode. It is one"),
        "{told}"
    );
    assert_eq!((told.matches("  by rule").count(), told.contains("limit tighter: ")), (1, true), "{told}");
    let (code, told, _) = why(&[one.debug], &[&admitted]);
    assert_eq!((code, told.contains("shadow")), (Some(1), false), "{told}");
}

const CHECKED: &str = "domain: edge
requests:
  from_gateway: nginx
  trusted_proxies: [127.0.0.0/8]
  descriptors: [[{ key: user, from: header, name: x-user-id, missing: skip }]]
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 1, name: yearly } }
";

/// The answer of `/json` about a user.
async fn json(server: &Tidegate, user: &str) -> Answer {
    http::post(server.http, "/json", http::descriptor("edge", &[("user", user)])).await
}

/// The answer of `/check` about a user.
async fn check(server: &Tidegate, user: &str) -> Answer {
    let own =
        [("x-forwarded-for", "192.0.2.1"), ("x-original-method", "GET"), ("x-original-uri", "/"), ("x-user-id", user)];
    http::get(server.http, "/check/edge").headers(&own).await
}

/// The answer to a call about a user: the value of a header for the client, the body, and the id in the metadata.
async fn called(server: &Tidegate, user: &str) -> (Option<String>, String, String) {
    let request = grpc::one("edge", "user", user);
    let answer = grpc::client(server.grpc).await.should_rate_limit(request).await.expect("no error").into_inner();
    let headers = &answer.response_headers_to_add;
    let id = headers.iter().find(|header| header.key == "x-tidegate-decision-id").map(|header| header.value.clone());
    (id, String::from_utf8(answer.raw_body.clone()).expect("text"), id_in_metadata(&answer))
}

#[tokio::test]
async fn a_refused_client_can_quote_an_id_whatever_way_it_asked() {
    let rules = rule_file(CHECKED);
    let variables = [("DECISION_ID_HEADER", "true"), ("DECISION_METADATA", "true"), ("REFUSAL_BODY", "json")];
    let server = Tidegate::start(rules.path(), &variables).await;
    let (none, _, _) = called(&server, "ann").await;
    let (id, body, in_metadata) = called(&server, "ann").await;
    let of_call = id.expect("a refusal has one");
    assert_eq!((none, &in_metadata), (None, &of_call), "an admission has none");
    let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(body["decision_id"], *of_call);

    assert!(!json(&server, "bob").await.contains("x-tidegate-decision-id"));
    let answer = json(&server, "bob").await;
    let header = answer.json()["responseHeadersToAdd"].as_array().expect("a list").iter().find_map(|header| {
        (header["key"] == "x-tidegate-decision-id").then(|| header["value"].as_str().expect("text").to_owned())
    });
    let of_json = header.unwrap_or_else(|| panic!("{answer}"));

    assert_eq!(check(&server, "eve").await.find("x-tidegate-decision-id"), None);
    let answer = check(&server, "eve").await;
    let of_check = answer.header("x-tidegate-decision-id").to_owned();
    assert_eq!(answer.json()["decision_id"], *of_check);

    for (id, user) in [(of_call, "ann"), (of_json, "bob"), (of_check, "eve")] {
        let (code, told, _) = why(&[server.debug], &[&id]);
        assert_eq!(code, Some(0), "{told}");
        assert!(told.contains(&format!(" UTC:\nedge  user={user}\n  refused once")), "{told}");
    }
}

#[tokio::test]
async fn an_id_is_sent_to_nobody_unless_it_is_asked_for() {
    let rules = rule_file(CHECKED);
    let server = Tidegate::start(rules.path(), &[("DECISION_METADATA", "true"), ("REFUSAL_BODY", "json")]).await;
    called(&server, "ann").await;
    let (id, body, _) = called(&server, "ann").await;
    assert!(id.is_none() && body.contains("rate_limited") && !body.contains("decision_id"), "{body}");
    let answer = check(&server, "ann").await;
    assert!(answer.contains("rate_limited") && !answer.contains("decision"), "{answer}");
}
