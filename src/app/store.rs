//! The wiring of the stores: what the settings say of them, in the stores' own terms.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::Context;

use super::{SystemClock, duration};
use crate::model::Clock;
use crate::settings::{self, Auth, RedisSettings, Settings, StoreChoice};
use crate::store::Store;
use crate::store::guard::{Deadline, Guard};
use crate::store::memory::Memory;
use crate::store::redis::credentials::{Credentials, Login};
use crate::store::redis::manager::{Access, Address, Tls};
use crate::store::redis::servers::Topology;
use crate::store::redis::{Instance, Redis};
use crate::telemetry::servers::Servers;

/// The stores of the process.
pub(super) struct Stores {
    /// The one that is asked, behind its guard.
    pub(super) guard: Guard,
    /// The embedded one: the one that is asked, or the one that decides under the policy `local`.
    pub(super) memory: Arc<Memory>,
    /// Redis, if it is the one that is asked.
    pub(super) redis: Option<Redis>,
}

/// Makes the stores, for so many threads that ask; `watched` is told how they answer.
///
/// # Errors
/// When a file that the settings name cannot be read: with the variable and the path.
pub(super) fn open(settings: &Settings, threads: usize, watched: &Arc<Servers>) -> anyhow::Result<Stores> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let memory = Arc::new(Memory::new(Arc::clone(&clock), settings.memory_max_counters.0));
    let redis = match &settings.store {
        StoreChoice::Memory { .. } => None,
        StoreChoice::Redis { main, per_second } => {
            let main = instance(main, "REDIS_AUTH_FILE", watched)?;
            let per_second = per_second.as_deref().map(|apart| instance(apart, "REDIS_PERSECOND_AUTH_FILE", watched));
            Some(Redis::new(main, per_second.transpose()?, &settings.cache_key_prefix.0, threads))
        }
    };
    let deadline = settings.store_deadline.0.map_or(Deadline::Auto, |length| Deadline::Fixed(duration(length)));
    let (store, deadline) = match &redis {
        Some(redis) => (Arc::new(redis.clone()) as Arc<dyn Store>, deadline),
        None => (Arc::clone(&memory) as Arc<dyn Store>, Deadline::AtOnce),
    };
    let guard = Guard::new(store, deadline, Arc::clone(&memory), settings.replicas, clock);
    Ok(Stores { guard, memory, redis })
}

fn instance(redis: &RedisSettings, auth_file: &str, watched: &Arc<Servers>) -> anyhow::Result<Instance> {
    let credentials = match &redis.auth {
        Auth::None => Credentials::fixed(Login::default()),
        Auth::Given(credentials) => Credentials::fixed(login(credentials)),
        Auth::File(path) => Credentials::of_file(path.clone(), parsed)
            .with_context(|| format!("{auth_file} is {}: it cannot be read", path.display()))?,
    };
    let tls = redis.tls.as_ref().map(|tls| Tls {
        ca: tls.authorities.clone(),
        client: tls.client.clone(),
        any_hostname: !tls.verifies_hostname,
    });
    if let Some(Tls { ca, client, .. }) = &tls {
        // The Redis client takes the process's own. A second start in one process keeps the first's.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (certificate, key) = client.clone().unzip();
        readable("REDIS_TLS_CACERT", ca.as_ref())?;
        readable("REDIS_TLS_CLIENT_CERT", certificate.as_ref())?;
        readable("REDIS_TLS_CLIENT_KEY", key.as_ref())?;
    }
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
        credentials: Arc::new(credentials),
        tls,
        db,
        connect_timeout: duration(redis.connect_timeout),
        alive: Arc::new(AtomicUsize::new(0)),
        watched: Arc::clone(watched),
    };
    Ok(Instance { topology, access })
}

/// Each connection reads it again; the first time it is to be there.
fn readable(variable: &str, path: Option<&PathBuf>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let read = std::fs::read(path).with_context(|| format!("{variable} is {}: it cannot be read", path.display()));
    read.map(drop)
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
