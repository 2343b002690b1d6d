//! The command line and the environment of gateways, and a real Envoy as they configure it.
//!
//! Environments are word for word those of the gateways; only paths below `/data`, `/certs` and `/etc`, addresses and ports are
//! replaced. The one other variable is `STORE_DEADLINE`: on a busy machine a policy would answer in place of Redis. The configurations of Envoy are in `gateways/`, and say where they are from.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rcgen::DnType;
use tempfile::TempDir;
use tidegate::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use tokio::process::Command;

use crate::envoy::proxy::{Proxy, get};
use crate::http::Answer;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, output, repository, tool};
use crate::tls::of_file;
use crate::xds::plane::{Plane, Secured, StreamTo, answer, response, rlconfig};

mod pages;

/// The Deployment `envoy-ratelimit` of Envoy Gateway 1.9.1.
const ENVOY_GATEWAY: &[(&str, &str)] = &[
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
    ("RUNTIME_WATCH_ROOT", "false"),
    ("LOG_LEVEL", "info"),
    ("USE_STATSD", "false"),
    ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
    ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
    ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
    ("GRPC_SERVER_USE_TLS", "true"),
    ("GRPC_SERVER_TLS_CERT", "/certs/tls.crt"),
    ("GRPC_SERVER_TLS_KEY", "/certs/tls.key"),
    ("GRPC_SERVER_TLS_CA_CERT", "/certs/ca.crt"),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "/certs/tls.key"),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/certs/ca.crt"),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ("REDIS_SOCKET_TYPE", "tcp"),
    ("REDIS_URL", "redis.redis.svc:6379"),
    ("USE_PROMETHEUS", "true"),
    ("PROMETHEUS_ADDR", ":19001"),
    ("PROMETHEUS_MAPPER_YAML", "/etc/statsd-exporter/conf.yaml"),
];

/// The Deployment of Istio's `samples/ratelimit/rate-limit-service.yaml`, August 2026.
pub const ISTIO: &[(&str, &str)] = &[
    ("LOG_LEVEL", "debug"),
    ("REDIS_SOCKET_TYPE", "tcp"),
    ("REDIS_URL", "redis:6379"),
    ("USE_STATSD", "false"),
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_WATCH_ROOT", "false"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
    ("HOST", "::"),
    ("GRPC_HOST", "::"),
];

/// The Deployment of Contour's `examples/ratelimit/02-ratelimit.yaml`, 1.33.8.
const CONTOUR: &[(&str, &str)] = &[
    ("USE_STATSD", "false"),
    ("LOG_LEVEL", "debug"),
    ("REDIS_SOCKET_TYPE", "tcp"),
    ("REDIS_URL", "localhost:6379"),
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_WATCH_ROOT", "false"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
];

/// The Deployment of kgateway's `test/e2e/features/rate_limit/global/testdata/rate-limit-server.yaml`.
const KGATEWAY: &[(&str, &str)] = &[
    ("USE_STATSD", "false"),
    ("LOG_LEVEL", "debug"),
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
    ("REDIS_SOCKET_TYPE", "tcp"),
    ("REDIS_URL", "redis:6379"),
];

/// A service as a gateway starts it: `/bin/ratelimit`, without arguments, with this environment.
struct Started {
    tidegate: Tidegate,
    _redis: Single,
    /// In the place of the root of the file system.
    root: TempDir,
}

impl Started {
    /// Starts it with this environment, and these variables that only the operator sets. `prepare` writes the mounted files.
    async fn new(
        environment: &[(&str, &str)],
        more: &[(&str, &str)],
        plane: Option<SocketAddr>,
        prepare: impl FnOnce(&Path),
    ) -> Self {
        let (root, redis) = (tempfile::tempdir().expect("a directory"), Single::start(&[]).await);
        prepare(root.path());
        let program = in_root(root.path(), "/bin/ratelimit");
        std::fs::create_dir_all(program.parent().expect("a directory")).expect("it is made");
        symlink(env!("CARGO_BIN_EXE_tidegate"), &program).expect("a link");
        let mut command = Command::new(program);
        command.env_clear();
        for (name, value) in environment.iter().chain(&[("STORE_DEADLINE", "5s")]).chain(more) {
            let value = match *name {
                "REDIS_URL" => redis.address().to_string(),
                "CONFIG_GRPC_XDS_SERVER_URL" => plane.expect("a control plane").to_string(),
                "PROMETHEUS_ADDR" => ":0".to_owned(),
                _ if value.starts_with('/') => in_root(root.path(), value).display().to_string(),
                _ => (*value).to_owned(),
            };
            command.env(name, value);
        }
        command.envs(["PORT", "GRPC_PORT", "DEBUG_PORT"].map(|name| (name, "0")));
        Self { tidegate: Tidegate::start_command(command, None).await, _redis: redis, root }
    }

    /// The same with this file in the mounted ConfigMap.
    async fn with_rules(environment: &[(&str, &str)], file: &str, rules: &str) -> Self {
        let file = format!("/data/ratelimit/config/{file}");
        Self::new(environment, &[], None, |root| write(root, &file, rules)).await
    }

    /// An Envoy in front of it with a configuration of `gateways/`.
    async fn envoy(&self, name: &str, changes: &[(&str, &str)]) -> Proxy {
        let path = repository(&format!("tests/it/gateways/{name}.yaml"));
        Proxy::start(path.to_str().expect("a path of text"), self.tidegate.grpc, changes).await
    }
}

fn in_root(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn write(root: &Path, path: &str, text: &str) {
    let path = in_root(root, path);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("it is made");
    std::fs::write(path, text).expect("it is written");
}

#[tokio::test]
async fn istios_environment_and_filter_limit_as_its_task_says() {
    let rules = "domain: ratelimit\ndescriptors:\n  - key: PATH\n    value: \"/productpage\"\n    rate_limit:\n      unit: week\n      requests_per_unit: 1\n  - key: PATH\n    rate_limit:\n      unit: week\n      requests_per_unit: 100\n";
    let started = Started::with_rules(ISTIO, "config.yaml", rules).await;
    assert!(started.tidegate.grpc.ip().is_unspecified() && started.tidegate.grpc.is_ipv6(), "HOST is `::`");
    let envoy = started.envoy("istio", &[]).await;
    let edge = envoy.listener("edge").await;
    assert_eq!(get(edge, "/productpage", "").await.status, 200);
    let refused = get(edge, "/productpage", "").await;
    assert_eq!((refused.status, refused.header("x-envoy-ratelimited")), (429, "true"));
    assert_eq!(get(edge, "/reviews", "").await.status, 200);
}

#[tokio::test]
async fn contours_environment_and_filter_limit_as_its_example_says() {
    let rules = "domain: contour\ndescriptors:\n  - key: generic_key\n    value: foo\n    rate_limit:\n      unit: week\n      requests_per_unit: 1\n  - key: remote_address\n    rate_limit:\n      unit: week\n      requests_per_unit: 3\n";
    let started = Started::with_rules(CONTOUR, "ratelimit-config.yaml", rules).await;
    let patient = (" timeout: 0.100s", " timeout: 30s");
    let edge = started.envoy("contour", &[patient]).await;
    let at = edge.listener("ingress_http").await;
    for status in [200, 429] {
        assert_eq!(get(at, "/", "").await.status, status);
    }
}

#[tokio::test]
async fn kgateways_environment_and_filter_limit_as_its_own_server_does() {
    let rules = "domain: api-gateway\ndescriptors:\n  - key: remote_address\n    rate_limit:\n      unit: week\n      requests_per_unit: 1\n  - key: path\n    value: \"/path1\"\n    rate_limit:\n      unit: week\n      requests_per_unit: 1\n";
    let started = Started::with_rules(KGATEWAY, "config.yaml", rules).await;
    let envoy = started.envoy("kgateway", &[(" timeout: 0.100s", " timeout: 30s")]).await;
    let http = envoy.listener("http").await;
    for (path, status) in [("/path1", 200), ("/path1", 429), ("/path2", 200), ("/path2", 200)] {
        assert_eq!(get(http, path, "").await.status, status, "{path}");
    }
}

/// Emissary starts no service: this one has the rules of the chart's example.
#[tokio::test]
async fn emissarys_filter_limits_as_the_example_says() {
    let values = pages::yaml("helm/tidegate/examples/emissary.yaml").await.remove(0);
    let rules = values["rules"]["files"]["edge.yaml"].as_str().expect("rules").replace("unit: minute", "unit: week");
    let started = Started::with_rules(CONTOUR, "edge.yaml", &rules).await;
    let envoy = started.envoy("emissary", &[(" timeout: 0.250s", " timeout: 30s")]).await;
    let listener = envoy.listener("ambassador-listener-8080").await;
    for (path, status) in [("/login", 200), ("/login?a", 200), ("/login", 429), ("/", 200)] {
        assert_eq!(get(listener, path, "").await.status, status, "{path}");
    }
}

/// The rules that Envoy Gateway sends for the BackendTrafficPolicy of the examples, with this limit.
fn pushed(unit: RateLimitUnit, requests_per_unit: u32) -> RateLimitConfig {
    let policy = RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() };
    let limited = RateLimitDescriptor {
        key: "rule-0-match-0".to_owned(),
        rate_limit: Some(policy),
        ..RateLimitDescriptor::default()
    };
    let route = "httproute/default/backend/rule/0".to_owned();
    let descriptor = RateLimitDescriptor {
        key: route.clone(),
        value: route,
        descriptors: vec![limited],
        ..RateLimitDescriptor::default()
    };
    let listener = "default/eg/http".to_owned();
    RateLimitConfig { name: listener.clone(), domain: listener, descriptors: vec![descriptor] }
}

/// A service, its control plane, and an Envoy as Envoy Gateway has them: mutual TLS between all three, with one authority.
struct EnvoyGateway {
    started: Started,
    plane: Plane,
    stream: StreamTo,
    envoy: Proxy,
    authority: Authority,
}

impl EnvoyGateway {
    async fn start(more: &[(&str, &str)], prepare: impl FnOnce(&Path)) -> Self {
        let authority = Authority::new();
        let mut plane =
            Plane::start_at("127.0.0.1:0".parse().expect("an address"), Some(&Secured::by(&authority))).await;
        // As Envoy Gateway makes them: RSA, a key as PKCS#1, no extended key usage, a wildcard of the namespace.
        let of_its_kind = || {
            of_file(&authority, "rsa.pkcs8.pem", "rsa.pkcs1.pem", "*.envoy-gateway-system", |params| {
                params.distinguished_name.push(DnType::CommonName, "*");
            })
        };
        let files = |root: &Path| {
            for directory in ["certs", "sds"] {
                let own = of_its_kind();
                let read = |path: &Path| std::fs::read_to_string(path).expect("it reads");
                write(root, &format!("/{directory}/tls.crt"), &read(&own.certificate));
                write(root, &format!("/{directory}/tls.key"), &read(&own.key));
                write(root, &format!("/{directory}/ca.crt"), &read(&authority.certificate()));
            }
            prepare(root);
        };
        let started = Started::new(ENVOY_GATEWAY, more, Some(plane.address), files).await;
        let (stream, first) = plane.stream().await;
        assert_eq!(first.node.as_ref().map(|node| &*node.id), Some("envoy-ratelimit"));
        assert_eq!(answer(&first), ("", "", None));

        let mut apply = Command::new(tool("python"));
        apply
            .arg(repository("tests/it/helm.py"))
            .arg("applied")
            .arg(repository("tests/it/gateways/envoy_gateway.yaml"));
        apply.arg(repository("examples/gateways/envoy-gateway/ratelimit-cluster.yaml"));
        let (status, configuration, errors) = output(&mut apply).await;
        assert!(status.success(), "{errors}");
        assert!(configuration.contains("max_outbound_control_frames: 65536"), "{configuration}");
        let below = started.root.path().display();
        for directory in ["certs", "sds"] {
            assert!(configuration.contains(&format!(" /{directory}/")), "{configuration}");
        }
        let configuration = configuration.replace(" /certs/", &format!(" {below}/certs/"));
        let configuration = configuration.replace(" /sds/", &format!(" {below}/sds/"));
        write(started.root.path(), "/envoy.yaml", &configuration);
        let path = in_root(started.root.path(), "/envoy.yaml");
        let slow = ("connect_timeout: 10s", "connect_timeout: 60s");
        let envoy = Proxy::start(path.to_str().expect("a path of text"), started.tidegate.grpc, &[slow]).await;
        Self { started, plane, stream, envoy, authority }
    }

    async fn push(&mut self, config: RateLimitConfig) {
        self.stream.send(response("1", "n1", &[config])).expect("it is sent");
        assert_eq!(answer(&self.plane.request().await), ("1", "n1", None));
    }

    async fn get(&self, user: &str) -> Answer {
        get(self.envoy.listener("default/eg/http").await, "/", user).await
    }
}

#[tokio::test]
async fn envoy_gateways_environment_certificates_and_cluster_limit_as_its_policy_says() {
    let mut gateway = EnvoyGateway::start(&[], |_| ()).await;
    let undecided = gateway.get("alice").await;
    assert_eq!(
        (undecided.status, undecided.find("x-ratelimit-limit")),
        (200, None),
        "without rules a call fails, and Envoy Gateway's filter lets pass unless it has failClosed"
    );
    gateway.push(pushed(RateLimitUnit::Week, 2)).await;
    let in_force = rlconfig(&gateway.started.tidegate).await;
    assert!(in_force.contains("requests_per_unit=2"), "{in_force}");
    for left in [1, 0] {
        let answer = gateway.get("alice").await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{answer:?}");
    }
    let refused = gateway.get("alice").await;
    assert_eq!((refused.status, refused.find("x-envoy-ratelimited")), (429, None), "{refused:?}");
    assert_eq!(gateway.get("bob").await.status, 200, "each value of the header has a limit of its own");
    let metrics = gateway.started.tidegate.metrics().await;
    let series =
        "ratelimit_service_rate_limit_over_limit{domain=\"default/eg/http\",key1=\"httproute/default/backend/rule/0";
    assert!(metrics.contains(series), "what dashboards of Envoy Gateway read: {metrics}");
}

#[tokio::test]
async fn the_variables_and_the_overlay_on_the_page_of_envoy_gateway_are_in_force() {
    let read = async |file: &str| pages::yaml(&format!("examples/gateways/envoy-gateway/{file}")).await.remove(0);
    let configuration = read("envoy-gateway.yaml").await;
    let container = &configuration["provider"]["kubernetes"]["rateLimitDeployment"]["container"];
    let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
    let own: Vec<(String, String)> = container["env"]
        .as_array()
        .expect("variables")
        .iter()
        .map(|it| (text(&it["name"]), text(&it["value"])))
        .collect();
    // A busy machine takes longer.
    let own: Vec<(&str, &str)> =
        own.iter().map(|(name, value)| (&**name, if name == "STORE_DEADLINE" { "5s" } else { value })).collect();
    assert!(own.contains(&("GRPC_CLIENT_AUTH", "require")));
    let overlay = text(&read("overlay.yaml").await["data"]["overlay.yaml"]);
    let mut gateway = EnvoyGateway::start(&own, |root| write(root, "/overlay/overlay.yaml", &overlay)).await;
    gateway.push(pushed(RateLimitUnit::Minute, 1)).await;
    let mut refused = gateway.get("alice").await;
    for _ in 0..10 {
        assert_eq!(refused.status, 200, "the overlay gives a burst of 10: {refused:?}");
        refused = gateway.get("alice").await;
    }
    while refused.status == 200 {
        refused = gateway.get("alice").await;
    }
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.body.contains("Too many requests."), "{refused:?}");

    // Only who has a certificate of the authority is served.
    let stranger = crate::tls::client::Client::of(&gateway.authority);
    stranger.call(gateway.started.tidegate.grpc).await.expect_err("it has no certificate");
}
