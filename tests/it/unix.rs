//! gRPC on a Unix socket: who may connect, what is left there, and what becomes of it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tempfile::{NamedTempFile, TempDir};
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio_rustls::TlsConnector;

use crate::envoy::proxy::{Proxy, get};
use crate::redis::certificates::Authority;
use crate::support::{Process, in_time, on_free_ports, output, repository, rule_file, tool};
use crate::tls::client::{Client, ask};

/// A server on a Unix socket in a directory of its own.
pub struct Served {
    process: Process,
    directory: TempDir,
    _rules: NamedTempFile,
}

fn rules() -> NamedTempFile {
    let text = fs::read_to_string(repository("examples/rules.yaml")).expect("it reads");
    rule_file(&text.replace("unit: minute", "unit: week"))
}

fn command(rules: &Path, socket: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules).env_clear().env("GRPC_UDS", socket).envs(variables.iter().copied());
    on_free_ports(&mut command);
    command
}

impl Served {
    /// Starts a server in `directory` with these rules.
    async fn start_in(directory: TempDir, rules: NamedTempFile, variables: &[(&str, &str)]) -> Self {
        let socket = directory.path().join("grpc.sock");
        let mut process = Process::start(&mut command(rules.path(), &socket, variables));
        loop {
            let line = process.line().await.unwrap_or_else(|| panic!("no start: {}", process.errors()));
            if line.contains("gRPC") {
                assert!(line.contains(&format!("unix:{}", socket.display())), "{line}");
                return Self { process, directory, _rules: rules };
            }
        }
    }

    pub async fn start(variables: &[(&str, &str)]) -> Self {
        Self::start_with(rules(), variables).await
    }

    /// The same with these rules.
    pub async fn start_with(rules: NamedTempFile, variables: &[(&str, &str)]) -> Self {
        Self::start_in(tempfile::tempdir().expect("a directory"), rules, variables).await
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("grpc.sock")
    }

    /// Ends it as an init system does. Returns its directory.
    async fn stop(mut self) -> TempDir {
        self.process.signal(rustix::process::Signal::TERM);
        assert!(self.process.ended().await.success(), "{}", self.process.errors());
        self.directory
    }
}

/// Makes one call of this user by `tidegate call`. Returns its exit code and what it printed.
async fn call(socket: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["call", "--domain", "edge", "-d", "user=alice", "--timeout", "30s", "--address"]);
    command.arg(format!("unix:{}", socket.display())).args(more).env_clear();
    let (status, printed, errors) = output(&mut command).await;
    (status.code(), printed + &errors)
}

fn mode(socket: &Path) -> u32 {
    let metadata = fs::symlink_metadata(socket).expect("it is there");
    assert!(metadata.file_type().is_socket());
    metadata.permissions().mode() & 0o777
}

#[tokio::test]
async fn calls_over_a_unix_socket_are_decided_and_the_file_is_gone_after_the_stop() {
    let served = Served::start(&[]).await;
    let (code, printed) = call(&served.socket(), &["--times", "6"]).await;
    assert_eq!((code, printed.matches("OVER_LIMIT").count()), (Some(1), 2), "{printed}");
    let directory = served.stop().await;
    assert_eq!(fs::read_dir(directory.path()).expect("it reads").count(), 0, "its file is gone");
}

#[tokio::test]
async fn an_envoy_asks_over_a_unix_socket() {
    let served = Served::start(&[]).await;
    let pipe = format!("pipe: {{ path: \"{}\" }}", served.socket().display());
    let nowhere = "127.0.0.1:1".parse().expect("an address");
    let tcp = "socket_address: { address: 127.0.0.1, port_value: 1 }";
    let envoy = Proxy::start("envoy.yaml", nowhere, &[(tcp, &pipe)]).await;
    let edge = envoy.listener("fail_closed").await;
    let mut statuses = Vec::new();
    for _ in 0..6 {
        statuses.push(get(edge, "/", "alice").await.status);
    }
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
}

#[tokio::test]
async fn the_file_has_the_permissions_that_are_set() {
    for (given, expected) in [("0600", 0o600), ("666", 0o666)] {
        let served = Served::start(&[("GRPC_UDS_MODE", given)]).await;
        assert_eq!(mode(&served.socket()), expected);
    }
}

#[tokio::test]
async fn a_socket_that_a_killed_process_has_left_is_replaced() {
    let mut served = Served::start(&[]).await;
    served.process.signal(rustix::process::Signal::KILL);
    assert!(!served.process.ended().await.success());
    assert!(served.socket().exists(), "nobody has removed it");
    let next = Served::start_in(served.directory, rules(), &[]).await;
    assert_eq!(call(&next.socket(), &[]).await.0, Some(0));
}

/// Starts a server on `socket`, which must not start. Returns what it complains of.
async fn refused(socket: &Path, variables: &[(&str, &str)]) -> String {
    let rules = rules();
    let (status, _, errors) = output(&mut command(rules.path(), socket, variables)).await;
    assert_eq!(status.code(), Some(2), "{errors}");
    errors
}

#[tokio::test]
async fn what_is_used_or_no_socket_is_left_alone_and_stops_the_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("grpc.sock");
    fs::write(&path, "mine").expect("it is written");
    let errors = refused(&path, &[]).await;
    let expected = format!(
        "cannot listen on {}: set GRPC_UDS to a free path in a directory that exists and that this user may write to: the file there is no socket",
        path.display()
    );
    assert!(errors.contains(&expected), "{errors}");
    assert_eq!(fs::read_to_string(&path).expect("it reads"), "mine");

    fs::remove_file(&path).expect("it is removed");
    let other = UnixListener::bind(&path).expect("it binds");
    assert!(refused(&path, &[]).await.contains("another process listens there"));
    assert!(path.exists());
    drop(other);

    let errors = refused(&directory.path().join("missing/grpc.sock"), &[]).await;
    assert!(errors.contains("missing/grpc.sock") && errors.contains("No such file or directory"), "{errors}");
    let errors = refused(Path::new(&"x".repeat(108)), &[("GRPC_UDS_MODE", "rw")]).await;
    assert!(
        errors.contains("GRPC_UDS is \"xxx") && errors.contains("expected a path of at most 107 bytes"),
        "{errors}"
    );
    assert!(errors.contains("GRPC_UDS_MODE is \"rw\": expected three or four octal digits"), "{errors}");
}

#[tokio::test]
async fn a_file_that_has_taken_the_place_of_the_socket_is_left_alone_at_the_stop() {
    let served = Served::start(&[]).await;
    fs::remove_file(served.socket()).expect("it is removed");
    fs::write(served.socket(), "mine").expect("it is written");
    let directory = served.stop().await;
    assert_eq!(fs::read_to_string(directory.path().join("grpc.sock")).expect("it reads"), "mine");
}

#[tokio::test]
async fn a_unix_socket_speaks_tls_as_a_port_does() {
    let authority = Authority::new();
    let own = authority.issue("127.0.0.1");
    let file = |path: &Path| path.display().to_string();
    let (certificate, key) = (file(&own.certificate), file(&own.key));
    let variables =
        [("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", &*certificate), ("GRPC_SERVER_TLS_KEY", &*key)];
    let served = Served::start(&variables).await;
    let stream = UnixStream::connect(served.socket()).await.expect("it listens");
    let connector = TlsConnector::from(Arc::new(Client::of(&authority).0));
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    in_time("there is an answer", async {
        let stream = connector.connect(name, stream).await.expect("a handshake");
        let (client, connection) = h2::client::handshake(stream).await.expect("a connection");
        tokio::spawn(connection);
        ask(client).await.expect("an answer");
    })
    .await;
    let ca = file(&authority.certificate());
    let (code, printed) = call(&served.socket(), &["--ca", &ca, "--server-name", "127.0.0.1"]).await;
    assert_eq!(code, Some(0), "{printed}");
    for (more, expected) in [
        (&["--ca", &ca][..], "a Unix socket has no host: set --server-name to a name of the server's certificate"),
        (&["--ca", &ca, "--server-name", "other.example"], "not valid for name \"other.example\""),
        (&[], "; if it speaks TLS, set --tls or --ca, and --server-name to a name of its certificate"),
    ] {
        let (code, printed) = call(&served.socket(), more).await;
        assert!(code == Some(2) && printed.contains(expected), "{more:?}: {printed}");
    }
}

/// The smallest client of Python: one call on each of two channels, whose targets are this socket.
const PYTHON: &str = "
import sys, grpc
request = b'\\n\\x04edge\\x12\\x0f\\n\\r\\n\\x04user\\x12\\x05alice'
path = '/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit'
for target in sys.argv[1:]:
    with grpc.insecure_channel(target) as channel:
        for _ in range(2):
            print(channel.unary_unary(path)(request, timeout=30)[:2].hex())
";

#[tokio::test]
async fn a_client_of_c_core_calls_over_a_unix_socket_whatever_its_path_is() {
    let directory = tempfile::Builder::new().prefix("a ~b.c%d+é").tempdir().expect("a directory");
    let served = Served::start_in(directory, rules(), &[]).await;
    let socket = served.socket().display().to_string();
    let mut python = Command::new(tool("python"));
    python.args(["-c", PYTHON, &format!("unix:{socket}"), &format!("unix://{socket}")]).env_clear();
    let (status, printed, errors) = output(&mut python).await;
    assert!(status.success(), "{errors}");
    assert_eq!(printed, "0801\n".repeat(4), "{errors}");
}
