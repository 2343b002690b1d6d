//! Choice of the store: the settings that determine it, and how they combine.

use super::redis::{MAIN, PER_SECOND, RedisSettings};
use super::tls::TlsVariables;
use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, rows};

/// Rows of the settings that choose and configure the store.
pub(super) const TABLES: [&[SettingRow]; 3] = [STORE.table, MAIN.rows.table, PER_SECOND.rows.table];

/// Store that holds the counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreChoice {
    /// The embedded store of this process.
    Memory {
        /// True if `BACKEND_TYPE` asks for it; false if no address of a Redis is given.
        is_asked: bool,
    },
    /// One or two Redis deployments.
    Redis {
        /// The Redis of all counters that have no other one.
        main: Box<RedisSettings>,
        /// The Redis of limits per second, if they have their own.
        per_second: Option<Box<RedisSettings>>,
    },
}

/// Value of `BACKEND_TYPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Auto,
    Memory,
    Redis,
}

/// Settings common to all Redis servers, not yet combined.
struct StoreVariables {
    backend: Backend,
    is_per_second_apart: bool,
    client_certificate: String,
    client_key: String,
    authorities: String,
    skips_hostname: bool,
}

const STORE: SettingRows<StoreVariables> = rows!(StoreVariables {
    backend: Backend = "BACKEND_TYPE", "", "Store for the counters; memory: the memory of this process; empty: redis if REDIS_URL or REDIS_PERSECOND_URL is set, else memory";
    is_per_second_apart: bool = "REDIS_PERSECOND", "false", "Counts limits per second in a separate Redis";
    client_certificate: String = "REDIS_TLS_CLIENT_CERT", "", "PEM file with the client certificate for Redis";
    client_key: String = "REDIS_TLS_CLIENT_KEY", "", "PEM file with the private key of REDIS_TLS_CLIENT_CERT";
    authorities: String = "REDIS_TLS_CACERT", "", "PEM file with the CA certificates to trust for Redis; empty: the CAs of the system";
    skips_hostname: bool = "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "false", "Accepts a Redis certificate for another host name";
});

/// Reads the settings of the store. Adds what is invalid to `wrong`.
pub(super) fn read(given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<StoreChoice> {
    let store = (STORE.read)(given, wrong);
    let main = (MAIN.rows.read)(given, wrong);
    let per_second = (PER_SECOND.rows.read)(given, wrong);
    let (store, main, per_second) = (store?, main?, per_second?);
    let is_redis = match store.backend {
        Backend::Auto => main.is_given() || per_second.is_given(),
        Backend::Memory => false,
        Backend::Redis => true,
    };
    if !is_redis {
        return Some(StoreChoice::Memory { is_asked: store.backend == Backend::Memory });
    }
    let tls = store.tls();
    if main.is_tls() || (store.is_per_second_apart && per_second.is_tls()) {
        wrong.extend(tls.half_a_client());
    }
    let tls = tls.files(store.skips_hostname);
    let main = main.settings(&MAIN.names, &tls, wrong);
    let per_second =
        store.is_per_second_apart.then(|| per_second.settings(&PER_SECOND.names, &tls, wrong).map(Box::new));
    Some(StoreChoice::Redis {
        main: Box::new(main?),
        per_second: match per_second {
            Some(apart) => Some(apart?),
            None => None,
        },
    })
}

impl StoreVariables {
    /// Returns the TLS variables common to all connections.
    fn tls(&self) -> TlsVariables<'_> {
        TlsVariables {
            authorities: ("REDIS_TLS_CACERT", &self.authorities),
            certificate: ("REDIS_TLS_CLIENT_CERT", &self.client_certificate),
            key: ("REDIS_TLS_CLIENT_KEY", &self.client_key),
        }
    }
}

impl Setting for Backend {
    const TAKES: &'static str = "memory, redis or empty";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "" => Some(Self::Auto),
            // `unsupported` already reports Memcached as an error, so the value here has no effect.
            "memory" | "memcache" => Some(Self::Memory),
            "redis" => Some(Self::Redis),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StoreChoice;
    use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};
    use crate::settings::tests::{read, wrong};

    fn named(variable: &'static str, path: &str, most: usize) -> Named {
        Named::new(variable, path.into(), most)
    }

    fn store(given: &[(&str, &str)]) -> StoreChoice {
        read(given).expect("settings").store
    }

    #[test]
    fn an_address_chooses_redis_and_backend_type_has_the_last_word() {
        let is_redis = |given: &[(&str, &str)]| matches!(store(given), StoreChoice::Redis { .. });
        assert_eq!(store(&[]), StoreChoice::Memory { is_asked: false });
        assert_eq!(store(&[("REDIS_URL", ""), ("REDIS_SOCKET_TYPE", "tcp")]), StoreChoice::Memory { is_asked: false });
        let asked = [("REDIS_URL", "redis:6379"), ("BACKEND_TYPE", "Memory")];
        assert_eq!(store(&asked), StoreChoice::Memory { is_asked: true });
        assert!(is_redis(&[("REDIS_URL", "redis:6379")]));
        assert!(is_redis(&[("REDIS_URL", "redis:6379"), ("BACKEND_TYPE", "redis")]));
    }

    #[test]
    fn redis_without_an_address_stops_the_start() {
        for given in [("BACKEND_TYPE", "redis"), ("REDIS_PERSECOND_URL", "redis:6379")] {
            let wrong = wrong(&[given]);
            assert!(wrong.len() == 1 && wrong[0].starts_with("REDIS_URL is \"\": expected HOST:PORT"), "{wrong:?}");
        }
        let wrong = wrong(&[("REDIS_URL", "redis:6379"), ("REDIS_PERSECOND", "true")]);
        assert!(wrong.len() == 1 && wrong[0].starts_with("REDIS_PERSECOND_URL is \"\""), "{wrong:?}");
    }

    #[test]
    fn limits_per_second_are_apart_only_when_asked() {
        let given = [("REDIS_URL", "a:1"), ("REDIS_PERSECOND_URL", "b:2")];
        assert!(matches!(store(&given), StoreChoice::Redis { per_second: None, .. }));
        let StoreChoice::Redis { main, per_second: Some(apart) } = store(&[
            given[0],
            given[1],
            ("REDIS_PERSECOND", "true"),
            ("REDIS_PERSECOND_TLS", "true"),
            ("REDIS_TLS_CACERT", "/ca.pem"),
            ("REDIS_PERSECOND_TIMEOUT", "300ms"),
            ("REDIS_PERSECOND_AUTH_FILE", "/password"),
        ]) else {
            panic!("two of them");
        };
        assert_eq!((main.to_string(), apart.to_string()), ("redis at a:1".to_owned(), "redis at b:2, TLS".to_owned()));
        assert_eq!((main.connect_timeout.get(), apart.connect_timeout.get()), (1_000_000, 300_000));
        assert_eq!(apart.tls.expect("TLS").authorities, Some(named("REDIS_TLS_CACERT", "/ca.pem", MAX_CERTIFICATES)));
    }

    #[test]
    fn tls_is_strict_unless_told_otherwise() {
        let tls = |given: &[(&str, &str)]| match store(given) {
            StoreChoice::Redis { main, .. } => main.tls,
            StoreChoice::Memory { .. } => panic!("no Redis"),
        };
        assert_eq!(tls(&[("REDIS_URL", "a:1"), ("REDIS_TLS_CACERT", "/ca.pem")]), None);
        let by_url = tls(&[("REDIS_URL", "rediss://a:1")]).expect("TLS");
        assert!(!by_url.any_hostname && by_url.client.is_none() && by_url.authorities.is_none());
        let all = tls(&[
            ("REDIS_URL", "a:1"),
            ("REDIS_TLS", "true"),
            ("REDIS_TLS_CLIENT_CERT", "/cert.pem"),
            ("REDIS_TLS_CLIENT_KEY", "/key.pem"),
            ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ]);
        let all = all.expect("TLS");
        assert_eq!(
            all.client,
            Some((
                named("REDIS_TLS_CLIENT_CERT", "/cert.pem", MAX_CERTIFICATES),
                named("REDIS_TLS_CLIENT_KEY", "/key.pem", MAX_SECRET)
            ))
        );
        assert!(all.any_hostname);
    }

    #[test]
    fn half_a_client_certificate_stops_the_start() {
        let given = |variable| [("REDIS_URL", "a:1"), ("REDIS_TLS", "true"), (variable, "/file.pem")];
        assert_eq!(
            wrong(&given("REDIS_TLS_CLIENT_CERT")),
            [r#"REDIS_TLS_CLIENT_KEY is "": expected the file with the key of the client's certificate, which is set"#]
        );
        assert_eq!(
            wrong(&given("REDIS_TLS_CLIENT_KEY")),
            [
                r#"REDIS_TLS_CLIENT_CERT is "": expected the file with the certificate of the client's key, which is set"#
            ]
        );
    }
}
