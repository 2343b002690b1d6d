//! The library: decisions in the process that asks, without the service.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tidegate::embedded::{InvalidRequest, NotLoaded, Outcome, RateLimiter};

use crate::support::{repository, rule_file};

fn cargo(arguments: &[&str]) -> Output {
    let mut cargo = Command::new(env!("CARGO"));
    let output = cargo.args(arguments).current_dir(repository("examples/library")).output().expect("cargo runs");
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "tests/nightly runs it"]
fn the_example_admits_three_calls_and_refuses_two() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("library");
    let target = target.to_str().expect("a path in UTF-8");
    let printed = text(&cargo(&["run", "--quiet", "--locked", "--target-dir", target]));
    let lines: Vec<&str> = printed.lines().collect();
    // A minute can begin between two calls.
    let refused = lines.iter().filter(|line| line.starts_with("refused, again after ")).count();
    assert_eq!((lines.len(), lines[0]), (5, "admitted, 2 left"), "{printed}");
    assert!(refused == 2 || lines.iter().filter(|line| line.ends_with(" 2 left")).count() == 2, "{printed}");
}

#[test]
fn the_library_pulls_in_no_server() {
    let tree = text(&cargo(&["tree", "--locked", "--prefix", "none", "--edges", "normal,build", "--format", "{p}"]));
    let crates: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(crates.contains("tidegate") && crates.contains("granit-parser"), "{tree}");
    let servers =
        ["tonic", "prost", "redis", "bb8", "hyper", "h2", "axum", "rustls", "opentelemetry", "tracing", "clap", "mio"];
    let found: Vec<&&str> = crates.iter().filter(|name| servers.contains(name)).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn the_public_interface_is_the_one_that_was_reviewed() {
    let source = fs::read_to_string(repository("src/embedded.rs")).expect("it is read");
    let mut items = Vec::new();
    let mut lines = source.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if !line.starts_with("pub ") {
            continue;
        }
        let mut item = line.to_owned();
        while !item.ends_with(['{', ';', ',']) || (item.contains('(') && !item.contains(')')) {
            item = format!("{item} {}", lines.next().expect("the end of the item"));
        }
        items.push(item.trim_end_matches(['{', ';', ',']).trim_end().to_owned());
    }
    let (path, found) = (repository("tests/golden/library.txt"), items.join("\n") + "\n");
    if std::env::var_os("TIDEGATE_BLESS").is_some() {
        fs::write(&path, &found).expect("it is written");
    }
    let reviewed = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, reviewed, "users of the library see these items: review them, then set TIDEGATE_BLESS=1");
}

#[test]
fn a_wrong_file_is_named_and_keeps_the_old_rules() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("rules.yaml");
    let write = |text: &str| fs::write(&path, text).expect("it is written");
    let missing = RateLimiter::from_files([&path]).expect_err("there is no file");
    assert!(matches!(missing, NotLoaded::Unreadable { .. }));
    assert!(missing.to_string().contains("rules.yaml: No such file"), "{missing}");

    let limit = |hits| {
        format!(
            "domain: edge\ndescriptors: [{{ key: user, rate_limit: {{ unit: year, requests_per_unit: {hits} }} }}]\n"
        )
    };
    write(&limit(2));
    let limiter = RateLimiter::from_files([&path]).expect("the rules are right");
    let ask = || limiter.decide("edge", [[("user", "ann")]]).expect("a right request");
    let first = ask();
    assert!(first.is_admitted() && first.retry_after.is_none());
    assert_eq!((first.limits[0].rule.as_str(), first.limits[0].limit, first.limits[0].remaining), ("edge.user", 2, 1));

    write("domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: yaer, requests_per_unit: 9 } }]\n");
    let wrong = limiter.reload().expect_err("the file is wrong").to_string();
    assert!(wrong.contains("rules.yaml:2:"), "{wrong}");
    assert!(ask().is_admitted());
    let refused = ask();
    assert!(refused.is_refused() && refused.retry_after.is_some() && refused.limits[0].is_refused, "{refused:?}");

    // A fixed window counts refused hits too, as in envoyproxy/ratelimit.
    write(&limit(5));
    limiter.reload().expect("the rules are right again");
    let more = ask();
    assert_eq!((more.outcome, more.limits[0].limit, more.limits[0].remaining), (Outcome::Admitted, 5, 1));

    // 0 hits look; what no rule matches is admitted; what is no request is an error.
    let look = limiter.decide_hits("edge", [[("user", "ann")]], 0).expect("a right request");
    assert_eq!(look.limits[0].remaining, 1);
    let other = limiter.decide("edge", [[("path", "/")]]).expect("a right request");
    assert!(other.is_admitted() && other.limits.is_empty());
    assert!(limiter.decide("", [[("user", "ann")]]).is_err());
    let unknown = limiter.decide("egde", [[("user", "ann")]]).expect_err("no rule has the domain");
    assert!(matches!(&unknown, InvalidRequest::UnknownDomain { domain } if domain == "egde"), "{unknown}");
    assert!(unknown.to_string().contains("no rule file has the domain 'egde'"), "{unknown}");
    assert!(limiter.decide("edge", Vec::<Vec<(&str, &str)>>::new()).is_err());
}

#[test]
fn threads_share_a_limit_to_the_last_hit() {
    let rules =
        rule_file("domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 1000 } }]\n");
    let limiter = RateLimiter::from_files([rules.path()]).expect("the rules are right");
    let ask = || limiter.decide("edge", [[("user", "ann")]]).expect("a right request").is_admitted();
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| (0..500).filter(|_| ask()).count())).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(admitted, 1000);
}
