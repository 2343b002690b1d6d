//! Rules that change while they are in force: whole or not at all, and nobody waits.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tempfile::TempDir;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::rulefile::{File, Options, load};
use tidegate::rules::Rule;

use crate::grpc;
use crate::http;
use crate::support::{Tidegate, by_tier, directory, eventually, in_time};

mod counters;
mod cuts;
mod editors;
mod irregular;
mod runtime;
mod swaps;

/// Nothing of a file but two rules of one limit, so that a half of one change would show in an answer.
fn rules(limit: u32) -> String {
    let rule = |key: &str| format!("  - {{ key: {key}, rate_limit: {{ unit: year, requests_per_unit: {limit} }} }}\n");
    format!("domain: d\ndescriptors:\n{}{}", rule("one"), rule("two"))
}

/// A domain of its own for each file of a directory.
fn domain(name: &str, limit: u32) -> String {
    format!("domain: {name}\ndescriptors: [{{ key: k, rate_limit: {{ unit: year, requests_per_unit: {limit} }} }}]\n")
}

/// A running server and the directory that its rule files are in.
struct Scene {
    directory: TempDir,
    server: Tidegate,
}

impl Scene {
    /// A server that is told of one file.
    async fn of_file(text: &str) -> Self {
        Self::of_file_with(text, &[]).await
    }

    /// The same, with these variables.
    async fn of_file_with(text: &str, variables: &[(&str, &str)]) -> Self {
        let directory = directory([("rules.yaml", text)]);
        let server = Tidegate::start(&directory.path().join("rules.yaml"), variables).await;
        Self { directory, server }
    }

    /// A server that is told of a directory.
    async fn of_directory(files: &[(&str, &str)]) -> Self {
        let directory = directory(files.iter().copied());
        let server = Tidegate::start(directory.path(), &[]).await;
        Self { directory, server }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Writes into the file that is there.
    fn edit(&self, path: &str, text: &str) {
        fs::write(self.at(path), text).expect("it is written");
    }

    /// Puts a new file in the place of the one that is there, as most editors do.
    fn replace(&self, path: &str, text: &str) {
        replace(&self.at(path), text);
    }

    /// The path and limit of each rule in force, by domain.
    async fn in_force(&self) -> Vec<(String, u32)> {
        limits(&page(&self.server, "/rlconfig").await)
    }

    /// Which load of the rules is in force.
    async fn load(&self) -> u64 {
        let page = page(&self.server, "/").await;
        let number = page.split_once("load ").and_then(|(_, rest)| rest.split_once(',')).map(|(number, _)| number);
        number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no load in {page:?}"))
    }

    /// Waits until these are the limits of the rules in force.
    async fn shows(&self, expected: &[(&str, u32)]) {
        let expected: Vec<_> = expected.iter().map(|(path, limit)| ((*path).to_owned(), *limit)).collect();
        let what = format!("{expected:?} is in force");
        eventually(&what, async || (self.in_force().await == expected).then_some(())).await;
        // Else it would have taken ten seconds each time.
        assert!(!self.server.log().contains("rules.polled"), "{}", self.server.log());
    }

    /// How often the server has read the files again and found nothing new; told at the level `debug`.
    fn looks(&self) -> usize {
        self.server.log().matches("rules.unchanged").count()
    }

    /// Waits until the files have been read once more than so often. The first two looks follow the start: one before the
    /// directories are watched, and one for what happened until they were.
    async fn looks_after(&self, looks: usize) {
        eventually("the files are read again", async || (self.looks() > looks).then_some(())).await;
    }

    /// Waits until the server has logged this.
    async fn says(&self, words: &str) {
        let what = format!("the server says {words:?}");
        eventually(&what, async || self.server.log().contains(words).then_some(())).await;
    }

    async fn client(&self) -> grpc::Client {
        grpc::client(self.server.grpc).await
    }
}

fn replace(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    fs::write(&beside, text).expect("it is written");
    fs::rename(&beside, path).expect("it is renamed");
}

/// What Kubernetes does to the volume of a ConfigMap: everything anew in a directory beside, and one link turned to it.
fn mount(volume: &Path, version: &str, text: &str) {
    fs::create_dir_all(volume.join(version)).expect("a directory");
    fs::write(volume.join(version).join("rules.yaml"), text).expect("it is written");
    let before = fs::read_link(volume.join("..data")).ok();
    symlink(version, volume.join("..data_tmp")).expect("a link");
    fs::rename(volume.join("..data_tmp"), volume.join("..data")).expect("the link is turned");
    match before {
        Some(before) => fs::remove_dir_all(volume.join(before)).expect("it is removed"),
        None => symlink("..data/rules.yaml", volume.join("rules.yaml")).expect("a link"),
    }
}

/// A page of the debug listener.
async fn page(server: &Tidegate, path: &str) -> String {
    let answer = http::get(server.debug, path).await;
    assert_eq!(answer.status, 200, "{answer}");
    answer.body
}

/// The limits that `/rlconfig` lists.
fn limits(page: &str) -> Vec<(String, u32)> {
    let limit = |line: &str| {
        let (path, rest) = line.split_once(": ")?;
        let limit = rest.split_once("requests_per_unit=")?.1.split_once(',')?.0;
        Some((path.to_owned(), limit.parse().ok()?))
    };
    page.lines().map(|line| limit(line).unwrap_or_else(|| panic!("no limit in {line:?}"))).collect()
}

fn descriptor(key: &str, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..grpc::descriptor(&[(key, "v")]) }
}

async fn ask(client: &mut grpc::Client, descriptors: Vec<RateLimitDescriptor>) -> RateLimitResponse {
    in_time("it is answered", client.should_rate_limit(grpc::request("d", descriptors)))
        .await
        .expect("it is no error")
        .into_inner()
}

/// The limits that the parts of an answer name.
fn named(answer: &RateLimitResponse) -> Vec<u32> {
    let limit = |status: &tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus| {
        status.current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit)
    };
    answer.statuses.iter().map(limit).collect()
}

#[tokio::test]
async fn a_file_that_is_edited_in_place_takes_over() {
    let scene = Scene::of_file(&rules(10)).await;
    scene.shows(&[("d.one", 10), ("d.two", 10)]).await;
    for (load, limit) in [(2, 20), (3, 30)] {
        scene.edit("rules.yaml", &rules(limit));
        scene.shows(&[("d.one", limit), ("d.two", limit)]).await;
        assert_eq!(scene.load().await, load);
    }
    scene.says("new rules are in force: 2 rules in 1 domain from 1 file").await;
}

#[tokio::test]
async fn a_file_that_is_renamed_over_takes_over_each_time() {
    let scene = Scene::of_file(&rules(10)).await;
    for limit in [20, 30, 40] {
        scene.replace("rules.yaml", &rules(limit));
        scene.shows(&[("d.one", limit), ("d.two", limit)]).await;
    }
}

#[tokio::test]
async fn the_files_of_a_directory_come_and_go() {
    let scene = Scene::of_directory(&[("a.yaml", &domain("a", 1))]).await;
    scene.edit("b.yaml", &domain("b", 2));
    scene.shows(&[("a.k", 1), ("b.k", 2)]).await;
    // A directory below is watched as soon as it is there.
    fs::create_dir(scene.at("deep")).expect("a directory");
    scene.edit("deep/c.yaml", &domain("c", 3));
    scene.shows(&[("a.k", 1), ("b.k", 2), ("c.k", 3)]).await;
    scene.edit("deep/c.yaml", &domain("c", 4));
    scene.shows(&[("a.k", 1), ("b.k", 2), ("c.k", 4)]).await;
    fs::remove_file(scene.at("a.yaml")).expect("it is removed");
    fs::remove_dir_all(scene.at("deep")).expect("it is removed");
    scene.shows(&[("b.k", 2)]).await;
    // Without any file it is more likely that something went wrong than that nothing is to be limited.
    fs::remove_file(scene.at("b.yaml")).expect("it is removed");
    scene.says("there is no *.yaml or *.yml file in this directory").await;
    assert_eq!(scene.in_force().await, [("b.k".to_owned(), 2)]);
    // And one made anew is as good as the one before.
    fs::remove_dir(scene.directory.path()).expect("it is removed");
    fs::create_dir(scene.directory.path()).expect("a directory");
    scene.edit("d.yaml", &domain("d", 5));
    scene.shows(&[("d.k", 5)]).await;
}

#[tokio::test]
async fn a_mounted_config_map_takes_over_when_its_link_is_turned() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path();
    mount(at, "..2026_11_21", &rules(10));
    // Named as a file, and as the directory that it is mounted at.
    let debug = [("LOG_LEVEL", "debug")];
    let file = Tidegate::start(&at.join("rules.yaml"), &debug).await;
    let whole = Tidegate::start(at, &debug).await;
    let looks = |server: &Tidegate| server.log().matches("rules.unchanged").count();
    for (turn, (version, limit)) in [("..2026_11_22", 20), ("..2026_11_23", 30)].into_iter().enumerate() {
        // The turn is to be told of, and not to be found by the look at what is newly watched.
        let are_quiet = || [&file, &whole].iter().all(|server| looks(server) > 1 + turn);
        eventually("all is quiet", async || are_quiet().then_some(())).await;
        mount(at, version, &rules(limit));
        for server in [&file, &whole] {
            let expected = [("d.one".to_owned(), limit), ("d.two".to_owned(), limit)];
            let what = format!("{version} is in force");
            eventually(&what, async || (limits(&page(server, "/rlconfig").await) == expected).then_some(())).await;
            assert!(!server.log().contains("rules.polled"), "{}", server.log());
        }
    }
}

#[tokio::test]
async fn a_link_further_up_the_path_may_be_turned() {
    let made = directory([("1/rules.yaml", &rules(10)), ("2/rules.yaml", &rules(20))]);
    symlink("1", made.path().join("current")).expect("a link");
    let server = Tidegate::start(&made.path().join("current/rules.yaml"), &[("LOG_LEVEL", "debug")]).await;
    let scene = Scene { directory: made, server };
    scene.looks_after(1).await;
    for (release, limit) in [("2", 20), ("1", 10), ("2", 20)] {
        symlink(release, scene.at("next")).expect("a link");
        fs::rename(scene.at("next"), scene.at("current")).expect("the link is turned");
        scene.shows(&[("d.one", limit), ("d.two", limit)]).await;
    }
    // What it leads to now is watched as well.
    scene.edit("2/rules.yaml", &rules(30));
    scene.shows(&[("d.one", 30), ("d.two", 30)]).await;
}

#[tokio::test]
async fn a_change_that_nothing_tells_of_is_found_all_the_same() {
    let made = directory([("watched/rules.yaml", &rules(10))]);
    // What is written by another name of the file is told to the directory of that name alone.
    fs::hard_link(made.path().join("watched/rules.yaml"), made.path().join("elsewhere")).expect("a link");
    let server = Tidegate::start(&made.path().join("watched"), &[("LOG_LEVEL", "debug")]).await;
    let scene = Scene { directory: made, server };
    scene.looks_after(1).await;
    scene.edit("elsewhere", &rules(20));
    scene.says("rules.polled").await;
    scene.says("rules.loaded").await;
    assert_eq!(scene.in_force().await, [("d.one".to_owned(), 20), ("d.two".to_owned(), 20)]);
}

#[tokio::test]
async fn a_runtime_directory_is_followed_with_its_root_watched_or_not() {
    for (is_watched, beside) in [("true", 3), ("false", 1)] {
        let made = directory([("tide/config/a.yaml", &domain("a", 1))]);
        let root = made.path().to_str().expect("text").to_owned();
        let variables =
            [("RUNTIME_ROOT", root.as_str()), ("RUNTIME_SUBDIRECTORY", "tide"), ("RUNTIME_WATCH_ROOT", is_watched)];
        let server = Tidegate::start_with(None, &variables).await;
        let scene = Scene { directory: made, server };
        scene.shows(&[("a.k", 1)]).await;
        // Only with the root watched a file beside the directory counts, by its dotted path.
        scene.edit("tide/config.yaml", &domain("beside", 3));
        scene.edit("tide/config/b.yaml", &domain("b", 2));
        let expected = [("a.k", 1), ("b.k", 2), ("beside.k", 3)];
        scene.shows(&expected[..if beside == 3 { 3 } else { 2 }]).await;
        fs::remove_file(scene.at("tide/config/a.yaml")).expect("it is removed");
        scene.shows(&expected[1..if beside == 3 { 3 } else { 2 }]).await;
    }
}

#[tokio::test]
async fn a_broken_file_leaves_the_rules_in_force_and_says_once_all_that_is_wrong() {
    let scene = Scene::of_file_with(&rules(10), &[("LOG_LEVEL", "debug")]).await;
    let broken = "domain: d\ndescriptors:\n  - { key: one, rate_limit: { unit: eon, requests_per_unit: 1 } }\n  - { value: x }\n";
    // Never seen half written.
    scene.replace("rules.yaml", broken);
    scene.says("rules.yaml:4").await;
    let log = scene.server.log();
    assert!(log.contains("ERROR") && log.contains("rules.rejected"), "{log}");
    assert!(log.contains("rules.yaml:3") && log.contains("eon"), "{log}");
    assert_eq!(scene.in_force().await, [("d.one".to_owned(), 10), ("d.two".to_owned(), 10)]);
    let told = page(&scene.server, "/").await;
    assert!(
        told.starts_with("rules in force: load 1, ") && told.contains(": 2 rules in 1 domain from 1 file\n"),
        "{told}"
    );
    assert!(told.contains("were rejected") && told.contains("rules.yaml:3") && told.contains("eon"), "{told}");
    assert!(scene.server.metrics().await.contains("\ntidegate_rules_rejected 1\n"));
    // The same again is no news.
    let looks = scene.looks();
    scene.replace("rules.yaml", broken);
    scene.looks_after(looks).await;
    scene.replace("rules.yaml", &rules(10));
    scene.says("rules.restored").await;
    assert_eq!(scene.server.log().matches("rules.rejected").count(), 1, "{}", scene.server.log());
    assert_eq!(scene.load().await, 1);
    assert!(!page(&scene.server, "/").await.contains("rejected"));
    assert!(scene.server.metrics().await.contains("\ntidegate_rules_rejected 0\n"));
    fs::remove_file(scene.at("rules.yaml")).expect("it is removed");
    scene.says("No such file").await;
    assert_eq!(scene.in_force().await, [("d.one".to_owned(), 10), ("d.two".to_owned(), 10)]);
    scene.edit("rules.yaml", &rules(20));
    scene.shows(&[("d.one", 20), ("d.two", 20)]).await;
}

#[tokio::test]
async fn warnings_of_a_reload_are_shown() {
    let scene = Scene::of_file(&rules(10)).await;
    scene.edit("rules.yaml", &rules(20).replace("unit: year,", "unit: year, unit: year,"));
    scene.shows(&[("d.one", 20), ("d.two", 20)]).await;
    scene.says("rules.yaml:3:").await;
    assert!(scene.server.log().contains(": warning: "), "{}", scene.server.log());
}

#[tokio::test]
async fn a_file_that_says_the_same_is_no_load() {
    let scene = Scene::of_file_with(&rules(10), &[("LOG_LEVEL", "debug")]).await;
    scene.looks_after(1).await;
    for change in [Scene::replace, Scene::edit] {
        let looks = scene.looks();
        change(&scene, "rules.yaml", &rules(10));
        scene.looks_after(looks).await;
    }
    assert_eq!((scene.load().await, scene.server.log().matches("in force").count()), (1, 0), "{}", scene.server.log());
}

#[tokio::test]
async fn a_file_cut_anywhere_is_taken_whole_or_not_at_all() {
    let whole = rules(10).replace("rate_limit", "\n    rate_limit").replace("10 }", "10,\n    }");
    let scene = Scene::of_file(&whole).await;
    let in_force = async |expected: &[(String, u32)]| {
        let what = format!("{expected:?} is in force");
        eventually(&what, async || (scene.in_force().await == expected).then_some(())).await;
    };
    let before = scene.in_force().await;
    let (mut taken, mut refused) = (0, 0);
    for end in (0..whole.len()).step_by(whole.len().div_ceil(30)) {
        let logged = scene.server.log().len();
        let says = async |words: &str| {
            let what = format!("cut at {end} the server says {words:?}");
            eventually(&what, async || scene.server.log()[logged..].contains(words).then_some(())).await;
        };
        let cut = &whole[..end];
        scene.edit("rules.yaml", cut);
        let file = File { name: scene.at("rules.yaml").to_string_lossy().into(), bytes: cut.as_bytes().to_vec() };
        match load(&[file], Options::default()) {
            // What is left is a whole of its own.
            Ok(loaded) => {
                let rules = loaded.rules.rules();
                let limit = |rule: &&Rule| (rule.path().to_string(), rule.limits()[0].limit.quota().limit());
                says("rules.loaded").await;
                in_force(&rules.iter().map(limit).collect::<Vec<_>>()).await;
                scene.edit("rules.yaml", &whole);
                in_force(&before).await;
                taken += 1;
            }
            Err(invalid) => {
                // In the log, a line that goes on is indented.
                says(&invalid.to_string().replace('\n', "\n    ")).await;
                assert_eq!(scene.in_force().await, before, "cut at {end}");
                scene.edit("rules.yaml", &whole);
                says("rules.restored").await;
                refused += 1;
            }
        }
    }
    assert!(refused >= 20 && taken >= 1, "{refused} refused, {taken} taken");
}

#[tokio::test]
async fn a_changed_limit_goes_on_with_the_hits_already_used() {
    let scene = Scene::of_file(&rules(100)).await;
    let mut client = scene.client().await;
    let answer = ask(&mut client, vec![descriptor("one", 80)]).await;
    assert_eq!(answer.statuses[0].limit_remaining, 20);
    scene.edit("rules.yaml", &rules(200));
    scene.shows(&[("d.one", 200), ("d.two", 200)]).await;
    let answer = ask(&mut client, vec![descriptor("one", 0)]).await;
    assert_eq!((named(&answer), answer.statuses[0].limit_remaining), (vec![200], 120));
    scene.edit("rules.yaml", &rules(50));
    scene.shows(&[("d.one", 50), ("d.two", 50)]).await;
    let answer = ask(&mut client, vec![descriptor("one", 1)]).await;
    assert_eq!((answer.overall_code(), answer.statuses[0].limit_remaining), (Code::OverLimit, 0));
}

#[tokio::test]
async fn no_request_sees_half_a_change_and_none_fails() {
    const CHANGES: u32 = 200;
    /// How often it is waited for that a change has taken over: between, files come faster than they are read.
    const WAIT_EVERY: u32 = 10;
    let limit_of = |change: u32| if change.is_multiple_of(2) { 1_000_000 } else { 2_000_000 };
    let scene = Scene::of_file(&rules(limit_of(0))).await;
    let (is_over, latest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let asking = {
        let (mut client, is_over, latest) = (scene.client().await, Arc::clone(&is_over), Arc::clone(&latest));
        tokio::spawn(async move {
            let (mut seen, mut answers) = (0, 0_u64);
            while !is_over.load(Ordering::Relaxed) {
                let limits = named(&ask(&mut client, vec![descriptor("one", 1), descriptor("two", 1)]).await);
                let [one, two] = limits[..] else { panic!("{limits:?}") };
                assert_eq!(one, two, "half of a change");
                assert!([limit_of(0), limit_of(1)].contains(&one), "{one} is of no file");
                if one != latest.swap(one, Ordering::Relaxed) {
                    seen += 1;
                }
                answers += 1;
            }
            (seen, answers)
        })
    };
    for change in 1..=CHANGES {
        // Odd files follow even ones, and it is waited for odd and even ones in turn.
        scene.replace("rules.yaml", &rules(limit_of(change)));
        if change % WAIT_EVERY <= 1 {
            let limit = limit_of(change);
            let is_seen = async || (latest.load(Ordering::Relaxed) == limit).then_some(());
            eventually("the last file is what answers come from", is_seen).await;
        }
    }
    is_over.store(true, Ordering::Relaxed);
    let (seen, answers) = asking.await.expect("every answer fits");
    assert!(seen >= 40, "only {seen} changes seen in {answers} answers");
    assert!(!scene.server.log().contains("ERROR"), "{}", scene.server.log());
}

#[tokio::test]
async fn a_list_of_values_is_followed_like_the_rules_that_name_it() {
    let rules = "domain: d
descriptors:
  - { key: one, values_file: blocked.txt, deny: true }
  - { key: one, rate_limit: { unit: year, requests_per_unit: 9 } }
";
    let scene = Scene::of_file(&rules.replace("values_file: blocked.txt", "values: [w]")).await;
    scene.edit("blocked.txt", "w\n");
    scene.edit("rules.yaml", rules);
    let mut client = scene.client().await;
    let mut is_denied = async || ask(&mut client, vec![descriptor("one", 0)]).await.overall_code() == Code::OverLimit;
    assert!(!is_denied().await);
    scene.edit("blocked.txt", "w\nv # the value that is asked for\n");
    eventually("it is denied", async || is_denied().await.then_some(())).await;
    scene.edit("blocked.txt", "v/32\n10.0.0.0/99\n");
    scene.says("blocked.txt:2:1: error: the line (11 bytes, not shown) is not a network").await;
    assert!(is_denied().await, "a list with an error changes nothing");
    scene.replace("blocked.txt", "w\n");
    eventually("it is denied no longer", async || (!is_denied().await).then_some(())).await;
    assert!(!scene.server.log().contains("rules.polled"), "{}", scene.server.log());
}
