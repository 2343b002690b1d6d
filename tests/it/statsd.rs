//! Statistics as a receiver of statsd (TCP) or DogStatsD (UDP) gets them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use tempfile::NamedTempFile;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinHandle;

use crate::http;
use crate::support::{Tidegate, eventually, in_time, rule_file};

const RULES: &str = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: week, requests_per_unit: 2 } }
  - key: a
    value: b
    descriptors: [{ key: c, descriptors: [{ key: d, value: e, rate_limit: { unit: week, requests_per_unit: 9 } }] }]
";

/// A receiver and what it has got. It ends when it is dropped.
struct Receiver {
    port: u16,
    packets: Arc<Mutex<Vec<Vec<u8>>>>,
    task: JoinHandle<()>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Receiver {
    /// One that listens over TCP on this port, or on a free one.
    async fn tcp(port: u16) -> Self {
        Self::of(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.expect("a free port"))
    }

    /// One that takes the connections of `listener`, one after the other.
    fn of(listener: TcpListener) -> Self {
        let port = listener.local_addr().expect("it is bound").port();
        let packets = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let kept = Arc::clone(&packets);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                read(stream, &kept).await;
            }
        });
        Self { port, packets, task }
    }

    /// One that listens over UDP on a free port.
    async fn udp() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let port = socket.local_addr().expect("it is bound").port();
        let packets = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let kept = Arc::clone(&packets);
        let task = tokio::spawn(async move {
            let mut bytes = vec![0; 65_536];
            while let Ok(length) = socket.recv(&mut bytes).await {
                kept.lock().expect("nobody panicked").push(bytes[..length].to_vec());
            }
        });
        Self { port, packets, task }
    }

    fn packets(&self) -> Vec<Vec<u8>> {
        self.packets.lock().expect("nobody panicked").clone()
    }

    /// The sum of each counter by its name with its tags, and the number of lines of each timer.
    fn sums(&self) -> BTreeMap<String, u64> {
        let text = String::from_utf8(self.packets().concat()).expect("text");
        let mut sums = BTreeMap::new();
        for line in text.lines() {
            let (name, value) = line.split_once(':').expect("a value");
            let mut parts = value.splitn(3, '|');
            let (value, kind) = (parts.next().expect("a value"), parts.next().expect("a type"));
            let tags = parts.next().map_or(String::new(), |tags| format!("|{tags}"));
            let grown = if kind == "c" { value.parse().expect("a whole number") } else { 1 };
            *sums.entry(format!("{name}{tags}")).or_default() += grown;
        }
        sums
    }

    /// Waits until this counter has grown so much.
    async fn sees(&self, name: &str, sum: u64) {
        eventually(&format!("{name} is {sum}"), async || (self.sums().get(name) == Some(&sum)).then_some(())).await;
    }
}

/// Keeps the whole lines of a connection. A line that is cut off at its end comes again on the next connection.
async fn read(mut stream: TcpStream, kept: &Mutex<Vec<Vec<u8>>>) {
    let (mut bytes, mut lines) = (vec![0; 65_536], Vec::new());
    while let Ok(length) = stream.read(&mut bytes).await {
        if length == 0 {
            break;
        }
        lines.extend_from_slice(&bytes[..length]);
        if let Some(end) = lines.iter().rposition(|byte| *byte == b'\n') {
            kept.lock().expect("nobody panicked").push(lines.drain(..=end).collect());
        }
    }
}

async fn ask(tidegate: &Tidegate, entries: &str, times: usize) {
    let body = format!(r#"{{"domain":"edge","descriptors":[{{"entries":[{entries}]}}]}}"#);
    for _ in 0..times {
        http::post(tidegate.http, "/json", &*body).await;
    }
}

const ALICE: &str = r#"{"key":"user","value":"alice"}"#;
const DEEP: &str = r#"{"key":"a","value":"b"},{"key":"c","value":"x"},{"key":"d","value":"e"}"#;
const USER: &str = "ratelimit.service.rate_limit.edge.user";

async fn serve(rules: &NamedTempFile, port: u16, more: &[(&str, &str)]) -> Tidegate {
    let port = port.to_string();
    let own = [("STATSD_HOST", "127.0.0.1"), ("STATSD_PORT", port.as_str()), ("STATS_FLUSH_INTERVAL", "100ms")];
    Tidegate::start(rules.path(), &[&own, more].concat()).await
}

#[tokio::test]
async fn statsd_gets_what_grew_under_the_names_of_the_reference() {
    let (receiver, rules) = (Receiver::tcp(0).await, rule_file(RULES));
    let tidegate = serve(&rules, receiver.port, &[("EXTRA_TAGS", "zone:eu.1,az:a")]).await;
    ask(&tidegate, ALICE, 3).await;
    receiver.sees(&format!("{USER}.total_hits.__az=a.__zone=eu_1"), 3).await;
    ask(&tidegate, DEEP, 2).await;
    ask(&tidegate, "", 1).await;
    tidegate.stop().await;
    let expected = [
        ("ratelimit.service.config_load_success", 1),
        ("ratelimit.service.rate_limit.edge.a_b.c.d_e.total_hits", 2),
        ("ratelimit.service.rate_limit.edge.a_b.c.d_e.within_limit", 2),
        ("ratelimit.service.rate_limit.edge.user.near_limit", 1),
        ("ratelimit.service.rate_limit.edge.user.over_limit", 1),
        ("ratelimit.service.rate_limit.edge.user.total_hits", 3),
        ("ratelimit.service.rate_limit.edge.user.within_limit", 2),
    ];
    let expected = expected.map(|(name, sum)| (format!("{name}.__az=a.__zone=eu_1"), sum));
    // What was sent at the stop may still be in the socket.
    for (name, sum) in &expected {
        receiver.sees(name, *sum).await;
    }
    assert_eq!(receiver.sums(), BTreeMap::from(expected));
}

#[tokio::test]
async fn statsd_goes_over_udp_where_its_protocol_says_so() {
    for protocol in ["udp", "UDP4"] {
        let (receiver, rules) = (Receiver::udp().await, rule_file(RULES));
        let tidegate = serve(&rules, receiver.port, &[("STATSD_PROTOCOL", protocol), ("EXTRA_TAGS", "az:a")]).await;
        ask(&tidegate, ALICE, 3).await;
        receiver.sees(&format!("{USER}.total_hits.__az=a"), 3).await;
        for packet in receiver.packets() {
            assert!(packet.ends_with(b"\n") && packet.len() <= 1_432, "{packet:?}");
        }
        tidegate.stop().await;
    }
    let (receiver, rules) = (Receiver::tcp(0).await, rule_file(RULES));
    let tidegate = serve(&rules, receiver.port, &[("STATSD_PROTOCOL", "tcp6")]).await;
    eventually("127.0.0.1 is no address of version 6", async || {
        tidegate.log().contains("the host has no address for STATSD_PROTOCOL").then_some(())
    })
    .await;
    tidegate.stop().await;
}

#[tokio::test]
async fn dogstatsd_gets_datagrams_of_whole_lines_with_tags_and_new_names() {
    let (receiver, rules) = (Receiver::udp().await, rule_file(RULES));
    let mogrifier = [
        ("USE_DOG_STATSD_MOGRIFIERS", "RULE"),
        ("DOG_STATSD_MOGRIFIER_RULE_PATTERN", r"^ratelimit\.service\.rate_limit\.([^.]*)\.(.*)\.([^.]*)$"),
        ("DOG_STATSD_MOGRIFIER_RULE_NAME", "hits.$3"),
        ("DOG_STATSD_MOGRIFIER_RULE_TAGS", "domain:$1,rule:$2"),
    ];
    let own = [("USE_DOG_STATSD", "True"), ("USE_STATSD", "1"), ("EXTRA_TAGS", "az:a"), ("DD_VERSION", "1.2")];
    let more = [&own[..], &mogrifier].concat();
    let tidegate = serve(&rules, receiver.port, &more).await;
    ask(&tidegate, DEEP, 2).await;
    receiver.sees("hits.total_hits|#version:1.2,az:a,domain:edge,rule:a_b.c.d_e", 2).await;
    receiver.sees("ratelimit.service.config_load_success|#version:1.2,az:a", 1).await;
    for packet in receiver.packets() {
        assert!(packet.ends_with(b"\n") && packet.len() <= 1_432, "{packet:?}");
    }
    assert_eq!(tidegate.log().matches("only DogStatsD is sent").count(), 1, "{}", tidegate.log());
    tidegate.stop().await;
}

#[tokio::test]
async fn a_receiver_that_comes_late_or_goes_and_comes_back_misses_nothing() {
    let rules = rule_file(RULES);
    let port = Receiver::tcp(0).await.port;
    let tidegate = serve(&rules, port, &[]).await;
    ask(&tidegate, ALICE, 3).await;
    eventually("the attempt failed", async || tidegate.log().contains("statistics wait here").then_some(())).await;
    let total = format!("{USER}.total_hits");
    let late = Receiver::tcp(port).await;
    late.sees(&total, 3).await;
    drop(late);
    let again = in_time("the port is free", async {
        loop {
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                drop(listener);
                return Receiver::tcp(port).await;
            }
            tokio::task::yield_now().await;
        }
    });
    let again = again.await;
    ask(&tidegate, ALICE, 4).await;
    again.sees(&total, 4).await;
    tidegate.stop().await;
}

#[tokio::test]
async fn the_last_hits_are_sent_at_the_stop() {
    let (receiver, rules) = (Receiver::tcp(0).await, rule_file(RULES));
    let tidegate = serve(&rules, receiver.port, &[("STATS_FLUSH_INTERVAL", "1h")]).await;
    ask(&tidegate, ALICE, 3).await;
    tidegate.stop().await;
    receiver.sees(&format!("{USER}.total_hits"), 3).await;
}

/// Number of rules whose counters fill the buffers of the kernel.
const RULES_OF_A_FLOOD: usize = 500;

#[tokio::test]
async fn a_receiver_that_reads_nothing_slows_no_decision_and_no_stop_and_misses_nothing_if_it_reads_later() {
    let rule = |number| {
        format!("  - {{ key: a-key-with-a-long-name-{number}, rate_limit: {{ unit: week, requests_per_unit: 9 }} }}\n")
    };
    let text: String = (0..RULES_OF_A_FLOOD).map(rule).collect();
    let rules = rule_file(&format!("domain: edge\ndescriptors:\n{text}"));
    let entry = |number| format!(r#"{{"entries":[{{"key":"a-key-with-a-long-name-{number}","value":"a"}}]}}"#);
    let descriptors: Vec<_> = (0..RULES_OF_A_FLOOD).map(entry).collect();
    let body = format!(r#"{{"domain":"edge","descriptors":[{}]}}"#, descriptors.join(","));
    // The kernel takes connections and a few bytes; nobody reads them.
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4_096).expect("a small buffer");
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
    let listener = socket.listen(16).expect("it listens");
    let tidegate = serve(&rules, listener.local_addr().expect("it is bound").port(), &[]).await;
    let asked = std::cell::Cell::new(0);
    let ask = async || {
        http::post(tidegate.http, "/json", &*body).await;
        asked.set(asked.get() + 1);
    };
    eventually("its buffers are full", async || {
        ask().await;
        tidegate.log().contains("statistics wait here").then_some(())
    })
    .await;
    for _ in 0..20 {
        ask().await;
    }
    let receiver = Receiver::of(listener);
    for number in [0, RULES_OF_A_FLOOD - 1] {
        let name = format!("ratelimit.service.rate_limit.edge.a-key-with-a-long-name-{number}.total_hits");
        receiver.sees(&name, asked.get()).await;
    }
    drop(receiver);
    tidegate.stop().await;
}
