//! What seeds have found, each as the shortest course of events that shows it.

use std::rc::Rc;
use std::time::Duration;

use tidegate::model::{Descriptor, Entry, Provenance, Request};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep};

use super::clock::SimulatedClock;
use super::server::Server;
use super::world::{Process, process};

const RULES: &str = "domain: d
on_store_overload: closed
descriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 9000 } }]
";

/// Who decides a call.
async fn provenance(instance: &Process) -> Option<Provenance> {
    let entries = [Entry::new("user".to_owned(), "a".to_owned())].into_iter().collect();
    let descriptor = Descriptor { entries, ..Descriptor::default() };
    let request = Request::new("d".to_owned(), vec![descriptor], 0).expect("a request");
    let rules = instance.limiter.rules();
    let decision = instance.limiter.decide(&rules, &request, Some(Duration::from_millis(100))).await;
    decision.limited().next().map(|(_, tightest)| tightest.verdict.provenance)
}

fn played(scene: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    LocalSet::new().block_on(&runtime.expect("a runtime"), scene);
}

/// Seed 96: while all calls are too late, each is followed by a pause. The call that would load the script again fell into the pause after its own first
/// reply, each time, and the instance never loaded it.
#[test]
fn a_lost_script_is_loaded_again_where_all_calls_were_too_late() {
    played(async {
        let clock = SimulatedClock::new(Instant::now(), 0);
        let (server, accepted) = Server::start(clock.clone(), Rc::default());
        let instance = process(RULES, clock, 100..=200, 1, accepted);
        sleep(Duration::from_millis(500)).await;
        assert_eq!(provenance(&instance).await, Some(Provenance::Store));
        instance.link.way.send_modify(|way| way.latency = 24_000..=24_000);
        for _ in 0..100 {
            provenance(&instance).await;
            sleep(Duration::from_millis(50)).await;
        }
        instance.link.way.send_modify(|way| way.latency = 100..=200);
        server.flush_scripts();
        let mut decided = 0;
        for _ in 0..20 {
            sleep(Duration::from_millis(300)).await;
            decided += u32::from(provenance(&instance).await == Some(Provenance::Store));
        }
        assert!(decided >= 18, "{decided} of 20");
    });
}
