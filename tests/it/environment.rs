//! The variables of the reference and of its libraries: each row of `docs/compatibility.md` is so, in the code and in a started process.

use std::collections::BTreeSet;

use tidegate::settings::{OF_LIBRARIES, Settings, UNUSED};

use crate::support::{Tidegate, eventually, repository, rule_file};

const RULES: &str = "domain: edge\ndescriptors: [{ key: k, rate_limit: { unit: week, requests_per_unit: 2 } }]\n";

/// Switches under which everything that the table names is read.
const SWITCHES: [(&str, &str); 4] = [
    ("TRACING_ENABLED", "true"),
    ("OTEL_METRICS_EXPORTER", "otlp"),
    ("USE_DOG_STATSD", "true"),
    ("STATSD_HOST", "127.0.0.1"),
];

/// The variable of each row and what the row says of it.
fn rows() -> Vec<(String, String)> {
    let page = std::fs::read_to_string(repository("docs/compatibility.md")).expect("it reads");
    let (_, section) = page.split_once("\n## Every variable of the reference\n").expect("the page has this section");
    let section = section.split("\n## ").next().expect("a first part");
    let row = |line: &str| {
        let cells: Vec<_> =
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`').to_owned()).collect();
        let [variable, read_by, here] = <[String; 3]>::try_from(cells).expect("three cells");
        assert!(!read_by.is_empty(), "{variable}: who reads it");
        (variable, here)
    };
    section.lines().filter(|line| line.starts_with("| `")).map(row).collect()
}

#[test]
fn each_variable_of_the_reference_is_a_setting_or_named_as_without_effect() {
    let rows = rows();
    let settings: BTreeSet<_> = Settings::table().map(|row| row.variable).collect();
    let of_libraries = OF_LIBRARIES.iter().map(|(_, unused)| unused);
    let unused: BTreeSet<_> = UNUSED.iter().chain(of_libraries).map(|unused| unused.variable).collect();
    let read = |given: Vec<(String, String)>| {
        Settings::read(move |name| given.iter().find(|(given, _)| given == name).map(|(_, value)| value.clone()))
    };
    for (variable, here) in &rows {
        let variable = variable.as_str();
        match here.as_str() {
            "setting" => assert!(settings.contains(variable) && !unused.contains(variable), "{variable}"),
            "no effect" => {
                assert!(!settings.contains(variable), "{variable}");
                let mut given = SWITCHES.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
                given.push((variable.to_owned(), "1".to_owned()));
                let named = read(given).expect("settings").unused;
                assert!(named.iter().any(|unused| unused.variable == variable), "a start does not name {variable}");
            }
            // `statsd` and `otlp` and `traces` try them.
            "read with USE_DOG_STATSD_MOGRIFIERS" | "read with `USE_DOG_STATSD_MOGRIFIERS" => {
                assert!(variable.starts_with("DOG_STATSD_MOGRIFIER_*_"), "{variable}");
            }
            "read by the TLS library" => assert!(["SSL_CERT_FILE", "SSL_CERT_DIR"].contains(&variable), "{variable}"),
            other => panic!("{variable}: {other}"),
        }
    }
    let told: BTreeSet<_> = rows.iter().map(|(variable, _)| variable.as_str()).collect();
    assert_eq!(told.len(), rows.len(), "a variable has two rows");
    // Metrics over OTLP are no part of the reference; their variables are named for the sake of the others.
    let missing: Vec<_> =
        unused.iter().filter(|name| !told.contains(*name) && !name.contains("_OTLP_METRICS_")).collect();
    assert!(missing.is_empty(), "without a row: {missing:?}");
}

#[tokio::test]
async fn a_start_names_each_variable_without_effect_in_its_log() {
    let unused: Vec<_> = rows().into_iter().filter(|(_, here)| here == "no effect").map(|(name, _)| name).collect();
    let variables: Vec<_> = SWITCHES.into_iter().chain(unused.iter().map(|name| (name.as_str(), "1"))).collect();
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &variables).await;
    eventually("all are named", async || {
        let log = tidegate.log();
        unused.iter().all(|name| log.contains(&format!(" {name} is set and has no effect: "))).then_some(())
    })
    .await;
    let lines = tidegate.log().matches("settings.unused").count();
    assert_eq!(lines, unused.len(), "each once: {}", tidegate.log());
}

#[tokio::test]
async fn the_page_has_what_the_kernel_says_of_the_process() {
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &[]).await;
    let before = kernel(tidegate.pid());
    let page = tidegate.metrics().await;
    let value = |name: &str| {
        let line =
            page.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap_or_else(|| panic!("{name}"));
        line.parse::<f64>().expect("a number")
    };
    let after = kernel(tidegate.pid());
    let near = |shown: f64, [before, after]: [f64; 2]| shown > before * 0.7 && shown < after * 1.4;
    assert!(near(value("process_resident_memory_bytes"), [before.resident, after.resident]));
    assert!(near(value("process_virtual_memory_bytes"), [before.size, after.size]));
    assert!(near(value("process_open_fds"), [before.files, after.files + 2.0]), "{}", value("process_open_fds"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", tidegate.pid())).expect("the kernel tells");
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).expect("a limit");
        let soft = line.split_whitespace().next().expect("a number");
        if soft == "unlimited" { 18_446_744_073_709_551_615.0 } else { soft.parse::<f64>().expect("a number") }
    };
    let same = |name: &str, limit: f64| (value(name) - limit).abs() <= limit / 1e9;
    assert!(same("process_max_fds", limit("Max open files")), "{}", value("process_max_fds"));
    assert!(same("process_virtual_memory_max_bytes", limit("Max address space")));
    let cpu = value("process_cpu_seconds_total");
    assert!(cpu >= before.cpu - 0.011 && cpu <= after.cpu + 0.011, "{cpu}: {} to {}", before.cpu, after.cpu);
}

/// What the kernel says of a process.
pub struct Kernel {
    pub resident: f64,
    size: f64,
    pub files: f64,
    cpu: f64,
}

pub fn kernel(pid: u32) -> Kernel {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("the kernel tells");
    let (status, stat) = (read("status"), read("stat"));
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") * 1_024.0
    };
    let fields = stat.rsplit_once(") ").expect("a name").1.split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.map(|ticks| ticks.parse::<f64>().expect("a number")).sum();
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the kernel tells").count();
    let files = f64::from(u32::try_from(files).expect("it is small"));
    Kernel { resident: bytes("VmRSS:"), size: bytes("VmSize:"), files, cpu: ticks / 100.0 }
}

#[tokio::test]
async fn no_password_in_a_url_is_shown_whichever_setting_has_it() {
    let rules = rule_file(RULES);
    let (file, secret) = (rules.path().to_str().expect("a path"), "hunter2");
    let mut shown = Vec::new();
    for row in Settings::table() {
        for url in ["http://me:hunter2@host:1", "me:hunter2@host:1", "dns:///me:hunter2@host:1"] {
            let switches = [("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("REDIS_URL", "127.0.0.1:1")];
            let given = SWITCHES.into_iter().chain(switches).chain([(row.variable, url)]);
            let given: Vec<_> = given.filter(|(name, value)| *name != row.variable || *value == url).collect();
            let read = Settings::read(|name| {
                given.iter().rev().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned())
            });
            // A path, a name or a text may be anything: only what is refused is shown.
            if let Err(wrong) = read
                && wrong.to_string().contains(secret)
            {
                shown.push(format!("{}: {wrong}", row.variable));
            }
        }
    }
    assert!(shown.is_empty(), "{shown:#?}");
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", file]).env_clear().env("CONFIG_TYPE", "GRPC_XDS_SOTW");
    command.env("CONFIG_GRPC_XDS_SERVER_URL", "http://me:hunter2@127.0.0.1:1");
    let (status, output, errors) = crate::support::output(&mut command).await;
    assert!(
        !status.success() && errors.contains("CONFIG_GRPC_XDS_SERVER_URL is \"http://***@127.0.0.1:1\""),
        "{errors}"
    );
    assert!(!errors.contains(secret) && !output.contains(secret), "{errors}");
}
