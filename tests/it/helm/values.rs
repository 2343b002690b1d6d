use std::collections::BTreeSet;

use serde_json::Value;
use tidegate::settings::Settings;

use super::{CHART, Helm, environment, server, yaml};
use crate::support::repository;

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn schema() -> Value {
    serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).expect("JSON")
}

/// The values that the schema describes, each by its path; what has no description of its own is a group of them.
fn described(schema: &Value, path: &str) -> Vec<(String, String)> {
    assert_eq!(schema["additionalProperties"], false, "a typo below {path:?} would not be seen");
    let properties = schema["properties"].as_object().expect("properties").iter();
    properties
        .flat_map(|(name, below)| {
            let path = format!("{path}{name}");
            match below["description"].as_str() {
                Some(description) => vec![(path, description.to_owned())],
                None => described(below, &format!("{path}.")),
            }
        })
        .collect()
}

fn at<'a>(values: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(values, |values, name| values.get(name))
}

#[tokio::test]
async fn every_value_is_explained_the_same_in_its_file_its_schema_and_on_the_page() {
    let values = &yaml(&format!("{CHART}/values.yaml")).await[0];
    let text = read(&format!("{CHART}/values.yaml"));
    let page = read("docs/deployment.md");
    let described = described(&schema(), "");
    let mut paths = BTreeSet::new();
    for (path, description) in &described {
        let default = at(values, path).unwrap_or_else(|| panic!("values.schema.json has {path}, values.yaml has not"));
        let row = format!("| `{path}` | `{default}` | {description} |");
        assert!(page.contains(&row), "docs/deployment.md lacks this row:\n{row}");
        let name = path.rsplit('.').next().expect("a name");
        let indent = "  ".repeat(path.matches('.').count());
        let comment = format!("{indent}# -- {description}\n{indent}{name}:");
        assert!(text.contains(&comment), "values.yaml lacks:\n{comment}");
        paths.insert(path.as_str());
    }
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    for row in rows {
        assert!(paths.contains(row), "docs/deployment.md explains {row}, which is no value");
    }
    assert_known(values, "", &paths);
}

/// Every value is described, or a group of what is.
fn assert_known(values: &Value, path: &str, described: &BTreeSet<&str>) {
    for (name, value) in values.as_object().expect("a group") {
        let path = format!("{path}{name}");
        if !described.contains(path.as_str()) {
            assert!(value.is_object(), "values.yaml has {path}, values.schema.json has not");
            assert_known(value, &format!("{path}."), described);
        }
    }
}

#[tokio::test]
async fn every_setting_can_be_given_to_the_chart_in_one_way_and_secrets_in_no_plain_one() {
    let Some(helm) = Helm::find() else { return };
    let schema = schema();
    let free: BTreeSet<String> =
        schema["properties"]["settings"]["properties"].as_object().expect("settings").keys().cloned().collect();
    let mut own = BTreeSet::new();
    for (values, objects) in helm.rendered().await {
        // The examples give some under `settings`, and one rendering does.
        let is_free = |name: &String| {
            let given = format!("settings.{name}=");
            free.contains(name) && values.iter().any(|it| it.contains("examples/") || it.contains(&given))
        };
        let names = environment(server(objects)).into_iter().map(|(name, _)| name);
        own.extend(names.filter(|name| !is_free(name)));
    }
    assert_eq!(own.intersection(&free).collect::<Vec<_>>(), Vec::<&String>::new(), "set by a value of its own");
    for row in Settings::table() {
        let name = row.variable.to_owned();
        // Rules come from a ConfigMap that is named on the command line.
        let is_of_rules = name.starts_with("RUNTIME_");
        if row.is_secret {
            assert!(!free.contains(&name), "{name} is a secret: extraEnv takes it by valueFrom");
        } else if !is_of_rules {
            assert!(
                free.contains(&name) || own.contains(&name),
                "the chart does not take {name}: add it to `settings` of helm/tidegate/values.schema.json"
            );
        }
    }
    let known: BTreeSet<&str> = Settings::table().map(|row| row.variable).collect();
    for name in free.union(&own) {
        assert!(known.contains(name.as_str()), "the chart has {name}, which is no setting");
    }
}

#[tokio::test]
async fn a_typo_in_values_is_refused_and_named() {
    let Some(helm) = Helm::find() else { return };
    for (set, named) in [
        ("replicaCounts=3", "replicaCounts"),
        ("image.repo=x", "'/image': additional properties 'repo'"),
        ("redis.bundled.enable=true", "'/redis/bundled': additional properties 'enable'"),
        ("settings.LOG_LEVLE=info", "LOG_LEVLE"),
        ("settings.ON_STORE_FAILURE=open", "ON_STORE_FAILURE"),
        ("settings.REDIS_AUTH=hunter2", "REDIS_AUTH"),
        ("resources.limit.memory=1Gi", "limit"),
        ("image.tag=latest", "/image/tag"),
        ("store=memcache", "'memory', 'redis'"),
        ("onStoreFailure=closd", "'error', 'open', 'closed', 'local'"),
        ("grpc.maxConnectionAge=5", "/grpc/maxConnectionAge"),
        ("replicaCount=0", "/replicaCount"),
        ("replicaCount=two", "/replicaCount"),
        (r"rules.files.a/b\.yaml=x", "a/b.yaml"),
        (r"overlay.files.a/b\.yaml=x", "a/b.yaml"),
        ("settings.RULES_OVERLAY=x", "RULES_OVERLAY"),
    ] {
        let refusal = helm.refusal(&["--set", set]).await;
        assert!(refusal.contains("don't meet the specifications") && refusal.contains(named), "{set}: {refusal}");
    }
}

#[tokio::test]
async fn values_that_are_wrong_together_are_refused_with_what_to_do() {
    let Some(helm) = Helm::find() else { return };
    let redis = "store=redis,onStoreFailure=open";
    let callers = &yaml(&format!("{CHART}/values.yaml")).await[0]["networkPolicy"];
    assert_eq!(
        (&callers["enabled"], &callers["grpcFrom"]),
        (&true.into(), &serde_json::json!([])),
        "the default is refused"
    );
    for (set, says) in [
        ("xds.enabled=true".to_owned(), "xds.enabled needs xds.url: set the address of the control plane"),
        ("networkPolicy.grpcFrom=null".to_owned(), "is empty, so nobody could call: name the pods of your gateways"),
        (
            "xds.enabled=true,xds.url=a:1,rules.existingConfigMap=mine".to_owned(),
            "takes the rules from the control plane",
        ),
        (
            "xds.enabled=true,xds.url=a:1,xds.tls.keyKey=".to_owned(),
            "xds.tls.certKey and xds.tls.keyKey belong together",
        ),
        ("replicaCount=2".to_owned(), "each admit the whole limit: set replicaCount: 1"),
        ("autoscaling.enabled=true".to_owned(), "each admit the whole limit"),
        ("redis.url=r:6379".to_owned(), "set store: redis, or remove them"),
        ("store=redis,redis.url=r:6379".to_owned(), "onStoreFailure is required with store: redis: set error"),
        ("store=redis,redis.bundled.enabled=true".to_owned(), "onStoreFailure is required"),
        (redis.to_owned(), "store: redis needs a Redis: set redis.url, or redis.bundled.enabled"),
        (format!("{redis},redis.url=r:6379,redis.bundled.enabled=true"), "are both set: remove one of them"),
        (format!("{redis},redis.url=redis://:hunter2@r:6379"), "set redis.auth.existingSecret to its name"),
        (
            format!("{redis},redis.bundled.enabled=true,redis.type=cluster"),
            "deploys one server without password and TLS",
        ),
        (
            format!("{redis},redis.url=r:1,redis.auth.existingSecret=s,settings.REDIS_AUTH_COMMAND=/token"),
            "both give the password of Redis, and pods would not start: remove one of them",
        ),
        (format!("{redis},redis.url=r:1,redis.tls.existingSecret=s"), "but redis.tls.enabled is false"),
        (format!("{redis},redis.url=r:1,redis.tls.enabled=true,redis.tls.certKey=c"), "set both, or none"),
        ("rules.existingConfigMap=a,rules.files.b=c".to_owned(), "rules.files are both set: remove one of them"),
        (
            "admin.tokens.existingSecret=a,service.headless.enabled=true".to_owned(),
            "admin.tokens.existingSecret is set, but grpc.tls.enabled is false",
        ),
        (
            "admin.tokens.existingSecret=a,grpc.tls.enabled=true,grpc.tls.existingSecret=b".to_owned(),
            "needs names under which readers ask: set service.headless.enabled: true",
        ),
        (
            "admin.tokens.existingSecret=a,admin.hosts[0]=b,grpc.tls.enabled=true,grpc.tls.existingSecret=b,settings.DEBUG_SERVER_USE_TLS=false".to_owned(),
            "settings.DEBUG_SERVER_USE_TLS says no: remove it",
        ),
        ("callers.existingConfigMap=a,callers.file=b".to_owned(), "callers.file are both set: remove one of them"),
        ("overlay.existingConfigMap=a,overlay.files.b=c".to_owned(), "overlay.files are both set: remove one of them"),
        (
            format!("{redis},redis.url=r:1,autoscaling.enabled=true,autoscaling.minReplicas=7"),
            "is above autoscaling.max",
        ),
        ("tracing.enabled=true".to_owned(), "tracing.enabled needs tracing.endpoint"),
    ] {
        let refusal = helm.refusal(&["--set", &set]).await;
        assert!(refusal.contains(says), "{set}: {refusal}");
    }
}

#[tokio::test]
async fn values_of_tls_that_are_wrong_together_are_refused_with_what_to_do() {
    let Some(helm) = Helm::find() else { return };
    for (set, says) in [
        ("grpc.tls.enabled=true", "needs a certificate: set grpc.tls.existingSecret"),
        ("grpc.tls.existingSecret=a", "set grpc.tls.enabled: true, or remove the Secret"),
        ("grpc.tls.certManager.enabled=true", "set grpc.tls.enabled: true, or remove the Certificate"),
        ("grpc.tls.enabled=true,grpc.tls.certManager.enabled=true", "set the name of an issuer of cert-manager"),
        (
            "grpc.tls.enabled=true,grpc.tls.certManager.enabled=true,grpc.tls.existingSecret=a",
            "grpc.tls.certManager.enabled are both set: remove one of them",
        ),
        (
            "grpc.tls.enabled=true,grpc.tls.certManager.enabled=true,grpc.tls.certManager.issuer=ca,grpc.tls.keyKey=k",
            "cert-manager writes tls.crt and tls.key",
        ),
        ("grpc.tls.clientCaKey=ca.crt", "so nobody would be verified: set grpc.tls.enabled: true"),
        ("settings.HTTP_SERVER_USE_TLS=true", "settings.HTTP_SERVER_USE_TLS is set, but grpc.tls.enabled is"),
        ("settings.DEBUG_SERVER_USE_TLS=1", "settings.DEBUG_SERVER_USE_TLS is set, but grpc.tls.enabled is"),
        (
            "settings.GRPC_CLIENT_TLS_SAN=edge,grpc.tls.enabled=true,grpc.tls.existingSecret=a",
            "set grpc.tls.clientCaKey: ca.crt, or remove the names",
        ),
        (
            "settings.HTTP_SERVER_USE_TLS=true,grpc.tls.enabled=true,grpc.tls.existingSecret=a,serviceMonitor.enabled=true",
            "need serviceMonitor.tlsConfig",
        ),
        ("settings.GRPC_UDS=/run/a", "a socket in the pod, and on no port: remove it"),
        (
            "callers.file=callers: [{ names: [edge] }]",
            "callers.file names edge, but client certificates are not verified",
        ),
        (
            "callers.file=callers: [{ names: [anonymous] }\\, { names: [edge] }],grpc.tls.enabled=true,grpc.tls.existingSecret=a",
            "set grpc.tls.enabled: true and grpc.tls.clientCaKey: ca.crt, or name `anonymous` only",
        ),
        ("callers.file=a: b: c", "callers.file is not a mapping in YAML, so pods would not start"),
        ("callers.file=[]", "callers.file is not a mapping in YAML"),
    ] {
        let refusal = helm.refusal(&["--set", set]).await;
        assert!(refusal.contains(says), "{set}: {refusal}");
    }
}

#[tokio::test]
async fn a_file_of_callers_that_names_nobody_with_a_certificate_needs_no_tls() {
    let Some(helm) = Helm::find() else { return };
    let required = "grpc.tls.enabled=true,grpc.tls.existingSecret=a,settings.GRPC_CLIENT_AUTH=require,settings.GRPC_SERVER_TLS_CA_CERT=/ca";
    for set in [
        "callers.file=callers: [{ names: [anonymous] }]".to_owned(),
        // What Tidegate refuses with line and column does not crash the templates.
        "callers.file=callers: 3".to_owned(),
        "callers.file=callers: [a\\, { names: edge }]".to_owned(),
        format!("callers.file=callers: [{{ names: [edge] }}],{required}"),
    ] {
        let objects = helm.render(&["--set".to_owned(), set]).await;
        let file = super::told(server(&objects), "CALLERS_FILE");
        assert_eq!(file.as_deref(), Some("/etc/tidegate/callers/callers.yaml"));
    }
}

#[tokio::test]
async fn a_large_number_among_the_settings_keeps_its_digits() {
    let Some(helm) = Helm::find() else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "settings: { MEMORY_MAX_COUNTERS: 20000000, SHADOW_MODE: true }\n").expect("written");
    let objects = helm.render(&["--values".to_owned(), file.path().display().to_string()]).await;
    assert_eq!(super::told(server(&objects), "MEMORY_MAX_COUNTERS").as_deref(), Some("20000000"));
    assert_eq!(super::told(server(&objects), "SHADOW_MODE").as_deref(), Some("true"));
}

#[tokio::test]
async fn the_chart_deploys_this_version() {
    let chart = &yaml(&format!("{CHART}/Chart.yaml")).await[0];
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["apiVersion"], "v2");
    let oldest = format!(">={}.0-0", super::KUBERNETES[0]);
    assert_eq!(chart["kubeVersion"], oldest, "the oldest Kubernetes that the tests hold the chart against");
}
