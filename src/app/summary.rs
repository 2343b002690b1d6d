//! Start-up summary: the listeners, the rules in force, and commands to try next.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use super::sockets::Addresses;
use crate::model::{self, StorePolicies};
use crate::rules::{Example, RuleSet};
use crate::serve::NetAddress;
use crate::settings::{ListenerTlsSettings, Settings, StoreChoice};

/// Maximum number of domains that are listed by name: 8.
const MOST_NAMED: usize = 8;

/// Start-up summary, as text for people.
#[derive(Debug)]
pub struct Summary<'a> {
    /// The settings in force.
    pub settings: &'a Settings,
    /// The rules in force.
    pub rules: &'a RuleSet,
    /// Name under which this program was called, for the commands to try.
    pub program: &'a str,
    /// Number of rule files.
    pub files: usize,
    /// Addresses of the listeners.
    pub addresses: Addresses,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { settings, rules, program, files, addresses: Addresses { grpc, http, debug, metrics } } = self;
        let domains = rules.domains();
        let more = if domains.len() > MOST_NAMED { ", ..." } else { "" };
        let named = domains.into_iter().take(MOST_NAMED).collect::<Vec<_>>().join(", ");
        writeln!(f, "tidegate {}", env!("CARGO_PKG_VERSION"))?;
        let tls = settings.listener_tls.as_ref();
        let if_tls = |is_tls: fn(&ListenerTlsSettings) -> bool, text| if tls.is_some_and(is_tls) { text } else { "" };
        let (over_tls, clients) =
            (if_tls(|_| true, ", over TLS"), if_tls(|tls| !tls.authorities.is_empty(), " with client certificates"));
        writeln!(f, "  gRPC     {grpc}  ShouldRateLimit, health, reflection{over_tls}{clients}")?;
        let over_tls = if_tls(|tls| tls.is_http_too, ", over TLS");
        writeln!(f, "  HTTP     {http}  /healthcheck, /json, /metrics{over_tls}")?;
        let over_tls = if_tls(|tls| tls.is_debug_too, ", over TLS");
        writeln!(f, "  debug    {debug}  /rlconfig, /log_level, /v1/{over_tls}")?;
        if let Some(metrics) = metrics {
            writeln!(f, "  metrics  {metrics}  {}", settings.prometheus_path.0)?;
        }
        writeln!(f, "  store    {}", store(settings))?;
        writeln!(f, "  rules    {}: {named}{more}", counted(rules, *files))?;
        let StorePolicies { on_failure, on_overload } = settings.policies();
        let (failure, overload) = (on_failure.name(), on_overload.name());
        writeln!(f, "  failure  {failure} (under overload: {overload}), unless a rule sets another policy")?;
        if let Some(terms) = settings.lease_default.0.terms() {
            writeln!(f, "  leases   hold up to {terms}, unless a rule sets others")?;
        }
        if !settings.callers_file.is_empty() {
            writeln!(f, "  callers  have the rights in {}, and no others", settings.callers_file)?;
        }
        if settings.shadow_mode {
            writeln!(f, "  mode     SHADOW_MODE: no request is refused")?;
        }
        if settings.quota_mode {
            writeln!(f, "  mode     QUOTA_MODE: a request is refused only if all of its limits refuse")?;
        }
        match rules.example() {
            // Only the operator knows a caller with the right to ask, and its certificate.
            Some(_) if !settings.callers_file.is_empty() => Ok(()),
            Some(example) => {
                let grpc = match grpc {
                    _ if settings.listener_tls.is_some() => None,
                    NetAddress::Tcp(address) => Some(reachable(*address).to_string()),
                    path @ NetAddress::Unix(_) => Some(quoted(&path.to_string())),
                };
                // The certificate is hardly for this address.
                let curl = match tls.is_some_and(|tls| tls.is_http_too) {
                    true => format!("curl -sk https://{}", reachable(*http)),
                    false => format!("curl -s http://{}", reachable(*http)),
                };
                let curl = settings.json_access.admits(Ipv4Addr::LOCALHOST.into()).then_some(curl);
                try_next(f, program, &example, grpc, curl)
            }
            None if !rules.is_loaded() => {
                writeln!(f, "  no rules yet: calls fail until the control plane has sent valid ones")
            }
            None if rules.is_empty() => writeln!(f, "  nothing is limited: there are no rules"),
            None => Ok(()),
        }
    }
}

impl Summary<'_> {
    /// Logs the summary as one event.
    pub(super) fn log(&self) {
        let Self { settings, rules, program: _, files, addresses } = self;
        let StorePolicies { on_failure, on_overload } = settings.policies();
        tracing::info!(
            event = "start.done",
            version = env!("CARGO_PKG_VERSION"),
            grpc = %addresses.grpc,
            http = %addresses.http,
            debug = %addresses.debug,
            metrics = addresses.metrics.map(tracing::field::display),
            store = store(settings),
            failure = on_failure.name(),
            overload = on_overload.name(),
            shadow_mode = settings.shadow_mode,
            quota_mode = settings.quota_mode,
            "the service has started with {}",
            counted(rules, *files)
        );
    }
}

/// Returns the size of a rule set, such as `12 rules in 2 domains from 1 file`.
pub fn counted(rules: &RuleSet, files: usize) -> String {
    let (all, domains) = (usize::try_from(rules.len()).unwrap_or(usize::MAX), rules.domains().len());
    let [all, domains, files] =
        [(all, "rule"), (domains, "domain"), (files, "file")].map(|(number, noun)| model::counted(number, noun));
    format!("{all} in {domains} from {files}")
}

/// Describes the store. Adds the reason if memory was chosen because no Redis address is set.
fn store(settings: &Settings) -> String {
    match &settings.store {
        StoreChoice::Memory { is_asked } => {
            let why = if *is_asked { "" } else { " (REDIS_URL is not set)" };
            format!("memory, at most about {} counters{why}", settings.memory_max_counters.0)
        }
        StoreChoice::Redis { main, per_second: None } => main.to_string(),
        StoreChoice::Redis { main, per_second: Some(apart) } => format!("{main}; limits per second: {apart}"),
    }
}

/// Writes example commands; each calls the server until a limit refuses. `grpc` is `None` if gRPC is served over TLS, because only
/// the operator knows the CA and the name that the first command needs then. `curl` is `None` if `/json` is closed.
fn try_next(
    f: &mut fmt::Formatter<'_>,
    program: &str,
    example: &Example<'_>,
    grpc: Option<String>,
    curl: Option<String>,
) -> fmt::Result {
    let entries = example.entries.iter().map(|(key, value)| serde_json::json!({ "key": key, "value": value }));
    let body = serde_json::json!({
        "domain": example.domain,
        "descriptors": [{ "entries": entries.collect::<Vec<_>>() }],
    });
    let body = quoted(&body.to_string());
    let descriptor = quoted(&notation(&example.entries));
    let (limit, times, domain) = (example.limit, u64::from(example.limit) + 1, quoted(example.domain));
    let again = format!(
        "the last of {times} calls is refused, and at most {} later a call is admitted again",
        example.admits_again_within
    );
    let call =
        |grpc| format!("{program} call --address {grpc} --domain {domain} --descriptor {descriptor} --times {times}");
    let post = |curl| format!("for i in $(seq {times}); do {curl}/json -w ' %{{http_code}}\\n' -d {body}; done");
    let commands = [grpc.map(call), curl.map(post)];
    match commands.iter().flatten().count() {
        0 => return Ok(()),
        1 => writeln!(f, "try this command (its limit is {limit}: {again})")?,
        _ => writeln!(f, "try one of these commands (they share a limit of {limit}: {again})")?,
    }
    commands.iter().flatten().try_for_each(|command| writeln!(f, "  {command}"))
}

/// Returns an address at which a client on this machine reaches `at`.
fn reachable(at: SocketAddr) -> SocketAddr {
    match at.ip() {
        ip if ip.is_unspecified() && ip.is_ipv6() => SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], at.port())),
        ip if ip.is_unspecified() => SocketAddr::from(([127, 0, 0, 1], at.port())),
        _ => at,
    }
}

/// Formats a descriptor as the command line takes it: `key=value,key=value`.
fn notation(entries: &[(String, String)]) -> String {
    let escape = |text: &str| text.replace('\\', "\\\\").replace(',', "\\,");
    entries.iter().map(|(key, value)| format!("{}={}", escape(key), escape(value))).collect::<Vec<_>>().join(",")
}

/// Quotes `text` for a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:@%+".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::{notation, quoted, store};
    use crate::settings::Settings;

    #[test]
    fn the_store_is_told_and_its_secrets_are_not() {
        let told = |given: &[(&str, &str)]| {
            let find =
                |name: &str| given.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned());
            store(&Settings::read(find).unwrap())
        };
        assert_eq!(told(&[]), "memory, at most about 1000000 counters (REDIS_URL is not set)");
        assert_eq!(told(&[("BACKEND_TYPE", "memory")]), "memory, at most about 1000000 counters");
        assert_eq!(told(&[("REDIS_URL", "rediss://alice:hunter2@[::1]/3")]), "redis at [::1]:6379, database 3, TLS");
        let apart = [
            ("REDIS_TYPE", "CLUSTER"),
            ("REDIS_URL", "n1:6379, n2:6379"),
            ("REDIS_AUTH", "hunter2"),
            ("REDIS_PERSECOND", "true"),
            ("REDIS_PERSECOND_TYPE", "sentinel"),
            ("REDIS_PERSECOND_URL", "tide,s1:26379,s2:26379"),
            ("REDIS_PERSECOND_SENTINEL_AUTH", "hunter2"),
        ];
        assert_eq!(
            told(&apart),
            "redis cluster at n1:6379,n2:6379; limits per second: redis master tide, sentinels at s1:26379,s2:26379"
        );
    }

    #[test]
    fn a_printed_descriptor_survives_the_shell_and_the_command_line() {
        let entries = [("k,".to_owned(), r"v\'".to_owned())];
        assert_eq!(notation(&entries), r"k\,=v\\'");
        assert_eq!(quoted(&notation(&entries)), r"'k\,=v\\'\'''");
        assert_eq!(quoted("user=alice"), "user=alice");
    }
}
