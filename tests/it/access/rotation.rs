//! The password in a file changes while calls come in: before the server's does, after it, and to another user's.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::{CANARY, PREFIX, Service, request, user};
use crate::load::Load;
use crate::redis::Single;
use crate::redis::user::User;
use crate::support::{eventually, replace_file};

/// Calls a second, enough for a storm of attempts to be told from one in a second.
const PER_SECOND: u32 = 200;

/// A server, a service that is let in by a file, and the file.
struct Scene {
    server: Single,
    service: Service,
    directory: tempfile::TempDir,
}

impl Scene {
    async fn new(user: &User) -> Self {
        let server = Single::start(&[]).await;
        user.let_in(&server).await;
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("auth");
        write(&file, user);
        let service = Service::start(&[
            ("REDIS_URL", &server.address().to_string()),
            ("REDIS_AUTH_FILE", file.to_str().expect("a path of text")),
            ("CACHE_KEY_PREFIX", PREFIX),
            // All calls on one connection.
            ("WORKERS", "1"),
        ])
        .await;
        service.counts("before").await;
        Self { server, service, directory }
    }

    fn write(&self, user: &User) {
        write(&self.directory.path().join("auth"), user);
    }

    async fn load(&self) -> Load {
        let requests = vec![request("week", "under load")];
        Load::start(self.service.tidegate.grpc, requests, PER_SECOND, Duration::from_secs(60)).await
    }

    /// Waits until calls are made as this user, and as nobody else.
    async fn comes_to_be_asked_by(&self, user: &User) {
        let mark = format!(" user={} ", user.name);
        eventually("calls are made as that user", async || {
            self.service.ask("week", "who").await.expect("it is answered");
            let clients = self.server.cli(&["CLIENT", "LIST"]).await;
            let mut callers = clients.lines().filter(|client| client.contains(" cmd=evalsha ")).peekable();
            (callers.peek().is_some() && callers.all(|client| client.contains(&mark))).then_some(())
        })
        .await;
    }

    /// How often a server has refused a password of this user's.
    async fn refusals(&self, user: &User) -> u32 {
        let log = self.server.cli(&["ACL", "LOG"]).await;
        let fields: Vec<_> = log.lines().collect();
        let entries = fields.split(|field| *field == "count").skip(1);
        let ours = entries.filter(|entry| entry.contains(&"auth") && entry.contains(&user.name.as_str()));
        ours.map(|entry| entry[0].parse::<u32>().expect("a number")).sum()
    }
}

/// Puts another file in the place of the one that is there, as a secret's owner does.
fn write(file: &Path, user: &User) {
    replace_file(file, &(user.auth() + "\n"));
}

#[tokio::test]
async fn a_file_that_changes_before_its_server_costs_no_answer() {
    let (before, after) = (user("before"), user("after"));
    let scene = Scene::new(&before).await;
    let load = scene.load().await;
    let began = Instant::now();
    scene.write(&after);
    eventually("the new one is tried", async || (scene.refusals(&after).await > 0).then_some(())).await;
    let reached = load.so_far().count() + 300;
    eventually("calls go on", async || (load.so_far().count() >= reached).then_some(())).await;
    let (refusals, took) = (scene.refusals(&after).await, began.elapsed());
    // Two threads with a connection each, twice a second at most; a storm would be hundreds.
    assert!(u64::from(refusals) <= 4 * (took.as_secs() + 2), "{refusals} in {took:?}");
    scene.comes_to_be_asked_by(&before).await;
    let calls = load.stop().await;
    assert!(calls.count() > 0 && calls.failed() == 0, "{} of {} failed", calls.failed(), calls.count());

    // Connections that are made meanwhile are let in as who is known.
    scene.server.cli(&["CLIENT", "KILL", "USER", &before.name]).await;
    scene.service.counts("meanwhile").await;
    scene.comes_to_be_asked_by(&before).await;

    let load = scene.load().await;
    after.let_in(&scene.server).await;
    scene.comes_to_be_asked_by(&after).await;
    assert_eq!(scene.server.cli(&["ACL", "DELUSER", &before.name]).await, "1");
    let calls = load.stop().await;
    assert!(calls.count() > 0 && calls.failed() == 0, "{} of {} failed", calls.failed(), calls.count());
    scene.server.cli(&["CLIENT", "KILL", "USER", &after.name]).await;
    scene.service.counts("after").await;
    let log = scene.service.log();
    assert!(log.contains("store.password.changed"), "{log}");
    assert_eq!(log.matches("store.password.rejected").count(), 1, "{log}");
}

#[tokio::test]
async fn a_server_that_changes_before_the_file_costs_no_answer() {
    let (before, after) = (user("alice"), user("alice").but("alice", &format!("{CANARY}-renewed")));
    let scene = Scene::new(&before).await;
    let load = scene.load().await;
    after.let_in(&scene.server).await;
    let reached = load.so_far().count() + 50;
    eventually("live connections go on", async || (load.so_far().count() >= reached).then_some(())).await;
    scene.write(&after);
    eventually("the file is read", async || scene.service.log().contains("has changed").then_some(())).await;
    let calls = load.stop().await;
    assert!(calls.count() > 0 && calls.failed() == 0, "{} of {} failed", calls.failed(), calls.count());
    scene.server.cli(&["CLIENT", "KILL", "USER", "alice"]).await;
    scene.service.counts("after").await;
    assert_eq!(scene.refusals(&after).await, 0, "nothing was tried in vain");
}
