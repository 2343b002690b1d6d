//! A control plane whose machine goes away: nothing arrives from it any more, not even the end of the connection.

use std::time::Duration;

use socket2::{SockFilter, SockRef};
use tidegate::proto::ratelimit::config::ratelimit::v3::RateLimitUnit;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::plane::{Plane, answer, limit, page, response, rlconfig, start};

/// Time in which the silence is noticed: TCP ends a connection after 60 s without an acknowledgement.
const NOTICED: Duration = Duration::from_secs(150);

/// Makes the kernel drop all that arrives on `stream`, so that nothing is acknowledged.
fn silence(stream: &TcpStream) {
    let drop_all = SockFilter::new(0x06, 0, 0, 0);
    SockRef::from(stream).attach_filter(&[drop_all]).expect("the kernel takes the filter");
}

#[tokio::test]
async fn a_control_plane_that_falls_silent_without_closing_is_left_and_connected_again() {
    let mut plane = Plane::start().await;
    let proxy = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (at, to) = (proxy.local_addr().expect("an address"), plane.address);
    let (silent, mut silenced) = mpsc::channel::<()>(1);
    let forwarding = tokio::spawn(async move {
        let (mut first, _) = proxy.accept().await.expect("a connection");
        let mut onward = TcpStream::connect(to).await.expect("it listens");
        tokio::select! {
            _ = copy_bidirectional(&mut first, &mut onward) => panic!("the first connection has ended"),
            _ = silenced.recv() => silence(&first),
        }
        // The first connection stays open and silent while the second one works.
        let (mut second, _) = proxy.accept().await.expect("a second connection");
        let mut onward_again = TcpStream::connect(to).await.expect("it listens");
        let _ = copy_bidirectional(&mut second, &mut onward_again).await;
        drop((first, onward));
    });
    let mut variables = plane.variables();
    variables.retain(|(name, _)| name != "CONFIG_GRPC_XDS_SERVER_URL");
    variables.push(("CONFIG_GRPC_XDS_SERVER_URL".to_owned(), at.to_string()));
    let server = start(&variables, &[("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));

    silent.send(()).await.expect("the proxy runs");
    let again = async {
        while !page(&server, "/").await.contains("not connected") && !server.log().contains("the stream ended") {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(NOTICED, again).await.expect("the silence is noticed");
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"), "the rules stay");
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 6)])).expect("it is sent");
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    forwarding.abort();
}
