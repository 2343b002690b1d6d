//! Rules that do nothing, or something else than their author means: one mistake in each file, and the advice that `tidegate check` has to give.

use std::fs;
use std::process::Command;

/// A limit that works.
const LIMIT: &str = "rate_limit: { unit: minute, requests_per_unit: 5 }";
/// The beginning of `requests` that work.
const REQUESTS: &str =
    "requests: { from_gateway: nginx, refusal_status: 403, trusted_proxies: [127.0.0.1], descriptors: ";
/// Between the rules and the overlay over them.
const OVERLAY: &str = "--- overlay\n";

/// What is written below `domain: d`, with LIMIT and REQUESTS for the texts above; the place and the advice.
const MISTAKES: [(&str, &str, &str); 50] = [
    ("descriptors: [{ key: remote_address, LIMIT }]", "2:22", "write `entries: { remote_address: { as: ip } }`"),
    ("descriptors: [{ key: \"^user$\", LIMIT }]", "2:22", "looks like a regular expression"),
    ("descriptors: [{ key: X-Forwarded-For, LIMIT }]", "2:22", "write `entries: { X-Forwarded-For: { as: ip } }`"),
    ("descriptors: [{ key: user, LIMIT }]\nentries: { usr: { as: path } }", "3:12", "check the spelling"),
    (
        "requests: { from_gateway: caddy, trusted_proxies: [0.0.0.0/0], descriptors: [[{ key: p, from: path }]] }\ndescriptors: [{ key: p, LIMIT }]",
        "2:52",
        "write the addresses of the gateway alone",
    ),
    (
        "requests: { from_gateway: caddy, trusted_proxies: [\"::/0\"], descriptors: [[{ key: p, from: path }]] }\ndescriptors: [{ key: p, LIMIT }]",
        "2:52",
        "write the addresses of the gateway alone",
    ),
    (
        "requests: { from_gateway: none, trusted_proxies: [127.0.0.1], descriptors: [[{ key: p, from: path }]] }\ndescriptors: [{ key: p, LIMIT }]",
        "2:63",
        "are in the body of each request: remove `descriptors`",
    ),
    (
        "REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: path, LIMIT }]",
        "2:100",
        "write an item with a limit for exactly these keys",
    ),
    (
        "REQUESTS[[{ key: m, from: method }, { key: p, from: path }]] }\ndescriptors: [{ key: p, descriptors: [{ key: m, LIMIT }] }]",
        "2:100",
        "in this order",
    ),
    (
        "REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: p, descriptors: [{ key: m, LIMIT }] }]",
        "2:100",
        "one below the other",
    ),
    (
        "REQUESTS[[{ key: tier, value: free }]] }\ndescriptors: [{ key: tier, value: gold, LIMIT }]",
        "2:100",
        "no rule matches the descriptor `tier=free`",
    ),
    (
        "REQUESTS[[{ key: p, from: path }], [{ key: p, from: path }]] }\ndescriptors: [{ key: p, LIMIT }]",
        "2:126",
        "each request is counted twice: remove one of the two",
    ),
    ("REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: p, value: login, LIMIT }]", "3:32", "write `/login`"),
    (
        "REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: p, value: \"/a?b=c\", LIMIT }]",
        "3:32",
        "without its query: write `/a`",
    ),
    (
        "REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: p, value: \"/users/{id}\", LIMIT }]",
        "3:32",
        "write `*` in place of the parameter",
    ),
    (
        "REQUESTS[[{ key: p, from: path }]] }\ndescriptors: [{ key: p, value: \"/users/:id/keys\", LIMIT }]",
        "3:32",
        "write `*` in place of the parameter",
    ),
    ("REQUESTS[[{ key: m, from: method }]] }\ndescriptors: [{ key: m, value: post, LIMIT }]", "3:32", "write `POST`"),
    ("entries: { p: { as: path } }\ndescriptors: [{ key: p, value: login, LIMIT }]", "3:32", "write `/login`"),
    (
        "descriptors: [{ key: p, value: /*, LIMIT }, { key: p, value: /a/*, LIMIT }]",
        "2:90",
        "move this item before that one, or remove it",
    ),
    ("descriptors: [{ key: p, value: \"*\", LIMIT }, { key: p, LIMIT }]", "2:91", "remove one of the two"),
    ("descriptors: [{ key: \"x-*\", LIMIT }, { key: \"x-user-*\", LIMIT }]", "2:83", "move this item before that one"),
    (
        "descriptors: [{ key: peer, value: 10.0.0.0/8, deny: true }]",
        "2:35",
        "write `cidr: [10.0.0.0/8]` in place of `value`",
    ),
    ("descriptors: [{ key: peer, value: \"2001:db8::/32\", deny: true }]", "2:35", "write `cidr: [2001:db8::/32]`"),
    ("descriptors: [{ key: peer, value: \"192.0.2.1,192.0.2.2\", deny: true }]", "2:35", "write a list of addresses"),
    ("descriptors: [{ key: p, value: ^/api/v1/.*$, LIMIT }]", "2:32", "only `*` is a wildcard"),
    ("descriptors: [{ key: p, value: \"/users/[0-9]+\", LIMIT }]", "2:32", "only `*` is a wildcard"),
    ("descriptors: [{ key: p, value: \"/(login|signup)\", LIMIT }]", "2:32", "write an item for each text"),
    ("descriptors: [{ key: agent, values: [\"curl/.+\"], deny: true }]", "2:38", "only `*` is a wildcard"),
    ("descriptors: [{ key: peer, value: '{{ .Values.ip }}', deny: true }]", "2:35", "render the file"),
    ("descriptors: [{ key: peer, value: \"<your address>\", deny: true }]", "2:35", "render the file"),
    ("descriptors: [{ key: peer, value: $IP_ADDRESS, deny: true }]", "2:35", "with `envsubst`"),
    ("descriptors: [{ key: user, value: \"%REQ(x-user)%\", LIMIT }]", "2:35", "remove `value` to match every value"),
    (
        "descriptors: [{ key: user, value: \"alice \", LIMIT }]",
        "2:35",
        "ends with a space, and it is compared with the space: remove it",
    ),
    ("descriptors: [{ key: generic_key, value: global }]", "1:9", "write `rate_limit:` into an item of `descriptors`"),
    (
        "descriptors:\n  - key: user\nrate_limit: { unit: day, requests_per_unit: 5 }",
        "4:1",
        "write it in a descriptor, beside `key`",
    ),
    ("descriptors: [{ key: user, unit: day, requests_per_unit: 5 }]", "2:28", "write it inside `rate_limit`"),
    ("descriptors: [{ key: user, rate_limit: { unit: day } }]", "2:40", "write the number of hits per window"),
    (
        "descriptors:\n  - key: user\n    rate_limit:\n    unit: day",
        "4:5",
        "write the keys of the limit below it, with more indentation",
    ),
    ("descriptors: [{ key: user, LIMIT, request_cost: 9 }]", "2:94", "write a smaller `request_cost`"),
    (
        "descriptors: [{ key: user, rate_limits: [{ unit: minute, requests_per_unit: 5 }, { unit: second, requests_per_unit: 9 }] }]",
        "2:15",
        "remove it, or write a smaller number",
    ),
    (
        "descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 5, replaces: [{ name: nobody }] } }]",
        "2:94",
        "check the spelling, or write `name:` into the limit that it should replace",
    ),
    ("descriptors: [{ key: user, values: [], deny: true }]", "2:28", "write a list like"),
    ("descriptors: [{ key: user, value: a, message: No. }, { key: user, LIMIT }]", "2:47", "write it beside a limit"),
    (
        "descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 5, shadow_mode: true } }]",
        "2:75",
        "write it in a descriptor, beside `key`",
    ),
    (
        "descriptors: [{ key: user, LIMIT }]\n---\ndomain: d\ndescriptors: [{ key: path, LIMIT }]",
        "3:1",
        "move them to a separate file",
    ),
    ("descriptors: [{ key: user, deny: true, LIMIT }]", "2:28", "remove one of the two"),
    (
        "descriptors: [{ key: user, LIMIT }]\n--- overlay\noverlay: d\ndescriptors: [{ key: user, value: alice, rate_limit: { unit: minute, requests_per_unit: 99 } }]",
        "overlay.yaml:2:15",
        "write `replace: true` beside the limit",
    ),
    (
        "descriptors: [{ key: user, LIMIT }]\n--- overlay\noverlay: d\ndescriptors: [{ key: user, value: alice, rate_limit: { unlimited: true } }]",
        "overlay.yaml:2:15",
        "write `replace: true` beside the limit",
    ),
    (
        "descriptors: [{ key: user, LIMIT }]\n--- overlay\noverlay: d\napply: [{ match: [usr], limit: { algorithm: gcra } }]",
        "overlay.yaml:2:9",
        "compare `match` with `/rlconfig`",
    ),
    (
        "descriptors: [{ key: user, LIMIT }]\n--- overlay\noverlay: d",
        "overlay.yaml:1:1",
        "write the rest of the file, or, to empty the overlay",
    ),
];

/// What `check` says of `text`, with an overlay over it if the text has one.
fn check(text: &str) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let text = format!("domain: d\n{text}\n").replace("LIMIT", LIMIT).replace("REQUESTS", REQUESTS);
    let (rules, overlay) = text.split_once(OVERLAY).map_or((text.as_str(), None), |(rules, over)| (rules, Some(over)));
    fs::write(directory.path().join("rules.yaml"), rules).expect("it is written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["check", "rules.yaml"]).current_dir(&directory).env_clear();
    if let Some(overlay) = overlay {
        fs::write(directory.path().join("overlay.yaml"), overlay).expect("it is written");
        command.args(["--overlay", "overlay.yaml"]);
    }
    String::from_utf8_lossy(&command.output().expect("the command runs").stderr).into_owned()
}

#[test]
fn check_names_each_mistake_with_its_place_and_the_advice_that_mends_it() {
    let mut unnamed = Vec::new();
    for (text, place, advice) in MISTAKES {
        let said = check(text);
        let is_named = |line: &str| line.contains(&format!("{place}: ")) && line.contains(advice);
        if !said.lines().any(is_named) {
            unnamed.push(format!("{text}\nexpected {place}: … {advice}\nsaid {said}"));
        }
    }
    assert!(unnamed.is_empty(), "{} of {}:\n{}", unnamed.len(), MISTAKES.len(), unnamed.join("\n"));
}

/// Rules beside those mistakes that have an effect: nothing is said of them.
#[test]
fn check_says_nothing_of_what_looks_similar_and_works() {
    for text in [
        "REQUESTS[[{ key: p, from: path }], [{ key: m, from: method }]] }\ndescriptors: [{ key: p, value: /a, LIMIT }, { key: p, value: \"*.css\", LIMIT }, { key: m, value: POST, LIMIT }]",
        "REQUESTS[[{ key: m, from: method }]] }\nentries: { m: { case: lower } }\ndescriptors: [{ key: m, value: post, LIMIT }]",
        "descriptors: [{ key: path, value: login, LIMIT }, { key: method, value: post, LIMIT }]",
        "descriptors: [{ key: user, rate_limits: [{ unit: second, requests_per_unit: 5 }, { unit: day, requests_per_unit: 99 }] }]",
        "descriptors: [{ key: user, rate_limits: [{ unit: minute, requests_per_unit: 5 }, { unit: minute, unit_multiplier: 2, requests_per_unit: 99, count_refused: true, algorithm: sliding_log }] }]",
        "entries: { p: { as: path } }\ndescriptors: [{ key: p, value: \"/a?b\", LIMIT }]",
        "descriptors: [{ key: user, LIMIT }]\n--- overlay\noverlay: d\ndescriptors: [{ key: user, value: alice, replace: true, rate_limit: { unit: minute, requests_per_unit: 99 } }]",
        "descriptors: [{ key: user, value: demo, LIMIT }]\n--- overlay\noverlay: d\ndescriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 99 } }]",
    ] {
        assert_eq!(check(text), "", "{text}");
    }
}
