//! The support itself: what it claims to start and to break is started and broken.

use rustix::process::Signal;

use super::Single;

#[tokio::test]
async fn a_server_answers_and_ends_with_its_owner() {
    let server = Single::start(&["--maxmemory", "10mb"]).await;
    assert_eq!(server.cli(&["CONFIG", "GET", "maxmemory"]).await, "maxmemory\n10485760");
    assert_eq!(server.cli(&["SET", "key", "value"]).await, "OK");
    assert_eq!(server.cli(&["GET", "key"]).await, "value");
    assert!(server.cli(&["INCR", "key"]).await.contains("not an integer"));
    let process = format!("/proc/{}/exe", server.pid());
    assert!(std::fs::read_link(&process).expect("it runs").ends_with("redis-check-rdb"), "{process}");
    drop(server);
    crate::support::eventually("it is gone", async || {
        (!std::fs::exists(&process).expect("it can be asked")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_restarted_server_has_its_port_and_what_it_kept_on_disk() {
    let mut forgetful = Single::start(&[]).await;
    let mut keeping = Single::start(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    for server in [&mut forgetful, &mut keeping] {
        let (address, pid) = (server.address(), server.pid());
        server.cli(&["SET", "key", "value"]).await;
        server.restart().await;
        assert_eq!(server.address(), address);
        assert_ne!(server.pid(), pid);
    }
    assert_eq!(forgetful.cli(&["GET", "key"]).await, "");
    assert_eq!(keeping.cli(&["GET", "key"]).await, "value");
    keeping.signal(Signal::KILL);
    keeping.ended().await;
    assert!(keeping.cli(&["PING"]).await.is_empty());
    assert!(keeping.log().contains("Ready to accept connections"));
    assert!(keeping.directory().join("appendonlydir").is_dir());
}

#[tokio::test]
async fn a_server_with_a_password_wants_it() {
    let server = Single::with_password("open:sesame", &[]).await;
    assert_eq!(server.cli(&["PING"]).await, "PONG");
    let stranger = format!("redis://{}", server.address());
    assert!(super::cli(&stranger, &["PING"]).await.contains("NOAUTH"));
}
