//! Construction of the stores from the settings.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::authorities::system_authorities;
use super::duration;
use crate::dial::tls::{Tls, TlsFiles};
use crate::model::{Clock, Micros};
use crate::settings::{Auth, RedisSettings, Settings, StoreChoice};
use crate::store::Store;
use crate::store::clock::SystemClock;
use crate::store::deadline::Deadline;
use crate::store::guard::Guard;
use crate::store::memory::Memory;
use crate::store::redis::credentials::Credentials;
use crate::store::redis::login::Login;
use crate::store::redis::manager::Access;
use crate::store::redis::{HostNetwork, Instance, Redis};
use crate::store::replicas::Replicas;
use crate::telemetry::servers::ServerMetrics;

/// Labels in metrics of the main Redis and of the one for limits per second.
pub(super) const STORES: [&str; 2] = ["redis", "redis_persecond"];

/// The stores of the process.
pub(super) struct Stores {
    /// The configured store, behind its guard.
    pub(super) guard: Guard,
    /// The embedded store: either the configured one, or the one that decides under the policy `local`.
    pub(super) memory: Arc<Memory>,
    /// Redis, if it is the configured store.
    pub(super) redis: Option<Redis>,
    /// Number of instances that share the counters.
    pub(super) replicas: Arc<Replicas>,
}

/// Contents of the files that the Redis settings name, for the main Redis and for the one for limits per second.
pub(super) struct RedisFiles {
    main: Secrets,
    per_second: Option<Secrets>,
}

/// Credentials for one Redis, and the TLS configuration if connections use TLS.
struct Secrets {
    credentials: Arc<Credentials>,
    tls: Option<Arc<Tls>>,
}

impl RedisFiles {
    /// Reads the files, if counters are in Redis. Blocks while the file system does.
    ///
    /// # Errors
    /// If a file cannot be used; names the variable and the path.
    pub(super) fn read(settings: &Settings) -> anyhow::Result<Option<Self>> {
        let StoreChoice::Redis { main, per_second } = &settings.store else { return Ok(None) };
        let per_second = per_second.as_deref().map(Secrets::read);
        Ok(Some(Self { main: Secrets::read(main)?, per_second: per_second.transpose()? }))
    }
}

impl RedisFiles {
    /// Returns the credentials for each Redis, with its label in the metrics.
    pub(super) fn credentials(&self) -> Vec<(&'static str, Arc<Credentials>)> {
        self.labelled().map(|(of, secrets)| (of, Arc::clone(&secrets.credentials))).collect()
    }

    /// Returns the TLS of each Redis that has some, with the label of its client certificate in the metrics.
    pub(super) fn tls(&self) -> Vec<(&'static str, Arc<Tls>)> {
        self.labelled().filter_map(|(of, secrets)| Some((of, secrets.tls.clone()?))).collect()
    }

    fn labelled(&self) -> impl Iterator<Item = (&'static str, &Secrets)> {
        let all = STORES.into_iter().zip([Some(&self.main), self.per_second.as_ref()]);
        all.filter_map(|(of, secrets)| Some((of, secrets?)))
    }
}

impl Secrets {
    fn read(redis: &RedisSettings) -> anyhow::Result<Self> {
        let credentials = match &redis.auth {
            Auth::None => Credentials::fixed(Login::default()),
            Auth::Given(login) => Credentials::fixed(login.clone()),
            Auth::File(file) => Credentials::of_file(file.clone())?,
            Auth::Command(command) => Credentials::of_command(command.clone())?,
        };
        Ok(Self { credentials: Arc::new(credentials), tls: redis.tls.as_ref().map(tls).transpose()? })
    }
}

/// Creates the stores for `threads` calling threads. `files` holds the contents of the files that the Redis settings
/// name; `metrics` records the metrics of each server.
pub(super) fn open(
    settings: &Settings,
    files: Option<RedisFiles>,
    threads: usize,
    metrics: &Arc<ServerMetrics>,
) -> Stores {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let memory = Arc::new(Memory::new(Arc::clone(&clock), settings.memory_max_counters.0));
    let redis = match (&settings.store, files) {
        (StoreChoice::Redis { main, per_second }, Some(files)) => {
            let per_second = per_second.as_deref().zip(files.per_second);
            let per_second = per_second.map(|(apart, secrets)| instance(apart, secrets, metrics));
            let main = instance(main, files.main, metrics);
            Some(Redis::new(main, per_second, &settings.cache_key_prefix.0, threads))
        }
        _ => None,
    };
    let deadline = settings.store_deadline.0.map_or(Deadline::Auto, |length| Deadline::Fixed(duration(length)));
    let (store, deadline) = match &redis {
        Some(redis) => (Arc::new(redis.clone()) as Arc<dyn Store>, deadline),
        None => (Arc::clone(&memory) as Arc<dyn Store>, Deadline::AtOnce),
    };
    let replicas = Arc::new(settings.replicas.0.map_or_else(Replicas::counted, Replicas::set));
    let guard = Guard::new(store, deadline, Arc::clone(&memory), Arc::clone(&replicas), clock);
    Stores { guard, memory, redis, replicas }
}

fn instance(redis: &RedisSettings, secrets: Secrets, metrics: &Arc<ServerMetrics>) -> Instance {
    let access = Access {
        credentials: secrets.credentials,
        max_age: (redis.max_age > Micros::ZERO).then(|| duration(redis.max_age)),
        tls: secrets.tls,
        db: redis.database,
        prefix: Arc::default(),
        connect_timeout: duration(redis.connect_timeout),
        alive: Arc::new(AtomicUsize::new(0)),
        metrics: Arc::clone(metrics),
        network: Arc::new(HostNetwork),
    };
    Instance { topology: redis.topology.clone(), access }
}

/// Reads the TLS files for the first time.
fn tls(files: &TlsFiles) -> anyhow::Result<Arc<Tls>> {
    system_authorities()?;
    // The Redis client uses the crypto provider of the process. A second start in one process keeps that of the first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(Arc::new(Tls::of_files(files.clone())?))
}
