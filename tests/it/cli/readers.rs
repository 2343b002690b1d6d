//! Who may read the debug listener, from this machine and from others, and what they see.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use tempfile::NamedTempFile;

use super::{over, path, stderr, stdout, tidegate_with};
use crate::http::{self, Answer, Request, said};
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, eventually, in_time, on_free_ports, output, rule_file};
use crate::tls::{Secured, variables_of};

const KEY_SECRET: &str = "0123456789abcdef0123456789abcdef";
const READ: &str = "Zk3c0cXv7m2o5l9Q1yJt8sR4wB6nD0aHfGpUeKiLxMY=";
const CLEAR: &str = "b1T9uVwXyZ0aBcDeFgHiJkLmNoPqRsTuVwXyZ2a4c6E=";
const WRITE: &str = "0123456789abcdef0123456789ABCDEF0123456789abcdef0123456789abcdef";

const RULES: &str = "domain: edge
entries: { api_key: { sensitive: true } }
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: ip, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: api_key, rate_limit: { unit: year, requests_per_unit: 1 } }
";

fn tokens() -> String {
    format!("# readers\nann:read:{READ}\noncall:read-clear:{CLEAR}\n\ndeploy:write:{WRITE}\n")
}

/// A server whose debug listener others reach, over TLS and with tokens.
struct Far {
    secured: Secured,
    tokens: NamedTempFile,
    at: SocketAddr,
    _secret: NamedTempFile,
}

impl Far {
    async fn start() -> Self {
        let (tokens, secret) = (rule_file(&tokens()), rule_file(KEY_SECRET));
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        let variables = [
            ("KEY_SECRET_FILE", path(&secret)),
            ("DEBUG_HOST", "0.0.0.0"),
            ("DEBUG_SERVER_USE_TLS", "true"),
            ("ADMIN_TOKEN_FILE", path(&tokens)),
            ("ADMIN_HOSTS", "Tidegate.Edge, 127.0.0.1"),
        ];
        let secured = Secured::start_of(rule_file(RULES), authority, &own, &variables).await;
        let at = SocketAddr::from(([127, 0, 0, 1], secured.tidegate.debug.port()));
        Self { secured, tokens, at, _secret: secret }
    }

    /// What is answered to a request with these header lines.
    async fn answer(&self, method: &str, path: &str, headers: &str) -> Answer {
        self.sent(http::request(self.at, method, path).lines(headers)).await
    }

    async fn sent(&self, request: Request) -> Answer {
        let client = self.secured.client().speaking(&[]);
        let stream = in_time("there is a connection", client.connect(self.at)).await.expect("a handshake");
        request.sent_on(stream).await.expect("an answer")
    }

    async fn get(&self, path: &str, secret: &str) -> Answer {
        self.answer("GET", path, &format!("host: tidegate.edge\r\nauthorization: Bearer {secret}\r\n")).await
    }

    /// Refuses a descriptor twice.
    async fn refuse(&self, key: &str, value: &str) {
        for _ in 0..3 {
            http::post(self.secured.tidegate.http, "/json", http::descriptor("edge", &[(key, value)])).await;
        }
    }

    /// Runs a command over this server. Returns its exit code, its output and its errors.
    fn run(&self, arguments: &[&str], token: Option<&str>) -> (Option<i32>, String, String) {
        let instance = format!("https://{}", self.at);
        let authority = self.secured.file("ca.crt");
        let more = ["--instance", &instance, "--ca", authority.to_str().expect("a path of text")];
        let environment: Vec<_> = token.map(|token| ("TIDEGATE_TOKEN", token)).into_iter().collect();
        let output = tidegate_with(&[arguments, &more[..]].concat(), &environment);
        (output.status.code(), stdout(&output), stderr(&output))
    }
}

/// A path, and the expected status in each column.
type Cells<const N: usize> = [(&'static str, [u16; N]); 15];

const OF_ID: &str = "/v1/refusals/00000000000000000000000000";

/// On loopback: GET, POST and PUT, GET under another name and by a page. Off loopback without tokens: GET and PUT.
const NEAR: Cells<7> = [
    ("/", [200, 405, 405, 403, 200, 200, 405]),
    ("/rlconfig", [200, 405, 405, 403, 200, 200, 405]),
    ("/log_level", [200, 405, 400, 403, 403, 403, 403]),
    ("/v1/rules", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/explain?domain=edge&entry=user=ann", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/health", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/log-level", [200, 405, 400, 403, 403, 403, 403]),
    ("/v1/refusals", [200, 405, 405, 403, 403, 403, 403]),
    (OF_ID, [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/top", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/unmatched", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/counters?domain=edge&entry=user=ann", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/decisions?rate=0", [400, 405, 405, 403, 403, 403, 403]),
    ("/v1/openapi.json", [200, 405, 405, 403, 403, 403, 403]),
    ("/v1/nothing", [404, 404, 404, 403, 403, 403, 403]),
];

#[tokio::test]
async fn each_path_answers_whom_it_may_on_this_machine_and_nobody_else_without_tokens() {
    let (rules, secret) = (rule_file(RULES), rule_file(KEY_SECRET));
    let secret = ("KEY_SECRET_FILE", path(&secret));
    let near = Tidegate::start(rules.path(), &[secret]).await;
    let closed = Tidegate::start(rules.path(), &[secret, ("DEBUG_HOST", "0.0.0.0")]).await;
    let far = SocketAddr::from(([127, 0, 0, 1], closed.debug.port()));
    let ask = async |at: SocketAddr, method: &str, path: &str, headers: &str| {
        http::request(at, method, path).lines(headers).await.status
    };
    for (path, expected) in NEAR {
        let local = "host: localhost\r\n";
        let found = [
            ask(near.debug, "GET", path, local).await,
            ask(near.debug, "POST", path, local).await,
            ask(near.debug, "PUT", path, local).await,
            ask(near.debug, "GET", path, "host: evil.example\r\n").await,
            ask(near.debug, "GET", path, "host: localhost\r\norigin: http://localhost\r\n").await,
            ask(far, "GET", path, "host: tidegate\r\n").await,
            ask(far, "PUT", path, "host: tidegate\r\n").await,
        ];
        assert_eq!(found, expected, "{path}");
    }
    for path in ["/log_level", "/v1/log-level"] {
        let page = ask(near.debug, "PUT", path, "host: localhost\r\norigin: null\r\n").await;
        assert_eq!(page, 403, "a page changes nothing");
    }
}

/// Off loopback with tokens. GET without a token, with an unknown one, GET and PUT with each right, GET under another name, by a page, and
/// with the token of `write` under another name.
const FAR: Cells<11> = [
    ("/", [200, 200, 200, 405, 200, 405, 200, 405, 200, 200, 405]),
    ("/rlconfig", [200, 200, 200, 405, 200, 405, 200, 405, 200, 200, 405]),
    ("/log_level", [401, 401, 200, 403, 200, 403, 200, 400, 403, 403, 403]),
    ("/v1/rules", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/explain?domain=edge&entry=user=ann", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/health", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/log-level", [401, 401, 200, 403, 200, 403, 200, 400, 403, 403, 403]),
    ("/v1/refusals", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    (OF_ID, [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/top", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/unmatched", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/counters?domain=edge&entry=user=ann", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/decisions?rate=0", [401, 401, 400, 403, 400, 403, 400, 405, 403, 403, 403]),
    ("/v1/openapi.json", [401, 401, 200, 403, 200, 403, 200, 405, 403, 403, 403]),
    ("/v1/nothing", [401, 401, 404, 403, 404, 403, 404, 404, 403, 403, 403]),
];

#[tokio::test]
async fn each_path_answers_readers_on_other_machines_by_the_right_of_their_token() {
    let far = Far::start().await;
    let host = "host: tidegate.edge:6070\r\n";
    let with = |host: &str, secret: &str| format!("{host}authorization: Bearer {secret}\r\n");
    let columns = [
        ("GET", host.to_owned()),
        ("GET", with(host, &READ.replace('Z', "z"))),
        ("GET", with(host, READ)),
        ("PUT", with(host, READ)),
        ("GET", with(host, CLEAR)),
        ("PUT", with(host, CLEAR)),
        ("GET", with(host, WRITE)),
        ("PUT", with(host, WRITE)),
        ("GET", with("host: evil.example\r\n", READ)),
        ("GET", with(host, READ) + "origin: https://tidegate.edge\r\n"),
        ("PUT", with("host: evil.example\r\n", WRITE)),
    ];
    for (path, expected) in FAR {
        for ((method, headers), expected) in columns.iter().zip(expected) {
            let page = far.answer(method, path, headers).await;
            assert_eq!(page.status, expected, "{method} {path} {headers}: {page}");
            let is_refused = matches!(expected, 401 | 403);
            assert!(!is_refused || page.body.split(' ').count() > 4, "it says why: {page}");
            assert_eq!(page.find("www-authenticate"), (expected == 401).then_some("Bearer"), "{page}");
        }
    }
    far.secured.logs("admin.denied").await;
    let answered: Vec<&str> = FAR.iter().map(|(path, _)| *path).collect();
    assert_eq!(answered, NEAR.map(|(path, _)| path), "the two tables are about the same paths");
    let plain = said(far.at, "GET /v1/rules HTTP/1.1\r\nhost: tidegate.edge\r\n\r\n").await;
    assert!(!plain.contains("HTTP/1.1 2"), "nothing is served in plaintext: {plain}");
}

#[tokio::test]
async fn the_limits_in_force_have_their_algorithm_and_burst_unless_they_are_those_of_the_reference() {
    let rules = rule_file(
        "domain: edge
descriptors:
  - { key: plain, rate_limit: { unit: minute, requests_per_unit: 5 } }
  - { key: smooth, rate_limit: { unit: minute, requests_per_unit: 5, algorithm: sliding_window } }
  - { key: burst, rate_limit: { unit: minute, requests_per_unit: 5, algorithm: gcra, burst: 20 } }
",
    );
    let tidegate = Tidegate::start(rules.path(), &[]).await;
    let page = http::get(tidegate.debug, "/rlconfig").await;
    let lines =
        ["plain", "smooth", "burst"].iter().zip(["", ", algorithm: sliding_window", ", algorithm: gcra, burst: 20"]);
    for (key, more) in lines {
        let line =
            format!("edge.{key}: unit=MINUTE requests_per_unit=5, shadow_mode: false, quota_mode: false{more}\n");
        assert!(page.contains(&line), "{line}: {page}");
    }
}

#[tokio::test]
async fn every_path_is_described_and_takes_the_parameters_that_are_described() {
    let (rules, secret) = (rule_file(RULES), rule_file(KEY_SECRET));
    let near = Tidegate::start(rules.path(), &[("KEY_SECRET_FILE", path(&secret))]).await;
    let get = async |path: &str| http::get(near.debug, path).await;
    let document = get("/v1/openapi.json").await.json();
    let id = "0".repeat(26);
    let paths = document["paths"].as_object().expect("paths");
    let described: BTreeSet<String> = paths.keys().map(|path| path.replace("{id}", &id)).collect();
    let tried = NEAR.iter().map(|(path, _)| path.split('?').next().unwrap_or_default().to_owned());
    let served = tried.filter(|path| path.starts_with("/v1/") && path != "/v1/nothing");
    assert_eq!(described, served.collect(), "each path has its cells, and is described");
    for (path, item) in paths {
        let cells = NEAR.iter().find(|(tried, _)| tried.split('?').next() == Some(&path.replace("{id}", &id)));
        let (_, cells) = cells.expect("it has cells");
        assert_eq!(item.get("put").is_some(), cells[2] != 405, "{path}: PUT");
        for parameter in item["get"]["parameters"].as_array().expect("parameters") {
            let parameter = match parameter["$ref"].as_str() {
                Some(reference) => &document["components"]["parameters"][reference.rsplit('/').next().expect("a name")],
                None => parameter,
            };
            let name = parameter["name"].as_str().expect("a name");
            if parameter["in"] != "path" {
                // A wrong rate, so that no stream begins.
                let more = if path == "/v1/decisions" { "&rate=0" } else { "" };
                let page = get(&format!("{path}?{name}=%00{more}")).await;
                assert!(!page.contains("there is no parameter"), "{path}: {page}");
                let page = get(&format!("{path}?no{name}=1")).await;
                assert!(page.contains("there is no parameter"), "{path}: {page}");
            }
        }
    }
}

#[tokio::test]
async fn values_are_masked_for_a_reader_unless_its_token_may_see_them_which_is_logged() {
    let far = Far::start().await;
    for (key, value) in [("user", "canary-ann"), ("ip", "203.0.113.77"), ("api_key", "canary-1234")] {
        far.refuse(key, value).await;
    }
    for secret in [READ, WRITE] {
        for (path, _) in NEAR.iter().filter(|(path, _)| path.starts_with("/v1/") && !path.contains("decisions")) {
            let page = far.get(path, secret).await;
            assert!(!page.contains("canary") && !page.contains("203.0.113.77"), "{path}: {page}");
        }
        for path in ["/v1/refusals", "/v1/top"] {
            let page = far.get(path, secret).await;
            assert!(page.contains("203.0.113.0/24") && page.contains("\"key\":\"user\""), "{path}: {page}");
        }
    }
    assert!(!far.secured.tidegate.log().contains("admin.read_clear"));
    for path in ["/v1/refusals", "/v1/top"] {
        let page = far.get(path, CLEAR).await;
        assert!(page.contains("canary-ann") && page.contains("203.0.113.77"), "{path}: {page}");
        assert!(!page.contains("canary-1234"), "a sensitive value is a digest: {page}");
    }
    // A probe is not in the log.
    assert_eq!(far.get("/v1/health", CLEAR).await.status, 200);
    assert_eq!(far.get("/v1/rules", CLEAR).await.status, 200);
    far.secured.logs("path=\"/v1/rules\"").await;
    let log = far.secured.tidegate.log();
    let audited: Vec<_> = log.lines().filter(|line| line.contains("admin.read_clear")).collect();
    assert_eq!(audited.len(), 3, "one line per request: {log}");
    assert!(audited.iter().all(|line| line.contains("token=\"oncall\"")), "{log}");
    for secret in [READ, CLEAR, WRITE] {
        assert!(!log.contains(&secret[..8]), "{log}");
    }
}

#[tokio::test]
async fn the_commands_ask_instances_on_other_machines_with_a_token() {
    let far = Far::start().await;
    for (key, value) in [("user", "canary-ann"), ("ip", "203.0.113.77")] {
        far.refuse(key, value).await;
    }
    let (code, told, errors) = far.run(&["why"], Some(READ));
    assert_eq!(code, Some(0), "{told}{errors}");
    assert!(told.contains("edge  ip=203.0.113.0/24") && !told.contains("canary"), "{told}");
    let (code, told, _) = far.run(&["why", "--descriptor", "user=canary-ann"], Some(READ));
    assert_eq!((code, told.matches("edge  user=").count()), (Some(0), 1), "the reader knows the value: {told}");
    let (_, digest) = told.split_once("edge  ").expect("a descriptor");
    let digest = digest.lines().next().expect("a line");
    for shown in [digest, "ip=203.0.113.0/24"] {
        let (code, told, _) = far.run(&["why", "--descriptor", shown], Some(READ));
        assert_eq!((code, told.matches("edge  ").count()), (Some(0), 1), "a value is named as it is shown: {told}");
        assert!(told.contains(&format!("edge  {shown}\n")), "{told}");
        let (code, told, _) = far.run(&["why", "--descriptor", shown], Some(CLEAR));
        assert_eq!(code, Some(1), "who sees values names values: {told}");
    }
    let (code, told, _) = far.run(&["why", "--descriptor", "ip=203.0.113.1"], Some(READ));
    assert!(
        code == Some(0) && told.contains("ip=203.0.113.0/24"),
        "another address of the network is answered alike: {told}"
    );
    let page = far.get("/v1/decisions?entry=ip=203.0.113.77", READ).await;
    assert!(page.contains("networks only"), "{page}");
    let (code, told, _) = far.run(&["why"], Some(CLEAR));
    assert!(code == Some(0) && told.contains("user=canary-ann") && told.contains("ip=203.0.113.77"), "{told}");
    let (code, told, _) = far.run(&["top", "--once"], Some(READ));
    assert!(code == Some(0) && told.contains("203.0.113.0/24"), "{told}");
    let (code, told, _) = far.run(&["top", "--unmatched"], Some(READ));
    assert_eq!(code, Some(0), "{told}");
    let (code, told, _) = far.run(&["counter", "--domain", "edge", "-d", "user=canary-ann"], Some(READ));
    assert!(code == Some(0) && told.contains("1 of 1 used"), "{told}");

    let file = rule_file(&format!("{READ}\n"));
    let (code, _, errors) = far.run(&["why", "--token-file", path(&file)], Some("wrong"));
    assert_eq!(code, Some(0), "the file goes before the variable: {errors}");
    let whole = rule_file(&format!("ann:read:{READ}\n"));
    let (code, _, errors) = far.run(&["why", "--token-file", path(&whole)], None);
    assert!(
        code == Some(2) && errors.contains("--token-file is ") && errors.contains("alone, on one line"),
        "{errors}"
    );
    assert!(!errors.contains(&READ[..8]), "{errors}");
    let (code, _, errors) = far.run(&["why"], None);
    assert!(code == Some(2) && errors.contains("401") && errors.contains("set --token-file"), "{errors}");
    let (code, _, errors) = far.run(&["why"], Some("unknown"));
    assert!(code == Some(2) && errors.contains("401") && errors.contains("not one of ADMIN_TOKEN_FILE"), "{errors}");

    let (_, _, errors) = over(&[far.at], &["why", "--ca", path(&file)]);
    assert!(errors.contains("--ca is for instances over TLS"), "{errors}");
    let token = [("TIDEGATE_TOKEN", READ)];
    let plain = |arguments: &[&str]| stderr(&tidegate_with(&[&["why"], arguments].concat(), &token));
    let errors = plain(&["--instance", "192.0.2.1:6070"]);
    assert!(errors.contains("a token is sent over TLS only: write https://192.0.2.1:6070"), "{errors}");
    let errors = plain(&["--instance", &far.at.to_string()]);
    assert!(errors.contains("write https://HOST:PORT"), "{errors}");
    let another = Authority::new();
    let other = another.certificate();
    let errors =
        plain(&["--instance", &format!("https://{}", far.at), "--ca", other.to_str().expect("a path of text")]);
    assert!(errors.contains("UnknownIssuer; set --ca"), "{errors}");
}

#[tokio::test]
async fn instances_with_one_secret_mask_a_value_alike_so_their_answers_are_put_together() {
    let (one, other) = (Far::start().await, Far::start().await);
    for far in [&one, &other] {
        far.refuse("user", "canary-ann").await;
    }
    let authorities = [&one, &other].map(|far| std::fs::read_to_string(far.secured.file("ca.crt")).expect("it reads"));
    let authorities = rule_file(&authorities.concat());
    let instances = [&one, &other].map(|far| format!("https://{}", far.at));
    let arguments = ["why", "--ca", path(&authorities), "--instance", &instances[0], "--instance", &instances[1]];
    let told = stdout(&tidegate_with(&arguments, &[("TIDEGATE_TOKEN", READ)]));
    assert_eq!(told.matches("edge  user=").count(), 1, "{told}");
    assert!(
        told.contains("refused 4 times") && instances.iter().all(|it| told.contains(&format!("{it} (2)"))),
        "{told}"
    );
}

#[tokio::test]
async fn a_tap_from_another_machine_is_masked_and_ends_when_its_token_is_gone() {
    let far = Far::start().await;
    let (lines, errors) = (NamedTempFile::new().expect("a file"), NamedTempFile::new().expect("a file"));
    let mut tap = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    tap.args(["tap", "--json", "--instance", &format!("https://{}", far.at), "--ca"]).arg(far.secured.file("ca.crt"));
    tap.env_clear().env("TIDEGATE_TOKEN", READ).stdin(Stdio::null());
    tap.stdout(lines.reopen().expect("it is there")).stderr(errors.reopen().expect("it is there"));
    let mut tap = tap.spawn().expect("it starts");
    let told = || std::fs::read_to_string(lines.path()).expect("it reads");
    eventually("a decision is shown", async || {
        far.refuse("ip", "203.0.113.77").await;
        far.refuse("user", "canary-ann").await;
        (told().contains("203.0.113.0/24") && told().contains("edge.user")).then_some(())
    })
    .await;
    assert!(!told().contains("canary") && !told().contains("203.0.113.77"), "{}", told());

    std::fs::write(far.tokens.path(), format!("bob:read:{}\n", READ.replace('Z', "z"))).expect("it is written");
    eventually("the stream has ended", async || tap.try_wait().expect("it can be asked")).await;
    let errors = std::fs::read_to_string(errors.path()).expect("it reads");
    assert!(errors.contains("no more decisions from here on"), "{errors}");
    assert!(far.get("/v1/rules", READ).await.status == 401);
    assert!(far.get("/v1/rules", &READ.replace('Z', "z")).await.status == 200);
}

#[tokio::test]
async fn a_file_with_an_error_changes_no_token_and_a_change_of_the_level_is_logged_with_its_token() {
    let far = Far::start().await;
    std::fs::write(far.tokens.path(), format!("ann:read:{READ}\nbob:admin:{CLEAR}\n")).expect("it is written");
    far.secured.logs("admin.tokens.unusable").await;
    let log = far.secured.tidegate.log();
    assert!(log.contains("line 2: RIGHT is expected to be read, read-clear or write"), "{log}");
    assert!(!log.contains(&READ[..8]) && !log.contains(&CLEAR[..8]), "{log}");
    assert!(far.get("/v1/rules", CLEAR).await.status == 200);
    assert_eq!(far.secured.metric("tidegate_admin_tokens_rejected").await, 1);
    let becomes = async |expected| {
        let what = format!("the metric becomes {expected}");
        let metric = async || far.secured.metric("tidegate_admin_tokens_rejected").await;
        eventually(&what, async || (metric().await == expected).then_some(())).await;
    };
    std::fs::write(far.tokens.path(), tokens()).expect("it is written");
    becomes(0).await;
    std::fs::remove_file(far.tokens.path()).expect("it was there");
    becomes(1).await;
    assert!(far.get("/v1/rules", READ).await.status == 200, "the last tokens stay in force");
    std::fs::write(far.tokens.path(), tokens()).expect("it is written");
    becomes(0).await;

    let request = http::request(far.at, "PUT", "/v1/log-level").body("debug");
    let answer =
        far.sent(request.header("host", "tidegate.edge").header("authorization", format!("Bearer {WRITE}"))).await;
    assert!(answer.status == 200 && answer.body.ends_with("debug\n"), "{answer}");
    far.secured.logs("log.level_changed").await;
    let log = far.secured.tidegate.log();
    let line = log.lines().find(|line| line.contains("log.level_changed")).expect("it is there");
    assert!(line.contains("token=\"deploy\" before=\"warn\" after=\"debug\""), "{line}");
}

#[tokio::test]
async fn tokens_that_cannot_be_used_stop_the_start_and_are_not_shown() {
    let rules = rule_file(&RULES.replace("entries: { api_key: { sensitive: true } }\n", ""));
    let start = async |content: &str, tls: bool| {
        let tokens = rule_file(content);
        let directory = tempfile::tempdir().expect("a directory");
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        std::fs::copy(&own.certificate, directory.path().join("tls.crt")).expect("it is copied");
        std::fs::copy(&own.key, directory.path().join("tls.key")).expect("it is copied");
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve").arg(rules.path()).env_clear();
        on_free_ports(&mut command).env("DEBUG_HOST", "0.0.0.0").env("ADMIN_HOSTS", "a");
        command.env("ADMIN_TOKEN_FILE", tokens.path()).env("DEBUG_SERVER_USE_TLS", tls.to_string());
        if tls {
            command.envs(variables_of(&directory, &[]));
        }
        let (status, _, errors) = output(&mut command).await;
        assert_eq!(status.code(), Some(2), "{errors}");
        assert!(!errors.contains(&READ[..8]), "{errors}");
        errors
    };
    let errors = start(&format!("ann:read:{READ}\nbob:read\n"), true).await;
    assert!(
        errors.contains("ADMIN_TOKEN_FILE is ") && errors.contains(": line 2: expected NAME:RIGHT:SECRET"),
        "{errors}"
    );
    let errors = start("", true).await;
    assert!(errors.contains("it has no token"), "{errors}");
    let errors = start(&tokens(), false).await;
    assert!(
        errors.contains("DEBUG_SERVER_USE_TLS is \"false\": expected true, because ADMIN_TOKEN_FILE is set"),
        "{errors}"
    );
}

#[tokio::test]
async fn the_rules_in_force_have_a_digest_of_their_files_and_a_descriptor_has_its_rule() {
    let (rules, secret) = (rule_file(RULES), rule_file(KEY_SECRET));
    let variables = [("KEY_SECRET_FILE", path(&secret))];
    let one = Tidegate::start(rules.path(), &variables).await;
    let same = rule_file(RULES);
    let other = Tidegate::start(same.path(), &variables).await;
    let get = async |server: &Tidegate, path: &str| http::get(server.debug, path).await.json();
    let (here, there) = (get(&one, "/v1/rules").await, get(&other, "/v1/rules").await);
    assert_eq!(here["digest"], there["digest"], "the same content under another name");
    assert_eq!(here["digest"].as_str().map(str::len), Some(32));
    assert_eq!((&here["generation"], &here["domains"]), (&1.into(), &serde_json::json!(["edge"])));
    assert_eq!((&here["sources"], &here["overlays"]), (&serde_json::json!([path(&rules)]), &serde_json::json!([])));
    std::fs::write(rules.path(), RULES.replace("year", "week")).expect("it is written");
    eventually("the new rules are in force", async || {
        let now = get(&one, "/v1/rules").await;
        (now["generation"] == 2 && now["digest"] != here["digest"]).then_some(())
    })
    .await;
    std::fs::write(rules.path(), "domain: [").expect("it is written");
    eventually("the rejection is told", async || get(&one, "/v1/rules").await["rejected"].is_string().then_some(()))
        .await;

    let explained = get(&other, "/v1/explain?domain=edge&entry=user=ann").await;
    assert_eq!((&explained["rule"], &explained["is_known_domain"]), (&"edge.user".into(), &true.into()));
    let text = explained["text"].as_str().expect("a text");
    assert!(text.contains("=> rule edge.user") && text.contains("1 per year"), "{text}");
    let explained = get(&other, "/v1/explain?domain=edge&entry=api_key=canary-1234").await;
    assert!(!explained.to_string().contains("canary"), "{explained}");
    let explained = get(&other, "/v1/explain?domain=none&entry=user=ann").await;
    assert_eq!((&explained["rule"], &explained["is_known_domain"]), (&serde_json::Value::Null, &false.into()));
    assert_eq!(get(&other, "/v1/health").await, serde_json::json!({ "is_ready": true }));
}
