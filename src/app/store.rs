//! Construction of the stores from the settings.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::read::system_authorities;
use super::{SystemClock, duration};
use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};
use crate::model::Clock;
use crate::settings::{self, Auth, RedisSettings, Settings, StoreChoice, TlsSettings};
use crate::store::Store;
use crate::store::guard::{Deadline, Guard};
use crate::store::memory::Memory;
use crate::store::redis::credentials::{Credentials, Login};
use crate::store::redis::manager::{Access, Address};
use crate::store::redis::servers::Topology;
use crate::store::redis::tls::{Files, Tls};
use crate::store::redis::{Instance, Redis};
use crate::store::replicas::Replicas;
use crate::telemetry::servers::Servers;

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
        let per_second = per_second.as_deref().map(|apart| Secrets::read(apart, "REDIS_PERSECOND_AUTH_FILE"));
        Ok(Some(Self { main: Secrets::read(main, "REDIS_AUTH_FILE")?, per_second: per_second.transpose()? }))
    }
}

impl Secrets {
    fn read(redis: &RedisSettings, auth_file: &'static str) -> anyhow::Result<Self> {
        let credentials = match &redis.auth {
            Auth::None => Credentials::fixed(Login::default()),
            Auth::Given(credentials) => Credentials::fixed(login(credentials)),
            Auth::File(path) => Credentials::of_file(Named::new(auth_file, path.clone(), MAX_SECRET), parsed)?,
        };
        Ok(Self { credentials: Arc::new(credentials), tls: redis.tls.as_ref().map(tls).transpose()? })
    }
}

/// Creates the stores for `threads` calling threads. `files` holds the contents of the files that the Redis settings
/// name; `watched` records the metrics of each server.
pub(super) fn open(settings: &Settings, files: Option<RedisFiles>, threads: usize, watched: &Arc<Servers>) -> Stores {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let memory = Arc::new(Memory::new(Arc::clone(&clock), settings.memory_max_counters.0));
    let redis = match (&settings.store, files) {
        (StoreChoice::Redis { main, per_second }, Some(files)) => {
            let per_second = per_second.as_deref().zip(files.per_second);
            let per_second = per_second.map(|(apart, secrets)| instance(apart, secrets, watched));
            let main = instance(main, files.main, watched);
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

fn instance(redis: &RedisSettings, secrets: Secrets, watched: &Arc<Servers>) -> Instance {
    let (topology, db) = match &redis.servers {
        settings::Servers::Single { address: server, database } => (Topology::Single(address(server)), *database),
        settings::Servers::Sentinel { master, sentinels, auth } => {
            let login = auth.as_ref().map(login).unwrap_or_default();
            let sentinels = sentinels.iter().map(address).collect();
            (Topology::Sentinel { master: master.clone(), sentinels, login }, 0)
        }
        settings::Servers::Cluster(nodes) => (Topology::Cluster(nodes.iter().map(address).collect()), 0),
    };
    let access = Access {
        credentials: secrets.credentials,
        tls: secrets.tls,
        db,
        connect_timeout: duration(redis.connect_timeout),
        alive: Arc::new(AtomicUsize::new(0)),
        watched: Arc::clone(watched),
    };
    Instance { topology, access }
}

/// Reads the TLS files for the first time.
fn tls(settings: &TlsSettings) -> anyhow::Result<Arc<Tls>> {
    system_authorities()?;
    // The Redis client uses the crypto provider of the process. A second start in one process keeps that of the first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authorities = settings.authorities.clone();
    let files = Files {
        authorities: authorities.map(|path| Named::new("REDIS_TLS_CACERT", path, MAX_CERTIFICATES)),
        client: settings.client.clone().map(|(certificate, key)| {
            (
                Named::new("REDIS_TLS_CLIENT_CERT", certificate, MAX_CERTIFICATES),
                Named::new("REDIS_TLS_CLIENT_KEY", key, MAX_SECRET),
            )
        }),
    };
    Ok(Arc::new(Tls::of_files(files, !settings.verifies_hostname)?))
}

fn parsed(text: &str) -> Option<Login> {
    settings::Credentials::parse(text).as_ref().map(login)
}

fn login(credentials: &settings::Credentials) -> Login {
    Login { user: credentials.user.clone(), password: Some(credentials.password.expose().to_owned()) }
}

fn address(address: &settings::Address) -> Address {
    match address {
        settings::Address::Tcp { host, port } => Address::Tcp(host.clone(), *port),
        settings::Address::Unix(path) => Address::Unix(path.clone()),
    }
}
