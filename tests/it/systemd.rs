//! A server under systemd: its unit, and the notices that it sends to the service manager.

use std::io::ErrorKind;
use std::path::Path;

use tokio::net::UnixDatagram;
use tokio::process::Command;

use crate::helm::aside;
use crate::support::{Process, in_time, on_free_ports, output, repository, rule_file};

/// Starts a server that notifies `socket`, with these variables.
fn start(rules: &Path, socket: &Path, variables: &[(&str, &str)]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules).env_clear().env("NOTIFY_SOCKET", socket).envs(variables.iter().copied());
    Process::start(on_free_ports(&mut command))
}

/// The next notice.
async fn notice(manager: &UnixDatagram) -> String {
    let mut notice = vec![0; 1_024];
    let length = in_time("there is a notice", manager.recv(&mut notice)).await.expect("it is received");
    String::from_utf8(notice[..length].to_vec()).expect("text")
}

#[tokio::test]
async fn a_service_manager_hears_of_the_start_and_of_the_stop() {
    let (directory, rules) = (tempfile::tempdir().expect("a directory"), rule_file("domain: d\n"));
    let socket = directory.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("it binds");
    let mut server = start(rules.path(), &socket, &[]);
    assert_eq!(notice(&manager).await, "STATUS=waiting for rules\n");
    assert_eq!(notice(&manager).await, "READY=1\nSTATUS=serving\n");
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(notice(&manager).await, "STOPPING=1\nSTATUS=answering the calls in flight\n");
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn a_watchdog_hears_that_the_server_is_alive() {
    let (directory, rules) = (tempfile::tempdir().expect("a directory"), rule_file("domain: d\n"));
    let socket = directory.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("it binds");
    let _server = start(rules.path(), &socket, &[("WATCHDOG_USEC", "20000")]);
    let mut heard = 0;
    while heard < 3 {
        heard += u32::from(notice(&manager).await == "WATCHDOG=1\n");
    }
}

#[tokio::test]
async fn a_server_that_waits_for_a_control_plane_is_not_ready() {
    let (directory, socket) = (tempfile::tempdir().expect("a directory"), "notify");
    let manager = UnixDatagram::bind(directory.path().join(socket)).expect("it binds");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").env_clear().env("NOTIFY_SOCKET", directory.path().join(socket));
    command.envs([("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_SERVER_URL", "127.0.0.1:1")]);
    let mut server = Process::start(on_free_ports(&mut command));
    assert_eq!(notice(&manager).await, "STATUS=waiting for rules\n");
    server.signal(rustix::process::Signal::TERM);
    assert!(server.ended().await.success());
    assert_eq!(manager.try_recv(&mut [0; 64]).map_err(|error| error.kind()), Err(ErrorKind::WouldBlock));
}

#[tokio::test]
async fn the_unit_is_valid() {
    let unit = std::fs::read_to_string(repository("packaging/tidegate.service")).expect("it reads");
    let installed = "ExecStart=/usr/bin/tidegate ";
    assert!(unit.contains(installed), "{unit}");
    let built = unit.replace(installed, &format!("ExecStart={} ", env!("CARGO_BIN_EXE_tidegate")));
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("tidegate.service");
    std::fs::write(&file, built).expect("it is written");
    if std::process::Command::new("systemd-analyze").arg("--version").output().is_err() {
        return aside("the unit of systemd is NOT CHECKED: there is no systemd-analyze in $PATH");
    }
    let mut verify = Command::new("systemd-analyze");
    let (status, printed, errors) = output(verify.args(["verify", "--man=no"]).arg(&file)).await;
    // What it does not know it only warns of.
    assert!(status.success() && printed.is_empty() && errors.is_empty(), "{printed}{errors}");
}
