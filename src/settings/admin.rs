//! Settings of readers of the debug listener on other machines.

use std::net::IpAddr;
use std::sync::Arc;

use http::uri::Authority;

use super::values::Setting;
use super::{InvalidSetting, ListenerTlsSettings, Lookup, SettingRow, SettingRows, UnusedVariable, rows};
use crate::file::{MAX_SECRET, Named};

/// Rows of these settings.
pub(super) const TABLE: &[SettingRow] = ROWS.table;

/// Maximum number of names in `ADMIN_HOSTS`: 100.
const MOST_HOSTS: usize = 100;

const TOKENS: &str = "ADMIN_TOKEN_FILE";
const HOSTS: &str = "ADMIN_HOSTS";
const DEBUG_HOST: &str = "DEBUG_HOST";

/// Settings of readers of the debug listener on other machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// File with the tokens of readers.
    pub tokens: Option<Named>,
    /// Names and addresses under which this instance is reached, in lower case and without brackets.
    pub hosts: Arc<[String]>,
}

/// These settings, not yet combined.
struct Variables {
    tokens: String,
    hosts: Hosts,
}

const ROWS: SettingRows<Variables> = rows!(Variables {
    tokens: String = TOKENS, "", "File with the tokens of readers of the debug listener on other machines, one NAME:RIGHT:SECRET per line; read again when it changes; empty: only callers at a loopback address read what is below /v1/";
    hosts: Hosts = HOSTS, "", "Host names and addresses, separated by commas, under which readers with a token reach the debug listener; requests below /v1/ with another Host are refused; empty: all are";
});

/// Reads the settings. `tls` are those of the listeners; `None` if they are invalid. Adds variables without effect to `unused`.
pub(super) fn read(
    given: Lookup<'_>,
    tls: Option<&Option<ListenerTlsSettings>>,
    wrong: &mut Vec<InvalidSetting>,
    unused: &mut Vec<UnusedVariable>,
) -> Option<AdminSettings> {
    let Variables { tokens, hosts: Hosts(hosts) } = (ROWS.read)(given, wrong)?;
    let address = given(DEBUG_HOST).and_then(|text| IpAddr::parse(text.trim()));
    let is_remote = address.is_some_and(|address| !address.is_loopback());
    let has_tls = |tls: &Option<ListenerTlsSettings>| tls.as_ref().is_some_and(|tls| tls.is_debug_too);
    let mut has_no_effect = |variable, why| unused.push(UnusedVariable { variable, why });
    match (tokens.is_empty(), is_remote) {
        (false, true) => {
            if tls.is_some_and(|tls| !has_tls(tls)) {
                let takes = "true, because ADMIN_TOKEN_FILE is set and DEBUG_HOST is not a loopback address, so tokens and values would cross the network in plaintext";
                wrong.push(InvalidSetting::Value {
                    variable: "DEBUG_SERVER_USE_TLS",
                    found: "false".to_owned(),
                    takes,
                });
            }
            if hosts.is_empty() {
                has_no_effect(
                    TOKENS,
                    "ADMIN_HOSTS is empty, so every request below /v1/ is refused; set it to the names under which this instance is reached",
                );
            }
        }
        (false, false) => {
            has_no_effect(TOKENS, "DEBUG_HOST is a loopback address, where reading needs no token");
        }
        (true, _) if !hosts.is_empty() => has_no_effect(HOSTS, "it applies only with ADMIN_TOKEN_FILE"),
        (true, _) => {}
    }
    let tokens = (!tokens.is_empty()).then(|| Named::new(TOKENS, tokens.into(), MAX_SECRET));
    Some(AdminSettings { tokens, hosts: hosts.into() })
}

/// Names and addresses of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hosts(Vec<String>);

impl Setting for Hosts {
    const TAKES: &'static str = "at most 100 host names or IP addresses without a port, separated by commas, such as tidegate.edge.svc,10.0.0.7";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(Vec::new()));
        }
        let hosts: Vec<_> = text.split(',').map(|host| parsed_host(host.trim())).collect::<Option<_>>()?;
        (hosts.len() <= MOST_HOSTS).then_some(Self(hosts))
    }
}

/// Returns a host name in lower case, or an address as a Host header has it without brackets.
fn parsed_host(host: &str) -> Option<String> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Some(address.to_string());
    }
    let is_name =
        host.parse::<Authority>().is_ok_and(|parsed| parsed.host() == host) && !host.contains(['*', '@', ':']);
    is_name.then(|| host.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, wrong};
    use super::*;

    const REMOTE: (&str, &str) = (DEBUG_HOST, "0.0.0.0");
    const FILE: (&str, &str) = (TOKENS, "/etc/tidegate/tokens");
    const NAMED: (&str, &str) = (HOSTS, "tidegate.edge");
    const TLS: [(&str, &str); 4] = [
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", "/certs/tls.crt"),
        ("GRPC_SERVER_TLS_KEY", "/certs/tls.key"),
        ("DEBUG_SERVER_USE_TLS", "true"),
    ];

    fn over_tls(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        [&TLS[..], more].concat()
    }

    #[test]
    fn tokens_for_other_machines_need_tls() {
        let expected = r#"DEBUG_SERVER_USE_TLS is "false": expected true, because ADMIN_TOKEN_FILE is set and DEBUG_HOST is not a loopback address, so tokens and values would cross the network in plaintext"#;
        assert_eq!(wrong(&[REMOTE, FILE, NAMED]), [expected]);
        assert_eq!(wrong(&[&TLS[..3], &[REMOTE, FILE, NAMED]].concat()), [expected]);
        let admin = read(&over_tls(&[REMOTE, FILE, NAMED])).unwrap().admin;
        assert_eq!(admin.hosts.to_vec(), ["tidegate.edge"]);
        assert!(admin.tokens.is_some());
        assert!(read(&[FILE]).is_ok(), "on loopback nothing crosses the network");
        assert!(read(&[REMOTE]).is_ok(), "without tokens nothing is served");
    }

    #[test]
    fn a_variable_without_effect_is_named_with_what_it_needs() {
        let unused = |given: &[(&str, &str)]| -> Vec<_> {
            read(given).unwrap().unused.into_iter().map(|unused| (unused.variable, unused.why)).collect()
        };
        assert_eq!(unused(&over_tls(&[REMOTE, FILE, NAMED])), []);
        let [(TOKENS, why)] = unused(&over_tls(&[REMOTE, FILE]))[..] else { panic!("one variable") };
        assert!(why.contains("ADMIN_HOSTS is empty"), "{why}");
        let [(TOKENS, why)] = unused(&[FILE])[..] else { panic!("one variable") };
        assert!(why.contains("loopback"), "{why}");
        let [(HOSTS, why)] = unused(&[NAMED])[..] else { panic!("one variable") };
        assert!(why.contains("ADMIN_TOKEN_FILE"), "{why}");
    }

    #[test]
    fn hosts_are_names_and_addresses_without_a_port() {
        let hosts = |text: &str| Hosts::parse(text).map(|Hosts(hosts)| hosts);
        let expected = ["tidegate.edge", "10.0.0.7", "2001:db8::1"];
        assert_eq!(hosts("Tidegate.Edge, 10.0.0.7,[2001:DB8::1]").unwrap(), expected);
        assert_eq!(hosts(""), Some(Vec::new()));
        for text in [",", "a,,b", "tidegate:6070", "10.0.0.7:6070", "*.edge", "*", "ann@edge", "a b", "http://a"] {
            assert_eq!(hosts(text), None, "{text}");
        }
    }
}
