//! A client in another language, with nothing but the address: what it learns of the protocol comes from the server.

use std::path::Path;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{Process, Tidegate, output, repository, tool};

const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const RULES: &str = "domain: python
descriptors:
  - key: user
    rate_limit: { unit: day, requests_per_unit: 2 }
";

async fn server(directory: &Path) -> Tidegate {
    let rules = directory.join("rules.yaml");
    std::fs::write(&rules, RULES).expect("it is written");
    Tidegate::start(&rules, &[]).await
}

fn client(server: &Tidegate, order: &str) -> Command {
    let mut command = Command::new(tool("python"));
    command.arg(repository("tests/it/python.py")).arg(server.grpc.to_string()).arg(order);
    command
}

/// What the client saw.
async fn look(server: &Tidegate) -> Value {
    let (status, said, errors) = output(&mut client(server, "look")).await;
    assert!(status.success(), "{errors}");
    serde_json::from_str(&said).expect("JSON")
}

#[tokio::test]
async fn a_python_client_that_has_no_proto_file_asks_and_is_answered() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = server(directory.path()).await;
    let seen = look(&server).await;
    for version in ["v1", "v1alpha"] {
        let services = seen["services"][version].as_array().expect("a list");
        for expected in [SERVICE, "grpc.health.v1.Health"] {
            assert!(services.contains(&json!(expected)), "reflection {version} does not list {expected}: {services:?}");
        }
    }
    // Bytes in the server, so that what a client sends is counted and not refused; text to everyone who asks.
    assert_eq!(seen["entry"], json!({ "key": "TYPE_STRING", "value": "TYPE_STRING" }));
    let codes: Vec<_> =
        seen["answers"].as_array().expect("a list").iter().map(|answer| &answer["overallCode"]).collect();
    assert_eq!(codes, ["OK", "OK", "OVER_LIMIT"]);
    let limit = json!({ "requestsPerUnit": 2, "unit": "DAY" });
    assert_eq!(seen["answers"][2]["statuses"][0]["currentLimit"], limit);
    let serving = "SERVING";
    assert_eq!(seen["health"], json!({ "": serving, "ratelimit": serving, SERVICE: serving, "unknown": "NOT_FOUND" }));
}

#[tokio::test]
async fn health_says_not_serving_before_a_server_that_was_told_to_stop_is_gone() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut server = server(directory.path()).await;
    let mut watch = Process::start(&mut client(&server, "watch"));
    for expected in ["SERVING", "NOT_SERVING"] {
        for name in ["", "ratelimit", SERVICE] {
            assert_eq!(
                watch.line().await.as_deref(),
                Some(format!("{name} {expected}").as_str()),
                "{}",
                watch.errors()
            );
        }
        if expected == "SERVING" {
            server.terminate();
        }
    }
    assert!(server.ended().await.success());
}
