//! Settings of statsd and DogStatsD, with the reference's names.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use regex::Regex;

use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, rows};
use crate::model::Micros;
use crate::telemetry::statsd::{Format, Mogrifier};

/// Rows of the settings of statsd.
pub(super) const TABLE: &[SettingRow] = STATSD.table;

/// Settings of statsd or DogStatsD.
#[derive(Clone, Debug)]
pub struct StatsdSettings {
    /// Format of the lines.
    pub format: Format,
    /// Transport of the lines. That of DogStatsD is UDP.
    pub transport: StatsdTransport,
    /// Host of the receiver.
    pub host: String,
    /// Port of the receiver.
    pub port: u16,
    /// Time between two flushes.
    pub interval: Micros,
    /// True if statsd was asked for too; only DogStatsD is served then.
    pub is_asked_twice: bool,
}

/// Transport of statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatsdTransport {
    /// True for UDP, false for TCP.
    pub is_udp: bool,
    /// True if the address must be of version 4, false for version 6; `None` for any.
    is_version_4: Option<bool>,
}

/// Values of the variables.
struct Variables {
    statsd: Option<bool>,
    dog: bool,
    host: String,
    port: NonZeroU16,
    protocol: Protocol,
    interval: FlushInterval,
    tags: Tags,
    mogrifiers: Names,
    entity: TagValue,
    env: TagValue,
    service: TagValue,
    version: TagValue,
}

const STATSD: SettingRows<Variables> = rows!(Variables {
    statsd: Option<bool> = "USE_STATSD", "", "Sends the reference's statistics to STATSD_HOST as statsd; empty: if STATSD_HOST is set and USE_DOG_STATSD is not";
    dog: bool = "USE_DOG_STATSD", "false", "Sends the reference's statistics to STATSD_HOST over UDP as DogStatsD; takes precedence over USE_STATSD";
    host: String = "STATSD_HOST", "localhost", "Host of the receiver of statsd or DogStatsD";
    port: NonZeroU16 = "STATSD_PORT", "8125", "Port of the receiver of statsd or DogStatsD";
    protocol: Protocol = "STATSD_PROTOCOL", "tcp", "Transport of statsd; DogStatsD is always sent over UDP";
    interval: FlushInterval = "STATS_FLUSH_INTERVAL", "10s", "Time between two deliveries to statsd or DogStatsD";
    tags: Tags = "EXTRA_TAGS", "", "Tags of every statistic sent to statsd or DogStatsD";
    mogrifiers: Names = "USE_DOG_STATSD_MOGRIFIERS", "", "Names of the rules that rename DogStatsD statistics and make tags of parts of their names; each rule NAME is set by DOG_STATSD_MOGRIFIER_NAME_PATTERN, _NAME and _TAGS, and the first that matches applies";
    entity: TagValue = "DD_ENTITY_ID", "", "Tag dd.internal.entity_id of every DogStatsD statistic, by which Datadog's agent knows the pod; empty: none";
    env: TagValue = "DD_ENV", "", "Tag env of every DogStatsD statistic; empty: none";
    service: TagValue = "DD_SERVICE", "", "Tag service of every DogStatsD statistic; empty: none";
    version: TagValue = "DD_VERSION", "", "Tag version of every DogStatsD statistic; empty: none";
});

/// Reads the settings of statsd. The inner `None` means that it is off.
pub(super) fn read(given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<Option<StatsdSettings>> {
    let Variables { statsd, dog, host, port, protocol, interval, tags, mogrifiers, entity, env, service, version } =
        (STATSD.read)(given, wrong)?;
    let is_host_set = given("STATSD_HOST").is_some_and(|host| !host.trim().is_empty());
    if !statsd.unwrap_or(is_host_set) && !dog {
        return Some(None);
    }
    let before = wrong.len();
    let mut refuse = |variable, found: &str, takes| {
        let found = <String as Setting>::shown(found);
        wrong.push(InvalidSetting::Value { variable, found, takes });
    };
    if host.contains(['/', '@']) {
        refuse(
            "STATSD_HOST",
            &host,
            "a host name or an IP address; STATSD_PORT has the port, and STATSD_PROTOCOL the protocol",
        );
    }
    let transport = match protocol.0 {
        _ if dog => StatsdTransport::UDP,
        Ok(transport) => transport,
        Err(found) => {
            refuse("STATSD_PROTOCOL", &found, Protocol::TAKES);
            StatsdTransport::TCP
        }
    };
    if wrong.len() > before {
        return None;
    }
    let format = if dog {
        let mogrifiers = mogrifiers.0.iter().map(|name| mogrifier(name, given, wrong)).collect::<Vec<_>>();
        let global = [("dd.internal.entity_id", entity), ("env", env), ("service", service), ("version", version)];
        let global = global.into_iter().filter(|(_, value)| !value.0.is_empty());
        Format::Dog {
            global: global.map(|(key, value)| format!("{key}:{}", value.0)).collect(),
            tags: tags.0,
            mogrifiers: mogrifiers.into_iter().collect::<Option<_>>()?,
        }
    } else {
        Format::Statsd { tags: tags.0 }
    };
    let is_asked_twice = dog && statsd == Some(true);
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    Some(Some(StatsdSettings { format, transport, host, port: port.get(), interval: interval.0, is_asked_twice }))
}

/// Reads the mogrifier `name`. Adds what is invalid to `wrong`.
fn mogrifier(name: &str, given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<Mogrifier> {
    let of = |part: &str| {
        let variable = format!("DOG_STATSD_MOGRIFIER_{name}_{part}");
        let found = given(&variable).unwrap_or_default();
        (variable, found)
    };
    let mut refuse = |(variable, found): (String, String), takes: &'static str| {
        wrong.push(InvalidSetting::Numbered { variable, found, takes });
    };
    let (pattern, renamed, tags) = (of("PATTERN"), of("NAME"), of("TAGS"));
    let compiled = Some(&pattern.1).filter(|text| !text.is_empty()).and_then(|text| Regex::new(text).ok());
    if compiled.is_none() {
        refuse(pattern, "a regular expression");
    }
    let read = Tags::parse(tags.1.trim());
    if read.is_none() {
        refuse(tags.clone(), Tags::TAKES);
    }
    if renamed.1.is_empty() {
        refuse(renamed, "a name, which may have $1 for the first group of the pattern");
        return None;
    }
    Mogrifier::new(compiled?, renamed.1.clone(), read?.0)
        .map_err(|_| {
            refuse((renamed.0, format!("{} with the tags {}", renamed.1, tags.1)), "only groups that the pattern has");
        })
        .ok()
}

impl Setting for Option<bool> {
    const TAKES: &'static str = "true, false or empty";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { bool::parse(text).map(Some) }
    }
}

impl Setting for NonZeroU16 {
    const TAKES: &'static str = "a port from 1 to 65535";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl StatsdTransport {
    const TCP: Self = Self { is_udp: false, is_version_4: None };
    const UDP: Self = Self { is_udp: true, is_version_4: None };

    /// Returns true if statistics may go to `address`.
    pub fn admits(self, address: &SocketAddr) -> bool {
        self.is_version_4.is_none_or(|is_version_4| is_version_4 == address.is_ipv4())
    }
}

/// Value of `STATSD_PROTOCOL`, or the text if it is none: it matters only if statsd is on.
struct Protocol(Result<StatsdTransport, String>);

impl Setting for Protocol {
    const TAKES: &'static str = "tcp, tcp4, tcp6, udp, udp4 or udp6";
    fn parse(text: &str) -> Option<Self> {
        let lower = text.to_ascii_lowercase();
        let (name, is_version_4) = match (lower.strip_suffix('4'), lower.strip_suffix('6')) {
            (Some(name), _) => (name, Some(true)),
            (_, Some(name)) => (name, Some(false)),
            _ => (lower.as_str(), None),
        };
        Some(Self(match name {
            "tcp" => Ok(StatsdTransport { is_udp: false, is_version_4 }),
            "udp" => Ok(StatsdTransport { is_udp: true, is_version_4 }),
            "" if is_version_4.is_none() => Ok(StatsdTransport::TCP),
            _ => Err(text.to_owned()),
        }))
    }
}

/// Value of a tag, without the characters that would end it.
struct TagValue(String);

impl Setting for TagValue {
    const TAKES: &'static str = "any text";
    fn parse(text: &str) -> Option<Self> {
        Some(Self(text.replace([',', '|', '\n'], "_")))
    }
}

/// Time between two flushes.
struct FlushInterval(Micros);

impl FlushInterval {
    /// Shortest: 100 ms, which is as fine as any receiver aggregates.
    const SHORTEST: Micros = Micros::from_millis(100);
    /// Longest: 1 h.
    const LONGEST: Micros = Micros::from_secs(3_600);
}

impl Setting for FlushInterval {
    const TAKES: &'static str = "a duration from 100ms to 1h";
    fn parse(text: &str) -> Option<Self> {
        Micros::parse(text).filter(|length| (Self::SHORTEST..=Self::LONGEST).contains(length)).map(Self)
    }
}

/// Tags, sorted by key as in the reference.
struct Tags(Vec<(String, String)>);

impl Setting for Tags {
    const TAKES: &'static str = "KEY:VALUE,KEY:VALUE";
    fn parse(text: &str) -> Option<Self> {
        let pair = |pair: &str| {
            let (key, value) = pair.split_once(':')?;
            let is_plain = |text: &str| !text.is_empty() && !text.contains([':', '|', '\n', '#']);
            (is_plain(key) && is_plain(value)).then(|| (key.to_owned(), value.to_owned()))
        };
        let parts = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let mut tags: Vec<_> = parts.map(pair).collect::<Option<_>>()?;
        tags.sort_unstable();
        Some(Self(tags))
    }
}

/// Names, separated by commas.
struct Names(Vec<String>);

impl Setting for Names {
    const TAKES: &'static str = "NAME,NAME of letters, digits and underscores";
    fn parse(text: &str) -> Option<Self> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        names.map(|name| is_name(name).then(|| name.to_owned())).collect::<Option<_>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use crate::settings::StatsdSettings;
    use crate::settings::tests::{read, wrong};
    use crate::telemetry::statsd::Format;

    fn statsd(given: &[(&str, &str)]) -> Option<StatsdSettings> {
        read(given).expect("settings").statsd
    }

    #[test]
    fn statsd_runs_if_it_is_asked_for_or_its_host_is_set() {
        assert!(statsd(&[]).is_none());
        assert!(statsd(&[("STATSD_PORT", "9125"), ("EXTRA_TAGS", "a:b")]).is_none());
        let found = statsd(&[("STATSD_HOST", "stats")]).expect("on");
        assert!(matches!(found.format, Format::Statsd { .. }) && found.host == "stats" && found.port == 8125);
        assert_eq!(statsd(&[("USE_STATSD", "T")]).expect("on").host, "localhost");
        assert!(statsd(&[("STATSD_HOST", "stats"), ("USE_STATSD", "false")]).is_none());
        let both = statsd(&[("USE_STATSD", "1"), ("USE_DOG_STATSD", "1")]).expect("on");
        assert!(matches!(both.format, Format::Dog { .. }) && both.is_asked_twice);
        assert!(!statsd(&[("STATSD_HOST", "a"), ("USE_DOG_STATSD", "1")]).expect("on").is_asked_twice);
        assert!(statsd(&[("USE_STATSD", "1"), ("DISABLE_STATS", "1")]).is_none());
    }

    #[test]
    fn statsd_goes_over_the_protocol_that_is_set_as_in_the_reference() {
        let of = |protocol| statsd(&[("STATSD_HOST", "a"), ("STATSD_PROTOCOL", protocol)]).expect("on").transport;
        let admits = |protocol| ["192.0.2.1:1", "[::1]:1"].map(|at| of(protocol).admits(&at.parse().expect("one")));
        let all = ["", "tcp", "TCP", "tcp4", "tcp6", "udp", "udp4", "udp6"].map(|protocol| of(protocol).is_udp);
        assert_eq!(all, [false, false, false, false, false, true, true, true]);
        assert_eq!(["tcp", "udp"].map(admits), [[true, true]; 2]);
        assert_eq!(["tcp4", "udp4"].map(admits), [[true, false]; 2]);
        assert_eq!(["tcp6", "udp6"].map(admits), [[false, true]; 2]);
        for unknown in ["unix", "4", "6", "udp5"] {
            assert_eq!(
                wrong(&[("STATSD_HOST", "a"), ("STATSD_PROTOCOL", unknown)]),
                [format!("STATSD_PROTOCOL is {unknown:?}: expected tcp, tcp4, tcp6, udp, udp4 or udp6")]
            );
            assert!(statsd(&[("STATSD_PROTOCOL", unknown)]).is_none(), "it matters only where statistics are sent");
            let dog = statsd(&[("USE_DOG_STATSD", "true"), ("STATSD_PROTOCOL", unknown)]).expect("on");
            assert!(dog.transport.is_udp);
        }
    }

    #[test]
    fn a_host_is_no_url_and_its_password_is_not_shown() {
        assert_eq!(
            wrong(&[("STATSD_HOST", "udp://me:hunter2@stats:8125")]),
            [
                r#"STATSD_HOST is "udp://***@stats:8125": expected a host name or an IP address; STATSD_PORT has the port, and STATSD_PROTOCOL the protocol"#
            ]
        );
    }

    #[test]
    fn datadog_s_variables_are_tags_of_dogstatsd() {
        let given = [("DD_VERSION", "1.2|3"), ("DD_ENTITY_ID", "a-1"), ("DD_ENV", ""), ("USE_DOG_STATSD", "true")];
        let Format::Dog { global, .. } = statsd(&given).expect("on").format else { panic!("DogStatsD") };
        assert_eq!(global, ["dd.internal.entity_id:a-1", "version:1.2_3"]);
    }

    #[test]
    fn wrong_values_of_statsd_are_all_named() {
        assert_eq!(
            wrong(&[
                ("USE_STATSD", "yes"),
                ("STATSD_PORT", "0"),
                ("STATS_FLUSH_INTERVAL", "1"),
                ("EXTRA_TAGS", "a"),
                ("USE_DOG_STATSD_MOGRIFIERS", "a-b"),
            ]),
            [
                r#"USE_STATSD is "yes": expected true, false or empty"#,
                r#"STATSD_PORT is "0": expected a port from 1 to 65535"#,
                r#"STATS_FLUSH_INTERVAL is "1": expected a duration from 100ms to 1h"#,
                r#"EXTRA_TAGS is "a": expected KEY:VALUE,KEY:VALUE"#,
                r#"USE_DOG_STATSD_MOGRIFIERS is "a-b": expected NAME,NAME of letters, digits and underscores"#,
            ]
        );
        let dog = [("USE_DOG_STATSD", "true"), ("USE_DOG_STATSD_MOGRIFIERS", "A,B")];
        let more = [
            ("DOG_STATSD_MOGRIFIER_A_PATTERN", "("),
            ("DOG_STATSD_MOGRIFIER_A_TAGS", "a:"),
            ("DOG_STATSD_MOGRIFIER_B_PATTERN", "(a)"),
            ("DOG_STATSD_MOGRIFIER_B_NAME", "$2"),
        ];
        assert_eq!(
            wrong(&[&dog[..], &more].concat()),
            [
                r#"DOG_STATSD_MOGRIFIER_A_PATTERN is "(": expected a regular expression"#,
                r#"DOG_STATSD_MOGRIFIER_A_TAGS is "a:": expected KEY:VALUE,KEY:VALUE"#,
                r#"DOG_STATSD_MOGRIFIER_A_NAME is "": expected a name, which may have $1 for the first group of the pattern"#,
                r#"DOG_STATSD_MOGRIFIER_B_NAME is "$2 with the tags ": expected only groups that the pattern has"#,
            ]
        );
    }
}
