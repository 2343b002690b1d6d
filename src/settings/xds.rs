//! Settings of the rule source, and of rules from a control plane over xDS.

use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::tls::TlsVariables;
use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, rows};
use crate::model::Micros;
use crate::source::xds::plane::{ControlPlane, PlaneTls};

/// Rows of the settings of the rule source.
pub(super) const TABLES: [&[SettingRow]; 1] = [ROWS.table];

/// Settings of the rule source.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// The control plane; `None` for rule files.
    pub plane: Option<ControlPlane>,
    /// True if the service starts before it has rules.
    pub starts_without_rules: bool,
    /// True if the health checks fail while the rules have no domain.
    pub needs_rules: bool,
}

/// Settings of the rule source, not yet combined.
struct Variables {
    config_type: ConfigType,
    starts_without_rules: bool,
    needs_rules: bool,
    node_id: String,
    node_metadata: TextPairs,
    server: ServerAddress,
    headers: Headers,
    is_tls: bool,
    certificate: String,
    key: String,
    authorities: String,
    name: String,
    backoff_initial: Micros,
    backoff_max: Micros,
    backoff_growth: BackoffGrowth,
    has_jitter: bool,
    max_message: ResponseSize,
    hold_empty: Micros,
    state: String,
    state_max_age: Micros,
}

const ROWS: SettingRows<Variables> = rows!(Variables {
    config_type: ConfigType = "CONFIG_TYPE", "FILE", "Source of the rules: FILE for rule files, GRPC_XDS_SOTW for a control plane such as Envoy Gateway";
    starts_without_rules: bool = "FORCE_START_WITHOUT_INITIAL_CONFIG", "false", "Opens the listeners before the control plane has sent rules; calls get an error until then";
    needs_rules: bool = "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "false", "Fails the health checks while the rules in force have no domain";
    node_id: String = "CONFIG_GRPC_XDS_NODE_ID", "default", "ID of this instance for the control plane";
    node_metadata: TextPairs = "CONFIG_GRPC_XDS_NODE_METADATA", "", "Metadata of this instance for the control plane, such as zone=a,pool=b; an entry without = is dropped";
    server: ServerAddress = "CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000", "Address of the control plane";
    headers: Headers = "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "", "Headers of the stream to the control plane, such as authorization:Bearer abc,x-zone:a; read from the environment only";
    is_tls: bool = "CONFIG_GRPC_XDS_SERVER_USE_TLS", "false", "Connects to the control plane over TLS; the files are read for each connection";
    certificate: String = "CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "", "PEM file with the client certificate for the control plane";
    key: String = "CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "", "PEM file with the private key of CONFIG_GRPC_XDS_CLIENT_TLS_CERT";
    authorities: String = "CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "", "PEM file with the CA certificates to trust for the control plane; empty: the CAs of the system";
    name: String = "CONFIG_GRPC_XDS_SERVER_TLS_SAN", "", "DNS name or IP address that the certificate of the control plane must have; empty: the host in CONFIG_GRPC_XDS_SERVER_URL";
    backoff_initial: Micros = "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "1s", "Wait before the first new connection to the control plane";
    backoff_max: Micros = "XDS_CLIENT_BACKOFF_MAX_INTERVAL", "60s", "Longest wait before a new connection to the control plane";
    backoff_growth: BackoffGrowth = "XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "0.5", "Factor by which the wait grows with each failed connection; a factor below 2 counts as 2";
    has_jitter: bool = "XDS_CLIENT_BACKOFF_JITTER", "true", "Waits a random time between half of the wait and the whole one";
    max_message: ResponseSize = "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "", "Maximum size of a response of the control plane; empty: 4194304; a larger one ends the stream, and the rules in force stay";
    hold_empty: Micros = "XDS_HOLD_EMPTY", "0s", "Time for which the rules in force stay after the control plane has sent an empty set, for example because it restarts";
    state: String = "STATE_DIR", "", "Directory that keeps the rules of the control plane over a restart; it must belong to the user of the process and have mode 0700, and is created if it does not exist; empty: none";
    state_max_age: Micros = "STATE_MAX_AGE", "24h", "Age above which rules in STATE_DIR are not used: the time since the stream to the control plane was last up; 0: no limit";
});

/// Reads the settings of the rule source.
pub(super) fn read(given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<SourceSettings> {
    let read = (ROWS.read)(given, wrong)?;
    let (starts_without_rules, needs_rules) = (read.starts_without_rules, read.needs_rules);
    let plane = match read.config_type {
        ConfigType::File => None,
        ConfigType::Xds => Some(read.plane(wrong)),
    };
    Some(SourceSettings { plane, starts_without_rules, needs_rules })
}

impl Variables {
    fn plane(self, wrong: &mut Vec<InvalidSetting>) -> ControlPlane {
        let variables = TlsVariables {
            authorities: ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", &self.authorities),
            certificate: ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", &self.certificate),
            key: ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", &self.key),
        };
        let tls = self.is_tls.then(|| {
            wrong.extend(variables.half_a_client());
            let name = (!self.name.is_empty()).then(|| self.name.clone());
            PlaneTls { files: variables.files(false), name }
        });
        let files = [variables.authorities, variables.certificate, variables.key];
        let named = files.into_iter().chain([("CONFIG_GRPC_XDS_SERVER_TLS_SAN", self.name.as_str())]);
        for (variable, found) in named.filter(|(_, found)| !found.is_empty() && !self.is_tls) {
            let takes = "an empty value, because CONFIG_GRPC_XDS_SERVER_USE_TLS is false; set that to true to use TLS";
            wrong.push(InvalidSetting::Value { variable, found: <String as Setting>::shown(found), takes });
        }
        let duration = |length: Micros| Duration::from_micros(length.get());
        ControlPlane {
            host: self.server.host,
            port: self.server.port,
            tls,
            headers: self.headers.0,
            node_id: self.node_id,
            node_metadata: self.node_metadata.0,
            backoff_initial: duration(self.backoff_initial),
            backoff_max: duration(self.backoff_max),
            backoff_growth: self.backoff_growth.0,
            has_jitter: self.has_jitter,
            max_message: self.max_message.0,
            hold_empty: duration(self.hold_empty),
            state: (!self.state.is_empty()).then(|| (self.state.into(), duration(self.state_max_age))),
        }
    }
}

/// Kind of a rule source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConfigType {
    /// Rule files.
    File,
    /// A control plane, over xDS.
    Xds,
}

impl Setting for ConfigType {
    const TAKES: &'static str = "FILE or GRPC_XDS_SOTW";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_uppercase().as_str() {
            "" | "FILE" => Some(Self::File),
            "GRPC_XDS_SOTW" => Some(Self::Xds),
            _ => None,
        }
    }
}

/// Pairs of a name and a text, in the given order.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TextPairs(Vec<(String, String)>);

impl Setting for TextPairs {
    const TAKES: &'static str = "pairs such as zone=a,pool=b";
    fn parse(text: &str) -> Option<Self> {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        Some(Self(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
    }
}

/// Host and port of a server. The host of an IPv6 address has no brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServerAddress {
    host: String,
    port: u16,
}

impl Setting for ServerAddress {
    const TAKES: &'static str = "HOST:PORT";
    const EMPTY_IS_DEFAULT: bool = true;
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("dns:///").unwrap_or(text);
        let (host, port) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        let port = port.parse().ok().filter(|port| *port > 0)?;
        (!host.is_empty() && host.chars().all(is_plain)).then(|| Self { host: host.to_owned(), port })
    }
}

/// Headers, in the form of the reference: `name:value,name:value`. A value may have colons. Values may be secrets.
#[derive(Clone, Debug)]
struct Headers(Vec<(HeaderName, HeaderValue)>);

impl Setting for Headers {
    const TAKES: &'static str = "headers such as authorization:Bearer abc,x-zone:a";
    const IS_SECRET: bool = true;
    fn parse(text: &str) -> Option<Self> {
        let header = |pair: &str| {
            let (name, value) = pair.split_once(':')?;
            let mut value = HeaderValue::from_str(value.trim()).ok()?;
            value.set_sensitive(true);
            // A name that ends in -bin has a value in base 64, and grpc- names belong to the protocol.
            let name: HeaderName = name.trim().parse().ok()?;
            let is_own = name.as_str().ends_with("-bin") || name.as_str().starts_with("grpc-");
            (!is_own).then_some((name, value))
        };
        match text.trim() {
            "" => Some(Self(Vec::new())),
            text => text.split(',').map(header).collect::<Option<_>>().map(Self),
        }
    }
}

/// Factor of a backoff.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BackoffGrowth(f64);

impl Setting for BackoffGrowth {
    const TAKES: &'static str = "a number from 0 to 100";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|factor| (0.0..=100.0).contains(factor)).map(Self)
    }
}

/// Maximum size of a response, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResponseSize(usize);

impl ResponseSize {
    /// 4 MiB, the limit of gRPC's libraries and of the reference.
    const DEFAULT: usize = 4 << 20;
    /// Upper bound: 256 MiB, which hold more rules than a process can compile in its memory.
    const MOST: usize = 256 << 20;
}

impl Setting for ResponseSize {
    const TAKES: &'static str = "a number of bytes from 1 to 268435456";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(Self::DEFAULT));
        }
        text.parse().ok().filter(|bytes| (1..=Self::MOST).contains(bytes)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, wrong};
    use super::*;

    #[test]
    fn the_reference_s_forms_are_accepted() {
        let given = [("CONFIG_TYPE", "grpc_xds_sotw"), ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b, c=d=e,none")];
        let plane = read(&given).unwrap().source.plane.unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(plane.node_metadata, [pair("a", "b"), pair(" c", "d=e")], "the space before a name stays");
        assert_eq!(plane.max_message, 4_194_304);
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        let parsed = |text| ServerAddress::parse(text).map(|address| (address.host, address.port));
        assert_eq!(parsed("dns:///envoy-gateway:18001"), Some(("envoy-gateway".to_owned(), 18_001)));
        assert_eq!(parsed("[::1]:18001"), Some(("::1".to_owned(), 18_001)));
        for text in ["", "host", ":18000", "host:", "host:0", "host:65536", "http://host:18000", "a b:1", "a:b@host:1"]
        {
            assert_eq!(ServerAddress::parse(text), None, "{text}");
        }
        assert_eq!(
            wrong(&[("CONFIG_TYPE", "xds"), ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "0")]),
            [
                r#"CONFIG_TYPE is "xds": expected FILE or GRPC_XDS_SOTW"#,
                r#"XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES is "0": expected a number of bytes from 1 to 268435456"#,
            ]
        );
    }

    #[test]
    fn a_header_may_have_colons_and_spaces_and_is_never_shown() {
        let parsed = Headers::parse(" Authorization : Bearer a:b ,x-zone:a").unwrap().0;
        let shown: Vec<_> = parsed.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(shown, [("authorization", "Bearer a:b"), ("x-zone", "a")]);
        assert!(!format!("{parsed:?}").contains("Bearer"));
        let given = [("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "token=hunter2")];
        assert_eq!(
            wrong(&given),
            [
                r#"CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS is "***": expected headers such as authorization:Bearer abc,x-zone:a"#
            ]
        );
        for text in ["a b:c", ":c", "grpc-timeout:1S", "x-bin:a", "a:b\n"] {
            assert_eq!(Headers::parse(text).is_some(), text == "a:b\n", "{text:?}");
        }
    }

    #[test]
    fn a_certificate_needs_its_key_and_tls() {
        let given = |is_tls| {
            [
                ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
                ("CONFIG_GRPC_XDS_SERVER_USE_TLS", is_tls),
                ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
            ]
        };
        assert_eq!(
            wrong(&given("false")),
            [
                r#"CONFIG_GRPC_XDS_CLIENT_TLS_CERT is "/certs/tls.crt": expected an empty value, because CONFIG_GRPC_XDS_SERVER_USE_TLS is false; set that to true to use TLS"#
            ]
        );
        assert_eq!(
            wrong(&given("true")),
            [
                r#"CONFIG_GRPC_XDS_CLIENT_TLS_KEY is "": expected the file with the key of the client's certificate, which is set"#
            ]
        );
    }
}
