//! Rule files and lists that become something else than regular files: the rules in force stay, and following goes on.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{Scene, ask, descriptor, domain, limits, page, replace, rules};
use crate::grpc;
use crate::redis::hang::Hang;
use crate::support::{Tidegate, eventually};

/// A memory bound for a server that reads small files: 256 MiB. It takes 20 MB; reading `/dev/zero` without a bound takes 1 GB
/// within a second.
const MEMORY: u64 = 256 << 20;

/// Makes something at a path.
type Make = fn(&Path);

/// The line of metrics while no load is slow.
const IDLE: &str = "\ntidegate_rules_loading_seconds 0\n";

/// The things that are no regular file or too large, and the words that the error has for each.
const IRREGULAR: [(&str, Make, &str); 6] = [
    ("pipe", pipe, "it is a pipe: expected a regular file"),
    ("socket", |path| drop(UnixListener::bind(path).expect("a socket")), "it is a socket: expected a regular file"),
    ("device", |path| symlink("/dev/zero", path).expect("a link"), "it is a device: expected a regular file"),
    ("loop", |path| symlink(path, path).expect("a link"), "Too many levels of symbolic links"),
    ("large", |path| File::create(path).expect("a file").set_len(1 << 40).expect("a hole"), "it is larger than "),
    ("endless", |path| symlink("/proc/self/mem", path).expect("a link"), "Input/output error"),
];

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
}

/// Puts something in the place of a file, by a rename.
fn put(path: &Path, make: Make) {
    let beside = path.with_extension("odd");
    make(&beside);
    // A loop leads to its own name.
    if fs::read_link(&beside).is_ok_and(|target| target == beside) {
        fs::remove_file(&beside).expect("it is removed");
        let _ = fs::remove_file(path);
        return make(path);
    }
    fs::rename(beside, path).expect("it is renamed");
}

#[tokio::test]
async fn a_rule_file_that_is_no_regular_file_changes_nothing_and_a_good_one_takes_over_again() {
    let scene = Scene::of_file(&rules(10)).await;
    let mut limit = 10;
    for (name, make, words) in IRREGULAR {
        put(&scene.at("rules.yaml"), make);
        scene.says(words).await;
        assert_eq!(scene.in_force().await, [("d.one".to_owned(), limit), ("d.two".to_owned(), limit)], "{name}");
        let told = page(&scene.server, "/").await;
        assert!(told.contains("rejected") && told.contains("rules.yaml: ") && told.contains(words), "{name}: {told}");
        limit += 1;
        fs::remove_file(scene.at("rules.yaml")).expect("it is removed");
        scene.replace("rules.yaml", &rules(limit));
        scene.shows(&[("d.one", limit), ("d.two", limit)]).await;
    }
    let peak = scene.server.peak_memory();
    assert!(peak < MEMORY, "{peak} bytes");
}

#[tokio::test]
async fn a_list_that_is_no_regular_file_changes_nothing_and_a_good_one_takes_over_again() {
    let rules = |limit: u32| {
        format!(
            "domain: d\ndescriptors:\n  - {{ key: k, values_file: list.txt, rate_limit: {{ unit: year, requests_per_unit: {limit} }} }}\n"
        )
    };
    let scene = Scene::of_directory(&[("rules.yaml", &rules(10)), ("list.txt", "a\n")]).await;
    let limits = async || scene.in_force().await.into_iter().map(|(_, limit)| limit).collect::<Vec<_>>();
    let mut limit = 10;
    for (name, make, words) in IRREGULAR {
        // Of a list, only regular files below its roots are read.
        let words = if name == "endless" { "it is not below the directory of a rule file" } else { words };
        put(&scene.at("list.txt"), make);
        scene.says(words).await;
        assert!(scene.server.log().contains("list.txt cannot be read: "), "{name}: {}", scene.server.log());
        assert_eq!(limits().await, [limit], "{name}");
        limit += 1;
        fs::remove_file(scene.at("list.txt")).expect("it is removed");
        scene.edit("rules.yaml", &rules(limit));
        scene.replace("list.txt", "b\n");
        eventually("the list is in force", async || (limits().await == [limit]).then_some(())).await;
    }
    let peak = scene.server.peak_memory();
    assert!(peak < MEMORY, "{peak} bytes");
}

#[tokio::test]
async fn a_file_system_that_stops_answering_is_reported_and_holds_up_neither_answers_nor_the_stop() {
    let hang = Hang::new();
    let file = hang.at("rules.yaml");
    fs::write(&file, rules(10)).expect("it is written");
    let mut server = Tidegate::start(&file, &hang.variables()).await;
    let in_force = async |server: &Tidegate| limits(&page(server, "/rlconfig").await)[0].1;
    hang.begin();
    replace(&file, &rules(20));
    hang.is_met().await;
    let said = "rules.slow";
    eventually("it is reported", async || server.log().contains(said).then_some(())).await;
    let told = page(&server, "/").await;
    assert!(told.contains("the next load has been under way for "), "{told}");
    assert!(!server.metrics().await.contains(IDLE));
    assert_eq!(in_force(&server).await, 10);
    let mut client = grpc::client(server.grpc).await;
    assert_eq!(ask(&mut client, vec![descriptor("one", 1)]).await.statuses[0].limit_remaining, 9);

    hang.end();
    eventually("the change takes over", async || (in_force(&server).await == 20).then_some(())).await;
    let told = page(&server, "/").await;
    assert!(!told.contains("under way"), "{told}");
    assert!(server.metrics().await.contains(IDLE));
    hang.begin();
    replace(&file, &rules(30));
    hang.is_met().await;
    server.terminate();
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn a_pipe_in_a_directory_of_rules_is_an_error_and_not_passed_over() {
    let scene = Scene::of_directory(&[("a.yaml", &domain("a", 1)), ("b.yaml", &domain("b", 2))]).await;
    put(&scene.at("b.yaml"), pipe);
    scene.says("b.yaml: it is a pipe: expected a regular file").await;
    assert_eq!(scene.in_force().await, [("a.k".to_owned(), 1), ("b.k".to_owned(), 2)]);
    // A pipe that is no rule file is nobody's concern.
    put(&scene.at("notes"), pipe);
    scene.replace("b.yaml", &domain("b", 3));
    scene.shows(&[("a.k", 1), ("b.k", 3)]).await;
}
