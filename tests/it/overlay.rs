//! Overlays: what an operator lays over rules of any source, followed live.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;
use tokio::process::Command;

mod law;

use crate::http::{self, Answer};
use crate::support::{Tidegate, by_tier, eventually, output, repository};

const RULES: &str = "domain: edge
descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 5 } }]
";

fn overlay(burst: u32) -> String {
    format!("overlay: \"*\"\napply: [{{ match: [user], limit: {{ algorithm: gcra, burst: {burst} }} }}]\n")
}

/// A directory with rules and an overlay.
struct Scene {
    directory: TempDir,
}

impl Scene {
    fn new(overlay: &str) -> Self {
        let scene = Self { directory: tempfile::tempdir().expect("a directory") };
        scene.write("rules.yaml", RULES);
        scene.write("overlay.yaml", overlay);
        scene
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let new = self.at("new");
        fs::write(&new, text).expect("it is written");
        fs::rename(new, self.at(name)).expect("it is moved");
    }

    fn overlay(&self) -> String {
        self.at("overlay.yaml").to_str().expect("a path of text").to_owned()
    }

    async fn start(&self) -> Tidegate {
        Tidegate::start(&self.at("rules.yaml"), &[("RULES_OVERLAY", &self.overlay())]).await
    }

    async fn run(&self, arguments: &[&str]) -> (bool, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).arg(self.at("rules.yaml")).env_clear().env("RULES_OVERLAY", self.overlay());
        let (status, said, errors) = output(command.stdin(Stdio::null())).await;
        (status.success(), said, errors)
    }
}

/// The answer to a request over `/json`.
async fn asked(server: &Tidegate, body: &str) -> Answer {
    http::post(server.http, "/json", body).header("content-type", "application/json").await
}

/// The rules in force, as the debug page shows them.
async fn rlconfig(server: &Tidegate) -> String {
    http::get(server.debug, "/rlconfig").await.body.trim().to_owned()
}

/// The number of hits of a new user that are admitted at once.
async fn admitted(server: &Tidegate, user: &str) -> u32 {
    let body = http::descriptor("edge", &[("user", user)]);
    let mut admitted = 0;
    while asked(server, &body).await.status == 200 {
        admitted += 1;
        assert!(admitted < 1_000, "nothing is refused");
    }
    admitted
}

async fn generation(server: &Tidegate, load: u32) {
    eventually("the change is in force", async || {
        (server.metric("tidegate_rules_generation").await == u64::from(load)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_overlay_and_the_rules_below_it_change_while_they_are_in_force() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    assert_eq!(admitted(&server, "a").await, 3);
    scene.write("overlay.yaml", &overlay(7));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "b").await, 7, "the new overlay over the old rules");
    scene.write("rules.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 6"));
    generation(&server, 3).await;
    assert_eq!(admitted(&server, "c").await, 7, "the old overlay over the new rules");
    scene.write("overlay.yaml", "empty_overlay: true\n");
    generation(&server, 4).await;
    assert_eq!(admitted(&server, "d").await, 6, "the rules alone");
}

#[tokio::test]
async fn a_broken_overlay_leaves_the_last_good_one_in_force_also_for_new_rules() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    scene.write("overlay.yaml", "overlay: \"*\"\napply: [{ match: [rule-0-match-0], limit: { burst: 9 } }]\n");
    eventually("it is rejected", async || (server.metric("tidegate_overlay_rejected").await == 1).then_some(())).await;
    eventually("the log names the line", async || server.log().contains("overlay.yaml:2:").then_some(())).await;
    assert_eq!(server.metric("tidegate_rules_rejected").await, 0, "the rules are right");
    scene.write("rules.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 6"));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "a").await, 3);
    scene.write("overlay.yaml", &overlay(3));
    eventually("it is good again", async || (server.metric("tidegate_overlay_rejected").await == 0).then_some(()))
        .await;
}

#[tokio::test]
async fn an_overlay_whose_last_file_is_removed_stays_in_force_until_a_file_says_that_it_is_empty() {
    let scene = Scene::new("");
    let directory = scene.at("exceptions");
    fs::create_dir(&directory).expect("a directory");
    let path = directory.to_str().expect("a path of text").to_owned();
    scene.write("exceptions/alice.yaml", &overlay(3));
    let server = Tidegate::start(&scene.at("rules.yaml"), &[("RULES_OVERLAY", &path)]).await;
    let rejected = async |value: u64| {
        let is_so = async || (server.metric("tidegate_overlay_rejected").await == value).then_some(());
        eventually(&format!("tidegate_overlay_rejected {value}"), is_so).await;
    };
    fs::remove_file(directory.join("alice.yaml")).expect("it is removed");
    rejected(1).await;
    eventually("the log says what to write", async || {
        let log = server.log();
        (log.contains("overlay.rejected") && log.contains("`empty_overlay: true`")).then_some(())
    })
    .await;
    assert_eq!(admitted(&server, "a").await, 3, "the last overlay");
    scene.write("exceptions/alice.yaml", "overlay: edge\n");
    eventually("a file that was cut off is named", async || server.log().contains("alice.yaml:1:1").then_some(()))
        .await;
    assert_eq!(admitted(&server, "b").await, 3, "the last overlay");
    scene.write("exceptions/alice.yaml", "empty_overlay: true\n");
    rejected(0).await;
    assert_eq!(admitted(&server, "c").await, 5, "the rules alone");
    fs::remove_file(directory.join("alice.yaml")).expect("it is removed");
    for command in [&["serve"][..], &["check", "--overlay", &path]] {
        let mut started = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        started.args(command).arg(scene.at("rules.yaml")).env_clear().env("RULES_OVERLAY", &path);
        let (status, _, errors) = output(started.stdin(Stdio::null())).await;
        assert!(!status.success() && errors.contains("`empty_overlay: true`"), "{command:?}: {errors}");
    }
}

/// The steps of "An exception, given and taken back" in docs/overlay.md.
#[tokio::test]
async fn an_exception_is_given_and_taken_back_as_the_page_says() {
    let page = fs::read_to_string(repository("docs/overlay.md")).expect("it reads");
    let block = page.split("# alice.yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("the file");
    // No week ends while the test runs.
    let [block, rules] = [block, RULES].map(|text| text.replace("unit: minute", "unit: week"));
    let scene = Scene::new("");
    scene.write("rules.yaml", &rules);
    fs::create_dir(scene.at("overlay")).expect("a directory");
    scene.write("overlay/none.yaml", "empty_overlay: true\n");
    let directory = scene.at("overlay").to_str().expect("a path of text").to_owned();
    let server = Tidegate::start(&scene.at("rules.yaml"), &[("RULES_OVERLAY", &directory)]).await;
    assert_eq!(admitted(&server, "alice").await, 5, "the source alone");

    scene.write("alice.yaml", &block);
    let file = scene.at("alice.yaml").to_str().expect("a path of text").to_owned();
    let (is_good, said, errors) = scene.run(&["check", "--overlay", &file]).await;
    assert!(is_good && said.starts_with("ok: ") && errors.is_empty(), "{said}{errors}");
    let (_, said, errors) = scene.run(&["check", "--overlay", &without_replace(&scene, &block)]).await;
    assert!(said.starts_with("ok, with 1 warning") && errors.contains("write `replace: true`"), "{said}{errors}");

    fs::remove_file(scene.at("overlay/none.yaml")).expect("it is removed");
    fs::rename(scene.at("alice.yaml"), scene.at("overlay/alice.yaml")).expect("it is moved");
    let of_alice = async || rlconfig(&server).await.contains("edge.overlay+user_alice").then_some(());
    eventually("the exception is in force", of_alice).await;
    assert_eq!(
        (admitted(&server, "alice").await, admitted(&server, "bob").await),
        (994, 5),
        "six of 1,000 were counted, one of them refused"
    );
    let asked = ["explain", "--overlay", &directory, "--domain", "edge", "--descriptor", "user=alice"];
    let (_, said, _) = scene.run(&asked).await;
    assert!(said.contains("=> rule edge.overlay+user_alice") && said.contains("  replace  "), "{said}");

    scene.write("overlay/alice.yaml", "empty_overlay: true\n");
    eventually("it is taken back", async || of_alice().await.is_none().then_some(())).await;
    assert_eq!(server.metric("tidegate_overlay_rejected").await, 0);
    assert_eq!(admitted(&server, "carol").await, 5, "the source alone");
    assert_eq!(admitted(&server, "alice").await, 0, "a counter of 1,000 hits is over a limit of 5");
}

/// The path of the same overlay without `replace: true`.
fn without_replace(scene: &Scene, overlay: &str) -> String {
    let other = overlay.replace("    replace: true\n", "");
    assert_ne!(other, overlay);
    scene.write("weak.yaml", &other);
    scene.at("weak.yaml").to_str().expect("a path of text").to_owned()
}

#[tokio::test]
async fn rules_that_are_rejected_stay_so_when_the_overlay_changes() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    scene.write("rules.yaml", "domain: edge\ndescriptors: [{ kee: user }]\n");
    eventually("they are rejected", async || (server.metric("tidegate_rules_rejected").await == 1).then_some(())).await;
    scene.write("overlay.yaml", &overlay(4));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "a").await, 4, "the new overlay over the last good rules");
    assert_eq!(server.metric("tidegate_rules_rejected").await, 1);
}

#[tokio::test]
async fn a_broken_overlay_stops_the_start_and_the_check() {
    let scene = Scene::new("overlay: \"*\"\napply: [{ match: [user], limit: { algoritm: gcra } }]\n");
    for command in ["serve", "check"] {
        let (is_good, _, errors) = scene.run(&[command]).await;
        assert!(!is_good && errors.contains("overlay.yaml:2:"), "{command}: {errors}");
    }
}

#[tokio::test]
async fn commands_read_rules_with_the_overlay() {
    let scene = Scene::new(&overlay(9));
    let (is_good, explained, errors) = scene.run(&["explain", "--domain", "edge", "--descriptor", "user=a"]).await;
    assert!(is_good && explained.contains("gcra, burst 9"), "{explained}{errors}");
    scene.write("overlay.yaml", "overlay: \"*\"\napply: [{ match: [nobody], limit: { burst: 9 } }]\n");
    let (is_good, said, errors) = scene.run(&["check"]).await;
    assert!(is_good && said.contains("1 warning") && errors.contains("matches no limit"), "{said}{errors}");
}

#[tokio::test]
async fn own_rules_of_an_overlay_are_in_force_and_change_live() {
    let own = |limit: u32| {
        format!(
            "overlay: \"*\"\ndescriptors: [{{ key: user, rate_limit: {{ unit: hour, requests_per_unit: {limit} }} }}]\n"
        )
    };
    let scene = Scene::new(&own(3));
    let server = scene.start().await;
    assert_eq!(admitted(&server, "a").await, 3, "the smaller limit refuses first");
    scene.write("overlay.yaml", &own(9));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "b").await, 5, "the limit of the source is still there");
    let page = rlconfig(&server).await;
    let [source, laid] = page.lines().collect::<Vec<_>>()[..] else { panic!("{page}") };
    assert_eq!(source, "edge.user: unit=MINUTE requests_per_unit=5, shadow_mode: false, quota_mode: false");
    assert!(laid.starts_with("edge.overlay+user: unit=HOUR requests_per_unit=9,"), "{laid}");
    assert!(laid.ends_with("/overlay.yaml:2"), "{laid}");
    scene.write("overlay.yaml", &format!("{}apply: [{{ match: [user], limit: {{ algorithm: gcra }} }}]\n", own(9)));
    generation(&server, 3).await;
    let page = rlconfig(&server).await;
    assert!(page.contains("/rules.yaml:2, with algorithm of "), "{page}");
    scene.write("overlay.yaml", "overlay: \"*\"\nentries: { user: { case: lower } }\ncharging: all_or_nothing\n");
    generation(&server, 4).await;
    let page = rlconfig(&server).await;
    let of_domain = page.lines().next().expect("a line");
    assert!(of_domain.starts_with("edge: with entries `user` of "), "{page}");
    assert!(of_domain.ends_with("/overlay.yaml:3"), "charging in {page}");
}

#[tokio::test]
async fn a_list_of_an_overlay_is_followed_live_and_rules_of_the_source_do_not_hide_it() {
    let scene = Scene::new("overlay: \"*\"\ndescriptors: [{ key: user, values_file: denied.txt, deny: true }]\n");
    scene.write("rules.yaml", &RULES.replace("key: user", "key: user, value: b"));
    scene.write("denied.txt", "a\n");
    let server = scene.start().await;
    assert_eq!((admitted(&server, "a").await, admitted(&server, "b").await), (0, 5));
    scene.write("denied.txt", "b\nc\n");
    generation(&server, 2).await;
    let body = |user: &str| http::descriptor("edge", &[("user", user)]);
    assert!(asked(&server, &body("a")).await.status == 200);
    for user in ["b", "c"] {
        assert!(asked(&server, &body(user)).await.status == 429, "{user}");
    }
}

#[tokio::test]
async fn own_rules_of_a_named_domain_are_in_force_before_the_control_plane_answers() {
    let scene =
        Scene::new("overlay: edge\ndescriptors: [{ key: user, rate_limit: { unit: hour, requests_per_unit: 2 } }]\n");
    let variables = [
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", "127.0.0.1:1"),
        ("CONFIG_GRPC_XDS_NODE_ID", "node-1"),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        ("RULES_OVERLAY", &scene.overlay()),
    ];
    let server = Tidegate::start_with(None, &variables).await;
    assert_eq!(admitted(&server, "a").await, 2);
    let other = asked(&server, &http::descriptor("other", &[("user", "a")])).await;
    assert!(other.status == 503 && other.contains("no rate limit"), "{other}");
    scene.write(
        "overlay.yaml",
        "overlay: edge\ndescriptors: [{ key: user, rate_limit: { unit: hour, requests_per_unit: 3 } }]\n",
    );
    eventually("the new overlay is in force", async || {
        rlconfig(&server).await.contains("requests_per_unit=3").then_some(())
    })
    .await;
    scene.write("overlay.yaml", "overlay: edge\ndescriptors: [{ key: user }, { key: user }]\n");
    eventually("it is rejected", async || (server.metric("tidegate_overlay_rejected").await == 1).then_some(())).await;
}

/// Runs `tidegate check` with these arguments. Returns the exit code, and both outputs.
async fn check(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("check").args(arguments).env_clear();
    let (status, said, errors) = output(command.stdin(Stdio::null())).await;
    (status.code(), said + &errors)
}

#[tokio::test]
async fn check_reads_an_overlay_alone_over_rule_files_and_over_a_recorded_push() {
    let scene = Scene::new("overlay: edge\napply: [{ match: [user], limit: { algorithm: gcra } }]\n");
    let (overlay, rules) = (scene.overlay(), scene.at("rules.yaml"));
    let push = scene.at("push.json");
    let text = r#"{"resources": [{"domain": "edge", "descriptors": [
  {"key": "path", "rateLimit": {"unit": "MINUTE", "requestsPerUnit": 5}}]}]}"#;
    fs::write(&push, text).expect("it is written");
    let [rules, push] = [&rules, &push].map(|path| path.to_str().expect("a path of text"));
    let of = |arguments: &[&str]| arguments.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    for (arguments, code, expected) in [
        (of(&["--overlay", &overlay, rules]), 0, "ok: 1 rule in 1 domain"),
        (of(&["--overlay", &overlay]), 0, "ok: 0 rules"),
        (of(&["--overlay", &overlay, "--push", push]), 0, "overlay.yaml:2:9: warning: this item matches no limit"),
        (of(&["--push", push]), 0, "ok: 1 rule in 1 domain"),
        (of(&["--overlay", "/nowhere.yaml", rules]), 2, "RULES_OVERLAY cannot be read"),
        (of(&["--push", "/nowhere.json"]), 2, "/nowhere.json"),
        (of(&[]), 2, "RUNTIME_ROOT"),
        (of(&["--push", push, rules]), 2, "cannot be used with"),
    ] {
        let (found, said) = check(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).await;
        assert_eq!(found, Some(code), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    scene.write("overlay.yaml", "overlay: edge\napply: [{ match: [user], limit: { algoritm: gcra } }]\n");
    for more in [vec!["--overlay", &overlay], vec!["--overlay", &overlay, "--push", push]] {
        let (code, said) = check(&more).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("overlay.yaml:2:") && said.contains("1 error"), "{said}");
    }
    fs::write(push, text.replace("MINUTE", "FORTNIGHT")).expect("it is written");
    let (code, said) = check(&["--push", push]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("push.json:2:"), "{said}");
}

#[tokio::test]
async fn the_example_fits_the_push_beside_it() {
    let at = |name: &str| repository(&format!("examples/overlay/{name}")).to_str().expect("a path of text").to_owned();
    let given = ["--overlay", &at("overlay.yaml"), "--push", &at("push.json")];
    let (code, said) = check(&given).await;
    assert_eq!((code, said.trim()), (Some(0), "ok: 4 rules in 1 domain from 1 file"));
    let route = |name: &str| {
        let route = format!("httproute/default/{name}/rule/0/match/0/www_example_com");
        format!("{route}={route}")
    };
    let (shop, login) = (route("shop"), route("login"));
    let address = |of: &str| format!("{shop},masked_remote_address=0.0.0.0/0,remote_address={of}");
    for (descriptor, expected) in [
        (address("198.51.100.7"), vec!["20 per second, gcra, burst 10", "message  Too many", "algorithm and burst of"]),
        (address("203.0.113.9"), vec!["deny     refuses the whole request"]),
        (address("2001:db8:1:2::3"), vec!["remote_address~=2001:db8:1:2::/64"]),
        (format!("{shop},rule-1-match-0=x"), vec!["1000 per hour, sliding_window", "when 80%"]),
        (format!("{login},rule-0-match-0=x"), vec!["5 per minute, sliding_log", "counts refused", "failure  closed"]),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["explain", "--domain", "default/eg/http", "--descriptor", &descriptor]).args(given).env_clear();
        let (status, said, errors) = output(command.stdin(Stdio::null())).await;
        assert!(status.success(), "{errors}");
        for text in expected {
            assert!(said.contains(text), "{text} in {said}");
        }
    }
}

/// Version `number` of the overlay: its own limit, and the burst that it sets on the limit of the source.
fn numbered_overlay(number: u64) -> String {
    format!(
        "overlay: \"*\"
apply: [{{ match: [user], limit: {{ algorithm: gcra, burst: {} }} }}]
descriptors: [{{ key: own, rate_limit: {{ unit: hour, requests_per_unit: {} }} }}]
",
        100_000 + number,
        200_000 + number
    )
}

fn numbered_rules(number: u64) -> String {
    RULES.replace("requests_per_unit: 5", &format!("requests_per_unit: {}", 300_000 + number))
}

/// Asks for a new user. Returns the versions of the overlay and of the rules that the answer shows.
async fn versions(server: &Tidegate, user: &str) -> (u64, u64) {
    let entry = |key: &str| format!(r#"{{"entries":[{{"key":"{key}","value":"{user}"}}]}}"#);
    let body = format!(r#"{{"domain":"edge","descriptors":[{},{}]}}"#, entry("user"), entry("own"));
    let answer = asked(server, &body).await;
    assert_eq!(answer.status, 200, "{answer}");
    let found = answer.json();
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or_else(|| panic!("{answer}"));
    let limit = |index: usize| number(&found["statuses"][index]["currentLimit"]["requestsPerUnit"]);
    let burst = number(&found["statuses"][0]["limitRemaining"]) + 1;
    assert_eq!(burst - 100_000, limit(1) - 200_000, "both halves of one overlay: {answer}");
    (limit(1) - 200_000, limit(0) - 300_000)
}

#[tokio::test]
async fn changes_of_both_under_load_give_no_wrong_mixed_or_old_answer() {
    let most_changes = by_tier(100, 500);
    let scene = Scene::new(&numbered_overlay(0));
    scene.write("rules.yaml", &numbered_rules(0));
    let server = scene.start().await;
    // Change n is of the overlay if n is odd, and of the rules if it is even.
    let expected = |change: u64| (change.div_ceil(2), change / 2);
    let [written, in_force] = [AtomicU64::new(0), AtomicU64::new(0)];
    let answers = AtomicU64::new(0);
    let load = async |client: u64| {
        while in_force.load(Ordering::SeqCst) < most_changes {
            let number = answers.fetch_add(1, Ordering::SeqCst);
            let least = in_force.load(Ordering::SeqCst);
            let found = versions(&server, &format!("{client}-{number}")).await;
            let most = written.load(Ordering::SeqCst);
            let is_expected = (least..=most).any(|change| expected(change) == found);
            assert!(is_expected, "{found:?} between change {least} and change {most}");
        }
    };
    let changes = async {
        for change in 1..=most_changes {
            written.store(change, Ordering::SeqCst);
            let (overlay, rules) = expected(change);
            match change % 2 {
                1 => scene.write("overlay.yaml", &numbered_overlay(overlay)),
                _ => scene.write("rules.yaml", &numbered_rules(rules)),
            }
            generation(&server, u32::try_from(change + 1).expect("a number")).await;
            in_force.store(change, Ordering::SeqCst);
        }
    };
    tokio::join!(changes, load(1), load(2), load(3), load(4));
    assert!(answers.load(Ordering::SeqCst) > 2 * most_changes);
    assert_eq!(server.metric("tidegate_overlay_fields_skipped").await, 0);
    assert_eq!(server.metric("tidegate_rules_rejected").await, 0);
}

/// An overlay whose 2,000 values are copied to each domain: it has room in 99 domains, not in 100.
fn wide_overlay() -> String {
    let values: Vec<_> = (0..2_000).map(|number| format!("v{number}")).collect();
    format!("overlay: \"*\"\ndescriptors: [{{ key: user, values: [{}], deny: true }}]\n", values.join(", "))
}

/// Writes a file of rules for the domain with this number.
fn write_domain(scene: &Scene, number: usize) {
    scene.write(&format!("rules/{number}.yaml"), &RULES.replace("edge", &format!("edge-{number}")));
}

/// A start with this many domains, each in a file of its own.
async fn start_with_domains(count: usize, overlay: &str) -> (Scene, Tidegate) {
    let scene = Scene::new(overlay);
    fs::create_dir(scene.at("rules")).expect("a directory");
    (0..count).for_each(|number| write_domain(&scene, number));
    let server = Tidegate::start(&scene.at("rules"), &[("RULES_OVERLAY", &scene.overlay())]).await;
    (scene, server)
}

#[tokio::test]
async fn rules_without_room_beside_the_overlay_come_into_force_once_it_has_shrunk() {
    let (scene, server) = start_with_domains(99, &wide_overlay()).await;
    write_domain(&scene, 99);
    eventually("they are rejected", async || (server.metric("tidegate_rules_rejected").await == 1).then_some(())).await;
    scene.write("overlay.yaml", &overlay(4));
    eventually("they are in force", async || (server.metric("tidegate_rules").await == 100).then_some(())).await;
    eventually("none is rejected", async || (server.metric("tidegate_rules_rejected").await == 0).then_some(())).await;
}

#[tokio::test]
async fn an_overlay_without_room_beside_the_rules_comes_into_force_once_they_have_shrunk() {
    let (scene, server) = start_with_domains(100, &overlay(4)).await;
    scene.write("overlay.yaml", &wide_overlay());
    eventually("it is rejected", async || (server.metric("tidegate_overlay_rejected").await == 1).then_some(())).await;
    fs::remove_file(scene.at("rules/99.yaml")).expect("it is removed");
    eventually("it is in force", async || (server.metric("tidegate_overlay_rejected").await == 0).then_some(())).await;
    let denied = http::descriptor("edge-0", &[("user", "v1999")]);
    assert!(asked(&server, &denied).await.status == 429, "the overlay's own rules are in force");
}
