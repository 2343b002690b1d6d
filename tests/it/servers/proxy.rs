//! A real Envoy as a proxy in front of Redis servers, over which it spreads the keys.

use std::net::SocketAddr;

use tempfile::TempDir;
use tokio::process::Command;

use crate::http;
use crate::redis::Single;
use crate::support::{Process, eventually, tool};

/// A running proxy.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    _process: Process,
    _directory: TempDir,
}

impl Proxy {
    /// Starts Envoy's `redis_proxy` in front of these servers; its clients need the password, if there is one.
    pub async fn start(servers: &[&Single], password: Option<&str>) -> Self {
        let endpoint = |server: &&Single| {
            let port = server.address().port();
            format!("{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}}}")
        };
        let endpoints: Vec<_> = servers.iter().map(endpoint).collect();
        let password = password.map_or_else(String::new, |password| {
            format!("downstream_auth_passwords: [{{inline_string: {password}}}], ")
        });
        let text = format!(
            "admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:
  - name: redis
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.redis_proxy
        typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy, stat_prefix: redis, {password}settings: {{op_timeout: 5s}}, prefix_routes: {{catch_all_route: {{cluster: redis}}}}}}
  clusters:
  - name: redis
    type: STATIC
    lb_policy: MAGLEV
    connect_timeout: 1s
    load_assignment: {{cluster_name: redis, endpoints: [{{lb_endpoints: [{}]}}]}}
",
            endpoints.join(", ")
        );
        let directory = tempfile::tempdir().expect("a directory");
        let (configuration, admin) = (directory.path().join("envoy.yaml"), directory.path().join("admin"));
        std::fs::write(&configuration, text).expect("it is written");
        let mut command = Command::new(tool("envoy"));
        command.arg("-c").arg(&configuration).arg("--admin-address-path").arg(&admin);
        command.args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]);
        let mut process = Process::start(&mut command);
        let address = eventually("Envoy listens", async || {
            assert!(!process.has_ended(), "Envoy does not start: {}", process.errors());
            let admin = std::fs::read_to_string(&admin).ok()?.parse().ok()?;
            let listeners = http::get(admin, "/listeners").await;
            listeners.body.lines().find_map(|line| line.strip_prefix("redis::")?.trim().parse().ok())
        })
        .await;
        Self { address, _process: process, _directory: directory }
    }
}
