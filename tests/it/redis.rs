//! Real Redis servers, on free ports of this machine, that end with the test that started them.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use futures_util::future::join_all;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::process::Command;

use certificates::Authority;
use clock::Clock;
use partition::Partition;

use crate::support::{Process, eventually, output};

pub mod certificates;
pub mod clock;
pub mod cluster;
pub mod hang;
pub mod liar;
pub mod paced;
mod partition;
pub mod preloaded;
pub mod proxy;
pub mod resolve;
pub mod sentinel;
mod tests;
pub mod user;

/// A port that nobody else is given while this lives; a server that sets `SO_REUSEADDR`, as Redis does, may listen on it.
pub struct Port(TcpSocket);

impl Port {
    /// A free port, out of those that the system hands out.
    pub fn free() -> Self {
        Self::take(Ipv4Addr::LOCALHOST, 0).expect("a port is free")
    }

    /// This port of an address of this machine, unless somebody holds it.
    fn take(host: Ipv4Addr, port: u16) -> Option<Self> {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((host, port))).ok()?;
        // Not before: two that ask for one port would both be given it.
        socket.set_reuseaddr(true).expect("a bound socket shares its port");
        Some(Self(socket))
    }

    /// This port of another address of this machine, for a test that holds the same port of 127.0.0.1: nobody else is given it, so
    /// connections that ended there a moment ago do not matter.
    fn beside(host: Ipv4Addr, port: u16) -> Option<Self> {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("a socket shares its port");
        socket.bind(SocketAddr::from((host, port))).ok()?;
        Some(Self(socket))
    }

    /// Where a server that listens on it is found.
    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().expect("it is bound")
    }
}

/// A program that the kernel kills when the thread that starts it ends, be it that the whole test process is killed.
pub fn bound_to_this_thread(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program]);
    command
}

/// A `redis-server`: without persistence, unless its arguments ask for it.
pub struct Single {
    /// The first to be dropped: it has ended when its files go.
    process: Process,
    ports: Vec<Port>,
    password: Option<String>,
    clock: Option<Clock>,
    partition: Option<Partition>,
    arguments: Vec<OsString>,
    directory: TempDir,
}

impl Single {
    /// Starts a server with these arguments after its own, such as `["--maxmemory", "10mb"]`.
    ///
    /// With `["--unixsocket", "redis.sock"]` it listens on that file of its directory, too; with
    /// `["--user", "alice", "on", ">secret", "~*", "+@all"]` it has one more user.
    pub async fn start(arguments: &[&str]) -> Self {
        Self::launch(vec![Port::free()], None, None, arguments).await
    }

    /// Starts a server with so many keys, which takes 50 us or more to load each of them again, and looks for clients after
    /// each KiB meanwhile.
    pub async fn slow_to_load(keys: u32) -> Self {
        let slow = ["--key-load-delay", "50", "--loading-process-events-interval-bytes", "1024"];
        let server = Self::start(&[&slow[..], &["--enable-debug-command", "yes"]].concat()).await;
        assert_eq!(server.cli(&["DEBUG", "POPULATE", &keys.to_string()]).await, "OK");
        server
    }

    /// Starts a server on the same free port of each of these addresses of this machine.
    pub async fn at_each<const N: usize>(hosts: [Ipv4Addr; N]) -> [Self; N] {
        let held = Port::free();
        let port = held.address().port();
        let servers = hosts.map(async |host| {
            let beside = Port::beside(host, port).expect("nobody else is given it");
            Self::launch(vec![beside], None, None, &["--bind", &host.to_string()]).await
        });
        let servers = join_all(servers).await;
        servers.try_into().unwrap_or_else(|_| panic!("one for each"))
    }

    /// Starts a server whose default user has a password, which the URL and `cli` give.
    pub async fn with_password(password: &str, arguments: &[&str]) -> Self {
        let arguments = [&["--requirepass", password], arguments].concat();
        Self::launch(vec![Port::free()], Some(password.to_owned()), None, &arguments).await
    }

    /// Starts a server that speaks TLS on a second port, under this name, to clients that have a certificate of the same
    /// authority; on the first it listens in plain.
    pub async fn with_tls(authority: &Authority, name: &str, arguments: &[&str]) -> Self {
        let (ports, server) = (vec![Port::free(), Port::free()], authority.issue(name));
        let port = ports[1].address().port().to_string();
        let files = [authority.certificate(), server.certificate, server.key];
        let [ca, certificate, key] = files.each_ref().map(|file| file.to_str().expect("a path of ours"));
        let tls =
            ["--tls-port", &port, "--tls-ca-cert-file", ca, "--tls-cert-file", certificate, "--tls-key-file", key];
        Self::launch(ports, None, None, &[&tls, arguments].concat()).await
    }

    /// Starts a server whose wall clock can be shifted.
    pub async fn with_clock(arguments: &[&str]) -> Self {
        Self::launch(vec![Port::free()], None, Some(Clock::new()), arguments).await
    }

    /// Starts a server on the first of these ports; it has use for the others, too.
    async fn launch(ports: Vec<Port>, password: Option<String>, clock: Option<Clock>, more: &[&str]) -> Self {
        let number = ports[0].address().port().to_string();
        let own = ["--bind", "127.0.0.1", "--port", &number, "--save", "", "--logfile", "redis.log"];
        let arguments = own.iter().chain(more).map(OsString::from).collect();
        Self::run(ports, password, clock, directory(), arguments).await
    }

    /// Starts a server with these arguments, in this directory.
    async fn run(
        ports: Vec<Port>,
        password: Option<String>,
        clock: Option<Clock>,
        directory: TempDir,
        arguments: Vec<OsString>,
    ) -> Self {
        // A node of a cluster can be cut from the others, unless it has a clock of its own.
        let is_node = arguments.iter().any(|argument| argument == "--cluster-enabled");
        let partition = (is_node && clock.is_none()).then(Partition::new);
        let process = Self::spawn(&directory, clock.as_ref(), partition.as_ref(), &arguments);
        let mut single = Self { process, ports, password, clock, partition, arguments, directory };
        single.answers().await;
        single
    }

    fn spawn(
        directory: &TempDir,
        clock: Option<&Clock>,
        partition: Option<&Partition>,
        arguments: &[OsString],
    ) -> Process {
        let mut command = bound_to_this_thread("redis-server");
        if let Some(clock) = clock {
            clock.preload(&mut command);
        }
        if let Some(partition) = partition {
            partition.preload(&mut command);
        }
        Process::start(command.args(arguments).current_dir(directory))
    }

    async fn answers(&mut self) {
        eventually("Redis answers", async || {
            assert!(!self.process.has_ended(), "Redis does not start: {}{}", self.process.errors(), self.log());
            (self.cli(&["PING"]).await == "PONG").then_some(())
        })
        .await;
    }

    /// What the server has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("redis.log")).unwrap_or_default()
    }

    /// Where it listens for plain TCP.
    pub fn address(&self) -> SocketAddr {
        self.ports[0].address()
    }

    /// The same as a URL, with the password of the default user.
    pub fn url(&self) -> String {
        let password = self.password.as_ref().map_or_else(String::new, |password| format!("default:{password}@"));
        format!("redis://{password}{}", self.address())
    }

    /// Where it listens for TLS.
    pub fn tls_address(&self) -> SocketAddr {
        self.ports.get(1).expect("started with TLS").address()
    }

    /// Its wall clock, if it was started with one.
    pub fn clock(&self) -> &Clock {
        self.clock.as_ref().expect("started with a clock")
    }

    /// From now on its wall clock is so much ahead, or behind where this is negative.
    pub fn shift_clock(&self, shift_us: i64) {
        self.clock().shift(shift_us);
    }

    /// The directory it keeps its files in.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// What `redis-cli` prints for a command of the default user: raw values, one to a line, an error as its text.
    pub async fn cli(&self, command: &[&str]) -> String {
        cli(&self.url(), command).await
    }

    /// Sends a command, and waits for no reply.
    pub fn send(&self, command: &'static [&'static str]) {
        let url = self.url();
        tokio::spawn(async move { cli(&url, command).await });
    }

    /// The numbers of a counter of Tidegate, such as `29735 17`; empty if there is none.
    pub async fn counter(&self, key: &str) -> String {
        let read = "local all, text = {}, redis.call('GET', KEYS[1]) or '' for at = 1, #text, 8 do \
                    all[#all + 1] = string.format('%.0f', (struct.unpack('<I8', text, at))) end return table.concat(all, ' ')";
        self.cli(&["EVAL", read, "1", key]).await
    }

    /// How often it has run a script.
    pub async fn scripts_run(&self) -> u32 {
        let stats = self.cli(&["INFO", "commandstats"]).await;
        let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        let number = |calls: &str| calls.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number");
        calls.map_or(0, number)
    }

    /// Sends a signal to it: `STOP` pauses it, `CONT` lets it go on, `KILL` ends it; `ended` waits for that.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits until it has ended.
    pub async fn ended(&mut self) {
        self.process.ended().await;
    }

    /// Kills it, if it still runs, and starts it again on the same port and in the same directory.
    pub async fn restart(&mut self) {
        self.restart_unready().await;
        self.answers().await;
    }

    /// Cuts it from the nodes of its cluster, and from its replicas: it hears of nobody, and clients that it knows of it.
    pub async fn cut(&self) {
        // The replica comes again, and is not let in.
        assert_eq!(self.cli(&["CONFIG", "SET", "requirepass", "nobody knows"]).await, "OK");
        self.partition.as_ref().expect("a node without a clock of its own").set(true);
        let url = format!("redis://default:nobody%20knows@{}", self.address());
        assert_eq!(cli(&url, &["CLIENT", "KILL", "TYPE", "replica"]).await, "1");
    }

    /// Ends the cut.
    pub async fn rejoin(&self) {
        self.partition.as_ref().expect("a node without a clock of its own").set(false);
        let url = format!("redis://default:nobody%20knows@{}", self.address());
        assert_eq!(cli(&url, &["CONFIG", "SET", "requirepass", ""]).await, "OK");
    }

    /// Restarts it, but does not wait until it has loaded what it kept.
    pub async fn restart_unready(&mut self) {
        if !self.process.has_ended() {
            self.signal(Signal::KILL);
            self.ended().await;
        }
        self.process = Self::spawn(&self.directory, self.clock.as_ref(), self.partition.as_ref(), &self.arguments);
    }
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// What `redis-cli` prints for a command to the server at a URL.
async fn cli(url: &str, command: &[&str]) -> String {
    let (_, printed, _) = output(Command::new("redis-cli").args(["--no-auth-warning", "-u", url]).args(command)).await;
    printed.trim_end().to_owned()
}
