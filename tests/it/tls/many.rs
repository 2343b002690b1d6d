//! Many certificates, one after the other, in each way that files change, under 2,000 calls a second.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::Channel;

use super::Secured;
use super::client::decide;
use super::rotation::{comes_into_use, mount, put, swap};
use crate::redis::certificates::Issued;
use crate::support::by_tier;

/// 10 calls every 5 ms.
const EVERY: Duration = Duration::from_millis(5);
const CALLS: usize = 10;

async fn call_for_ever(channel: Channel, answered: Arc<AtomicU64>) -> tonic::Status {
    let mut due = interval(EVERY);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        for answer in join_all((0..CALLS).map(|_| decide(&channel))).await {
            match answer {
                Ok(()) => answered.fetch_add(1, Ordering::Relaxed),
                Err(status) => return status,
            };
        }
    }
}

/// Changes the certificate many times by `change`, which gets the directory, the certificate and its number.
async fn many(server: &Secured, change: impl Fn(&Path, &Issued, u32)) {
    let answered = Arc::new(AtomicU64::new(0));
    let calls = tokio::spawn(call_for_ever(server.client().channel(server.tidegate.grpc), Arc::clone(&answered)));
    let began = Instant::now();
    for number in 0..by_tier(10, 200) {
        let next = server.authority.issue("127.0.0.1");
        change(server.directory.path(), &next, number);
        comes_into_use(server, &next).await;
    }
    assert!(!calls.is_finished(), "a call failed: {:?}", calls.await);
    calls.abort();
    let answered = answered.load(Ordering::Relaxed);
    assert!(answered > 0, "no call was made");
    println!("{answered} calls in {:?}", began.elapsed());
    assert_eq!(server.tidegate.log().matches("tls.unusable").count(), 0, "{}", server.tidegate.log());
}

#[tokio::test]
async fn certificates_in_place_fail_no_call() {
    many(&Secured::start(&[]).await, |directory, next, _| put(next, directory, false)).await;
}

#[tokio::test]
async fn certificates_by_rename_fail_no_call() {
    many(&Secured::start(&[]).await, |directory, next, _| put(next, directory, true)).await;
}

#[tokio::test]
async fn swaps_of_the_kubelet_fail_no_call() {
    let server = Secured::start(&[]).await;
    let first = server.authority.issue("127.0.0.1");
    swap(&first, server.directory.path(), "..first");
    mount(server.directory.path());
    many(&server, |directory, next, number| swap(next, directory, &format!("..{number}"))).await;
}
