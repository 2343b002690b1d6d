//! A password file on a mount that stops answering.

use super::{PREFIX, Service, user};
use crate::redis::Single;
use crate::redis::hang::Hang;
use crate::support::eventually;

#[tokio::test]
async fn a_password_file_on_a_mount_that_hangs_holds_up_nothing_and_the_last_password_stays() {
    let (before, after) = (user("before"), user("after"));
    let server = Single::start(&[]).await;
    before.let_in(&server).await;
    after.let_in(&server).await;
    let hang = Hang::new();
    let (file, address) = (hang.at("auth"), server.address().to_string());
    std::fs::write(&file, before.auth()).expect("it is written");
    let given = [
        ("REDIS_URL", address.as_str()),
        ("REDIS_AUTH_FILE", file.to_str().expect("a path of text")),
        ("CACHE_KEY_PREFIX", PREFIX),
        ("WORKERS", "2"),
    ];
    let mut service = Service::start(&[&given, hang.variables().as_slice()].concat()).await;
    service.counts("at first").await;
    let threads = service.tidegate.threads();

    hang.begin();
    std::fs::write(&file, after.auth()).expect("it is written");
    hang.is_met().await;
    for _ in 0..3 {
        assert_ne!(server.cli(&["CLIENT", "KILL", "USER", &before.name]).await, "0");
        service.counts("by a new connection").await;
    }
    assert!(service.is_healthy().await);
    let told = "still reading the file with the password of Redis";
    eventually("it is reported", async || service.log().contains(told).then_some(())).await;
    // Ten reads would have been due since.
    assert!(service.tidegate.threads() <= threads + 1, "{} after {threads}", service.tidegate.threads());
    assert!(service.is_healthy().await);
    service.counts("all the while").await;

    hang.end();
    eventually("the file is read", async || service.log().contains("has changed").then_some(())).await;
    service.counts("as another user").await;
    hang.begin();
    hang.is_met().await;
    service.tidegate.terminate();
    assert!(service.tidegate.ended().await.success(), "{}", service.log());
}
