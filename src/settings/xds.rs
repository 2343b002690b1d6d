//! Settings of the rule source, and of rules from a control plane over xDS.

use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, rows};
use crate::model::Micros;

/// Rows of the settings of the rule source.
pub(super) const TABLES: [&[SettingRow]; 1] = [ROWS.table];

/// Settings of the rule source.
#[derive(Clone, Debug)]
pub struct XdsSettings {
    /// Kind of the rule source.
    pub config_type: ConfigType,
    /// True if the service starts before it has rules.
    pub starts_without_rules: bool,
    /// ID of this node.
    pub node_id: String,
    /// Metadata of this node.
    pub node_metadata: TextPairs,
    /// Address of the control plane.
    pub server: ServerAddress,
    /// Not used.
    pub _connect_retry: Micros,
    /// First wait before a new connection.
    pub backoff_initial: Micros,
    /// Longest wait before a new connection.
    pub backoff_max: Micros,
    /// Growth of the wait.
    pub backoff_growth: BackoffGrowth,
    /// True if the wait varies at random.
    pub has_jitter: bool,
    /// Maximum size of a response.
    pub max_message: ResponseSize,
}

const ROWS: SettingRows<XdsSettings> = rows!(XdsSettings {
    config_type: ConfigType = "CONFIG_TYPE", "FILE", "Source of the rules: FILE for rule files, GRPC_XDS_SOTW for a control plane such as Envoy Gateway";
    starts_without_rules: bool = "FORCE_START_WITHOUT_INITIAL_CONFIG", "false", "Opens the listeners before the control plane has sent rules; calls get an error until then";
    node_id: String = "CONFIG_GRPC_XDS_NODE_ID", "default", "ID of this instance for the control plane";
    node_metadata: TextPairs = "CONFIG_GRPC_XDS_NODE_METADATA", "", "Metadata of this instance for the control plane, such as zone=a,pool=b; an entry without = is dropped";
    server: ServerAddress = "CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000", "Address of the control plane";
    _connect_retry: Micros = "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "3s", "No effect; accepted because envoyproxy/ratelimit has it. XDS_CLIENT_BACKOFF_INITIAL_INTERVAL applies";
    backoff_initial: Micros = "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "1s", "Wait before the first new connection to the control plane";
    backoff_max: Micros = "XDS_CLIENT_BACKOFF_MAX_INTERVAL", "60s", "Longest wait before a new connection to the control plane";
    backoff_growth: BackoffGrowth = "XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "0.5", "Factor by which the wait grows with each failed connection; a factor below 2 counts as 2";
    has_jitter: bool = "XDS_CLIENT_BACKOFF_JITTER", "true", "Waits a random time between half of the wait and the whole one";
    max_message: ResponseSize = "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "", "Maximum size of a response of the control plane; empty: 4194304; a larger one ends the stream, and the rules in force stay";
});

/// Reads the settings of the rule source.
pub(super) fn read(given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<XdsSettings> {
    (ROWS.read)(given, wrong)
}

/// Kind of a rule source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigType {
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
pub struct TextPairs(pub Vec<(String, String)>);

impl Setting for TextPairs {
    const TAKES: &'static str = "pairs such as zone=a,pool=b";
    fn parse(text: &str) -> Option<Self> {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        Some(Self(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
    }
}

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress(pub String);

impl Setting for ServerAddress {
    const TAKES: &'static str = "HOST:PORT";
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("dns:///").unwrap_or(text);
        let (host, port) = text.rsplit_once(':')?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.[]:".contains(c);
        let is_valid = !host.is_empty() && host.chars().all(is_plain) && port.parse::<u16>().is_ok_and(|port| port > 0);
        is_valid.then(|| Self(text.to_owned()))
    }
}

/// Factor of a backoff.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackoffGrowth(pub f64);

impl Setting for BackoffGrowth {
    const TAKES: &'static str = "a number from 0 to 100";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|factor| (0.0..=100.0).contains(factor)).map(Self)
    }
}

/// Maximum size of a response, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseSize(pub usize);

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
        let xds = read(&given).unwrap().xds;
        assert_eq!(xds.config_type, ConfigType::Xds);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(xds.node_metadata.0, [pair("a", "b"), pair(" c", "d=e")], "the space before a name stays");
        assert_eq!(xds.max_message.0, 4_194_304);
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        assert_eq!(ServerAddress::parse("dns:///envoy-gateway:18001").unwrap().0, "envoy-gateway:18001");
        for text in ["", "host", ":18000", "host:", "host:0", "host:65536", "http://host:18000", "a b:1"] {
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
}
