//! Sixty-four at once: what is admitted is the limit, to the hit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};

use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Clock, Hits, Quota, Unit, Window};
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::store::memory::Memory;

use crate::grpc;
use crate::histories;
use crate::support::{Tidegate, by_tier, directory, in_time};
use crate::world::{HandClock, NOON};

mod held;

const CLIENTS: usize = 64;
const LIMITS: [u32; 5] = [1, 2, 7, 100, 10_000];

/// How many rounds there are at a limit.
fn rounds(limit: u32) -> usize {
    if limit < 10_000 { by_tier(100, 1_000) } else { by_tier(5, 20) }
}

/// How many charges a round offers: three times what fits, and at least one by each client.
fn offered(limit: u32) -> usize {
    CLIENTS.max(3 * usize::try_from(limit).expect("it is small"))
}

/// From 1 to 5, in no order.
fn mixed(charge: usize) -> u64 {
    ((charge as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % 5 + 1
}

fn memory() -> Memory {
    Memory::new(HandClock::at(NOON) as Arc<dyn Clock>, 1_000_000)
}

fn charge(name: &str, limit: Limit, charging: Charging, hits: u64) -> Charge {
    histories::charge(name, limit, charging, Hits::take(hits))
}

fn limit(algorithm: Algorithm, hits: u32) -> Limit {
    Limit::new(algorithm, Quota::new(hits, Window::of_unit(Unit::Year))).expect("it can be counted")
}

/// One counter under fire, and what became of the hits that were asked of it.
struct Target {
    limit: Limit,
    charging: Charging,
    is_mixed: bool,
    admitted: AtomicU64,
    least_refused: AtomicU64,
    most_refused: AtomicU64,
}

impl Target {
    fn new(limit: Limit, charging: Charging, is_mixed: bool) -> Self {
        let number = AtomicU64::new;
        Self {
            limit,
            charging,
            is_mixed,
            admitted: number(0),
            least_refused: number(u64::MAX),
            most_refused: number(0),
        }
    }

    fn note(&self, hits: u64, is_refused: bool) {
        if is_refused {
            self.least_refused.fetch_min(hits, Ordering::Relaxed);
            self.most_refused.fetch_max(hits, Ordering::Relaxed);
        } else {
            self.admitted.fetch_add(hits, Ordering::Relaxed);
        }
    }

    fn judge(&self, round: usize) {
        let Self { limit, charging, is_mixed, .. } = self;
        let what = || format!("{limit:?}, {charging:?}, mixed hits: {is_mixed}, round {round}");
        let most = u64::from(limit.quota().limit());
        let admitted = self.admitted.swap(0, Ordering::Relaxed);
        let least = self.least_refused.swap(u64::MAX, Ordering::Relaxed);
        let largest = self.most_refused.swap(0, Ordering::Relaxed);
        if !is_mixed {
            assert_eq!(admitted, most, "{}", what());
        }
        assert!(admitted <= most, "{admitted} of {most}: {}", what());
        // Where refused hits count, nothing passes after the first that did not fit.
        let did_not_fit = if limit.records_refused(*charging) { largest } else { least };
        assert!(admitted + did_not_fit > most, "{admitted} of {most}, and {did_not_fit} refused: {}", what());
    }
}

/// Runs rounds on sixty-four threads that begin each of them together: each charge of a round once, by whoever takes it.
/// After a round nobody charges while `judge` looks. The first panic ends it for all, so that nobody waits for ever.
fn burst(rounds: usize, charges: usize, charge: impl Fn(usize, usize) + Sync, judge: impl Fn(usize) + Sync) {
    let barrier = Barrier::new(CLIENTS);
    let next = AtomicUsize::new(0);
    let panic = OnceLock::new();
    let guarded = |act: &dyn Fn()| {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(act)) {
            let _ = panic.set(Mutex::new(payload));
        }
    };
    let client = || {
        for round in 0..rounds {
            barrier.wait();
            if panic.get().is_some() {
                return;
            }
            guarded(&|| {
                while let number = next.fetch_add(1, Ordering::Relaxed)
                    && number < charges
                {
                    charge(round, number);
                }
            });
            if barrier.wait().is_leader() {
                next.store(0, Ordering::Relaxed);
                guarded(&|| judge(round));
            }
        }
    };
    std::thread::scope(|scope| (0..CLIENTS).for_each(|_| drop(scope.spawn(client))));
    if let Some(payload) = panic.into_inner() {
        resume_unwind(payload.into_inner().expect("nobody holds it"));
    }
}

#[test]
fn sixty_four_threads_are_admitted_as_much_as_the_limit_to_the_hit() {
    for hits in LIMITS {
        let mut targets = Vec::new();
        for (_, algorithm) in Algorithm::ALL {
            for (_, charging) in Charging::ALL {
                for is_mixed in [false, true] {
                    targets.push(Target::new(limit(algorithm, hits), charging, is_mixed));
                }
            }
        }
        let store = memory();
        burst(
            rounds(hits),
            offered(hits) * targets.len(),
            |round, number| {
                let (which, number) = (number % targets.len(), number / targets.len());
                let target = &targets[which];
                let hits = if target.is_mixed { mixed(number + round) } else { 1 };
                let charge = charge(&format!("{round}.{which}"), target.limit, target.charging, hits);
                target.note(hits, store.charge_now(&[charge])[0].outcome.is_refused());
            },
            |round| targets.iter().for_each(|target| target.judge(round)),
        );
    }
}

#[test]
fn a_shared_tier_ends_at_what_its_requests_were_admitted() {
    const USERS: usize = 4;
    for hits in LIMITS {
        for [global, own] in tier_pairs(hits) {
            let store = memory();
            let admitted: [AtomicU64; USERS] = Default::default();
            let tiers = |round: usize, user: usize, hits: u64| {
                [
                    charge(&format!("{round}"), global, Charging::AllOrNothing, hits),
                    Charge { descriptor: 1, ..charge(&format!("{round}.{user}"), own, Charging::AllOrNothing, hits) },
                ]
            };
            burst(
                rounds(hits) / 10,
                USERS * offered(hits),
                |round, number| {
                    let (user, hits) = (number % USERS, mixed(number + round));
                    let mut tiers = tiers(round, user, hits);
                    // Whichever tier comes first, they are locked in one order.
                    if number.is_multiple_of(2) {
                        tiers.reverse();
                    }
                    if !store.charge_now(&tiers).iter().any(|verdict| verdict.outcome.is_refused()) {
                        admitted[user].fetch_add(hits, Ordering::Relaxed);
                    }
                },
                |round| {
                    let mut all = 0;
                    for (user, admitted) in admitted.iter().enumerate() {
                        let admitted = admitted.swap(0, Ordering::Relaxed);
                        let [_, own] = tiers(round, user, 0);
                        let left = store.charge_now(&[own])[0].remaining;
                        assert_eq!(u64::from(hits - left), admitted, "user {user} of round {round}");
                        all += admitted;
                    }
                    let [shared, _] = tiers(round, 0, 0);
                    let left = store.charge_now(&[shared])[0].remaining;
                    assert_eq!(u64::from(global.quota().limit() - left), all, "round {round}, {global:?}");
                },
            );
        }
    }
}

/// A tier that all users share, with room for three users of four where it can be as large, and their own: every algorithm
/// with itself and with the next.
fn tier_pairs(hits: u32) -> Vec<[Limit; 2]> {
    let next = Algorithm::ALL.into_iter().cycle().skip(1);
    let pairs = Algorithm::ALL.into_iter().zip(next).flat_map(|((_, one), (_, next))| [(one, one), (one, next)]);
    let tier = |algorithm, hits| histories::limit(algorithm, Window::of_unit(Unit::Year), hits, 1_000);
    pairs.map(|(global, own)| [tier(global, 3 * hits), tier(own, hits)]).collect()
}

/// So many rounds share one burst of calls, each on keys of its own.
const ROUNDS_AT_ONCE: usize = 10;

fn rule_files() -> tempfile::TempDir {
    directory(Charging::ALL.map(|(name, _)| {
        let mut rules = format!("domain: {name}\ncharging: {name}\ndescriptors:\n");
        for hits in LIMITS {
            for (algorithm, _) in Algorithm::ALL {
                rules += &format!(
                    "  - {{ key: {algorithm}_{hits}, rate_limit: {{ unit: year, requests_per_unit: {hits}, algorithm: {algorithm} }} }}\n"
                );
            }
        }
        (format!("{name}.yaml"), rules)
    }))
}

/// A request against fresh counters: ten rounds, by every algorithm.
fn request(burst: usize, domain: &str, hits: u32) -> RateLimitRequest {
    let rounds = (0..ROUNDS_AT_ONCE).flat_map(|round| Algorithm::ALL.map(|(algorithm, _)| (round, algorithm)));
    let descriptors = rounds
        .map(|(round, algorithm)| grpc::descriptor(&[(format!("{algorithm}_{hits}"), format!("{burst}.{round}"))]));
    grpc::request(domain, descriptors)
}

/// The window is a year, so that none ends meanwhile.
#[tokio::test]
async fn sixty_four_grpc_clients_are_admitted_as_much_as_the_limit_to_the_hit() {
    let rules = rule_files();
    let server = Tidegate::start(rules.path(), &[("LOG_LEVEL", "warn")]).await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(grpc::client(server.grpc).await);
    }
    for hits in LIMITS {
        let bursts = rounds(hits) / ROUNDS_AT_ONCE;
        for burst in 0..bursts {
            let (domain, _) = Charging::ALL[burst % Charging::ALL.len()];
            let request = Arc::new(request(burst, domain, hits));
            let admitted = Arc::new(request.descriptors.iter().map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
            let next = Arc::new(AtomicU64::new(0));
            let barrier = Arc::new(tokio::sync::Barrier::new(CLIENTS));
            let calls = clients.iter().map(|client| {
                let (mut client, request, admitted) = (client.clone(), Arc::clone(&request), Arc::clone(&admitted));
                let (next, barrier) = (Arc::clone(&next), Arc::clone(&barrier));
                tokio::spawn(async move {
                    barrier.wait().await;
                    while next.fetch_add(1, Ordering::Relaxed) < offered(hits) as u64 {
                        let answer = client.should_rate_limit(RateLimitRequest::clone(&request)).await;
                        let answer = answer.expect("it is answered").into_inner();
                        assert_eq!(answer.statuses.len(), admitted.len());
                        for (status, admitted) in answer.statuses.iter().zip(admitted.iter()) {
                            admitted.fetch_add(u64::from(status.code() == Code::Ok), Ordering::Relaxed);
                        }
                    }
                })
            });
            for call in calls.collect::<Vec<_>>() {
                in_time("the burst is answered", call).await.expect("no client fails");
            }
            for (descriptor, admitted) in request.descriptors.iter().zip(admitted.iter()) {
                let admitted = admitted.load(Ordering::Relaxed);
                assert_eq!(admitted, u64::from(hits), "burst {burst} of {domain}: {:?}", descriptor.entries);
            }
        }
    }
}
