//! Files that the process reads at its start: regular files of a bounded size, or the start stops with the reason.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::process::Command;

use crate::redis::certificates::Authority;
use crate::redis::hang::Hang;
use crate::support::{Process, eventually, output};

mod secrets;

const RULES: &str = "domain: d\ndescriptors: [{ key: k, rate_limit: { unit: year, requests_per_unit: 1 } }]\n";

/// The things that are no regular file or too large, by name, and the words that an error has for each.
const IRREGULAR: [(&str, &str); 6] = [
    ("pipe", "it is a pipe: expected a regular file"),
    ("socket", "it is a socket: expected a regular file"),
    ("device", "it is a device: expected a regular file"),
    ("directory", "it is a directory: expected a regular file"),
    ("loop", "Too many levels of symbolic links"),
    ("large", "it is larger than "),
];

/// A directory with each of them, and a link to each.
fn irregular() -> TempDir {
    let made = tempfile::tempdir().expect("a directory");
    let at = |name: &str| made.path().join(name);
    mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    drop(UnixListener::bind(at("socket")).expect("a socket"));
    symlink("/dev/zero", at("device")).expect("a link");
    fs::create_dir(at("directory")).expect("a directory");
    symlink("loop", at("loop")).expect("a link");
    File::create(at("large")).expect("a file").set_len(1 << 40).expect("a hole");
    for (name, _) in IRREGULAR {
        symlink(name, at(&format!("{name}.link"))).expect("a link");
    }
    fs::write(at("rules.yaml"), RULES).expect("it is written");
    made
}

/// The error text of a command that is expected to fail.
async fn refused(arguments: &[&str], path: Option<&Path>, variables: &[(&str, &Path)]) -> String {
    // A read without a bound fails at 4 GiB of address space and leaves the machine its memory.
    let mut command = Command::new("sh");
    command.args(["-c", r#"ulimit -v 4194304; exec "$0" "$@""#, env!("CARGO_BIN_EXE_tidegate")]).args(arguments);
    command.args(path).env_clear().stdin(Stdio::null()).envs(variables.iter().copied());
    for port in ["GRPC_PORT", "PORT", "DEBUG_PORT"] {
        command.env(port, "0");
    }
    let (status, _, errors) = output(&mut command).await;
    assert!(!status.success(), "{arguments:?} {path:?} {variables:?} succeeds");
    errors
}

#[tokio::test]
async fn check_and_serve_stop_at_a_rule_file_that_is_no_regular_file() {
    let made = irregular();
    for (name, words) in IRREGULAR {
        // A directory that is named is one of rule files.
        let words = if name == "directory" { "there is no *.yaml or *.yml file in this directory" } else { words };
        for path in [made.path().join(name), made.path().join(format!("{name}.link"))] {
            for command in ["check", "serve"] {
                let told = refused(&[command], Some(&path), &[]).await;
                assert!(told.contains(&format!("{}: {words}", path.display())), "{command} {name}: {told}");
            }
        }
    }
}

#[tokio::test]
async fn check_and_serve_stop_at_a_list_that_is_no_regular_file() {
    let made = irregular();
    let rules = made.path().join("listed.yaml");
    for (name, words) in IRREGULAR {
        let text = format!("domain: d\ndescriptors: [{{ key: k, values_file: {name}.link, deny: true }}]\n");
        fs::write(&rules, text).expect("it is written");
        for command in ["check", "serve"] {
            let told = refused(&[command], Some(&rules), &[]).await;
            assert!(told.contains(&format!("{name}.link cannot be read: {words}")), "{command} {name}: {told}");
        }
    }
}

#[tokio::test]
async fn a_start_stops_at_a_secret_that_is_no_regular_file() {
    let (made, authority) = (irregular(), Authority::new());
    let good = authority.issue("client");
    let rules = made.path().join("rules.yaml");
    let at = |name: &str| -> PathBuf { made.path().join(name) };
    for (name, words) in IRREGULAR {
        let path = at(name);
        for command in ["check", "serve"] {
            let told = refused(&[command], Some(&rules), &[("KEY_SECRET_FILE", &path)]).await;
            assert!(told.contains(&format!("KEY_SECRET_FILE is {}: ", path.display())), "{command} {name}: {told}");
            assert!(told.contains(words), "{command} {name}: {told}");
        }
        let redis = ("REDIS_URL", Path::new("127.0.0.1:1"));
        let tls = ("REDIS_TLS", Path::new("true"));
        let metrics = ("OTEL_METRICS_EXPORTER", Path::new("otlp"));
        let collector = ("OTEL_EXPORTER_OTLP_ENDPOINT", Path::new("https://127.0.0.1:1"));
        for variables in [
            &[("REDIS_AUTH_FILE", path.as_path()), redis][..],
            &[("REDIS_TLS_CACERT", &path), redis, tls],
            &[("REDIS_TLS_CLIENT_CERT", &path), ("REDIS_TLS_CLIENT_KEY", &good.key), redis, tls],
            &[("REDIS_TLS_CLIENT_KEY", &path), ("REDIS_TLS_CLIENT_CERT", &good.certificate), redis, tls],
            &[("OTEL_EXPORTER_OTLP_CERTIFICATE", &path), metrics, collector],
            &[("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", &path), ("TRACING_ENABLED", Path::new("true")), collector],
            &[
                ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", &path),
                ("OTEL_EXPORTER_OTLP_CLIENT_KEY", &good.key),
                metrics,
                collector,
            ],
            &[
                ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", &path),
                ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE", &good.certificate),
                metrics,
                collector,
            ],
        ] {
            let told = refused(&["serve"], Some(&rules), variables).await;
            let (variable, _) = variables[0];
            assert!(told.contains(&format!("{variable} is ")) && told.contains(words), "{variable} {name}: {told}");
        }
    }
}

#[tokio::test]
async fn a_start_stops_at_a_file_for_a_receiver_that_is_not_what_it_should_be() {
    let (authority, made) = (Authority::new(), tempfile::tempdir().expect("a directory"));
    let (one, other) = (authority.issue("one"), authority.issue("other"));
    let (rules, text) = (made.path().join("rules.yaml"), made.path().join("text"));
    fs::write(&rules, RULES).expect("it is written");
    fs::write(&text, "not PEM").expect("it is written");
    for protocol in ["grpc", "http/protobuf"] {
        let shared = [
            ("OTEL_METRICS_EXPORTER", Path::new("otlp")),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", Path::new(protocol)),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", Path::new("https://127.0.0.1:1")),
        ];
        let authorities = [&shared[..], &[("OTEL_EXPORTER_OTLP_CERTIFICATE", &text)]].concat();
        let told = refused(&["serve"], Some(&rules), &authorities).await;
        let expected =
            format!("OTEL_EXPORTER_OTLP_CERTIFICATE is {}: expected at least one certificate", text.display());
        assert!(told.contains(&expected), "{told}");
        let client = [
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", one.certificate.as_path()),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", &other.key),
        ];
        let told = refused(&["serve"], Some(&rules), &[&shared[..], &client].concat()).await;
        assert!(
            told.contains("OTEL_EXPORTER_OTLP_CLIENT_KEY is ") && told.contains("with the certificate beside it"),
            "{told}"
        );
    }
}

#[tokio::test]
async fn a_start_whose_file_system_does_not_answer_says_so_and_stops_when_it_is_told_to() {
    let hang = Hang::new();
    fs::write(hang.at("rules.yaml"), RULES).expect("it is written");
    hang.begin();
    let start = |subcommand: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg(subcommand).arg(hang.at("rules.yaml")).env_clear().envs(hang.variables());
        Process::start(&mut command)
    };
    let (mut serve, mut check) = (start("serve"), start("check"));
    hang.is_met().await;
    for process in [&serve, &check] {
        eventually("it is reported", async || process.errors().contains("still reading").then_some(())).await;
    }
    serve.signal(Signal::TERM);
    assert!(serve.ended().await.success(), "{}", serve.errors());
    hang.end();
    assert!(check.ended().await.success(), "{}", check.errors());
}
