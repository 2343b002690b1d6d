//! `explain` of HTTP requests, and the files that `check` reads.

use std::fs;

use super::{path, stderr, stdout, tidegate, tidegate_with};
use crate::support::{directory, rule_file};

const RULES: &str = "domain: edge
requests:
  from_gateway: nginx
  trusted_proxies: [127.0.0.1]
  refusal_status: 403
  descriptors:
    - [{ key: path, from: path }, { key: remote_address, from: client_ip }]
    - [{ key: key, from: header, name: x-api-key, missing: skip }]
    - [{ key: method, from: method }]
entries: { remote_address: { as: ip } }
descriptors:
  - key: path
    value: /login
    descriptors: [{ key: remote_address, rate_limit: { unit: minute, requests_per_unit: 5 } }]
  - { key: key, rate_limit: { unit: hour, requests_per_unit: 9 } }
  - { key: method, value: POST, rate_limit: { unit: day, requests_per_unit: 7 } }
";

/// Explains a request to the domain. Returns true if the command succeeded, its output and its errors.
fn explain(rules: &str, more: &[&str]) -> (bool, String, String) {
    let file = rule_file(rules);
    let output = tidegate(&[&["explain", "--domain", "edge", path(&file)], more].concat());
    (output.status.success(), stdout(&output), stderr(&output))
}

#[test]
fn explain_says_which_descriptors_a_request_of_a_gateway_makes_and_what_each_meets() {
    let request = ["--gateway", "nginx", "--path", "/a/../login?next=/", "--header", "X-Forwarded-For: 2001:db8::7"];
    let (is_good, text, errors) = explain(RULES, &[&request[..], &["--method", "POST"]].concat());
    assert!(is_good, "{errors}");
    for expected in [
        "nginx at 127.0.0.1 asks about POST /a/../login?next=/",
        "descriptor path=/login,remote_address=2001:db8::7",
        "{edge|path=/login|remote_address~=2001:db8::/64}fixed_window:1m",
        "descriptor method=POST",
        "=> rule edge.method_POST",
        "1 of 3 descriptors are not made",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    assert!(!errors.contains("--unmatched"), "{errors}");
    let (_, text, errors) = explain(RULES, &[&request[..], &["--header", "x-api-key: k"]].concat());
    assert!(text.contains("=> rule edge.key") && text.contains("descriptor method=GET\n"), "{text}");
    assert!(errors.contains("tidegate top --unmatched"), "GET meets no rule: {errors}");
}

#[test]
fn explain_says_why_a_request_cannot_be_read_and_who_may_not_ask() {
    let (_, text, _) = explain(RULES, &["--path", "/a%2Fb"]);
    assert!(text.contains("=> refused with 403, and nothing is charged: the path"), "{text}");
    let (_, text, _) = explain(RULES, &["--path", "/", "--peer", "192.0.2.9"]);
    assert!(text.contains("192.0.2.9 is not in `trusted_proxies`"), "{text}");
    let (is_good, _, errors) = explain(RULES, &["--path", "/", "--gateway", "caddy"]);
    assert!(!is_good && errors.contains("`from_gateway: nginx`"), "{errors}");
    let (is_good, _, errors) = explain(&RULES.replace("edge", "other"), &["--path", "/"]);
    assert!(!is_good && errors.contains("has no `requests`"), "{errors}");
    for wrong in [&["--path", "/", "-d", "a=b"][..], &["-d", "a=b", "--method", "POST"], &[]] {
        assert!(!explain(RULES, wrong).0, "{wrong:?}");
    }
}

#[test]
fn check_reads_the_files_that_serve_reads_there_and_names_those_that_both_pass_over() {
    let rules = "domain: NAME\ndescriptors: [{ key: user, rate_limit: { unit: UNIT, requests_per_unit: 1 } }]\n";
    let made = directory([
        ("config/base.yaml", rules.replace("NAME", "base").replace("UNIT", "hour")),
        ("config/other.conf", rules.replace("NAME", "other").replace("UNIT", "houry")),
        ("rules.yaml", rules.replace("NAME", "above").replace("UNIT", "hour")),
    ]);
    let at = |name: &str| made.path().join(name).to_str().expect("a path of text").to_owned();
    let root = made.path().to_str().expect("a path of text");
    let check = |arguments: &[&str]| {
        let output = tidegate_with(&[&["check"], arguments].concat(), &[("RUNTIME_ROOT", root)]);
        (output.status.code(), stderr(&output))
    };
    let directory = at("config");
    for runtime in [&[][..], &[directory.as_str()]] {
        let (code, errors) = check(runtime);
        assert_eq!(code, Some(1), "{errors}");
        assert!(errors.contains("other.conf:2:"), "every file below the app directory: {errors}");
        assert!(errors.contains("rules.yaml: warning: this file looks like a rule file and is not read"), "{errors}");
    }
    let output = tidegate(&["check", &directory]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("other.conf: warning: this file looks like a rule file"), "{}", stderr(&output));
    fs::remove_file(at("config/base.yaml")).expect("it is removed");
    let output = tidegate(&["check", &directory]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`other.conf` looks like a rule file"), "{}", stderr(&output));
}

/// A virtual host with two routes, and the filter in front of it.
const ENVOY: &str = r#"filters:
- name: hcm
  typed_config:
    route_config:
      virtual_hosts:
      - name: shop
        domains: ["*"]
        rate_limits:
        - actions: [{ remote_address: {} }]
        routes:
        - name: admin
          match: { prefix: /admin }
          route: { cluster: admin, rate_limits: [{ actions: [{ generic_key: { descriptor_value: admin } }] }] }
        - name: login
          match: { prefix: /login, headers: [{ name: ":method", string_match: { exact: POST } }] }
          route:
            cluster: web
            include_vh_rate_limits: true
            rate_limits:
            - actions: [{ request_headers: { header_name: x-user-id, descriptor_key: user } }]
            - actions: [{ metadata: { descriptor_key: plan, metadata_key: { key: jwt } } }, { generic_key: { descriptor_value: a } }]
              apply_on_stream_done: true
            - hits_addend: { number: 5 }
              actions: [{ generic_key: { descriptor_key: path, descriptor_value: /login } }]
        - name: rest
          match: { prefix: / }
          route: { cluster: web }
    http_filters:
    - name: limits
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
        domain: edge
"#;

const OF_ENVOY: &str = "domain: edge
entries: { remote_address: { as: ip } }
descriptors:
  - { key: user, rate_limit: { unit: hour, requests_per_unit: 9 } }
  - { key: remote_address, rate_limit: { unit: hour, requests_per_unit: 99 } }
";

/// Explains a request by these actions. Returns true if the command succeeded, its output and its errors.
fn explain_envoy(envoy: &str, more: &[&str]) -> (bool, String, String) {
    let (rules, envoy) = (rule_file(OF_ENVOY), rule_file(envoy));
    let output = tidegate(&[&["explain", path(&rules), "--envoy", path(&envoy)], more].concat());
    (output.status.success(), stdout(&output), stderr(&output))
}

#[test]
fn explain_says_which_descriptors_envoy_makes_of_a_request_and_what_each_meets() {
    let login = ["--path", "/login?next=/", "--method", "POST"];
    let user = ["--header", "x-user-id=alice", "--peer", "2001:db8::7"];
    let (is_good, text, errors) = explain_envoy(ENVOY, &[&login[..], &user].concat());
    assert!(is_good, "{errors}");
    for expected in [
        "POST /login?next=/\n",
        ":14: route login of virtual host shop: asks about domain edge, by the filter limits\n",
        "descriptor user=alice  (line 20)\n",
        "=> rule edge.user\n",
        "descriptor plan=?,generic_key=a  (line 21)\n=> not known here: `metadata`",
        "note     sent when the response ends",
        "descriptor path=/login  (line 23)\n",
        "note     Envoy ignores `hits_addend`",
        "descriptor remote_address=2001:db8::7  (line 9)\n",
        "2 routes not shown",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    assert!(!text.contains("admin"), "{text}");
    assert!(errors.contains("tidegate top --unmatched"), "path=/login meets no rule: {errors}");

    let (_, text, _) = explain_envoy(ENVOY, &login);
    assert!(text.contains("no descriptor  (line 20): the request has no header x-user-id"), "{text}");
    assert!(text.contains("descriptor remote_address=?") && text.contains("--peer"), "{text}");
    let (_, text, _) = explain_envoy(ENVOY, &["--path", "/login", "--peer", "192.0.2.1"]);
    assert!(text.contains("route rest of") && text.matches("\ndescriptor ").count() == 1, "a GET: {text}");
    let (_, text, _) = explain_envoy(ENVOY, &["--path", "/login", "--route", "admin"]);
    assert!(text.contains("✗ its `match` is for other requests") && text.contains("generic_key=admin"), "{text}");
}

#[test]
fn explain_takes_a_list_alone_the_configuration_of_a_route_and_the_json_of_protobuf() {
    let list = "- actions: [{ request_headers: { header_name: x-user-id, descriptor_key: user } }]\n";
    let json =
        r#"{"rateLimits": [{"actions": [{"requestHeaders": {"headerName": "x-user-id", "descriptorKey": "user"}}]}]}"#;
    let objects = format!("kind: A\n---\nspec:\n  patch:\n    value:\n      rate_limits:\n      {list}");
    for envoy in [list, json, &objects] {
        let (is_good, text, errors) = explain_envoy(envoy, &["--path", "/", "--header", "X-User-ID: alice"]);
        assert!(is_good && text.contains("descriptor user=alice"), "{envoy}: {text}{errors}");
        assert!(text.contains("rate_limits: asks about domain edge\n"), "{text}");
    }
    let per_route = format!(
        "match: {{ prefix: / }}\nroute: {{ cluster: a, rate_limits: [{{ actions: [{{ generic_key: {{ descriptor_value: b }} }}] }}] }}\ntyped_per_filter_config:\n  limits:\n    \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute\n    domain: DOMAIN\n    rate_limits:\n    {list}"
    );
    let (_, text, _) =
        explain_envoy(&per_route.replace("DOMAIN", "other"), &["--path", "/", "--header", "x-user-id: a"]);
    assert!(text.contains("asks about domain other, by the filter limits"), "{text}");
    assert!(text.contains("descriptor user=a ") && !text.contains("generic_key"), "only those of the filter: {text}");
    assert!(text.contains("no rule file has this domain"), "{text}");
    let (is_good, _, errors) =
        explain_envoy(&per_route.replace("DOMAIN", "other"), &["--path", "/", "--domain", "edge"]);
    assert!(!is_good && errors.contains("no list `rate_limits` with `actions` was found"), "{errors}");
}

#[test]
fn explain_knows_the_older_conditions_of_headers_and_a_query_parameter_without_a_condition() {
    for (condition, met, unmet) in [
        ("exact_match: abc", "abc", "abcd"),
        ("prefix_match: ab", "abc", "xab"),
        ("suffix_match: bc", "abc", "bcx"),
        ("contains_match: b", "abc", "xyz"),
    ] {
        let items = format!(
            "- actions: [{{ header_value_match: {{ descriptor_value: met, headers: [{{ name: x-a, {condition} }}] }} }}]\n"
        );
        for (value, is_met) in [(met, true), (unmet, false)] {
            let (_, text, errors) = explain_envoy(&items, &["--path", "/", "--header", &format!("x-a: {value}")]);
            assert_eq!(text.contains("descriptor header_match=met"), is_met, "{condition}, {value}: {text}{errors}");
        }
    }
    let items =
        "- actions: [{ query_parameter_value_match: { descriptor_value: met, query_parameters: [{ name: page }] } }]\n";
    for (path, is_met) in [("/?page=1", true), ("/?pages=1", false)] {
        let (_, text, errors) = explain_envoy(items, &["--path", path]);
        assert_eq!(text.contains("descriptor query_match=met"), is_met, "{path}: {text}{errors}");
    }
}

#[test]
fn explain_says_that_envoy_asks_nothing_and_what_it_cannot_read() {
    let (_, text, _) =
        explain_envoy("- actions: [{ request_headers: { header_name: a, descriptor_key: a } }]\n", &["--path", "/"]);
    assert!(text.contains("=> Envoy does not ask Tidegate about this request"), "{text}");
    let (_, text, _) = explain_envoy(&ENVOY.replace("match: { prefix: / }", "match: { path: /x }"), &["--path", "/y"]);
    assert!(text.contains("=> Envoy does not ask Tidegate about this request") && text.contains("3 routes"), "{text}");
    let unknown = "- actions: [{ extension: { name: cel } }]\n- actions: [{ query_parameters: { query_parameter_name: a, descriptor_key: a } }]\n";
    let (_, text, _) = explain_envoy(unknown, &["--path", "/?a=%20"]);
    assert!(text.matches("=> not known here: ").count() == 2, "{text}");
    for (envoy, expected) in [
        ("a: b\n", "no list `rate_limits` with `actions` was found"),
        (
            "typed_config: { \"@type\": x.local_ratelimit.v3.LocalRateLimit, rate_limits: [{ actions: [] }] }\n",
            "sends nothing",
        ),
        ("a: [\n", "is not YAML"),
    ] {
        let (is_good, _, errors) = explain_envoy(envoy, &["--path", "/"]);
        assert!(!is_good && errors.contains(expected), "{expected} in {errors}");
    }
    for wrong in [&["--gateway", "nginx", "--path", "/"][..], &["-d", "a=b"], &[]] {
        assert!(!explain_envoy(ENVOY, wrong).0, "{wrong:?}");
    }
}
