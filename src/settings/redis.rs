//! Where a Redis is and how it is spoken to: what one group of `REDIS_*` variables says.

use std::fmt;
use std::path::PathBuf;

use super::secret::{Credentials, HIDDEN};
use super::values::Setting;
use super::{InvalidSetting, Rows, rows};
use crate::model::Micros;

/// One Redis: a server, a group of servers under sentinels, or a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Where it is.
    pub servers: Servers,
    /// Who Tidegate is to it.
    pub auth: Auth,
    /// How connections are protected, if they are.
    pub tls: Option<TlsSettings>,
    /// How long connecting may take.
    pub connect_timeout: Micros,
}

/// Where a Redis is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// One server.
    Single {
        /// The server.
        address: Address,
        /// The number of its database.
        database: i64,
    },
    /// The server that sentinels call the master.
    Sentinel {
        /// The name of the master.
        master: String,
        /// The sentinels to ask, at least one.
        sentinels: Vec<Address>,
        /// Who Tidegate is to the sentinels.
        auth: Option<Credentials>,
    },
    /// Some nodes of a cluster, at least one, which know the others.
    Cluster(Vec<Address>),
}

/// Where one server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host and a port.
    Tcp {
        /// A name, or an address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// The path of a socket.
    Unix(PathBuf),
}

/// Who Tidegate is to a Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Nobody in particular.
    None,
    /// A user or a password.
    Given(Credentials),
    /// What is in a file, as [`Credentials::parse`] reads it.
    File(PathBuf),
}

/// How connections to Redis are protected. The files are named and not yet read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// A file with the authorities to trust in place of those of the system, PEM.
    pub authorities: Option<PathBuf>,
    /// The files with the certificate to show and its key, PEM.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Whether the certificate of Redis must be for its host.
    pub verifies_hostname: bool,
}

/// One group of variables.
pub(super) struct Group {
    /// Its rows.
    pub(super) rows: Rows<Variables>,
    /// The names of those that can contradict each other.
    pub(super) names: Names,
}

/// The names of the variables that can contradict each other.
pub(super) struct Names {
    url: &'static str,
    socket_type: &'static str,
    auth_file: &'static str,
    tls: &'static str,
}

/// One group of variables, as written.
pub(super) struct Variables {
    kind: Kind,
    socket: Socket,
    url: Url,
    auth: Option<Credentials>,
    auth_file: String,
    sentinel_auth: Option<Credentials>,
    tls: bool,
    timeout: ConnectTimeout,
}

/// The port of Redis where a URL names none, as registered for it: 6379.
const PORT: u16 = 6379;

/// What a single server's URL can be.
const SINGLE: &str = "HOST:PORT, the path of a socket, redis://[USER:PASSWORD@]HOST:PORT[/DATABASE], the same with rediss:// for TLS, or unix://PATH";
/// What the URL of servers under sentinels can be.
const SENTINEL: &str = "MASTER,HOST:PORT,HOST:PORT,...: the name of the master and its sentinels";
/// What a cluster's URL can be.
const CLUSTER: &str = "HOST:PORT,HOST:PORT,...: some nodes of the cluster";

macro_rules! group {
    ($prefix:literal, $of:literal) => {
        Group {
            rows: rows!(Variables {
                kind: Kind = concat!($prefix, "TYPE"), "single", concat!("How the servers of ", $of, " stand together, and so what ", $prefix, "URL is");
                socket: Socket = concat!($prefix, "SOCKET_TYPE"), "", concat!("How a single server of ", $of, " is reached; empty is unix when ", $prefix, "URL is a path, else tcp");
                url: Url = concat!($prefix, "URL"), "", concat!("Where ", $of, " is");
                auth: Option<Credentials> = concat!($prefix, "AUTH"), "", concat!("The password of ", $of, ", or user and password; goes before one in the URL");
                auth_file: String = concat!($prefix, "AUTH_FILE"), "", concat!("File whose first line is what ", $prefix, "AUTH would be; read again when it changes");
                sentinel_auth: Option<Credentials> = concat!($prefix, "SENTINEL_AUTH"), "", concat!("The password of the sentinels of ", $of, ", or user and password");
                tls: bool = concat!($prefix, "TLS"), "false", concat!("Whether ", $of, " is spoken to under TLS");
                timeout: ConnectTimeout = concat!($prefix, "TIMEOUT"), "1s", concat!("How long connecting to ", $of, " may take; STORE_DEADLINE bounds everything else");
            }),
            names: Names {
                url: concat!($prefix, "URL"),
                socket_type: concat!($prefix, "SOCKET_TYPE"),
                auth_file: concat!($prefix, "AUTH_FILE"),
                tls: concat!($prefix, "TLS"),
            },
        }
    };
}

/// The Redis of all limits, but for those that have one of their own.
pub(super) const MAIN: Group = group!("REDIS_", "Redis");
/// The Redis of limits per second.
pub(super) const PER_SECOND: Group = group!("REDIS_PERSECOND_", "the Redis for limits per second");

impl Variables {
    /// Whether an address is given.
    pub(super) fn is_given(&self) -> bool {
        !self.url.0.is_empty()
    }

    /// Whether TLS is asked for, by the variable or by the URL.
    pub(super) fn is_tls(&self) -> bool {
        self.tls || (self.kind == Kind::Single && self.url.0.starts_with("rediss://"))
    }

    /// What they say together.
    pub(super) fn settings(
        self,
        names: &Names,
        tls: &TlsSettings,
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
                "nothing, for the variable without _FILE is set too: keep one of them",
            );
        }
        let url = self.url.0.as_str();
        let read = match self.kind {
            Kind::Single => single(url, self.socket).ok_or(SINGLE),
            Kind::Sentinel => sentinel(url, self.sentinel_auth).ok_or(SENTINEL).map(|servers| (servers, None)),
            Kind::Cluster => nodes(url).ok_or(CLUSTER).map(|nodes| (Servers::Cluster(nodes), None)),
        };
        if let Err(takes) = read {
            say(names.url, &shown(url), takes);
        }
        let (servers, from_url) = read.ok()?;
        if let Servers::Single { address, .. } = &servers {
            let is_path = matches!(address, Address::Unix(_));
            if is_path && self.socket == Socket::Tcp {
                say(names.socket_type, "tcp", "unix or nothing, for the URL is a path");
            }
            if !is_path && self.socket == Socket::Unix {
                say(names.socket_type, "unix", "tcp or nothing, for the URL is no path");
            }
            if is_path && is_tls {
                say(names.tls, "true", "false, for the URL is the path of a socket");
            }
        }
        let auth = match self.auth.or(from_url.filter(|_| self.auth_file.is_empty())) {
            Some(credentials) => Auth::Given(credentials),
            None if self.auth_file.is_empty() => Auth::None,
            None => Auth::File(self.auth_file.into()),
        };
        let tls = is_tls.then(|| tls.clone());
        (wrong.len() == before).then_some(RedisSettings { servers, auth, tls, connect_timeout: self.timeout.0 })
    }
}

/// For people: `redis cluster at n1:6379,n2:6379`. Never a secret.
impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.servers {
            Servers::Single { address, database: 0 } => write!(f, "redis at {address}")?,
            Servers::Single { address, database } => write!(f, "redis at {address}, database {database}")?,
            Servers::Sentinel { master, sentinels, .. } => {
                write!(f, "redis master {master} by the sentinels at {}", list(sentinels))?;
            }
            Servers::Cluster(nodes) => write!(f, "redis cluster at {}", list(nodes))?,
        }
        f.write_str(if self.tls.is_some() { ", TLS" } else { "" })
    }
}

/// As it is written: `redis:6379`, `[::1]:6379`, `/run/redis.sock`.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// What `REDIS_TYPE` says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Single,
    Sentinel,
    Cluster,
}

impl Setting for Kind {
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

/// What `REDIS_SOCKET_TYPE` says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Socket {
    Auto,
    Tcp,
    Unix,
}

impl Setting for Socket {
    const TAKES: &'static str = "tcp, unix or nothing";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "" => Some(Self::Auto),
            "tcp" => Some(Self::Tcp),
            "unix" => Some(Self::Unix),
            _ => None,
        }
    }
}

/// A URL as written, which may hold a password. What it must be is known only beside `REDIS_TYPE`.
struct Url(String);

impl Setting for Url {
    const TAKES: &'static str = "HOST:PORT, the path of a socket, or a URL with redis://, rediss:// or unix://; for a cluster several HOST:PORT with commas between; for sentinels the name of the master and then those";
    fn parse(text: &str) -> Option<Self> {
        Some(Self(text.to_owned()))
    }
}

/// How long connecting may take; 1 s unless told otherwise (the reference: 10 s). A handshake that was lost is begun again
/// by the kernel after 1 s (RFC 6298, 2.1); a connection of our own making is as soon there, and asks the name anew.
struct ConnectTimeout(Micros);

impl Setting for ConnectTimeout {
    const TAKES: &'static str = "a duration above 0, such as 1s or 250ms";
    fn parse(text: &str) -> Option<Self> {
        Micros::parse(text).filter(|length| *length > Micros::ZERO).map(Self)
    }
}

fn single(text: &str, socket: Socket) -> Option<(Servers, Option<Credentials>)> {
    let (address, database, credentials) = match text.split_once("://") {
        Some(("redis" | "rediss", rest)) => remote(rest)?,
        Some(("unix", path)) if path.starts_with('/') => (Address::Unix(path.into()), 0, None),
        Some(_) => return None,
        None if text.starts_with('/') => (Address::Unix(text.into()), 0, None),
        None => match host_and_port(text, None) {
            Some(address) => (address, 0, None),
            None if socket == Socket::Unix && !text.is_empty() => (Address::Unix(text.into()), 0, None),
            None => return None,
        },
    };
    Some((Servers::Single { address, database }, credentials))
}

/// What stands behind `redis://`: `[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, where user and password write as `%` and two
/// digits what would end them.
fn remote(rest: &str) -> Option<(Address, i64, Option<Credentials>)> {
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (credentials, host) = match authority.rsplit_once('@') {
        Some((credentials, _)) if credentials.contains(['?', '#']) => return None,
        Some((credentials, host)) => {
            let (user, password) = credentials.split_once(':')?;
            (Some(Credentials::of(&decoded(user)?, &decoded(password)?)?), host)
        }
        None => (None, authority),
    };
    let database = if database.is_empty() { 0 } else { i64::from(database.parse::<u32>().ok()?) };
    Some((host_and_port(host, Some(PORT))?, database, credentials))
}

fn sentinel(text: &str, auth: Option<Credentials>) -> Option<Servers> {
    let (master, sentinels) = text.split_once(',')?;
    let is_name = !master.trim().is_empty() && !master.contains([':', '/', '@']);
    let sentinels = nodes(sentinels)?;
    is_name.then(|| Servers::Sentinel { master: master.trim().to_owned(), sentinels, auth })
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
    Some(Address::Tcp { host: host.to_owned(), port })
}

/// Text in which `%` and two hexadecimal digits stand for a byte.
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

/// A URL that could not be read, without what may be a password in it: everything before the last `@`, everything where there
/// are parameters or a fragment, and in a URL without `@` what stands in the place of the port.
pub(super) fn shown(url: &str) -> String {
    let (scheme, rest) = url.find("://").map_or(("", url), |at| url.split_at(at + "://".len()));
    if rest.contains(['?', '#']) {
        return format!("{scheme}{HIDDEN}");
    }
    if let Some((_, host)) = rest.rsplit_once('@') {
        return format!("{scheme}{HIDDEN}@{host}");
    }
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/');
    // The colon behind an address in brackets, or the first one.
    let colon = if rest.starts_with('[') { rest.find("]:").map(|at| at + 1) } else { rest.find(':') };
    match colon.map(|at| rest.split_at(at)) {
        Some((host, port)) if !scheme.is_empty() && !is_port(port.trim_start_matches(':')) => {
            format!("{scheme}{host}:{HIDDEN}")
        }
        _ => url.to_owned(),
    }
}

fn list(addresses: &[Address]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
