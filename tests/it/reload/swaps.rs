//! A ConfigMap that changes many times while clients call all the time.

use std::ops::RangeInclusive;

use tokio::task::JoinHandle;

use super::*;

/// Clients that keep their connection.
const CLIENTS: usize = 3;
/// How many calls one connection carries of the client that opens new ones all the time.
const CALLS_OF_ONE: usize = 10;

/// The version that a limit stands for: each has one of its own.
const fn limit_of(version: u32) -> u32 {
    1_000_000 + version
}

/// What the clients know of the swaps.
#[derive(Default)]
struct Progress {
    /// The version that is written, or just being written.
    written: AtomicU32,
    /// The version that an answer has named after it was written.
    confirmed: AtomicU32,
    is_over: AtomicBool,
}

impl Progress {
    /// The versions that may answer a call that is made now and answered before the next version is written.
    fn may_answer(&self, since: u32) -> RangeInclusive<u32> {
        since..=self.written.load(Ordering::SeqCst)
    }

    /// Calls once. The version of the answer, which is whole and no older than `seen` and than what is confirmed.
    async fn call(&self, client: &mut grpc::Client, seen: u32) -> u32 {
        let since = seen.max(self.confirmed.load(Ordering::SeqCst));
        let limits = named(&ask(client, vec![descriptor("one", 1), descriptor("two", 1)]).await);
        let [one, two] = limits[..] else { panic!("{limits:?}") };
        assert_eq!(one, two, "half of a change");
        let version = one - limit_of(0);
        let may = self.may_answer(since);
        assert!(may.contains(&version), "version {version} answered where {may:?} may");
        version
    }
}

/// What one client got.
#[derive(Default)]
struct Tally {
    answers: u32,
    connections: u32,
    /// How many answers named another version than the one before.
    changes: u32,
}

/// Calls until all is over, by connections of so many calls each. Every call and every connection has to succeed.
fn calls(scene: &Scene, progress: &Arc<Progress>, calls_of_one: usize) -> JoinHandle<Tally> {
    let (address, progress) = (scene.server.grpc, Arc::clone(progress));
    tokio::spawn(async move {
        let (mut tally, mut seen) = (Tally::default(), 0);
        while !progress.is_over.load(Ordering::SeqCst) {
            let mut client = grpc::client(address).await;
            tally.connections += 1;
            for _ in 0..calls_of_one {
                let version = progress.call(&mut client, seen).await;
                tally.answers += 1;
                tally.changes += u32::from(version != seen);
                seen = version;
                if progress.is_over.load(Ordering::SeqCst) {
                    break;
                }
            }
        }
        tally
    })
}

#[tokio::test]
async fn each_turn_of_a_config_map_under_load_is_one_load_and_no_call_fails() {
    let swaps = by_tier(100, 500);
    let made = tempfile::tempdir().expect("a directory");
    mount(made.path(), "..2026_0", &rules(limit_of(0)));
    let server = Tidegate::start(made.path(), &[]).await;
    let scene = Scene { directory: made, server };
    let progress = Arc::new(Progress::default());
    let steady: Vec<_> = (0..CLIENTS).map(|_| calls(&scene, &progress, usize::MAX)).collect();
    let coming = calls(&scene, &progress, CALLS_OF_ONE);

    let mut probe = scene.client().await;
    for version in 1..=swaps {
        progress.written.store(version, Ordering::SeqCst);
        mount(scene.directory.path(), &format!("..2026_{version}"), &rules(limit_of(version)));
        let what = format!("version {version} is in force");
        eventually(&what, async || (progress.call(&mut probe, 0).await == version).then_some(())).await;
        progress.confirmed.store(version, Ordering::SeqCst);
    }
    progress.is_over.store(true, Ordering::SeqCst);

    // The first load was the start.
    assert_eq!(scene.load().await, u64::from(swaps) + 1);
    // A thread of its own writes the log, a moment later.
    let loads = || u32::try_from(scene.server.log().matches("rules.loaded").count()).expect("few");
    eventually("every load is logged", async || (loads() >= swaps).then_some(())).await;
    let log = scene.server.log();
    assert_eq!(loads(), swaps, "{log}");
    for trouble in ["ERROR", "WARN", "rules.polled"] {
        assert!(!log.contains(trouble), "{log}");
    }
    for client in steady {
        let tally = client.await.expect("every answer fits");
        assert_eq!(tally.connections, 1);
        // Each version was in force for 100 ms or more, and no call takes that long but on a machine that is very busy.
        assert!(tally.changes >= swaps / 5, "{} changes seen in {} answers", tally.changes, tally.answers);
    }
    let tally = coming.await.expect("every connection is taken and every answer fits");
    assert!(tally.connections >= swaps / 5, "{} connections, {} answers", tally.connections, tally.answers);
}
