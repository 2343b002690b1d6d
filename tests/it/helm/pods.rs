use serde_json::{Value, json};

use super::{Helm, KUBERNETES, environment, of, one, python, server, told, yaml};
use crate::support::{output, repository};
use tokio::process::Command;

/// The pods of a rendering, with what they are part of: `spec` of each.
fn pods(objects: &[Value]) -> Vec<(String, &Value)> {
    let name = |object: &Value| format!("{} {}", object["kind"], object["metadata"]["name"]);
    let templated = ["Deployment", "StatefulSet"].into_iter().flat_map(|kind| of(kind, objects));
    let templated = templated.map(|object| (name(object), &object["spec"]["template"]["spec"]));
    templated.chain(of("Pod", objects).into_iter().map(|object| (name(object), &object["spec"]))).collect()
}

#[tokio::test]
async fn the_chart_and_its_examples_pass_the_linter_and_are_what_kubernetes_takes() {
    let Some(helm) = Helm::find() else { return };
    for (values, objects) in helm.rendered().await {
        helm.run("lint", values).await.unwrap_or_else(|error| panic!("{values:?}: {error}"));
        for kind in ["Deployment", "Service"] {
            assert!(!of(kind, objects).is_empty(), "{values:?}: no {kind}");
        }
    }
}

#[tokio::test]
async fn every_pod_is_confined_and_bounded() {
    let Some(helm) = Helm::find() else { return };
    for (values, objects) in helm.rendered().await {
        let pods = pods(objects);
        assert!(pods.len() >= 2, "the server and the test");
        for (name, pod) in pods {
            let what = format!("{values:?}: {name}");
            assert_eq!(pod["automountServiceAccountToken"], false, "{what}");
            assert_eq!(pod["enableServiceLinks"], false, "{what}");
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{what}");
            assert!(pod["securityContext"]["runAsUser"].as_u64().is_some_and(|user| user > 0), "{what}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{what}");
            for outside in ["hostNetwork", "hostPID", "hostIPC"] {
                assert_eq!(pod[outside], Value::Null, "{what}: {outside}");
            }
            for volume in pod["volumes"].as_array().map_or(&[][..], Vec::as_slice) {
                assert_eq!(volume["hostPath"], Value::Null, "{what}");
            }
            for container in pod["containers"].as_array().expect("containers") {
                assert_confined(&what, container);
            }
        }
    }
}

fn assert_confined(what: &str, container: &Value) {
    let confined = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    });
    assert_eq!(container["securityContext"], confined, "{what}");
    for bound in [["requests", "cpu"], ["requests", "memory"], ["limits", "memory"]] {
        assert!(!container["resources"][bound[0]][bound[1]].is_null(), "{what}: {bound:?}");
    }
    let image = container["image"].as_str().expect("an image");
    let (_, version) = image.rsplit_once([':', '@']).unwrap_or_else(|| panic!("{what}: {image} has no version"));
    assert_ne!(version, "latest", "{what}");
    for mount in container["volumeMounts"].as_array().map_or(&[][..], Vec::as_slice) {
        assert!(mount["subPath"].is_null() && mount["subPathExpr"].is_null(), "{what}: changes would not be seen");
    }
    for (name, text) in environment(container) {
        let is_secret = ["AUTH", "PASSWORD", "SECRET", "TOKEN"].iter().any(|word| name.contains(word));
        assert!(!is_secret || name.ends_with("_FILE") || text.is_none(), "{what}: {name} stands there in plain");
        assert!(text.is_none_or(|text| !text.contains('@')), "{what}: {name} holds a user or a password");
    }
}

#[tokio::test]
async fn no_pod_goes_before_its_successor_is_ready_and_none_is_killed_while_it_drains() {
    let Some(helm) = Helm::find() else { return };
    for (values, objects) in helm.rendered().await {
        let deployment = &one("Deployment", objects)["spec"];
        assert_eq!(deployment["strategy"]["rollingUpdate"], json!({ "maxUnavailable": 0, "maxSurge": 1 }));
        let container = server(objects);
        let mut expected = json!({ "path": "/healthcheck", "port": "http" });
        if is_http_over_tls(container) {
            expected["scheme"] = "HTTPS".into();
        }
        for probe in ["startupProbe", "readinessProbe"] {
            assert_eq!(container[probe]["httpGet"], expected, "{values:?}");
        }
        // A pod that drains is not healthy, and must not be restarted for that.
        let liveness = &container["livenessProbe"];
        assert_eq!(liveness["tcpSocket"], json!({ "port": "http" }), "{values:?}");
        let seconds = |name| {
            let told = told(container, name).unwrap_or_else(|| panic!("{name} is set"));
            told.strip_suffix('s').and_then(|seconds| seconds.parse::<u64>().ok()).expect("seconds")
        };
        let needed = seconds("DRAIN_DELAY") + seconds("DRAIN_TIMEOUT");
        let granted = deployment["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().expect("seconds");
        assert!(granted >= needed + 5, "{values:?}: killed after {granted} s, and drains for {needed} s");
        // Whoever balances by readiness has noticed before calls end.
        let readiness = &container["readinessProbe"];
        let product = readiness["periodSeconds"].as_u64().zip(readiness["failureThreshold"].as_u64());
        assert!(product.is_some_and(|(every, times)| every * times <= seconds("DRAIN_DELAY")), "{values:?}");
    }
}

#[tokio::test]
async fn a_change_of_rules_rolls_no_pod_and_a_change_of_a_setting_does() {
    let Some(helm) = Helm::find() else { return };
    let render = async |set: &str| helm.render(&["--set".to_owned(), set.to_owned()]).await;
    let before = render(r"rules.files.edge\.yaml=domain: a").await;
    let other_rules = render(r"rules.files.edge\.yaml=domain: b").await;
    assert_eq!(one("ConfigMap", &before)["data"]["edge.yaml"], "domain: a\n");
    assert_ne!(one("ConfigMap", &before)["data"], one("ConfigMap", &other_rules)["data"]);
    assert_eq!(one("Deployment", &before), one("Deployment", &other_rules), "running pods follow their rules");
    for setting in ["settings.REFUSAL_BODY=json", "grpc.maxConnectionAge=1m", "drain.timeoutSeconds=6"] {
        let other_setting = render(&format!(r"rules.files.edge\.yaml=domain: a,{setting}")).await;
        let template = |objects: &[Value]| one("Deployment", objects)["spec"]["template"].clone();
        assert_ne!(template(&before), template(&other_setting), "{setting} is read at the start only");
    }
}

#[tokio::test]
async fn pods_count_themselves_unless_they_are_told_their_number() {
    let Some(helm) = Helm::find() else { return };
    let redis = "store=redis,redis.url=r:6379,onStoreFailure=local,replicaCount=3";
    let told = async |set: &str| {
        let objects = helm.render(&["--set".to_owned(), format!("{redis},{set}")]).await;
        (told(server(&objects), "REPLICAS"), one("Deployment", &objects)["spec"]["replicas"].clone())
    };
    assert_eq!(told("autoscaling.enabled=false").await, (None, json!(3)));
    assert_eq!(told("settings.REPLICAS=5").await, (Some("5".to_owned()), json!(3)));
    let scaled = "autoscaling.enabled=true,autoscaling.minReplicas=2,autoscaling.maxReplicas=9";
    assert_eq!(told(scaled).await, (None, Value::Null), "the autoscaler owns the number of pods");
}

#[tokio::test]
async fn secrets_reach_the_pod_as_files_but_for_the_one_that_has_no_file() {
    let Some(helm) = Helm::find() else { return };
    let set = "store=redis,onStoreFailure=open,redis.type=sentinel,redis.url=m\\,s:26379,redis.auth.existingSecret=one,redis.auth.key=pw,redis.sentinelAuth.existingSecret=two,redis.tls.enabled=true,redis.tls.existingSecret=three,redis.tls.certKey=c.crt,redis.tls.keyKey=c.key,admin.tokens.existingSecret=four,admin.hosts[0]=a,admin.hosts[1]=b,grpc.tls.enabled=true,grpc.tls.existingSecret=five";
    let objects = helm.render(&["--set".to_owned(), set.to_owned()]).await;
    let (container, pod) = (server(&objects), &one("Deployment", &objects)["spec"]["template"]["spec"]);
    for (variable, file, secret) in [
        ("REDIS_AUTH_FILE", "/etc/tidegate/redis-auth/pw", "one"),
        ("REDIS_TLS_CACERT", "/etc/tidegate/redis-tls/ca.crt", "three"),
        ("REDIS_TLS_CLIENT_CERT", "/etc/tidegate/redis-tls/c.crt", "three"),
        ("REDIS_TLS_CLIENT_KEY", "/etc/tidegate/redis-tls/c.key", "three"),
        ("ADMIN_TOKEN_FILE", "/etc/tidegate/admin-tokens/tokens", "four"),
    ] {
        assert_eq!(told(container, variable).as_deref(), Some(file));
        let (directory, _) = file.rsplit_once('/').expect("a directory");
        let mounts = container["volumeMounts"].as_array().expect("mounts");
        let mount = mounts.iter().find(|mount| mount["mountPath"] == directory).expect("it is mounted");
        let volumes = pod["volumes"].as_array().expect("volumes");
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("a volume");
        assert_eq!(volume["secret"], json!({ "secretName": secret, "defaultMode": 0o440 }), "for its group alone");
    }
    assert_eq!(pod["securityContext"]["fsGroup"], 65532, "the group that may read them");
    let of_readers = ["DEBUG_HOST", "DEBUG_SERVER_USE_TLS", "ADMIN_HOSTS"].map(|name| told(container, name));
    assert_eq!(of_readers.map(Option::unwrap_or_default), ["0.0.0.0", "true", "a,b"]);
    let variables = container["env"].as_array().expect("variables");
    let of_sentinels = variables.iter().find(|item| item["name"] == "REDIS_SENTINEL_AUTH").expect("it is set");
    assert_eq!(of_sentinels["valueFrom"]["secretKeyRef"], json!({ "name": "two", "key": "auth" }));
}

#[tokio::test]
async fn a_network_policy_lets_in_who_is_named_and_out_to_redis_names_and_spans() {
    let Some(helm) = Helm::find() else { return };
    let set = "store=redis,onStoreFailure=open,redis.url=r:6380,tracing.enabled=true,tracing.endpoint=http://c:9999,settings.STATSD_HOST=s,settings.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://m:9998/v1/metrics,networkPolicy.httpFrom=null";
    let objects = helm.render(&["--set".to_owned(), set.to_owned()]).await;
    let policy = &one("NetworkPolicy", &objects)["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
    let ingress = policy["ingress"].as_array().expect("rules");
    assert!(ingress.iter().all(|rule| rule["from"].as_array().is_some_and(|from| !from.is_empty())), "nobody unnamed");
    assert_eq!(ingress[0]["from"][0]["podSelector"]["matchLabels"], json!({ "app": "gateway" }));
    assert_eq!(ingress[0]["ports"], json!([{ "port": "grpc" }]));
    assert_eq!(ingress.len(), 2, "a list without peers lets nobody in; the other is the test pod: {ingress:?}");
    let egress = policy["egress"].as_array().expect("rules");
    let mut ports: Vec<_> = egress.iter().flat_map(|rule| rule["ports"].as_array().expect("bounded ports")).collect();
    ports.dedup_by_key(|port| port["port"].clone());
    let ports: Vec<_> = ports.iter().map(|port| &port["port"]).collect();
    assert_eq!(ports, [53, 6379, 6380, 4317, 4318, 9999, 9998, 8125], "a port of an address needs no value of its own");
    let readers = r#"networkPolicy.adminFrom=[{"podSelector":{}}]"#;
    for (tokens, rules) in [("admin.hosts[0]=a", 0), ("admin.tokens.existingSecret=a,admin.hosts[0]=a", 1)] {
        let tls = format!("{tokens},grpc.tls.enabled=true,grpc.tls.existingSecret=b");
        let objects = helm.render(&["--set", &tls, "--set-json", readers].map(str::to_owned)).await;
        let ingress = one("NetworkPolicy", &objects)["spec"]["ingress"].as_array().expect("rules").clone();
        let to_debug = ingress.iter().filter(|rule| rule["ports"] == json!([{ "port": "debug" }]));
        assert_eq!(to_debug.count(), rules, "nobody reaches the debug listener without tokens: {ingress:?}");
    }
    let asking = r#"networkPolicy.checkFrom=[{"podSelector":{"matchLabels":{"app":"nginx"}}}]"#;
    let objects = helm.render(&["--set-json", asking].map(str::to_owned)).await;
    let ingress = one("NetworkPolicy", &objects)["spec"]["ingress"].as_array().expect("rules").clone();
    let by_http = json!({
        "from": [{ "podSelector": { "matchLabels": { "app": "nginx" } } }],
        "ports": [{ "port": "http" }],
    });
    assert!(ingress.contains(&by_http), "{ingress:?}");
    let bundled = "store=redis,onStoreFailure=open,redis.bundled.enabled=true";
    let objects = helm.render(&["--set".to_owned(), bundled.to_owned()]).await;
    let redis =
        of("NetworkPolicy", &objects).into_iter().find(|policy| policy["metadata"]["name"] == "t-tidegate-redis");
    let redis = &redis.expect("the bundled Redis has one of its own")["spec"];
    assert_eq!(redis["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"], "server");
    assert_eq!(redis["egress"], json!([]));
}

#[tokio::test]
async fn services_and_monitors_find_the_pods_and_nothing_else() {
    let Some(helm) = Helm::find() else { return };
    for (values, objects) in helm.rendered().await {
        let labels =
            |kind: &str| of(kind, objects).first().map(|it| it["spec"]["template"]["metadata"]["labels"].clone());
        let templates = ["Deployment", "StatefulSet"].map(|kind| (kind, labels(kind)));
        let is_in = |selector: &Value, labels: &Value| {
            selector.as_object().expect("a selector").iter().all(|(key, value)| labels[key] == *value)
        };
        for service in of("Service", objects) {
            let name = service["metadata"]["name"].as_str().expect("a name");
            let expected = if name.ends_with("-redis") { "StatefulSet" } else { "Deployment" };
            for (kind, labels) in &templates {
                let found = labels.as_ref().is_some_and(|labels| is_in(&service["spec"]["selector"], labels));
                assert_eq!(found, *kind == expected, "{values:?}: {name} and the {kind}");
            }
            let ports = service["spec"]["ports"].as_array().expect("ports");
            if let Some(grpc) = ports.iter().find(|port| port["name"] == "grpc") {
                let is_tls = values.iter().any(|value| value.contains("grpc.tls.enabled=true"));
                let allowed: &[_] = if is_tls { &[Value::Null] } else { &[json!("kubernetes.io/h2c"), json!("grpc")] };
                assert!(allowed.contains(&grpc["appProtocol"]), "{values:?}");
            }
        }
        for monitor in of("ServiceMonitor", objects) {
            let services = of("Service", objects).into_iter();
            let selector = &monitor["spec"]["selector"]["matchLabels"];
            let found: Vec<_> = services.filter(|service| is_in(selector, &service["metadata"]["labels"])).collect();
            assert_eq!(found.len(), 1, "each pod is read once: {found:?}");
            let endpoint = &monitor["spec"]["endpoints"][0];
            assert_eq!((&endpoint["port"], &endpoint["path"]), (&json!("http"), &json!("/metrics")));
            let scheme = if is_http_over_tls(server(objects)) { json!("https") } else { Value::Null };
            assert_eq!(endpoint["scheme"], scheme, "{values:?}");
            let ports = found[0]["spec"]["ports"].as_array().expect("ports");
            assert!(ports.iter().any(|port| port["name"] == endpoint["port"]));
        }
        let deployment = &templates[0].1.clone().expect("labels");
        for budget in of("PodDisruptionBudget", objects) {
            assert!(is_in(&budget["spec"]["selector"]["matchLabels"], deployment), "{values:?}");
        }
    }
}

#[tokio::test]
async fn alerts_and_the_dashboard_are_deployed_as_their_files_have_them() {
    let Some(helm) = Helm::find() else { return };
    let set = "prometheusRule.enabled=true,dashboard.enabled=true,prometheusRule.labels.release=prometheus";
    let objects = helm.render(&["--set".to_owned(), set.to_owned()]).await;
    let rule = one("PrometheusRule", &objects);
    assert_eq!(rule["metadata"]["labels"]["release"], "prometheus");
    let file = yaml("helm/tidegate/files/alerts.yaml").await;
    assert_eq!(rule["spec"], file[0], "nothing in it is taken for a template of Helm");
    for rule in rule["spec"]["groups"].as_array().expect("groups").iter().flat_map(|group| group["rules"].as_array()) {
        for rule in rule {
            for field in [&rule["alert"], &rule["expr"], &rule["labels"]["severity"], &rule["annotations"]["summary"]] {
                assert!(field.as_str().is_some_and(|text| !text.is_empty()), "{rule}");
            }
        }
    }
    let dashboards = of("ConfigMap", &objects).into_iter();
    let dashboard = dashboards.filter(|it| it["metadata"]["labels"]["grafana_dashboard"] == "1").collect::<Vec<_>>();
    let deployed: Value =
        serde_json::from_str(dashboard[0]["data"]["tidegate.json"].as_str().expect("text")).expect("JSON");
    let text = std::fs::read_to_string(repository("helm/tidegate/files/dashboard.json")).expect("it reads");
    assert_eq!(deployed, serde_json::from_str::<Value>(&text).expect("JSON"));
    assert!(deployed["panels"].as_array().is_some_and(|panels| !panels.is_empty()));
}

#[tokio::test]
async fn every_rule_file_of_the_chart_charges_all_or_nothing_and_passes_check_without_a_warning() {
    let Some(helm) = Helm::find() else { return };
    let mut files = 0;
    for (values, objects) in helm.rendered().await {
        let maps = of("ConfigMap", objects).into_iter().filter(|map| map["metadata"]["name"] == "t-tidegate-rules");
        for (name, text) in maps.flat_map(|map| map["data"].as_object()).flatten() {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join(name);
            std::fs::write(&path, text.as_str().expect("text")).expect("it is written");
            let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"));
            let (status, _, errors) = output(check.arg("check").arg(&path)).await;
            assert!(status.success() && errors.is_empty(), "{values:?}: {errors}");
            let document = &python(&["yaml", path.to_str().expect("a path of text")]).await[0];
            assert_eq!(document["charging"], "all_or_nothing", "{values:?}: {name}");
            files += 1;
        }
    }
    assert!(files > super::EXAMPLES.len(), "those of the examples, and the default");
}

/// The notes for these values.
async fn notes(helm: &Helm, more: &[&str]) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let copied = Command::new("cp").arg("-r").arg(repository(super::CHART)).arg(directory.path()).status().await;
    assert!(copied.is_ok_and(|status| status.success()));
    // Helm shows notes when it installs, for which it wants a cluster; as an object of the chart they need none.
    let chart = directory.path().join("tidegate");
    std::fs::rename(chart.join("templates/NOTES.txt"), chart.join("files/NOTES.txt")).expect("it is moved");
    let object = "notes: |\n  {{- tpl (.Files.Get \"files/NOTES.txt\") . | nindent 2 }}\n";
    std::fs::write(chart.join("templates/notes.yaml"), object).expect("it is written");
    let mut template = Command::new(&helm.0);
    template.args(["template", super::RELEASE]).arg(&chart).arg("--values").arg(repository(super::CALLERS));
    template.args(["--show-only", "templates/notes.yaml"]).args(more);
    template.args(["--namespace", "here", "--kube-version", KUBERNETES[1]]);
    let (status, notes, errors) = output(&mut template).await;
    assert!(status.success(), "{errors}");
    notes
}

#[tokio::test]
async fn the_notes_show_a_call_that_is_answered() {
    let Some(helm) = Helm::find() else { return };
    let shown = notes(&helm, &[]).await;
    for expected in [
        "t-tidegate.here.svc:8081",
        "put yours into rules.files",
        "kubectl -n here port-forward svc/t-tidegate 8080:8080",
    ] {
        assert!(shown.contains(expected), "{expected:?} is missing in {shown}");
    }
    let question = shown.split('\'').find(|part| part.starts_with('{')).expect("a question");
    let question: Value = serde_json::from_str(question).expect("JSON");
    let expected = json!({ "entries": [{ "key": "tier", "value": "global" }], "hitsAddend": 1 });
    assert_eq!(question, json!({ "domain": "edge", "descriptors": [expected] }));
    for (set, expected) in [
        (
            "callers.existingConfigMap=mine",
            "The file of callers decides who may ask, so both look at /healthcheck only",
        ),
        ("settings.JSON_ACCESS=off", "settings.JSON_ACCESS closes /json to other pods"),
    ] {
        let shown = notes(&helm, &["--set", set]).await;
        assert!(shown.contains(expected) && shown.contains(":8080/healthcheck"), "{set}: {shown}");
        assert!(!shown.contains(":8080/json"), "{set}: {shown}");
    }
}

#[tokio::test]
async fn the_notes_warn_of_callers_that_nobody_verifies() {
    let Some(helm) = Helm::find() else { return };
    let warning = "no client certificate is verified and every caller is `anonymous`";
    let callers = "callers.existingConfigMap=mine";
    let verified = format!("{callers},grpc.tls.enabled=true,grpc.tls.existingSecret=a,grpc.tls.clientCaKey=ca.crt");
    for (set, is_shown) in [("replicaCount=1", false), (callers, true), (&verified, false)] {
        assert_eq!(notes(&helm, &["--set", set]).await.contains(warning), is_shown, "{set}");
    }
}

#[tokio::test]
async fn the_test_of_the_release_asks_nothing_that_is_denied_to_it() {
    let Some(helm) = Helm::find() else { return };
    // The file is YAML 1.1, in which `off` is false.
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "settings: { JSON_ACCESS: off }\n").expect("it is written");
    let path = file.path().to_str().expect("a path of text");
    for (more, is_grpc, is_json) in [
        (["--set", "replicaCount=1"], true, true),
        (["--set", "settings.JSON_ACCESS=true"], true, true),
        (["--set", "settings.JSON_ACCESS=on"], true, true),
        (["--set", "settings.JSON_ACCESS=loopback"], true, false),
        (["--set", "settings.JSON_ACCESS=off"], true, false),
        (["--values", path], true, false),
        (["--set", "callers.existingConfigMap=mine"], false, false),
        (["--set", "callers.file=callers: [{ names: [anonymous] }]"], false, false),
    ] {
        let objects = helm.render(&more.map(str::to_owned)).await;
        let containers = one("Pod", &objects)["spec"]["containers"].as_array().expect("containers");
        let named = |name: &str| containers.iter().find(|container| container["name"] == name);
        assert_eq!(named("grpc").is_some(), is_grpc, "{more:?}");
        let script = named("http").expect("it looks over HTTP")["args"][0].as_str().expect("a script").to_owned();
        assert!(script.contains("/healthcheck"), "{more:?}: {script}");
        assert_eq!(script.contains("/json"), is_json, "{more:?}: {script}");
    }
}

/// Whether its HTTP listener speaks TLS.
fn is_http_over_tls(container: &Value) -> bool {
    told(container, "HTTP_SERVER_USE_TLS").as_deref() == Some("true")
}
