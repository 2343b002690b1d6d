use tokio::process::Command;

use super::{example, python};
use crate::envoy::proxy::{Proxy, get};
use crate::support::{Tidegate, output, repository, tool};

/// Puts the patches of a gateway's object into an Envoy, as the gateway would, and asks it.
async fn patched(object: &str, values: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let values = &python(&["yaml", &example(values)]).await[0];
    let rules = values["rules"]["files"]["edge.yaml"].as_str().expect("rules");
    let path = directory.path().join("edge.yaml");
    std::fs::write(&path, rules.replace("unit: minute", "unit: week")).expect("it is written");
    let tidegate = Tidegate::start(&path, &[]).await;

    let mut patch = Command::new(tool("python"));
    patch.arg(repository("tests/it/helm.py")).arg("patched").arg(repository(object));
    let (status, configuration, errors) = output(&mut patch).await;
    assert!(status.success(), "{errors}");
    let configured = directory.path().join("envoy.yaml");
    std::fs::write(&configured, configuration).expect("it is written");
    let envoy = Proxy::start(configured.to_str().expect("a path of text"), tidegate.grpc, &[]).await;
    let edge = envoy.listener("default/eg/http").await;
    let answer = get(edge, "/", "").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let limits = answer.header("x-ratelimit-limit");
    assert!(limits.contains("name=\"global\"") && limits.contains("name=\"per-address\""), "{limits}");
    for status in [200, 200, 429] {
        assert_eq!(get(edge, "/login", "").await.status, status, "{}", tidegate.log());
    }
    assert_eq!(get(edge, "/", "").await.status, 200, "another path has no such limit");
}

#[tokio::test]
async fn the_filter_for_istio_limits_as_the_example_says() {
    patched("examples/gateways/istio/envoyfilter.yaml", "istio").await;
}

#[tokio::test]
async fn the_policy_for_envoy_gateway_limits_as_the_example_says() {
    patched("examples/gateways/envoy-gateway/own-rules.yaml", "envoy-gateway").await;
}

#[tokio::test]
async fn the_names_in_the_objects_are_those_that_the_examples_deploy() {
    let Some(helm) = super::Helm::find() else { return };
    for (values, object, named) in [
        ("istio", "envoyfilter", "cluster_name: outbound|8081||tidegate.tidegate.svc.cluster.local"),
        ("envoy-gateway", "own-rules", "address: tidegate-headless.tidegate.svc.cluster.local, port_value: 8081"),
        ("contour", "extensionservice", "    - name: tidegate\n      port: 8081"),
        ("kgateway", "gatewayextension", "        name: tidegate\n        namespace: tidegate\n        port: 8081"),
        ("emissary", "ratelimitservice", "service: tidegate-headless.tidegate:8081"),
    ] {
        let path = format!("examples/gateways/{values}/{object}.yaml");
        let text = std::fs::read_to_string(repository(&path)).expect("it reads");
        assert!(text.contains(named), "{path}: {named}");
        let text = std::fs::read_to_string(example(values)).expect("it reads");
        assert!(text.contains(&format!(
            "helm install -n tidegate tidegate helm/tidegate -f helm/tidegate/examples/{values}.yaml"
        )));
        let more = ["--values".to_owned(), example(values), "--set".to_owned(), "fullnameOverride=tidegate".to_owned()];
        let objects = helm.render(&more).await;
        let service = named.split(['|', '.', ' ', '\n']).find(|word| word.starts_with("tidegate")).expect("a name");
        let services = super::of("Service", &objects);
        let service = services.iter().find(|it| it["metadata"]["name"] == service).expect("it is deployed");
        assert_eq!(service["spec"]["ports"][0]["port"], 8081);
    }
}
