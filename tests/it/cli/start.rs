//! Starts as other projects' files have them, and what a start says.

use serde_json::Value;

use super::*;
use crate::support::directory;

/// A link to this program, named as the reference's.
fn ratelimit(directory: &Path) -> Command {
    let program = directory.join("ratelimit");
    if !program.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tidegate"), &program).expect("a link");
    }
    Command::new(program)
}

#[test]
fn a_command_or_arguments_for_the_reference_start_the_service() {
    let directory = tempfile::tempdir().expect("a directory");
    let serves = |mut command: Command, arguments: &[&str], is_warned: bool| {
        let output = command.args(arguments).env_clear().env("RUNTIME_ROOT", "/nowhere").output().expect("it runs");
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains("tidegate serve: /nowhere: there is no such directory"), "{arguments:?}: {text}");
        assert_eq!(text.contains("start.arguments_ignored"), is_warned, "{arguments:?}: {text}");
        assert!(!text.contains("hunter2"), "{arguments:?}: {text}");
    };
    let tidegate = || Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serves(tidegate(), &["/bin/ratelimit"], false);
    serves(tidegate(), &["ratelimit"], false);
    serves(tidegate(), &["/usr/bin/ratelimit", "--config-dir=/data/x", "--redis-url=redis://:hunter2@r"], true);
    serves(ratelimit(directory.path()), &[], false);
    serves(ratelimit(directory.path()), &["/bin/ratelimit"], false);
    serves(ratelimit(directory.path()), &["-configpath=/data/config/config.yaml"], true);
    serves(ratelimit(directory.path()), &["--any-flag", "--port", "1", "--", "hunter2"], true);
    let unknown = tidegate_with(&["/bin/other"], &[]);
    assert!(stderr(&unknown).contains("unrecognized subcommand"), "{}", stderr(&unknown));
    let version = ratelimit(directory.path()).arg("--version").output().expect("it runs");
    assert!(stdout(&version).starts_with("tidegate "), "{}", stdout(&version));
}

/// Runs a start that fails, with a log for programs. Returns its lines.
fn failed(arguments: &[&str], environment: &[(&str, &str)]) -> Vec<Value> {
    let output = tidegate_with(&[&["serve"], arguments].concat(), &[&[("LOG_FORMAT", "JSON")], environment].concat());
    assert_eq!((output.status.code(), &*output.stdout), (Some(2), &b""[..]), "{}", stderr(&output));
    objects(&stderr(&output))
}

fn objects(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"))).collect()
}

/// Returns the events and, after a colon, the lines in rule files.
fn events(lines: &[Value]) -> Vec<String> {
    let event = |line: &Value| line["event"].as_str().expect("an event").to_owned();
    let place = |line: &Value| line["line"].as_u64().map_or(String::new(), |number| format!(":{number}"));
    lines.iter().map(|line| event(line) + &place(line)).collect()
}

#[test]
fn a_wrong_flag_is_explained_to_people_unless_the_log_is_for_programs_and_help_always_is() {
    let wrong = tidegate_with(&["serve", "--nonsense"], &[]);
    assert!(stderr(&wrong).starts_with("error: unexpected argument '--nonsense'"), "{}", stderr(&wrong));
    let help = tidegate_with(&["serve", "--help"], &[("LOG_FORMAT", "JSON")]);
    assert!(help.status.success() && stdout(&help).contains("Usage: "), "{}", stderr(&help));
}

#[test]
fn every_line_of_a_start_that_fails_is_an_object_for_programs() {
    let wrong = failed(&[], &[("PORT", "x"), ("SHADOW_MODE", "perhaps")]);
    assert_eq!(events(&wrong), ["settings.invalid", "settings.invalid", "start.failed"]);
    assert!(wrong[0]["@message"].as_str().expect("text").contains("PORT is \"x\""), "{wrong:?}");
    assert_eq!((&wrong[0]["level"], wrong[0]["@timestamp"].is_string()), (&Value::from("error"), true));

    let file = rule_file(
        "domain: d\ndescriptors:\n  - key: a\n    rate_limit: { unit: eon }\n  - key: b\n    rate_limit: {unit: hour}\n",
    );
    let wrong = failed(&[path(&file)], &[]);
    let mut found = events(&wrong);
    found.sort();
    assert_eq!(found, ["rules.invalid:4", "rules.warning:4", "rules.warning:6", "start.failed"], "{wrong:?}");
    for line in wrong.iter().filter(|line| line["line"].is_u64()) {
        assert_eq!((&line["file"], line["column"].as_u64() > Some(4)), (&Value::from(path(&file)), true), "{line}");
    }

    for (arguments, environment, expected) in [
        (&["/nowhere.yaml"][..], &[][..], "/nowhere.yaml"),
        (&["--no-such-flag"], &[], "unexpected argument '--no-such-flag'"),
        (&["a.yaml"], &[("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_SERVER_URL", "h:1")], "names rule files"),
        (&[], &[("RULES_OVERLAY", "/nowhere"), ("RUNTIME_ROOT", "/nowhere")], "/nowhere"),
    ] {
        let lines = failed(arguments, environment);
        assert_eq!(events(&lines), ["start.failed"], "{arguments:?}");
        assert!(lines[0]["@message"].as_str().expect("text").contains(expected), "{lines:?}");
    }
}

#[tokio::test]
async fn every_line_of_a_start_is_an_object_for_programs() {
    let file = rule_file("domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: hour}\n");
    let environment = [("LOG_FORMAT", "json"), ("RESPONSE_HEADERS", "x-ratelimit"), ("REDIS_POOL_SIZE", "5")];
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
    on_free_ports(command.arg("serve").arg(file.path()).env_clear()).envs(environment);
    let mut process = Process::start(&mut command);
    let started = process.line().await.expect("the start says something");
    let started: Value = serde_json::from_str(&started).unwrap_or_else(|error| panic!("{error}: {started:?}"));
    assert_eq!((&started["event"], &started["level"]), (&Value::from("start.done"), &Value::from("info")));
    assert_eq!(started["@message"], "the service has started with 1 rule in 1 domain from 1 file");
    for listener in ["grpc", "http", "debug"] {
        assert!(started[listener].as_str().is_some_and(|at| at.parse::<SocketAddr>().is_ok()), "{started}");
    }
    assert!(started["store"].as_str().expect("text").starts_with("memory, "), "{started}");
    process.signal(rustix::process::Signal::TERM);
    assert!(process.ended().await.success());
    assert_eq!(process.line().await, None, "nothing else is on standard output");
    let lines = objects(&process.errors());
    let begin = &events(&lines)[..3];
    assert_eq!(begin, ["settings.unused", "rules.warning:4", "settings.headers_twice"], "{lines:?}");
    let warning = &lines[1];
    assert_eq!((&warning["file"], warning["column"].as_u64()), (&Value::from(path(&file)), Some(17)), "{warning}");
    assert!(warning["@message"].as_str().expect("text").contains("`requests_per_unit` is missing"), "{warning}");
}

#[tokio::test]
async fn a_redis_that_may_be_meant_and_is_not_used_is_named_in_the_log() {
    let made = directory([("config/a.yaml", RULES)]);
    let root = ("RUNTIME_ROOT", made.path().to_str().expect("text"));
    let environment = [
        root,
        ("LOG_FORMAT", "json"),
        ("REPLICAS", "3"),
        ("REDIS_HOST", "cache"),
        ("REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("REDIS_SERVICE_HOST", "10.0.0.1"),
    ];
    let events_of = async |environment: &[(&str, &str)]| {
        let server = Tidegate::start_with(None, environment).await;
        let lines = objects(&server.log());
        // The memory store is named last, before the listeners open.
        (events(&lines), lines)
    };
    let (found, lines) = events_of(&environment).await;
    assert_eq!(found, ["settings.unknown", "store.memory.replicas", "store.memory"], "{lines:?}");
    let told = lines[0]["@message"].as_str().expect("text");
    assert!(told.contains("REDIS_HOST, so it has no effect: did you mean REDIS_URL?"), "{told}");
    assert!(told.contains("Kubernetes sets REDIS_PORT, REDIS_SERVICE_HOST beside a Service"), "{told}");
    let asked = [&environment[..], &[("BACKEND_TYPE", "memory")]].concat();
    assert_eq!(events_of(&asked).await.0, ["settings.unknown", "store.memory.replicas"]);
    let only_one = [root, ("LOG_FORMAT", "json"), ("BACKEND_TYPE", "memory"), ("REPLICAS", "1"), environment[4]];
    assert_eq!(events_of(&only_one).await.0, Vec::<String>::new());
}
