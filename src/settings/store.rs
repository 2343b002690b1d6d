//! Choice of the store: the settings that determine it, and how they combine.

use super::redis::{MAIN, PER_SECOND, RedisSettings};
use super::tls::TlsVariables;
use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, Settings, rows};

/// Rows of the settings that choose and configure the store.
pub(super) const TABLES: [&[SettingRow]; 3] = [STORE.table, MAIN.rows.table, PER_SECOND.rows.table];

/// Store that holds the counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreChoice {
    /// The embedded store of this process.
    Memory {
        /// True if `BACKEND_TYPE` asks for it; false if nothing names a Redis.
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
    backend: Backend = "BACKEND_TYPE", "", "Store for the counters; memory: the memory of this process; empty: redis if REDIS_URL is set, else memory";
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
        Backend::Auto if main.is_given() => true,
        Backend::Auto => {
            let is_empty = given("REDIS_URL").is_some();
            let variables: Vec<_> = of_redis(given).collect();
            if is_empty || !variables.is_empty() {
                wrong.push(InvalidSetting::WithoutRedis { is_empty, variables });
                return None;
            }
            false
        }
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

/// Returns the settings that only Redis gives a meaning, and that are given with another value than the default.
pub(super) fn of_redis(given: Lookup<'_>) -> impl Iterator<Item = &'static str> {
    let beside = Settings::PROCESS.iter().filter(|row| row.variable == "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION");
    let all = TABLES.into_iter().flatten().chain(beside).filter(|row| row.variable != "BACKEND_TYPE");
    all.filter(move |row| given(row.variable).is_some_and(|text| !row.is_default(&text))).map(|row| row.variable)
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
        let asked = [("REDIS_URL", "redis:6379"), ("BACKEND_TYPE", "Memory")];
        assert_eq!(store(&asked), StoreChoice::Memory { is_asked: true });
        assert!(is_redis(&[("REDIS_URL", "redis:6379")]));
        assert!(is_redis(&[("REDIS_URL", "redis:6379"), ("BACKEND_TYPE", "redis")]));
    }

    /// Settings that only Redis gives a meaning, each with a value that is not its default.
    const OF_REDIS: &str = "REDIS_PERSECOND=1 REDIS_TLS_CLIENT_CERT=/c REDIS_TLS_CLIENT_KEY=/k REDIS_TLS_CACERT=/a
        REDIS_TLS_SKIP_HOSTNAME_VERIFICATION=T REDIS_TYPE=SENTINEL REDIS_SOCKET_TYPE=tcp REDIS_AUTH=p REDIS_AUTH_FILE=/p
        REDIS_AUTH_COMMAND=/p REDIS_CONNECTION_MAX_AGE=12h REDIS_SENTINEL_AUTH=p REDIS_TLS=true REDIS_TIMEOUT=10s
        REDIS_PERSECOND_TYPE=cluster REDIS_PERSECOND_SOCKET_TYPE=unix REDIS_PERSECOND_URL=b:2 REDIS_PERSECOND_AUTH=p
        REDIS_PERSECOND_AUTH_FILE=/p REDIS_PERSECOND_AUTH_COMMAND=/p REDIS_PERSECOND_CONNECTION_MAX_AGE=2s
        REDIS_PERSECOND_SENTINEL_AUTH=p REDIS_PERSECOND_TLS=True REDIS_PERSECOND_TIMEOUT=2s
        REDIS_HEALTH_CHECK_ACTIVE_CONNECTION=true";

    #[test]
    fn a_setting_of_redis_without_its_address_stops_the_start_unless_memory_is_asked_for() {
        let of_redis: Vec<_> =
            OF_REDIS.split_whitespace().map(|given| given.split_once('=').expect("a value")).collect();
        let advice = "set REDIS_URL, or set BACKEND_TYPE=memory, with which each instance counts for itself";
        for given in &of_redis {
            let expected = format!("REDIS_URL is not set, but {} is set: {advice}", given.0);
            assert_eq!(wrong(&[*given]), [expected]);
            let asked = read(&[*given, ("BACKEND_TYPE", "memory")]).expect("settings");
            assert_eq!(asked.store, StoreChoice::Memory { is_asked: true });
            let why = "BACKEND_TYPE is memory, so counters are in the memory of this process";
            assert_eq!(
                asked.unused.iter().map(|unused| (unused.variable, unused.why)).collect::<Vec<_>>(),
                [(given.0, why)]
            );
            assert!(read(&[*given, ("REDIS_URL", "")]).is_err());
        }
        let names = of_redis.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        assert_eq!(wrong(&of_redis), [format!("REDIS_URL is not set, but {names} are set: {advice}")]);
        for empty in ["", " "] {
            assert_eq!(wrong(&[("REDIS_URL", empty)]), [format!("REDIS_URL is empty: {advice}")]);
        }
        let empty = [("REDIS_URL", ""), ("REDIS_TYPE", "cluster")];
        assert_eq!(wrong(&empty), [format!("REDIS_URL is empty, but REDIS_TYPE is set: {advice}")]);
    }

    #[test]
    fn every_setting_named_for_redis_and_no_default_of_one_stops_the_start_without_an_address() {
        let named: Vec<_> = OF_REDIS.split_whitespace().filter_map(|given| given.split('=').next()).collect();
        for row in crate::settings::Settings::table() {
            let is_of_redis = row.variable.starts_with("REDIS_");
            assert_eq!(named.contains(&row.variable), is_of_redis && row.variable != "REDIS_URL", "{}", row.variable);
            let is_url = row.variable == "REDIS_URL";
            assert!(is_url || store(&[(row.variable, row.default)]) == StoreChoice::Memory { is_asked: false });
        }
        for given in [
            ("REDIS_TYPE", "SINGLE"),
            ("REDIS_TLS", "0"),
            ("REDIS_PERSECOND", "F"),
            ("REDIS_TIMEOUT", "1000ms"),
            ("REDIS_CONNECTION_MAX_AGE", "0h"),
            ("REDIS_AUTH", ""),
        ] {
            assert_eq!(store(&[given]), StoreChoice::Memory { is_asked: false }, "{given:?}");
        }
    }

    #[test]
    fn redis_without_an_address_stops_the_start() {
        let wrong_ones = wrong(&[("BACKEND_TYPE", "redis")]);
        assert!(
            wrong_ones.len() == 1 && wrong_ones[0].starts_with("REDIS_URL is \"\": expected HOST:PORT"),
            "{wrong_ones:?}"
        );
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
