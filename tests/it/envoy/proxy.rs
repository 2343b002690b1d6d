//! A real Envoy with a configuration of `examples/`, and a client that writes whatever bytes it likes.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::process::Command;

use crate::http::{self, Answer};
use crate::support::{Process, eventually, in_time, repository, tool};

/// A running Envoy.
pub struct Proxy {
    process: Process,
    admin: SocketAddr,
    _upstream: TcpSocket,
    directory: TempDir,
}

impl Proxy {
    /// Starts Envoy with this example in front of this server, after these changes to the example's text.
    ///
    /// Every port becomes a free one, and the time that a decision may take becomes one that a busy machine keeps.
    pub async fn start(example: &str, tidegate: SocketAddr, changes: &[(&str, &str)]) -> Self {
        Self::start_as(true, 1, example, tidegate, changes).await
    }

    /// The same with this many worker threads, and with the example's own timeout where it is not patient.
    pub async fn start_as(
        is_patient: bool,
        workers: u32,
        example: &str,
        tidegate: SocketAddr,
        changes: &[(&str, &str)],
    ) -> Self {
        let upstream = reserved_port();
        let upstream_port = port(upstream.local_addr().expect("it has an address"));
        let mut text = std::fs::read_to_string(repository("examples").join(example)).expect("it reads");
        // Envoy asks over gRPC at 8081, or over HTTP at 8080.
        let asked = if text.contains("port_value: 8080 ") { "8080" } else { "8081" };
        let ports = [(asked, port(tidegate)), ("8090", upstream_port), ("9901", port_of(0)), ("10000", port_of(0))];
        let ports = ports.map(|(written, real)| (format!("port_value: {written} "), real));
        let ports = ports.iter().map(|(written, real)| (written.as_str(), real.as_str()));
        let patient = [" timeout: 0.25s", " timeout: 5s", " timeout: 3s"]
            .into_iter()
            .filter(|written| is_patient && text.contains(written));
        let patient: Vec<_> = patient.map(|written| (written, " timeout: 30s")).collect();
        for (from, to) in ports.chain(patient).chain(changes.iter().copied()) {
            assert!(text.contains(from), "{example} has no {from:?}");
            text = text.replace(from, to);
        }
        text = text.replace("port_value: 10001 ", "port_value: 0 ");

        let directory = tempfile::tempdir().expect("a directory");
        let (configuration, admin) = (directory.path().join("envoy.yaml"), directory.path().join("admin"));
        std::fs::write(&configuration, text).expect("it is written");
        let mut command = Command::new(tool("envoy"));
        command.arg("-c").arg(&configuration).arg("--admin-address-path").arg(&admin);
        command.args(["--concurrency", &workers.to_string(), "--disable-hot-restart", "--log-level", "warning"]);
        let mut process = Process::start(&mut command);
        let admin = eventually("Envoy is ready", async || {
            assert!(!process.has_ended(), "Envoy does not start: {}", process.errors());
            let admin = std::fs::read_to_string(&admin).ok()?.parse().ok()?;
            (http::get(admin, "/ready").sent().await.ok()?.status == 200).then_some(admin)
        })
        .await;
        Self { process, admin, _upstream: upstream, directory }
    }

    /// Its configuration.
    pub fn configuration(&self) -> PathBuf {
        self.directory.path().join("envoy.yaml")
    }

    /// What it has written to standard error: its access log.
    pub fn log(&self) -> String {
        self.process.errors()
    }

    /// Its counters whose names match a regular expression, a line each.
    pub async fn stats(&self, names: &str) -> String {
        http::get(self.admin, &format!("/stats?filter={names}")).await.body
    }

    /// Changes its runtime, such as `key=1&other=2`.
    pub async fn modify_runtime(&self, values: &str) {
        let answer = http::post(self.admin, &format!("/runtime_modify?{values}"), "").await;
        assert_eq!(answer.status, 200, "{answer}");
    }

    /// What it knows of the instances of its clusters.
    pub async fn clusters(&self) -> String {
        http::get(self.admin, "/clusters").await.body
    }

    /// The address of a listener of the example.
    pub async fn listener(&self, name: &str) -> SocketAddr {
        let listeners = http::get(self.admin, "/listeners").await;
        let found = listeners.body.lines().filter_map(|line| line.split_once("::")).find(|(found, _)| *found == name);
        found.and_then(|(_, address)| address.parse().ok()).unwrap_or_else(|| panic!("no {name} in {listeners:?}"))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("Envoy said:\n{}", self.process.errors());
        }
    }
}

/// A port that stays ours until Envoy, which sets SO_REUSEPORT too, listens on it.
fn reserved_port() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseport(true).expect("the option is set");
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
    socket
}

fn port(address: SocketAddr) -> String {
    port_of(address.port())
}

fn port_of(port: u16) -> String {
    format!("port_value: {port} ")
}

/// Asks for a path on behalf of a user, whose name may have any bytes but an end of line.
pub async fn get(at: SocketAddr, path: &str, user: impl AsRef<[u8]>) -> Answer {
    let request = http::get(at, path).header("host", "edge");
    let user = user.as_ref();
    if user.is_empty() { request.await } else { request.header("x-user-id", user).await }
}

/// Asks with these headers, each a line without its end.
pub async fn get_with(at: SocketAddr, path: &str, headers: &[&str]) -> Answer {
    let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    http::get(at, path).header("host", "edge").lines(lines).await
}

/// Asks for each of these paths, with each of these headers, one after the other on one connection.
pub async fn statuses(at: SocketAddr, asked: impl IntoIterator<Item = (String, String)>) -> Vec<u16> {
    let mut socket = BufReader::new(TcpStream::connect(at).await.expect("Envoy listens"));
    let mut statuses = Vec::new();
    for (path, header) in asked {
        let request = format!("GET {path} HTTP/1.1\r\nhost: edge\r\n{header}\r\n\r\n");
        socket.write_all(request.as_bytes()).await.expect("it is sent");
        statuses.push(status(&mut socket).await);
    }
    statuses
}

/// The status of the next answer on a connection, read to its end.
pub async fn status(socket: &mut BufReader<TcpStream>) -> u16 {
    let (mut status, mut length) = (0, 0);
    loop {
        let mut line = String::new();
        in_time("there is an answer", socket.read_line(&mut line)).await.expect("a line");
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(rest) = line.strip_prefix("http/1.1 ") {
            status = rest[..3].parse().expect("a status");
        } else if let Some(rest) = line.strip_prefix("content-length: ") {
            length = rest.parse().expect("a length");
        } else if line.is_empty() {
            break;
        }
    }
    socket.read_exact(&mut vec![0; length]).await.expect("a body");
    status
}
