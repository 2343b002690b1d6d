//! Addresses and connection settings of Redis: one group of `REDIS_*` variables.

use std::fmt;

use super::hidden::{HIDDEN, shown_url};
use super::values::Setting;
use super::{InvalidSetting, SettingRows, rows};
use crate::dial::tls::TlsFiles;
use crate::file::{MAX_SECRET, Named};
use crate::model::Micros;
use crate::store::redis::address::{Address, Topology};
use crate::store::redis::auth_command::AuthCommand;
use crate::store::redis::login::Login;

/// Settings of one Redis: a server, a group of servers under sentinels, or a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Addresses of its servers.
    pub topology: Topology,
    /// Number of the database; 0 unless it is a single server.
    pub database: i64,
    /// Credentials for it.
    pub auth: Auth,
    /// TLS settings, if connections use TLS.
    pub tls: Option<TlsFiles>,
    /// Timeout for connecting.
    pub connect_timeout: Micros,
    /// Age before which a connection authenticates again; 0: never.
    pub max_age: Micros,
}

/// Credentials for a Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// No credentials.
    None,
    /// Credentials from the settings.
    Given(Login),
    /// File with a login in the format of [`Login::parse`].
    File(Named),
    /// Command that prints a login in the same format.
    Command(AuthCommand),
}

/// One group of variables.
pub(super) struct VariableGroup {
    /// Rows of the group.
    pub(super) rows: SettingRows<Variables>,
    /// Names of its variables that can contradict each other.
    pub(super) names: VariableNames,
}

/// Names of the variables that can contradict each other.
pub(super) struct VariableNames {
    url: &'static str,
    /// Advice for a list of servers where one is expected.
    several: &'static str,
    socket_type: &'static str,
    auth_file: &'static str,
    auth_command: &'static str,
    tls: &'static str,
}

/// Values of one group of variables, not yet combined.
pub(super) struct Variables {
    kind: RedisType,
    socket: SocketType,
    url: Url,
    auth: Option<Login>,
    auth_file: String,
    auth_command: CommandText,
    max_age: MaxAge,
    sentinel_auth: Option<Login>,
    tls: bool,
    timeout: ConnectTimeout,
}

/// Default port of a Redis URL: 6379, as registered for Redis.
const PORT: u16 = 6379;

/// Accepted forms of a single server's URL.
const SINGLE: &str = "HOST:PORT, the path of a socket, redis://[USER:PASSWORD@]HOST:PORT[/DATABASE], the same with rediss:// for TLS, or unix://PATH";
/// Accepted forms of a single server's URL that has credentials.
const ENCODED: &str = "redis://USER:PASSWORD@HOST:PORT[/DATABASE], or the same with rediss://, in which `/`, `?`, `#`, `%` and `@` of user and password are written %2F, %3F, %23, %25 and %40";
/// Accepted form of the URL of servers under sentinels.
const SENTINEL: &str = "MASTER,HOST:PORT,HOST:PORT,...: the name of the master, then its sentinels";
/// Accepted form of a cluster's URL.
const CLUSTER: &str = "HOST:PORT,HOST:PORT,...: some nodes of the cluster";

macro_rules! group {
    ($prefix:literal, $of:literal) => {
        VariableGroup {
            rows: rows!(Variables {
                kind: RedisType = concat!($prefix, "TYPE"), "single", concat!("Topology of ", $of, "; decides the format of ", $prefix, "URL");
                socket: SocketType = concat!($prefix, "SOCKET_TYPE"), "", concat!("Socket type of a single server of ", $of, "; empty: unix if ", $prefix, "URL is a path, else tcp");
                url: Url = concat!($prefix, "URL"), "", concat!("Address of ", $of);
                auth: Option<Login> = concat!($prefix, "AUTH"), "", concat!("Password of ", $of, ", or user and password; takes precedence over a password in the URL");
                auth_file: String = concat!($prefix, "AUTH_FILE"), "", concat!("File whose first line is used as ", $prefix, "AUTH; read again when it changes");
                auth_command: CommandText = concat!($prefix, "AUTH_COMMAND"), "", concat!("Command whose first line of output is used as ", $prefix, "AUTH, such as a token of a cloud; run without a shell before each connection is made");
                max_age: MaxAge = concat!($prefix, "CONNECTION_MAX_AGE"), "0s", concat!("Age before which connections to ", $of, " authenticate again, with what ", $prefix, "AUTH_FILE or ", $prefix, "AUTH_COMMAND then gives; 0s: never");
                sentinel_auth: Option<Login> = concat!($prefix, "SENTINEL_AUTH"), "", concat!("Password of the sentinels of ", $of, ", or user and password");
                tls: bool = concat!($prefix, "TLS"), "false", concat!("Uses TLS for connections to ", $of);
                timeout: ConnectTimeout = concat!($prefix, "TIMEOUT"), "1s", concat!("Timeout of connecting to ", $of, "; STORE_DEADLINE limits everything else");
            }),
            names: VariableNames {
                url: concat!($prefix, "URL"),
                several: concat!("one address; for several, set ", $prefix, "TYPE=sentinel (MASTER,HOST:PORT,HOST:PORT,...) or ", $prefix, "TYPE=cluster (HOST:PORT,HOST:PORT,...)"),
                socket_type: concat!($prefix, "SOCKET_TYPE"),
                auth_file: concat!($prefix, "AUTH_FILE"),
                auth_command: concat!($prefix, "AUTH_COMMAND"),
                tls: concat!($prefix, "TLS"),
            },
        }
    };
}

/// Variables of the main Redis, for all limits that have no Redis of their own.
pub(super) const MAIN: VariableGroup = group!("REDIS_", "Redis");
/// Variables of the Redis for limits per second.
pub(super) const PER_SECOND: VariableGroup = group!("REDIS_PERSECOND_", "the Redis for limits per second");

impl Variables {
    /// Returns true if an address is given.
    pub(super) fn is_given(&self) -> bool {
        !self.url.0.is_empty()
    }

    /// Returns true if the variable or the URL asks for TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls || (self.kind == RedisType::Single && self.url.0.starts_with("rediss://"))
    }

    /// Combines the variables into settings. Adds each contradiction to `wrong`.
    pub(super) fn settings(
        self,
        names: &VariableNames,
        tls: &TlsFiles,
        wrong: &mut Vec<InvalidSetting>,
    ) -> Option<RedisSettings> {
        let is_tls = self.is_tls();
        let before = wrong.len();
        let mut say = |variable, found: &str, takes| {
            wrong.push(InvalidSetting::Value { variable, found: found.to_owned(), takes });
        };
        if self.auth.is_some() && !self.auth_file.is_empty() {
            say(
                names.auth_file,
                &self.auth_file,
                "an empty value, because the variable without _FILE is set too; unset one of them",
            );
        }
        let is_given = self.auth.is_some() || !self.auth_file.is_empty();
        let command = AuthCommand::parse(names.auth_command, &self.auth_command.0);
        match (&command, self.auth_command.0.is_empty(), is_given) {
            (None, false, _) => say(names.auth_command, HIDDEN, CommandText::TAKES),
            (Some(_), _, true) => say(
                names.auth_command,
                HIDDEN,
                "an empty value, because the password is given in another way too; unset one of them",
            ),
            _ => {}
        }
        let url = self.url.0.as_str();
        let read = match self.kind {
            RedisType::Single => single(url, self.socket).ok_or_else(|| match url.split_once("://") {
                Some((_, rest)) if rest.contains('@') => ENCODED,
                None if url.contains(',') => names.several,
                _ => SINGLE,
            }),
            RedisType::Sentinel => {
                sentinel(url, self.sentinel_auth).ok_or(SENTINEL).map(|topology| (topology, 0, None))
            }
            RedisType::Cluster => nodes(url).ok_or(CLUSTER).map(|nodes| (Topology::Cluster(nodes), 0, None)),
        };
        if let Err(takes) = read {
            say(names.url, &shown_url(url), takes);
        }
        let (topology, database, from_url) = read.ok()?;
        if let Topology::Single(address) = &topology {
            let is_path = matches!(address, Address::Unix(_));
            if is_path && self.socket == SocketType::Tcp {
                say(names.socket_type, "tcp", "unix or empty, because the URL is a path");
            }
            if !is_path && self.socket == SocketType::Unix {
                say(names.socket_type, "unix", "tcp or empty, because the URL is not a path");
            }
            if is_path && is_tls {
                say(names.tls, "true", "false, because the URL is the path of a socket");
            }
        }
        let is_read = !self.auth_file.is_empty() || command.is_some();
        let auth = match (self.auth.or(from_url.filter(|_| !is_read)), command) {
            (Some(login), _) => Auth::Given(login),
            (None, Some(command)) => Auth::Command(command),
            (None, None) if self.auth_file.is_empty() => Auth::None,
            (None, None) => Auth::File(Named::new(names.auth_file, self.auth_file.into(), MAX_SECRET)),
        };
        let tls = is_tls.then(|| tls.clone());
        (wrong.len() == before).then_some(RedisSettings {
            topology,
            database,
            auth,
            tls,
            connect_timeout: self.timeout.0,
            max_age: self.max_age.0,
        })
    }
}

/// Text for people, such as `redis cluster at n1:6379,n2:6379`. Contains no secret.
impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.topology, self.database) {
            (Topology::Single(address), 0) => write!(f, "redis at {address}")?,
            (Topology::Single(address), database) => write!(f, "redis at {address}, database {database}")?,
            (Topology::Sentinel { master, sentinels, .. }, _) => {
                write!(f, "redis master {master}, sentinels at {}", list(sentinels))?;
            }
            (Topology::Cluster(nodes), _) => write!(f, "redis cluster at {}", list(nodes))?,
        }
        f.write_str(if self.tls.is_some() { ", TLS" } else { "" })
    }
}

/// Value of `REDIS_TYPE`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RedisType {
    Single,
    Sentinel,
    Cluster,
}

impl Setting for RedisType {
    const TAKES: &'static str = "single, cluster or sentinel";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "single" => Some(Self::Single),
            "sentinel" => Some(Self::Sentinel),
            "cluster" => Some(Self::Cluster),
            _ => None,
        }
    }
}

/// Value of `REDIS_SOCKET_TYPE`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SocketType {
    Auto,
    Tcp,
    Unix,
}

impl Setting for SocketType {
    const TAKES: &'static str = "tcp, unix or empty";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "" => Some(Self::Auto),
            "tcp" => Some(Self::Tcp),
            "unix" => Some(Self::Unix),
            _ => None,
        }
    }
}

/// A URL as written; may contain a password. Its accepted form depends on `REDIS_TYPE`.
struct Url(String);

impl Setting for Url {
    const TAKES: &'static str = "HOST:PORT, the path of a socket, or a URL with redis://, rediss:// or unix://; for a cluster HOST:PORT,HOST:PORT,...; for sentinels MASTER,HOST:PORT,HOST:PORT,...";
    fn parse(text: &str) -> Option<Self> {
        Some(Self(text.to_owned()))
    }
}

/// Timeout for connecting; 1 s by default (the reference: 10 s). The kernel repeats a lost handshake after 1 s (RFC 6298,
/// 2.1). A new attempt after 1 s connects just as soon, and also resolves the host name again.
struct ConnectTimeout(Micros);

impl Setting for ConnectTimeout {
    const TAKES: &'static str = "a duration above 0, such as 1s or 250ms";
    fn parse(text: &str) -> Option<Self> {
        Micros::parse(text).filter(|length| *length > Micros::ZERO).map(Self)
    }
}

/// Value of `REDIS_AUTH_COMMAND`, not yet taken apart; empty: none. Blanks alone are a mistake, such as a variable that a template
/// left empty: without the command, connections would have no login.
struct CommandText(String);

impl Setting for CommandText {
    const TAKES: &'static str = "a program and its arguments, in quotes where they have spaces, as in a shell";
    const KEEPS_BLANKS: bool = true;
    fn parse(text: &str) -> Option<Self> {
        (text.is_empty() || !text.trim().is_empty()).then(|| Self(text.to_owned()))
    }
    fn shown(_: &str) -> String {
        HIDDEN.to_owned()
    }
}

/// Value of `REDIS_CONNECTION_MAX_AGE`.
struct MaxAge(Micros);

impl Setting for MaxAge {
    const TAKES: &'static str = "0s, or a duration of at least 1s, such as 12h";
    fn parse(text: &str) -> Option<Self> {
        Micros::parse(text).filter(|age| *age == Micros::ZERO || *age >= Micros::from_secs(1)).map(Self)
    }
}

/// Address, database, and login from a URL.
type Remote = (Address, i64, Option<Login>);

fn single(text: &str, socket: SocketType) -> Option<(Topology, i64, Option<Login>)> {
    let (address, database, login) = match text.split_once("://") {
        Some(("redis" | "rediss", rest)) => remote(rest)?,
        Some(("unix", path)) if path.starts_with('/') => (Address::Unix(path.into()), 0, None),
        Some(_) => return None,
        None if text.starts_with('/') => (Address::Unix(text.into()), 0, None),
        None => match host_and_port(text, None) {
            Some(address) => (address, 0, None),
            None if socket == SocketType::Unix && !text.is_empty() => (Address::Unix(text.into()), 0, None),
            None => return None,
        },
    };
    Some((Topology::Single(address), database, login))
}

/// Parses the part after `redis://`: `[USER:PASSWORD@]HOST[:PORT][/DATABASE]`. User and password are percent-encoded where a
/// character would end them.
fn remote(rest: &str) -> Option<Remote> {
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (credentials, host) = match authority.rsplit_once('@') {
        Some((credentials, _)) if credentials.contains(['?', '#']) => return None,
        Some((credentials, host)) => {
            let (user, password) = credentials.split_once(':')?;
            (Some(Login::new(&decoded(user)?, &decoded(password)?)?), host)
        }
        None => (None, authority),
    };
    let database = if database.is_empty() { 0 } else { i64::from(database.parse::<u32>().ok()?) };
    Some((host_and_port(host, Some(PORT))?, database, credentials))
}

fn sentinel(text: &str, login: Option<Login>) -> Option<Topology> {
    let (master, sentinels) = text.split_once(',')?;
    let is_name = !master.trim().is_empty() && !master.contains([':', '/', '@']);
    let sentinels = nodes(sentinels)?;
    let login = login.unwrap_or_default();
    is_name.then(|| Topology::Sentinel { master: master.trim().to_owned(), sentinels, login })
}

fn nodes(text: &str) -> Option<Vec<Address>> {
    text.split(',').map(|node| host_and_port(node.trim(), None)).collect()
}

fn host_and_port(text: &str, default: Option<u16>) -> Option<Address> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if behind.is_empty() { None } else { Some(behind.strip_prefix(':')?) })
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            (!host.is_empty() && host.chars().all(is_name)).then_some(())?;
            (host, port)
        }
    };
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port > 0)?,
        None => default?,
    };
    Some(Address::Tcp(host.to_owned(), port))
}

/// Decodes percent-encoded text. Returns `None` if an escape is incomplete or the result is not UTF-8.
pub(super) fn decoded(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let digits = piece.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(piece.get(2..)?.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn list(addresses: &[Address]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
