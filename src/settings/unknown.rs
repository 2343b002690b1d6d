//! Variables of the environment that are named as settings of Redis are, and are none.

use std::fmt;

use super::{Settings, UNUSED};

/// Maximum number of names in the warning: 20. Kubernetes sets seven for each Service.
const MOST_NAMED: usize = 20;

/// Variables that look like settings of Redis and have no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVariables {
    names: Vec<String>,
    of_kubernetes: Vec<String>,
    /// True if nothing says where the counters are.
    is_undecided: bool,
}

impl UnknownVariables {
    /// Returns those of `environment`, pairs of name and value. `is_undecided`: neither a Redis nor memory is asked for. `None` if there
    /// are none, or only those that Kubernetes sets beside a Service, and these cannot be a mistake.
    pub fn find(environment: impl IntoIterator<Item = (String, String)>, is_undecided: bool) -> Option<Self> {
        let is_known = |name: &str| {
            Settings::table().any(|row| row.variable == name) || UNUSED.iter().any(|unused| unused.variable == name)
        };
        let looks_like_redis = |name: &str| name.get(..5).is_some_and(|begin| begin.eq_ignore_ascii_case("redis"));
        let found = environment.into_iter().filter(|(name, _)| looks_like_redis(name) && !is_known(name));
        let (of_kubernetes, own): (Vec<_>, Vec<_>) = found.partition(|(name, value)| is_of_kubernetes(name, value));
        let sorted = |variables: Vec<(String, String)>| {
            let mut names: Vec<_> = variables.into_iter().map(|(name, _)| name).collect();
            names.sort_unstable();
            names
        };
        let (names, of_kubernetes) = (sorted(own), sorted(of_kubernetes));
        let is_worth_a_line = !names.is_empty() || (is_undecided && !of_kubernetes.is_empty());
        is_worth_a_line.then_some(Self { names, of_kubernetes, is_undecided })
    }
}

/// One sentence that names them and says what to set.
impl fmt::Display for UnknownVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.names.is_empty() {
            write!(f, "no setting has the name {}, so it has no effect", list(&self.names, " or "))?;
            f.write_str(if self.is_undecided { ": did you mean REDIS_URL?" } else { "" })?;
        }
        if !self.of_kubernetes.is_empty() {
            f.write_str(if self.names.is_empty() { "" } else { "; " })?;
            write!(
                f,
                "Kubernetes sets {} beside a Service of that name, which has no effect",
                list(&self.of_kubernetes, ", ")
            )?;
            let advice = if self.is_undecided { ": to count in that Redis, set REDIS_URL" } else { "" };
            f.write_str(advice)?;
        }
        Ok(())
    }
}

fn list(names: &[String], between: &str) -> String {
    let more = if names.len() > MOST_NAMED { format!("{between}...") } else { String::new() };
    let named: Vec<_> = names.iter().take(MOST_NAMED).map(String::as_str).collect();
    named.join(between) + &more
}

/// Returns true for a variable that Kubernetes sets in each pod for a Service of the namespace, such as `REDIS_SERVICE_HOST` and
/// `REDIS_PORT=tcp://10.0.0.1:6379`.
pub(super) fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let is_of_port = |(_, rest): (&str, &str)| rest.starts_with(|c: char| c.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.split_once("_PORT_").is_some_and(is_of_port)
        || (name.ends_with("_PORT") && value.contains("://"))
}

/// Returns the name of the Service beside which Kubernetes sets `variable`.
pub(super) fn service_of(variable: &str) -> String {
    variable.trim_end_matches("_PORT").to_ascii_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests {
    use super::super::tests::wrong;
    use super::{Settings, UnknownVariables};

    fn told(environment: &[(&str, &str)], is_undecided: bool) -> Option<String> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        UnknownVariables::find(environment, is_undecided).map(|unknown| unknown.to_string())
    }

    /// The variables that Kubernetes sets in pods beside the Services `redis` and `redis-ratelimit`.
    const OF_KUBERNETES: [(&str, &str); 9] = [
        ("REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("REDIS_PORT_6379_TCP", "tcp://10.0.0.1:6379"),
        ("REDIS_PORT_6379_TCP_ADDR", "10.0.0.1"),
        ("REDIS_PORT_6379_TCP_PORT", "6379"),
        ("REDIS_PORT_6379_TCP_PROTO", "tcp"),
        ("REDIS_RATELIMIT_PORT", "tcp://[fd00::1]:6379"),
        ("REDIS_SERVICE_HOST", "10.0.0.1"),
        ("REDIS_SERVICE_PORT", "6379"),
        ("REDIS_SERVICE_PORT_TCP_REDIS", "6379"),
    ];

    #[test]
    fn names_that_are_no_setting_are_named_once_with_the_one_that_is() {
        let given = [
            ("REDIS_PORT", "6379"),
            ("REDIS_HOST", "cache"),
            ("REDIS_URI", "redis://h"),
            ("REDISURL", "h:1"),
            ("redis_url", "h:1"),
        ];
        assert_eq!(
            told(&given, true).as_deref(),
            Some(
                "no setting has the name REDISURL or REDIS_HOST or REDIS_PORT or REDIS_URI or redis_url, so it has no effect: did you mean REDIS_URL?"
            )
        );
        assert_eq!(
            told(&given[1..2], false).as_deref(),
            Some("no setting has the name REDIS_HOST, so it has no effect"),
            "with an address there is nothing to guess"
        );
        for known in ["REDIS_URL", "REDIS_POOL_SIZE", "REDIS_PERSECOND_TIMEOUT", "PATH", "RÉDIS", "REDI"] {
            assert_eq!(told(&[(known, "1")], true), None, "{known}");
        }
    }

    #[test]
    fn what_kubernetes_sets_beside_a_service_is_known_and_named_only_where_redis_may_be_meant() {
        let names = OF_KUBERNETES.map(|(name, _)| name).join(", ");
        let expected = format!(
            "Kubernetes sets {names} beside a Service of that name, which has no effect: to count in that Redis, set REDIS_URL"
        );
        assert_eq!(told(&OF_KUBERNETES, true), Some(expected));
        assert_eq!(told(&OF_KUBERNETES, false), None);
        let both = told(&[("REDIS_HOST", "a"), OF_KUBERNETES[0]], false);
        assert_eq!(
            both.as_deref(),
            Some(
                "no setting has the name REDIS_HOST, so it has no effect; Kubernetes sets REDIS_PORT beside a Service of that name, which has no effect"
            )
        );
    }

    #[test]
    fn a_port_that_kubernetes_sets_beside_a_service_of_that_name_has_advice() {
        let ports: Vec<_> = Settings::table().filter(|row| row.variable.ends_with("_PORT")).collect();
        assert_eq!(ports.len(), 3);
        for (row, service) in ports.into_iter().zip(["grpc", "debug", "statsd"]) {
            for (address, is_advised) in
                [("tcp://10.0.0.1:8081", true), ("udp://[fd00::1]:8125", true), ("http", false)]
            {
                let told = wrong(&[(row.variable, address)]).join("\n");
                let (variable, takes) = (row.variable, row.takes);
                let advice = format!(
                    "; Kubernetes sets it beside a Service named {service}: set enableServiceLinks: false in the spec of the pod, or {variable} in the env of the container"
                );
                let advice = if is_advised { &advice } else { "" };
                assert_eq!(told, format!("{variable} is {address:?}: expected {takes}{advice}"));
            }
        }
    }

    #[test]
    fn a_long_list_of_names_ends() {
        let many: Vec<_> = (10..40).map(|number| (format!("REDIS_X{number}"), String::new())).collect();
        let told = UnknownVariables::find(many, false).expect("a warning").to_string();
        assert!(told.contains("REDIS_X29 or ..., so") && !told.contains("REDIS_X30"), "{told}");
    }
}
