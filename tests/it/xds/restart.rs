//! Rules that survive a restart, and stops at every moment.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use tidegate::proto::ratelimit::config::ratelimit::v3::RateLimitUnit;
use tokio::process::Command;

use super::plane::{Plane, answer, call, limit, page, response, rlconfig, start};
use crate::support::{Process, eventually, on_free_ports, output};

#[tokio::test]
async fn rules_in_the_state_directory_decide_until_the_control_plane_sends_others() {
    let mut plane = Plane::start().await;
    let directory = tempfile::tempdir().unwrap();
    // As systemd has it with DynamicUser: /var/lib/tidegate is a link, and others may open the directory that it names.
    let (private, library) = (directory.path().join("private/tidegate"), directory.path().join("tidegate"));
    fs::create_dir_all(&private).unwrap();
    symlink("private/tidegate", &library).unwrap();
    let state = library.join("rules").display().to_string();
    let more = [("STATE_DIR", &*state), ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")];
    let mut server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 1)])).unwrap();
    plane.request().await;
    let file = private.join("rules/rules.state");
    eventually("the rules are written", async || file.exists().then_some(())).await;
    server.terminate();
    server.ended().await;
    let address = plane.address;
    let variables = plane.variables();
    drop((plane, stream));

    // Without FORCE the listeners open only because there are rules.
    let server = start(&variables, &more[..1]).await;
    assert!(rlconfig(&server).await.contains("requests_per_unit=1"));
    assert!(call(&server).await.status == 200);
    assert!(call(&server).await.status == 429);
    let about = page(&server, "/").await;
    assert!(about.contains("the rules in force are from STATE_DIR"), "{about}");
    assert!(about.contains("not connected, next attempt in"), "{about}");
    assert!(server.metrics().await.contains("tidegate_xds_connected 0"));

    let mut plane = Plane::start_at(address, None).await;
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 9)])).unwrap();
    plane.request().await;
    assert!(rlconfig(&server).await.contains("requests_per_unit=9"));
    assert!(!page(&server, "/").await.contains("STATE_DIR"));
    assert!(server.metrics().await.contains("tidegate_xds_restored_age_seconds 0"));
}

#[tokio::test]
async fn rules_that_are_too_old_or_damaged_are_named_and_not_used() {
    let mut plane = Plane::start().await;
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state").display().to_string();
    let more = [("STATE_DIR", &*state), ("STATE_MAX_AGE", "1h"), ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")];
    let mut server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 1)])).unwrap();
    plane.request().await;
    let file = directory.path().join("state").join("rules.state");
    eventually("the rules are written", async || file.exists().then_some(())).await;
    server.kill();
    server.ended().await;
    let variables = plane.variables();
    drop((plane, stream));
    let two_hours_ago = SystemTime::now() - Duration::from_secs(7_200);
    File::options().write(true).open(&file).unwrap().set_modified(two_hours_ago).unwrap();
    for why in ["STATE_MAX_AGE is 3600 s", "its checksum is wrong"] {
        let server = start(&variables, &more).await;
        eventually("it is named", async || server.log().contains(why).then_some(())).await;
        assert!(call(&server).await.contains("no rate limit configuration loaded"));
        drop(server);
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
    }
}

#[tokio::test]
async fn an_empty_set_in_the_state_directory_opens_no_listener() {
    let mut plane = Plane::start().await;
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state").display().to_string();
    let more = [("STATE_DIR", &*state), ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")];
    let mut server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[])).unwrap();
    plane.request().await;
    let file = directory.path().join("state").join("rules.state");
    eventually("the set is written", async || file.exists().then_some(())).await;
    server.terminate();
    server.ended().await;
    let variables = plane.variables();
    drop((plane, stream));
    let server = start(&variables, &more).await;
    assert!(call(&server).await.contains("no rate limit configuration loaded"));
}

#[tokio::test]
async fn a_state_directory_that_others_could_write_to_stops_the_start() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").env_clear().env("CONFIG_TYPE", "GRPC_XDS_SOTW").env("STATE_DIR", "/tmp");
    let (status, _, errors) = output(on_free_ports(&mut command)).await;
    assert!(!status.success());
    assert!(errors.contains("STATE_DIR is /tmp: its mode is 0777"), "{errors}");
}

#[tokio::test]
async fn a_stop_signal_is_obeyed_before_there_is_a_connection_and_while_an_empty_set_is_held() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").env_clear().env("CONFIG_TYPE", "GRPC_XDS_SOTW");
    // Nothing listens there.
    command.env("CONFIG_GRPC_XDS_SERVER_URL", "127.0.0.1:1").env("LOG_LEVEL", "info");
    let mut process = Process::start(on_free_ports(&mut command));
    eventually("it has tried", async || process.errors().contains("xds.disconnected").then_some(())).await;
    process.signal(Signal::TERM);
    assert!(process.ended().await.success());

    let mut plane = Plane::start().await;
    let more = [("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"), ("XDS_HOLD_EMPTY", "1h")];
    let mut server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 1)])).unwrap();
    plane.request().await;
    stream.send(response("2", "n2", &[])).unwrap();
    plane.request().await;
    server.terminate();
    assert!(server.ended().await.success());
}
