//! Certificates and authorities that change under load.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::task::JoinHandle;

use super::client::{Client, ask, decide};
use super::{MUTUAL, Secured};
use crate::redis::certificates::{Authority, Issued};
use crate::support::eventually;

/// Calls on one connection, and calls on connections of their own, until it is stopped.
struct Calls {
    is_over: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<Result<(), String>>>,
}

impl Calls {
    fn start(server: &Secured, client: &Client) -> Self {
        let (is_over, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (at, channel) = (server.tidegate.grpc, client.channel(server.tidegate.grpc));
        let goes_on = {
            let (is_over, made) = (Arc::clone(&is_over), Arc::clone(&made));
            move || {
                made.fetch_add(1, Ordering::Relaxed);
                !is_over.load(Ordering::Relaxed)
            }
        };
        let on_one = {
            let goes_on = goes_on.clone();
            async move {
                while goes_on() {
                    decide(&channel).await.map_err(|status| status.to_string())?;
                }
                Ok(())
            }
        };
        let client = client.clone();
        let on_many = async move {
            while goes_on() {
                client.call(at).await?;
            }
            Ok(())
        };
        Self { is_over, made, tasks: vec![tokio::spawn(on_one), tokio::spawn(on_many)] }
    }

    async fn go_on(&self) {
        let reached = self.made.load(Ordering::Relaxed) + 100;
        eventually("calls go on", async || (self.made.load(Ordering::Relaxed) > reached).then_some(())).await;
    }

    async fn all_answered(self) {
        self.is_over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("it does not panic").expect("each call is answered");
        }
    }
}

/// Waits until new connections get this certificate.
pub(super) async fn comes_into_use(server: &Secured, issued: &Issued) {
    let expected = CertificateDer::from_pem_file(&issued.certificate).expect("a certificate").to_vec();
    eventually("it is in use", async || {
        // A client of its own, so that no session is resumed.
        let seen = server.client().call(server.tidegate.grpc).await.expect("it is answered");
        (seen.certificate == expected).then_some(())
    })
    .await;
}

pub(super) fn put(from: &Issued, directory: &Path, by_rename: bool) {
    for (file, name) in [(&from.certificate, "tls.crt"), (&from.key, "tls.key")] {
        let place = directory.join(name);
        if by_rename {
            let new = directory.join("new");
            fs::copy(file, &new).expect("it is copied");
            fs::rename(new, place).expect("it takes its place");
        } else {
            fs::write(place, fs::read(file).expect("it reads")).expect("it is written");
        }
    }
}

/// Puts a certificate into `version` of a mounted secret, and makes this the version that `..data` names, as the kubelet does.
pub(super) fn swap(from: &Issued, directory: &Path, version: &str) {
    swap_with(directory, version, |place| put(from, place, false));
}

/// The same with the files that `fill` writes.
pub(super) fn swap_with(directory: &Path, version: &str, fill: impl FnOnce(&Path)) {
    let place = directory.join(version);
    fs::create_dir(&place).expect("it is created");
    fill(&place);
    symlink(version, directory.join("..data_tmp")).expect("a link");
    fs::rename(directory.join("..data_tmp"), directory.join("..data")).expect("it takes its place");
}

/// Makes the files links through `..data`, as those of a mounted secret.
pub(super) fn mount(directory: &Path) {
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        if !directory.join("..data").join(name).exists() {
            continue;
        }
        symlink(Path::new("..data").join(name), directory.join("new")).expect("a link");
        fs::rename(directory.join("new"), directory.join(name)).expect("it takes its place");
    }
}

#[tokio::test]
async fn a_certificate_changes_in_place_and_by_rename_without_a_failed_call_and_a_broken_one_changes_nothing() {
    let server = Secured::start(&[]).await;
    let calls = Calls::start(&server, &server.client());
    let directory = server.directory.path();
    let second = server.authority.issue("127.0.0.1");
    put(&second, directory, false);
    comes_into_use(&server, &second).await;
    server.logs("tls.certificate.changed").await;
    let third = server.authority.issue("127.0.0.1");
    put(&third, directory, true);
    comes_into_use(&server, &third).await;
    calls.go_on().await;

    // Each of these keeps the third.
    fs::copy(&second.key, server.file("tls.key")).expect("it is copied");
    server.logs("it is the key of another certificate").await;
    fs::write(server.file("tls.key"), "no key").expect("it is written");
    fs::write(server.file("tls.crt"), "no certificate").expect("it is written");
    fs::remove_file(server.file("tls.crt")).expect("it is removed");
    let expired = server.authority.issue_as("127.0.0.1", |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    put(&expired, directory, true);
    server.logs("expected a certificate that is valid now").await;
    comes_into_use(&server, &third).await;
    let fourth = server.authority.issue("127.0.0.1");
    put(&fourth, directory, true);
    comes_into_use(&server, &fourth).await;
    calls.go_on().await;
    calls.all_answered().await;
}

#[tokio::test]
async fn a_secret_that_the_kubelet_swaps_is_read_without_a_failed_call() {
    let server = Secured::start(&[]).await;
    let directory = server.directory.path();
    let first = server.authority.issue("127.0.0.1");
    swap(&first, directory, "..1");
    mount(directory);
    comes_into_use(&server, &first).await;
    let calls = Calls::start(&server, &server.client());
    for version in ["..2", "..3"] {
        let next = server.authority.issue("127.0.0.1");
        swap(&next, directory, version);
        comes_into_use(&server, &next).await;
        calls.go_on().await;
    }
    calls.all_answered().await;
}

#[tokio::test]
async fn clients_of_an_authority_that_is_gone_are_ended_with_their_calls_answered_and_others_stay() {
    let server = Secured::start(&[MUTUAL]).await;
    let (old, new) = (&server.authority, Authority::new());
    let (leaving, staying) = (server.client().with(&old.issue("old")), server.client().with(&new.issue("new")));
    let both = [old.certificate(), new.certificate()].map(|file| fs::read_to_string(file).expect("it reads")).concat();
    fs::write(server.file("ca.crt"), both).expect("it is written");
    server.logs("tls.authorities.changed").await;
    let at = server.tidegate.grpc;
    let of_old = leaving.connection(at).await;
    ask(of_old.clone()).await.expect("it is answered");
    leaving.call(at).await.expect("it is answered");
    assert_eq!(server.metric("tidegate_connections_ended_total{listener=\"gRPC\",how=\"revoked\"}").await, 0);
    let calls = Calls::start(&server, &staying);

    fs::copy(new.certificate(), server.file("ca.crt")).expect("it is copied");
    eventually("new connections are refused", async || leaving.call(at).await.err()).await;
    let unknown = "tidegate_tls_handshakes_total{outcome=\"unknown_authority\"}";
    eventually("the reason is counted", async || (server.metric(unknown).await > 0).then_some(())).await;
    // On its connection, the client is answered until it is told to go elsewhere.
    let ended = eventually("the connection ends", async || ask(of_old.clone()).await.err()).await;
    assert!(ended.is_go_away() && ended.reason() == Some(h2::Reason::NO_ERROR), "{ended:?}");
    let revoked = "tidegate_connections_ended_total{listener=\"gRPC\",how=\"revoked\"}";
    eventually("it is counted", async || (server.metric(revoked).await > 0).then_some(())).await;
    calls.go_on().await;
    calls.all_answered().await;
    // An authority file without a certificate changes nothing.
    fs::write(server.file("ca.crt"), "nothing").expect("it is written");
    server.logs("ca.crt: expected at least one certificate as PEM").await;
    staying.call(at).await.expect("it is answered");
}
