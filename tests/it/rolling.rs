//! Instances that are replaced one after the other behind an Envoy that fails closed: no request notices.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::envoy::proxy::{Proxy, status};
use crate::support::{Tidegate, directory, eventually, in_time};

/// How often both instances are replaced.
const ROUNDS: usize = 20;
/// How many clients ask all the time, each on a connection of its own.
const CLIENTS: usize = 8;
/// How late the word of an instance's end reaches Envoy, as in a cluster where it goes through several hands.
const NEWS_TAKE: Duration = Duration::from_millis(200);
/// Longer than that.
const DRAIN_DELAY: (&str, &str) = ("DRAIN_DELAY", "600ms");
const RULES: &str =
    "domain: edge\ndescriptors: [{ key: tier, rate_limit: { unit: week, requests_per_unit: 4000000000 } }]\n";

/// Two instances, and where they are.
struct Fleet {
    directory: TempDir,
    instances: Vec<Tidegate>,
}

impl Fleet {
    async fn start() -> Self {
        let mut fleet = Self { directory: directory([("rules.yaml", RULES)]), instances: Vec::new() };
        for _ in 0..2 {
            let instance = fleet.instance("0").await;
            fleet.instances.push(instance);
        }
        fleet
    }

    /// Another instance, on this port.
    async fn instance(&self, port: &str) -> Tidegate {
        let rules = self.directory.path().join("rules.yaml");
        Tidegate::start(&rules, &[("GRPC_PORT", port), DRAIN_DELAY]).await
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.instances.iter().map(|instance| instance.grpc).collect()
    }

    /// The text of an Envoy's list of instances.
    fn endpoints(&self) -> String {
        let endpoint = |at: SocketAddr| {
            format!(
                "{{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }} }}",
                at.port()
            )
        };
        self.addresses().into_iter().map(endpoint).collect::<Vec<_>>().join(", ")
    }

    fn list(&self) -> PathBuf {
        self.directory.path().join("endpoints.yaml")
    }

    /// Writes the list as a control plane does: whole, and in one step.
    fn publish(&self) {
        let text = format!(
            "resources:\n- \"@type\": type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment\n  cluster_name: tidegate\n  endpoints: [{{ lb_endpoints: [{}] }}]\n",
            self.endpoints()
        );
        let new = self.directory.path().join("new.yaml");
        std::fs::write(&new, text).expect("it is written");
        std::fs::rename(new, self.list()).expect("it is put in place");
    }
}

/// Who asks through Envoy, until told to stop.
struct Clients {
    is_over: Arc<AtomicBool>,
    asking: JoinSet<Vec<u16>>,
}

impl Clients {
    fn start(edge: SocketAddr) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut asking = JoinSet::new();
        for _ in 0..CLIENTS {
            asking.spawn(ask(edge, Arc::clone(&is_over)));
        }
        Self { is_over, asking }
    }

    /// Every status there was.
    async fn stop(self) -> Vec<u16> {
        self.is_over.store(true, Ordering::Release);
        in_time("the last answer comes", self.asking.join_all()).await.concat()
    }
}

async fn ask(edge: SocketAddr, is_over: Arc<AtomicBool>) -> Vec<u16> {
    let mut socket = BufReader::new(TcpStream::connect(edge).await.expect("Envoy listens"));
    let mut statuses = Vec::new();
    while !is_over.load(Ordering::Acquire) {
        socket.write_all(b"GET / HTTP/1.1\r\nhost: edge\r\n\r\n").await.expect("it is sent");
        statuses.push(status(&mut socket).await);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    statuses
}

/// The example's cluster, with another way of finding its instances.
async fn envoy(fleet: &Fleet, found: &str) -> Proxy {
    let first = fleet.instances[0].grpc;
    let listed = format!(
        "    load_assignment:\n      cluster_name: tidegate\n      endpoints:\n      - lb_endpoints:\n        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }}\n",
        first.port()
    );
    let static_type = "    type: STATIC # in Kubernetes STRICT_DNS and a headless Service: connections live long\n";
    let node = ("static_resources:\n", "node: { id: edge, cluster: edge }\nstatic_resources:\n");
    Proxy::start("envoy.yaml", first, &[node, (static_type, ""), (&listed, found)]).await
}

fn assert_all_passed(statuses: &[u16]) {
    let failed: Vec<_> = statuses.iter().filter(|status| **status != 200).collect();
    assert!(failed.is_empty(), "{} of {} requests failed: {failed:?}", failed.len(), statuses.len());
    assert!(statuses.len() > 100 * ROUNDS, "there was load: {} requests", statuses.len());
}

#[tokio::test]
async fn no_request_fails_while_instances_are_replaced_as_kubernetes_does() {
    let mut fleet = Fleet::start().await;
    fleet.publish();
    let (list, directory) = (fleet.list(), fleet.directory.path().to_owned());
    let found = discovered(&list, &directory);
    let envoy = envoy(&fleet, &found).await;
    let clients = Clients::start(envoy.listener("fail_closed").await);
    for round in 0..2 * ROUNDS {
        let place = round % 2;
        let new = fleet.instance("0").await;
        let mut old = std::mem::replace(&mut fleet.instances[place], new);
        old.terminate();
        tokio::time::sleep(NEWS_TAKE).await;
        fleet.publish();
        assert!(old.ended().await.success(), "{}", old.log());
    }
    assert_all_passed(&clients.stop().await);
}

fn discovered(list: &Path, directory: &Path) -> String {
    format!(
        "    type: EDS\n    eds_cluster_config:\n      eds_config:\n        resource_api_version: V3\n        path_config_source: {{ path: {}, watched_directory: {{ path: {} }} }}\n",
        list.display(),
        directory.display()
    )
}

#[tokio::test]
async fn no_request_fails_while_instances_are_replaced_under_health_checks() {
    let mut fleet = Fleet::start().await;
    // Envoy waits for 60 s where nothing is asked yet, and for up to 1 s to tell its workers of several changes at once.
    let checked = format!(
        "    type: STATIC\n    common_lb_config: {{ healthy_panic_threshold: {{ value: 0 }}, update_merge_window: 0s }}\n    health_checks: [{{ timeout: 1s, interval: 0.1s, no_traffic_interval: 0.1s, unhealthy_threshold: 1, healthy_threshold: 1, grpc_health_check: {{}} }}]\n    load_assignment: {{ cluster_name: tidegate, endpoints: [{{ lb_endpoints: [{}] }}] }}\n",
        fleet.endpoints()
    );
    let envoy = envoy(&fleet, &checked).await;
    let clients = Clients::start(envoy.listener("fail_closed").await);
    for round in 0..2 * ROUNDS {
        let place = round % 2;
        let port = fleet.instances[place].grpc.port().to_string();
        fleet.instances[place].terminate();
        assert!(fleet.instances[place].ended().await.success(), "{}", fleet.instances[place].log());
        fleet.instances[place] = fleet.instance(&port).await;
        let healthy = |clusters: String| {
            let said =
                |line: &&str| line.starts_with("tidegate::127.0.0.1:") && line.ends_with("::health_flags::healthy");
            clusters.lines().filter(said).count() == 2
        };
        eventually("both are healthy", async || healthy(envoy.clusters().await).then_some(())).await;
    }
    assert_all_passed(&clients.stop().await);
}
