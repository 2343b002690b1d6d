//! The content of a secret is in no message: not in the errors of a start, and not in what a running service logs.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use super::RULES;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, answering, eventually, output, rule_file};

/// The text that no message may contain, and its first letters as the numbers that a list of bytes is printed by.
const CANARY: &str = "Canary-7f3a9";
const SPELLED: [&str; 2] = ["67, 97, 110, 97", "43616e617279"];

fn assert_clean(what: &str, text: &str) {
    let is_clean = !text.contains(&CANARY[..6]) && !SPELLED.iter().any(|spelled| text.contains(spelled));
    assert!(is_clean, "{what}: {text}");
}

/// All that a start says which must fail.
async fn refused(arguments: &[&Path], variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").args(arguments).env_clear().envs(variables.iter().copied()).stdin(Stdio::null());
    let (status, told, errors) = output(&mut command).await;
    assert!(!status.success(), "{variables:?} succeeds");
    told + &errors
}

#[tokio::test]
async fn no_error_of_a_start_quotes_a_secret() {
    let directory = tempfile::tempdir().expect("a directory");
    let (rules, secret) = (directory.path().join("rules.yaml"), directory.path().join("secret"));
    fs::write(&rules, RULES).expect("it is written");
    let authority = Authority::new();
    let good = authority.issue("client");
    let path = secret.to_str().expect("a path of text");
    let (good_certificate, good_key) = (good.certificate.to_str().expect("text"), good.key.to_str().expect("text"));
    let (redis, tls) = (("REDIS_URL", "127.0.0.1:1"), ("REDIS_TLS", "true"));

    let not_text = [CANARY.as_bytes(), b"\xff"].concat();
    let pem = [
        format!("-----BEGIN PRIVATE KEY-----{CANARY}-----END PRIVATE KEY-----"),
        format!("-----BEGIN {CANARY}"),
        format!("-----BEGIN CERTIFICATE-----\n{CANARY}!\n-----END CERTIFICATE-----\n"),
        format!("-----BEGIN PRIVATE KEY-----\n{CANARY}!\n-----END PRIVATE KEY-----\n"),
        format!("-----BEGIN PRIVATE KEY-----\n{CANARY}"),
        CANARY.to_owned(),
    ];
    let mut cases = vec![
        (vec![("KEY_SECRET_FILE", path)], CANARY.as_bytes().to_vec()),
        (vec![("REDIS_AUTH_FILE", path), redis], format!("{CANARY}:").into()),
        (vec![("REDIS_AUTH_FILE", path), redis], format!("\n{CANARY}").into()),
        (vec![("REDIS_AUTH_FILE", path), redis], not_text),
    ];
    for pem in pem {
        cases.push((vec![("REDIS_TLS_CACERT", path), redis, tls], pem.clone().into()));
        let both = [("REDIS_TLS_CLIENT_CERT", path), ("REDIS_TLS_CLIENT_KEY", good_key), redis, tls];
        cases.push((both.into(), pem.clone().into()));
        let both = [("REDIS_TLS_CLIENT_KEY", path), ("REDIS_TLS_CLIENT_CERT", good_certificate), redis, tls];
        cases.push((both.into(), pem.into()));
    }
    for (variables, content) in cases {
        fs::write(&secret, &content).expect("it is written");
        let told = refused(&[&rules], &variables).await;
        let (variable, _) = variables[0];
        assert!(told.contains(&format!("{variable} is {path}: expected ")), "{told}");
        assert_clean(variable, &told);
    }

    let lines = format!("{CANARY}\n{CANARY}");
    let text = |text: &str| text.replace('@', CANARY);
    for (variable, value) in [
        ("REDIS_AUTH", lines.clone()),
        ("REDIS_SENTINEL_AUTH", lines),
        ("REDIS_URL", format!("redis://a:{CANARY}@h:x")),
        ("REDIS_URL", text("redis://:@")),
        ("OTEL_EXPORTER_OTLP_HEADERS", text("authorization=%zz@")),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", text("a b=@")),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://a:{CANARY}@h:1")),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", text("http://h:1/?key=@")),
    ] {
        let told = refused(&[&rules], &[(variable, &value), ("TRACING_ENABLED", "true")]).await;
        assert!(told.contains(&format!("{variable} is \"")) && told.contains("***"), "{told}");
        assert_clean(variable, &told);
    }
}

/// Whoever writes a rule file may name any file as a list, or put a link to one beside the rule file.
#[tokio::test]
async fn a_message_about_a_list_does_not_quote_it_and_a_list_elsewhere_is_not_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let secret = format!("10.0.0.0/99 {CANARY}\n10.67.97.110/8\nfine {CANARY}\nfe80::77%{CANARY}\n192.0.2.77/40\n");
    fs::create_dir(at("rules")).expect("it is made");
    for list in ["rules/list", "secret", "key"] {
        fs::write(at(list), &secret).expect("it is written");
    }
    std::os::unix::fs::symlink("../secret", at("rules/link")).expect("it is made");
    let (rules, key) = (at("rules/rules.yaml"), at("key"));
    let key = key.to_str().expect("text");
    let name = |named: &str, entries: &str| {
        let rules_text = format!(
            "domain: d\nentries: {{ k: {{ {entries} }} }}\ndescriptors: [{{ key: k, values_file: {named}, deny: true }}]\n"
        );
        fs::write(&rules, rules_text).expect("it is written");
    };
    for entries in ["as: ip", "sensitive: true", "as: ip, sensitive: true"] {
        name("list", entries);
        let told = refused(&[&rules], &[("KEY_SECRET_FILE", key)]).await;
        assert!(told.contains("list:5:1: error: the line (13 bytes, not shown) is not a network"), "{told}");
        assert_clean("the list", &told);
        assert!(!told.contains("192.0.2") && !told.contains("10.67") && !told.contains("fe80"), "{told}");
    }
    let outside = at("secret").display().to_string();
    for named in
        ["link", "../secret", &outside, key, "/proc/self/environ", "/proc/self/root/etc/passwd", "../rules/../secret"]
    {
        name(named, "as: ip");
        let told = refused(&[&rules], &[("SECRET", CANARY)]).await;
        assert!(told.contains("cannot be read: it is not below the directory of a rule file"), "{named}: {told}");
        assert_clean(named, &told);
    }
    name("link", "as: ip");
    let root = directory.path().to_str().expect("text");
    let told = refused(&[&rules], &[("VALUES_ROOT", root)]).await;
    assert!(told.contains("link:5:1: error: "), "it is read below the root of the operator: {told}");
    assert_clean("the link", &told);
    let told = refused(&[&rules], &[("VALUES_ROOT", key)]).await;
    assert!(told.contains("VALUES_ROOT is ") && told.contains("expected a directory"), "{told}");
}

/// A server that refuses every command and repeats all that it was sent.
async fn repeating() -> String {
    let answer = async |mut stream: TcpStream| {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut bytes).await {
            let said = String::from_utf8_lossy(&bytes[..count]).replace("\r\n", " ");
            if stream.write_all(format!("-ERR what is '{said}'\r\n").as_bytes()).await.is_err() {
                return;
            }
        }
    };
    answering(answer).await.to_string()
}

#[tokio::test]
async fn a_password_that_a_server_repeats_is_not_logged() {
    // Redis repeats 128 bytes of the arguments of a command that it does not have: a part of this.
    let password = format!("{CANARY}{}", "x".repeat(200));
    let (rules, file) = (rule_file(RULES), rule_file(&password));
    let server = Single::start(&["--rename-command", "HELLO", "", "--rename-command", "AUTH", ""]).await;
    let (real, repeating) = (server.address().to_string(), repeating().await);
    for variables in [
        [("REDIS_URL", real.clone()), ("REDIS_AUTH", format!("alice:{password}"))],
        [("REDIS_URL", repeating.clone()), ("REDIS_AUTH_FILE", file.path().to_str().expect("text").to_owned())],
        [("REDIS_URL", format!("redis://alice:{password}@{repeating}")), ("REDIS_TYPE", "single".to_owned())],
        [("REDIS_URL", format!("mymaster,{repeating}")), ("REDIS_SENTINEL_AUTH", password.clone())],
    ] {
        let is_sentinel = variables[1].0 == "REDIS_SENTINEL_AUTH";
        let kind = ("REDIS_TYPE", if is_sentinel { "sentinel" } else { "single" });
        let mut given: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        given.extend([kind, ("LOG_LEVEL", "debug")]);
        let tidegate = Tidegate::start(rules.path(), &given).await;
        let told = || tidegate.log().lines().find(|line| line.contains("cannot connect to Redis")).map(str::to_owned);
        let line = eventually("the failure is logged", async || told()).await;
        assert!(line.contains("***"), "{line}");
        assert_clean("the log", &tidegate.log());
        assert!(!tidegate.log().contains("xxxx"), "{}", tidegate.log());
    }
}

#[tokio::test]
async fn a_password_file_that_goes_bad_is_not_quoted_and_the_last_password_stays() {
    let (rules, file) = (rule_file(RULES), rule_file("good"));
    let given = [("REDIS_URL", "127.0.0.1:1"), ("REDIS_AUTH_FILE", file.path().to_str().expect("text"))];
    let tidegate = Tidegate::start(rules.path(), &given).await;
    fs::write(&file, [CANARY.as_bytes(), b"\xff"].concat()).expect("it is written");
    let told = "the last content stays in use";
    eventually("it is logged", async || tidegate.log().contains(told).then_some(())).await;
    assert!(tidegate.log().contains("expected PASSWORD or USER:PASSWORD"), "{}", tidegate.log());
    assert_clean("the log", &tidegate.log());
}
