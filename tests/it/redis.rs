//! Real Redis servers, on free ports of this machine, that end with the test that started them.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::process::Command;

use crate::support::{Process, eventually, output};

pub mod cluster;
mod tests;

/// A port that nobody else is given while this lives; a server that sets `SO_REUSEADDR`, as Redis does, may listen on it.
pub struct Port(TcpSocket);

impl Port {
    /// A free port, out of those that the system hands out.
    pub fn free() -> Self {
        Self::take(0).expect("a port is free")
    }

    /// This port, unless somebody holds it.
    fn take(port: u16) -> Option<Self> {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).ok()?;
        // Not before: two that ask for one port would both be given it.
        socket.set_reuseaddr(true).expect("a bound socket shares its port");
        Some(Self(socket))
    }

    /// Where a server that listens on it is found.
    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().expect("it is bound")
    }
}

/// A program that the kernel kills when the thread that starts it ends, be it that the whole test process is killed.
fn bound_to_this_thread(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program]);
    command
}

/// A `redis-server`: without persistence, unless its arguments ask for it.
pub struct Single {
    ports: Vec<Port>,
    password: Option<String>,
    arguments: Vec<OsString>,
    directory: TempDir,
    process: Process,
}

impl Single {
    /// Starts a server with these arguments after its own, such as `["--maxmemory", "10mb"]`.
    pub async fn start(arguments: &[&str]) -> Self {
        Self::launch(vec![Port::free()], None, arguments).await
    }

    /// Starts a server whose default user has a password, which the URL and `cli` give.
    pub async fn with_password(password: &str, arguments: &[&str]) -> Self {
        let arguments = [&["--requirepass", password], arguments].concat();
        Self::launch(vec![Port::free()], Some(password.to_owned()), &arguments).await
    }

    /// Starts a server on the first of these ports; it has use for the others, too.
    async fn launch(ports: Vec<Port>, password: Option<String>, more: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let number = ports[0].address().port().to_string();
        let own = ["--bind", "127.0.0.1", "--port", &number, "--save", "", "--logfile", "redis.log", "--dir"];
        let mut arguments: Vec<OsString> = own.map(OsString::from).into();
        arguments.push(directory.path().into());
        arguments.extend(more.iter().map(OsString::from));
        let process = Self::spawn(&arguments);
        let mut single = Self { ports, password, arguments, directory, process };
        single.answers().await;
        single
    }

    fn spawn(arguments: &[OsString]) -> Process {
        Process::start(bound_to_this_thread("redis-server").args(arguments))
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
        if !self.process.has_ended() {
            self.signal(Signal::KILL);
            self.ended().await;
        }
        self.process = Self::spawn(&self.arguments);
        self.answers().await;
    }
}

/// What `redis-cli` prints for a command to the server at a URL.
async fn cli(url: &str, command: &[&str]) -> String {
    let (_, printed, _) = output(Command::new("redis-cli").args(["--no-auth-warning", "-u", url]).args(command)).await;
    printed.trim_end().to_owned()
}
