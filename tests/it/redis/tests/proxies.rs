//! Proxies delay, hang, cut and refuse, and stop doing so.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::super::Single;
use super::super::cluster::{Cluster, NAMES_NO_HOST, NAMES_PROXIES};
use super::super::proxy::{Faults, Proxy, Way};
use super::Line;
use crate::support::{eventually, in_time};

/// Longer than an answer takes, for one that must not come.
const A_WHILE: Duration = Duration::from_millis(200);

async fn asked(line: &mut Line) -> Duration {
    let began = Instant::now();
    assert_eq!(line.ask("PING").await, "+PONG\r\n");
    began.elapsed()
}

#[tokio::test]
async fn a_proxy_holds_bytes_up_and_lets_them_pass_again() {
    let server = Single::start(&[]).await;
    let proxy = Proxy::start(server.address()).await;
    let mut line = Line::connect(proxy.address()).await;
    let millis = Duration::from_millis;

    proxy.set(Faults { to_server: Way::latency_ms(20), to_client: Way::latency_ms(30), ..Faults::default() });
    assert!(asked(&mut line).await >= millis(50));
    proxy.set(Faults::both(Way { slices: Some((1, millis(10))), ..Way::default() }));
    let began = Instant::now();
    line.send("PING").await;
    let mut answer = String::new();
    while answer != "+PONG\r\n" {
        answer += &line.hear().await.expect("more of it");
    }
    // Six bytes there and seven back: a pause follows each.
    assert!(began.elapsed() >= millis(110), "{:?}", began.elapsed());
    proxy.set(Faults::both(Way { straggler: Some((2, millis(80))), ..Way::default() }));
    let both = [asked(&mut line).await, asked(&mut line).await];
    assert!(both.iter().sum::<Duration>() >= millis(160), "each way, one of two: {both:?}");
    proxy.set(Faults::both(Way { jitter: millis(40), ..Way::default() }));
    let mut times = Vec::new();
    for _ in 0..10 {
        times.push(asked(&mut line).await);
    }
    let (least, most) = (times.iter().min().expect("ten"), times.iter().max().expect("ten"));
    assert!(*most > *least + millis(10), "{times:?}");

    proxy.heal();
    eventually("it is quick again", async || (asked(&mut line).await < millis(10)).then_some(())).await;
    assert_eq!(proxy.accepted(), 1);
    let [there, back] = proxy.passed();
    assert_eq!((there % 6, back % 7), (0, 0));
    assert_eq!(there / 6, back / 7);
}

#[tokio::test]
async fn a_black_hole_hangs_and_gives_back_what_fell_in() {
    let server = Single::start(&[]).await;
    let proxy = Proxy::start(server.address()).await;
    let mut line = Line::connect(proxy.address()).await;
    asked(&mut line).await;

    proxy.set(Faults::both(Way::black_hole()));
    line.send("INCR counter").await;
    let mut other = Line::connect(proxy.address()).await;
    other.send("PING").await;
    assert!(timeout(A_WHILE, line.hear()).await.is_err());
    assert!(timeout(A_WHILE, other.hear()).await.is_err());
    assert_eq!(server.cli(&["EXISTS", "counter"]).await, "0");
    drop(other);
    let clients = server.cli(&["CLIENT", "LIST", "TYPE", "normal"]).await.lines().count();
    assert_eq!(clients, 3, "both and this one: the server does not hear of the end");

    proxy.set(Faults { to_client: Way::black_hole(), ..Faults::default() });
    let counted = async || (server.cli(&["GET", "counter"]).await == "1").then_some(());
    eventually("what was sent before arrives", counted).await;
    assert!(timeout(A_WHILE, line.hear()).await.is_err());
    proxy.heal();
    assert_eq!(in_time("the answer arrives", line.hear()).await.expect("whole"), ":1\r\n");
    let alone = async || (server.cli(&["CLIENT", "LIST", "TYPE", "normal"]).await.lines().count() == 2).then_some(());
    eventually("the end of the other arrives", alone).await;
}

#[tokio::test]
async fn a_proxy_resets_connections_and_refuses_them() {
    let server = Single::start(&[]).await;
    let proxy = Proxy::start(server.address()).await;
    let mut lines = [Line::connect(proxy.address()).await, Line::connect(proxy.address()).await];
    for line in &mut lines {
        asked(line).await;
    }
    proxy.reset();
    for line in &mut lines {
        let end = in_time("it ends", line.hear()).await.expect_err("it is cut");
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(proxy.accepted(), 2);

    proxy.set(Faults { reset_each: Some(Duration::from_millis(20)), ..Faults::default() });
    for _ in 0..3 {
        let mut line = Line::connect(proxy.address()).await;
        in_time("it ends", line.hear()).await.expect_err("it is cut");
    }
    proxy.heal();
    let mut line = Line::connect(proxy.address()).await;
    asked(&mut line).await;
    proxy.set(Faults { is_refusing: true, ..Faults::default() });
    let is_refused = async || {
        let refused = TcpStream::connect(proxy.address()).await.err()?;
        (refused.kind() == ErrorKind::ConnectionRefused).then_some(())
    };
    eventually("nobody listens", is_refused).await;
    asked(&mut line).await;
    proxy.heal();
    eventually("it listens", async || TcpStream::connect(proxy.address()).await.ok()).await;

    drop(server);
    assert_eq!(in_time("it ends", line.hear()).await.unwrap_or_default(), "");
    let mut late = Line::connect(proxy.address()).await;
    in_time("it ends", late.hear()).await.expect_err("there is no server");
}

#[tokio::test]
async fn a_cluster_names_its_proxies_to_clients() {
    let cluster = Cluster::start_with(NAMES_PROXIES).await;
    let proxies = cluster.proxies(Ipv4Addr::new(127, 0, 0, 2)).await;
    let shards = cluster.shards().await;
    let key = cluster.key_of(shards[0].master, "named").await;
    let home = proxies[shards[0].master].address();
    let mut astray = Line::connect(proxies[shards[1].master].address()).await;
    let moved = astray.ask(&format!("GET {key}")).await;
    assert!(moved.starts_with("-MOVED ") && moved.ends_with(&format!(" {home}\r\n")), "{moved}");
    let slots = astray.ask("CLUSTER SLOTS").await;
    assert_eq!(slots.matches("$9\r\n127.0.0.2\r\n").count(), 6, "{slots}");

    proxies[shards[0].master].set(Faults::both(Way::black_hole()));
    assert_eq!(cluster.nodes()[shards[0].master].cli(&["SET", &key, "1", "EX", "60"]).await, "OK");
    assert_eq!(cluster.nodes()[shards[0].master].cli(&["WAIT", "1", "0"]).await, "1", "its replica hears it");
    let mut line = Line::connect(home).await;
    line.send(&format!("GET {key}")).await;
    assert!(timeout(A_WHILE, line.hear()).await.is_err());
    assert_eq!(cluster.shards().await, shards);
}

#[tokio::test]
async fn each_client_of_a_cluster_may_have_proxies_of_its_own() {
    let cluster = Cluster::start_with(NAMES_NO_HOST).await;
    let one = cluster.proxies(Ipv4Addr::new(127, 0, 0, 2)).await;
    let other = cluster.proxies(Ipv4Addr::new(127, 0, 0, 3)).await;
    let shards = cluster.shards().await;
    let key = cluster.key_of(shards[0].master, "unnamed").await;
    let mut astray = Line::connect(one[shards[1].master].address()).await;
    let moved = astray.ask(&format!("GET {key}")).await;
    let port = one[shards[0].master].address().port();
    assert!(moved.starts_with("-MOVED ") && moved.ends_with(&format!(" :{port}\r\n")), "{moved}");

    one[shards[0].master].set(Faults::both(Way::black_hole()));
    let mut cut = Line::connect(one[shards[0].master].address()).await;
    cut.send("PING").await;
    asked(&mut Line::connect(other[shards[0].master].address()).await).await;
    assert!(timeout(A_WHILE, cut.hear()).await.is_err());
}
