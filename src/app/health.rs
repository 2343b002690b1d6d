//! Health of this instance, as callers and probes see it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::edge::grpc::Health;
use crate::edge::json::Readiness;
use crate::model::FailurePolicy;
use crate::rules::live::LiveRules;
use crate::serve::Workers;
use crate::store::redis::Redis;

/// Longest wait for the first connection to Redis, before the start reports its health without one: 500 ms. A reachable
/// Redis accepts within some milliseconds.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);
/// Interval at which that wait checks for a connection: 5 ms.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Interval at which health follows its conditions, if the settings ask for any: 100 ms.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);

/// Time after the start at which a Redis that was not reached is logged: 2 s. The first attempt ends after 1 s (`REDIS_TIMEOUT`), the
/// second begins about half a second later.
const UNREACHED: Duration = Duration::from_secs(2);

/// The health check and the readiness probe: both report whether this instance accepts calls.
#[derive(Clone)]
pub(super) struct HealthState {
    /// Health check of gRPC.
    pub(super) health: Health,
    /// Probe `/healthcheck` of HTTP.
    pub(super) readiness: Readiness,
}

impl HealthState {
    /// Reports that this instance accepts calls, or that it does not.
    pub(super) async fn show(&self, is_ready: bool) {
        self.readiness.set(is_ready);
        self.health.set_serving(is_ready).await;
    }

    /// Follows the conditions. `shown` is the state that is reported now. Never returns.
    pub(super) async fn follow(self, conditions: Conditions, mut shown: bool) {
        let mut due = tokio::time::interval(FOLLOW_EVERY);
        loop {
            due.tick().await;
            let is_ready = conditions.hold();
            if is_ready != shown {
                self.show(is_ready).await;
                shown = is_ready;
            }
        }
    }
}

/// Conditions of health that the settings ask for.
pub(super) struct Conditions {
    /// Redis to which there must be a connection.
    pub(super) redis: Option<Redis>,
    /// Rules of which the source must have at least one domain.
    pub(super) rules: Option<Arc<LiveRules>>,
}

impl Conditions {
    /// Returns true if there is a condition.
    pub(super) fn are_any(&self) -> bool {
        self.redis.is_some() || self.rules.is_some()
    }

    /// Returns true if all conditions hold.
    pub(super) fn hold(&self) -> bool {
        let has_rules = |rules: &Arc<LiveRules>| rules.snapshot().has_domain_of_source();
        self.redis.as_ref().is_none_or(Redis::is_connected) && self.rules.as_ref().is_none_or(has_rules)
    }
}

/// Logs each Redis that is not reached within 2 s of the start, and shows in `/healthcheck` that there is one, until all have been
/// reached. `names` are the main Redis and the one for limits per second; `policy` answers while they are away.
pub(super) async fn report_unreached(redis: Redis, names: Vec<String>, policy: FailurePolicy, readiness: Readiness) {
    let are_reached = || redis.were_reached().all(|is_reached| is_reached);
    let mut due = tokio::time::interval(FOLLOW_EVERY);
    let log_at = Instant::now() + UNREACHED;
    let mut is_logged = false;
    while !are_reached() {
        readiness.set_lacks_store(true);
        if !is_logged && log_at <= Instant::now() {
            is_logged = true;
            let unreached = names.iter().zip(redis.were_reached()).filter(|(_, is_reached)| !is_reached);
            for (server, _) in unreached {
                tracing::warn!(
                    event = "store.unreached",
                    server,
                    on_store_failure = policy.name(),
                    "this Redis has not been reached since the start, so {}, unless a rule has another policy: check the address, the network and the password; store.connection.failed has the reason",
                    effect(policy)
                );
            }
        }
        due.tick().await;
    }
    readiness.set_lacks_store(false);
    if is_logged {
        tracing::warn!(event = "store.reached", "every Redis has been reached now");
    }
}

/// Says for people what `policy` does to requests.
const fn effect(policy: FailurePolicy) -> &'static str {
    match policy {
        FailurePolicy::Error => {
            "each call fails, and its caller decides (Envoy admits it unless failure_mode_deny is true)"
        }
        FailurePolicy::Open => "every request is admitted",
        FailurePolicy::Closed => "every request is refused",
        FailurePolicy::Local => "each instance counts by itself, its share of each limit",
    }
}

/// Waits at most 500 ms until Redis is connected from this thread and then from each worker, so that no first call pays
/// for connecting. Returns true once all are connected, or if there is no Redis.
pub(super) async fn connected_at_first(redis: Option<&Redis>, workers: &Workers) -> bool {
    let Some(redis) = redis else { return true };
    let connect = || {
        let redis = redis.clone();
        async move { redis.connect(FIRST_CONNECTION).await }
    };
    let connected = async {
        while !redis.is_connected() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        workers.on_each(connect).await;
    };
    tokio::time::timeout(FIRST_CONNECTION, connected).await.is_ok()
}
