use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;
use tidegate::proto::ratelimit::config::ratelimit::v3::RateLimitUnit;
use tokio::process::Command;

use super::container::{Host, Mounted, USER};
use super::{Helm, environment, of, one, server};
use crate::gateways::ISTIO;
use crate::redis::certificates::Authority;
use crate::support::{Process, Tidegate, eventually, listeners, output, repository, tool};
use crate::xds::plane::{Plane, Secured, answer, limit, response, rlconfig};

/// The password of Redis in these tests.
const PASSWORD: &str = "of-this-test";

/// The login of a client in the rules of the chart and of its examples.
const LOGIN: &str = "path=/login,remote_address=192.0.2.1";

#[tokio::test]
async fn the_default_values_run_as_they_are_deployed() {
    let Some(helm) = Helm::find() else { return };
    deployed(&helm.render(&[]).await).await;
}

#[tokio::test]
async fn the_trial_with_its_own_redis_runs_as_it_is_deployed() {
    let Some(helm) = Helm::find() else { return };
    deployed(&helm.render(&["--values".to_owned(), super::example("trial")]).await).await;
}

#[tokio::test]
async fn the_example_for_istio_runs_as_it_is_deployed() {
    let Some(helm) = Helm::find() else { return };
    deployed(&helm.render(&["--values".to_owned(), super::example("istio")]).await).await;
}

#[tokio::test]
async fn the_example_for_envoy_gateway_runs_as_it_is_deployed() {
    let Some(helm) = Helm::find() else { return };
    deployed(&helm.render(&["--values".to_owned(), super::example("envoy-gateway")]).await).await;
}

#[tokio::test]
async fn the_examples_for_contour_kgateway_and_emissary_run_as_they_are_deployed() {
    let Some(helm) = Helm::find() else { return };
    for name in ["contour", "kgateway", "emissary"] {
        deployed(&helm.render(&["--values".to_owned(), super::example(name)]).await).await;
    }
}

#[tokio::test]
async fn an_overlay_of_the_values_is_mounted_where_the_service_reads_it() {
    let Some(helm) = Helm::find() else { return };
    let values = tempfile::NamedTempFile::new().expect("a file");
    let text = "overlay: { files: { all.yaml: \"overlay: edge\\ncharging: each\" } }\n";
    fs::write(values.path(), text).expect("it is written");
    let objects = helm.render(&["--values".to_owned(), values.path().display().to_string()]).await;
    assert_eq!(super::told(server(&objects), "RULES_OVERLAY").as_deref(), Some("/etc/tidegate/overlay"));
    // Without the file, the service would not start.
    deployed(&objects).await;
}

#[tokio::test]
async fn secrets_and_certificates_are_where_the_settings_say_and_readable_to_the_pod() {
    let Some(helm) = Helm::find() else { return };
    let tls = "redis.tls.enabled=true,redis.tls.existingSecret=s,redis.tls.certKey=tls.crt,redis.tls.keyKey=tls.key";
    let more = ["--values".to_owned(), super::example("istio"), "--set".to_owned(), tls.to_owned()];
    deployed(&helm.render(&more).await).await;
}

#[tokio::test]
async fn with_a_control_plane_the_rules_come_over_mutual_tls_and_survive_a_restart() {
    let Some(helm) = Helm::find() else { return };
    let authority = Authority::new();
    let mut plane = Plane::start_at("127.0.0.1:0".parse().unwrap(), Some(&Secured::by(&authority))).await;
    let set =
        format!("xds.enabled=true,xds.url={},xds.nodeId=envoy-ratelimit,xds.tls.existingSecret=mine", plane.address);
    let objects = helm.render(&["--set".to_owned(), set]).await;
    assert!(of("ConfigMap", &objects).is_empty(), "no rule files");
    let container = server(&objects);
    assert_eq!(container["args"], serde_json::json!(["serve"]));
    // What the volumes hold, in directories of this test.
    let volumes = tempfile::tempdir().unwrap();
    let at = |mount: &str| volumes.path().join(mount.trim_start_matches('/'));
    let client = authority.issue("envoy-ratelimit");
    for mount in container["volumeMounts"].as_array().unwrap() {
        fs::create_dir_all(at(mount["mountPath"].as_str().unwrap())).unwrap();
    }
    let secret = [("ca.crt", authority.certificate()), ("tls.crt", client.certificate), ("tls.key", client.key)];
    for (name, path) in secret {
        fs::copy(path, at("/etc/tidegate/xds-tls").join(name)).unwrap();
    }
    let variables = in_volumes(container, volumes.path());
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, text)| (&**name, &**text)).collect();
    let answered = async {
        let (stream, first) = plane.stream().await;
        assert_eq!(first.node.expect("a node").id, "envoy-ratelimit");
        stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).unwrap();
        assert_eq!(answer(&plane.request().await), ("1", "n1", None));
        stream
    };
    let (server, stream) = tokio::join!(Tidegate::start_with(None, &variables), answered);
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    let kept = at("/var/lib/tidegate/rules/rules.state");
    eventually("the rules are kept", async || kept.is_file().then_some(())).await;
    drop((server, stream, plane));
    let server = Tidegate::start_with(None, &variables).await;
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
}

/// The environment of a container on free ports, with its volumes below `volumes`.
fn in_volumes(container: &Value, volumes: &Path) -> Vec<(String, String)> {
    let ports = ["GRPC_PORT", "PORT", "DEBUG_PORT"];
    let at = |mount: &str| volumes.join(mount.trim_start_matches('/')).display().to_string();
    environment(container)
        .into_iter()
        .filter(|(name, _)| !ports.contains(&name.as_str()))
        .map(|(name, text)| (name, text.expect("a variable with a text")))
        .map(|(name, text)| (name, if text.starts_with('/') { at(&text) } else { text }))
        .collect()
}

#[tokio::test]
async fn grpc_is_served_over_mutual_tls_with_the_files_of_a_secret_or_of_cert_manager() {
    let Some(helm) = Helm::find() else { return };
    let more = "grpc.tls.enabled=true,grpc.tls.clientCaKey=ca.crt,settings.GRPC_CLIENT_TLS_SAN=envoy";
    let render = async |set: &str| helm.render(&["--set".to_owned(), format!("{more},{set}")]).await;
    let objects = render("grpc.tls.existingSecret=mine").await;
    assert_eq!((of("Certificate", &objects).len(), mounted_secret(&objects)), (0, "mine"));
    serves_mutual_tls(&objects).await;
    let issuer = "grpc.tls.certManager.issuer=ca,grpc.tls.certManager.issuerKind=ClusterIssuer";
    let names = "grpc.tls.certManager.dnsNames[0]=limits.example.com,service.headless.enabled=true";
    let objects = render(&format!("grpc.tls.certManager.enabled=true,{issuer},{names}")).await;
    let certificate = &one("Certificate", &objects)["spec"];
    assert_eq!(certificate["secretName"], mounted_secret(&objects), "the pods mount what cert-manager writes");
    assert_eq!(certificate["issuerRef"]["kind"], "ClusterIssuer");
    let names = certificate["dnsNames"].as_array().unwrap();
    for service in of("Service", &objects) {
        let name = service["metadata"]["name"].as_str().unwrap();
        for name in [name.to_owned(), format!("{name}.default.svc"), format!("{name}.default.svc.cluster.local")] {
            assert!(names.iter().any(|it| *it == *name), "{name} in {names:?}");
        }
    }
    assert!(names.iter().any(|it| it == "limits.example.com"));
    serves_mutual_tls(&objects).await;
}

/// The Secret with the certificate of the gRPC listener.
fn mounted_secret(objects: &[Value]) -> &str {
    let volumes = one("Deployment", objects)["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == "grpc-tls").unwrap();
    volume["secret"]["secretName"].as_str().unwrap()
}

/// Starts what a rendering deploys, with certificates in its volume, and calls it.
async fn serves_mutual_tls(objects: &[Value]) {
    for service in of("Service", objects) {
        for port in service["spec"]["ports"].as_array().unwrap().iter().filter(|port| port["name"] == "grpc") {
            assert_eq!(port["appProtocol"], Value::Null, "h2c would be wrong");
        }
    }
    let container = server(objects);
    let volumes = tempfile::tempdir().unwrap();
    let secret = volumes.path().join("etc/tidegate/grpc-tls");
    fs::create_dir_all(&secret).unwrap();
    let authority = Authority::new();
    let own = authority.issue("127.0.0.1");
    for (name, path) in [("ca.crt", authority.certificate()), ("tls.crt", own.certificate), ("tls.key", own.key)] {
        fs::copy(path, secret.join(name)).unwrap();
    }
    let variables = in_volumes(container, volumes.path());
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, text)| (&**name, &**text)).collect();
    let rules = crate::tls::rules();
    let server = Tidegate::start(rules.path(), &variables).await;
    let client = crate::tls::client::Client::of(&authority);
    client.clone().with(&authority.issue("envoy")).call(server.grpc).await.expect("it is answered");
    client.clone().with(&authority.issue("other")).call(server.grpc).await.expect_err("it has another name");
    client.call(server.grpc).await.expect_err("it has no certificate");
}

/// Starts what a rendering deploys, with its environment, arguments, volumes, names and ports unchanged, as the user and
/// with the rights of its pod, and looks at what it answers and what it can reach.
#[expect(clippy::too_many_lines, reason = "one run of the chart, step after step")]
async fn deployed(objects: &[Value]) {
    let container = server(objects);
    let user = &one("Deployment", objects)["spec"]["template"]["spec"]["securityContext"]["runAsUser"];
    assert_eq!(*user, USER, "the user that it runs as here");
    let variables: Vec<_> = environment(container);
    let variables: Vec<(String, String)> =
        variables.into_iter().map(|(name, text)| (name, text.expect("a variable with a text"))).collect();
    let told = |name: &str| variables.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str());
    let url = told("REDIS_URL");
    let mut names: Vec<String> =
        of("Service", objects).iter().map(|it| it["metadata"]["name"].as_str().expect("a name").to_owned()).collect();
    names.extend(url.and_then(|url| url.split(':').next()).map(str::to_owned));
    let mounts = container["volumeMounts"].as_array().expect("volumes");
    let mounts: Vec<&str> = mounts.iter().map(|mount| mount["mountPath"].as_str().expect("a path")).collect();
    let Some(host) = Host::new(&names, &mounts).await else { return };

    let authority = Authority::new();
    let guarded = (told("REDIS_TLS") == Some("true")).then_some(&authority);
    let redis = if let Some(url) = url { Some(redis(&host, objects, url, guarded).await) } else { None };
    let rules = of("ConfigMap", objects).into_iter().find(|it| it["metadata"]["name"] == "t-tidegate-rules");
    let rules = files_of(rules.expect("rules"));
    let overlay = of("ConfigMap", objects).into_iter().find(|it| it["metadata"]["name"] == "t-tidegate-overlay");
    let overlay = Mounted::new(&overlay.map(files_of).unwrap_or_default());
    let mut mounted = Mounted::new(&rules);
    let auth = Mounted::secret(&[("auth".to_owned(), format!("tidegate:{PASSWORD}\n"))]);
    let client = authority.issue("tidegate");
    let files = [("ca.crt", authority.certificate()), ("tls.crt", client.certificate), ("tls.key", client.key)];
    let files = files.map(|(name, path)| (name.to_owned(), fs::read_to_string(path).expect("it reads")));
    let certificates = Mounted::secret(&files);
    let volumes: Vec<(PathBuf, &str)> = mounts
        .iter()
        .map(|mount| {
            let volume = match *mount {
                "/etc/tidegate/rules" => &mounted,
                "/etc/tidegate/overlay" => &overlay,
                "/etc/tidegate/redis-auth" => &auth,
                "/etc/tidegate/redis-tls" => &certificates,
                other => panic!("what is mounted at {other}?"),
            };
            (volume.directory.path().to_owned(), *mount)
        })
        .collect();
    let arguments = container["args"].as_array().expect("arguments").iter().map(|it| it.as_str().expect("text"));
    let command: Vec<&str> = ["/bin/tidegate"].into_iter().chain(arguments).collect();
    // On a busy machine a test would fail on time; this one is about answers.
    let patient = variables.iter().cloned().chain([("STORE_DEADLINE".to_owned(), "5s".to_owned())]);
    let mut server = host.container(&volumes, &patient.collect::<Vec<_>>(), &command);
    listens(&mut server, container).await;

    assert_confined(&server);
    let call = async |more: &[&str]| {
        let address = format!("{}:8081", names[0]);
        let mut command = vec!["/bin/tidegate", "call", "--timeout", "30s", "--address", &address, "--domain", "edge"];
        command.extend(more);
        host.run(&[], &command).await
    };
    let (status, said) = call(&["--descriptor", LOGIN, "--times", "3"]).await;
    let words: Vec<_> = said.lines().filter(|line| !line.starts_with(' ')).collect();
    assert_eq!(words, ["OK", "OK", "OVER_LIMIT"], "{said}{}", server.errors());
    assert_eq!(status.code(), Some(1));
    // However it is spelled, it is this path.
    assert_eq!(call(&["--descriptor", "path=/./login?a=b,remote_address=192.0.2.1"]).await.0.code(), Some(1));
    helm_test(&host, objects).await;

    // The kubelet turns the link, and the running pod follows.
    let raised: Vec<_> = rules
        .iter()
        .map(|(name, text)| {
            (name.clone(), text.replace("unit: minute, requests_per_unit: 2,", "unit: minute, requests_per_unit: 4,"))
        })
        .collect();
    assert_ne!(raised, rules);
    mounted.turn(&raised);
    eventually("the changed rules are in force", async || {
        let (_, said) = call(&["--descriptor", LOGIN, "--hits", "0"]).await;
        said.contains("4 per minute").then_some(())
    })
    .await;

    assert_reaches_only(&server, redis.is_some());
    let errors = server.errors();
    assert!(!errors.contains("\"WARN\"") && !errors.contains("\"ERROR\""), "nothing to complain of: {errors}");
    assert!(!errors.contains(PASSWORD), "{errors}");

    // A pod that Kubernetes takes away: not healthy at once, and it still answers for the delay that the chart sets.
    server.signal(Signal::TERM);
    let mut ask = host.beside(tool("python"));
    ask.arg(repository("tests/it/helm.py")).args(["ask", "http://127.0.0.1:8080", "{}"]);
    eventually("it is not healthy", async || output(&mut ask).await.2.contains("HTTP Error 500").then_some(())).await;
    let (_, said) = call(&["--descriptor", LOGIN, "--hits", "0"]).await;
    assert!(said.contains("4 per minute"), "{said}");
}

/// The files of a ConfigMap.
fn files_of(map: &Value) -> Vec<(String, String)> {
    let files = map["data"].as_object().expect("files").iter();
    files.map(|(name, text)| (name.clone(), text.as_str().expect("text").to_owned())).collect()
}

/// Waits until it has started, and holds the ports that it says against those that its container declares.
async fn listens(server: &mut Process, container: &Value) {
    let said = listeners(server, ["gRPC", "HTTP", "debug"]).await;
    let ports = container["ports"].as_array().expect("ports");
    let port = |name: &str| ports.iter().find(|port| port["name"] == name).expect("a port")["containerPort"].clone();
    let expected =
        [format!("0.0.0.0:{}", port("grpc")), format!("0.0.0.0:{}", port("http")), "127.0.0.1:6070".to_owned()];
    assert_eq!(said.map(|address| address.to_string()), expected);
    assert_eq!(ports.len(), 2, "the debug listener is on loopback, and no port of the pod");
}

/// The Redis that the rendering has, or one that stands for the one outside, with the user of docs/redis.md.
async fn redis(host: &Host, objects: &[Value], url: &str, guarded: Option<&Authority>) -> (Process, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a path of text");
    let mut command = host.beside("redis-server");
    let bundled = of("StatefulSet", objects);
    let mut auth = vec![];
    if let Some(authority) = guarded {
        let server = authority.issue(url.split(':').next().expect("a host"));
        let files = [authority.certificate(), server.certificate, server.key].map(|path| path.display().to_string());
        let [ca, certificate, key] = files.each_ref();
        command.args(["--port", "0", "--tls-port", "6379", "--tls-ca-cert-file", ca]);
        command.args(["--tls-cert-file", certificate, "--tls-key-file", key]);
        auth = ["--tls", "--cacert", ca, "--cert", certificate, "--key", key].map(str::to_owned).to_vec();
    }
    if bundled.is_empty() {
        let rights = fs::read_to_string(repository("docs/redis.md")).expect("it reads");
        let line = rights.lines().find_map(|line| line.strip_prefix("user tidegate ")).expect("a user");
        command.args(["--dir", path, "--save", "", "--maxmemory-policy", "noeviction"]);
        // Nobody gets in without the secret.
        command.args(["--user", "default", "off", "--user", "tidegate"]);
        command.args(line.replace("PASSWORD", PASSWORD).split(' '));
        auth.extend(["--user", "tidegate", "--pass", PASSWORD, "--no-auth-warning"].map(str::to_owned));
    } else {
        let container = &one("StatefulSet", objects)["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(container["command"][0], "redis-server");
        let arguments = container["args"].as_array().expect("arguments").iter().map(|it| it.as_str().expect("text"));
        command.args(arguments.map(|argument| if argument == "/data" { path } else { argument }));
    }
    let process = Process::start(&mut command);
    eventually("Redis answers", async || {
        let (_, said, _) = output(host.beside("redis-cli").args(&auth).arg("PING")).await;
        (said.trim() == "PONG").then_some(())
    })
    .await;
    (process, directory)
}

/// What `helm test` runs: the first container's command as it stands, the second's question by another client.
async fn helm_test(host: &Host, objects: &[Value]) {
    let containers = &one("Pod", objects)["spec"]["containers"];
    let words = ["command", "args"].into_iter().flat_map(|part| containers[0][part].as_array().expect("words"));
    let words: Vec<&str> = words.map(|word| word.as_str().expect("text")).collect();
    let (status, said) = host.run(&[], &words).await;
    assert!(status.success(), "{said}");
    assert!(
        said.contains("tier=global") && said.contains("600 per minute") || said.contains("5000 per second"),
        "{said}"
    );
    let told = |name| super::told(&containers[1], name).expect("it is told");
    let url = told("URL").replace("t-tidegate", "127.0.0.1");
    let mut ask: Command = host.beside(tool("python"));
    ask.arg(repository("tests/it/helm.py")).args(["ask", &url, &told("QUESTION")]);
    let (status, said, errors) = output(&mut ask).await;
    assert!(status.success(), "{errors}");
    let (health, rest) = said.split_once('\n').expect("an answer");
    assert_eq!(health, "200 OK");
    let (decision, metrics) = rest.split_once('\n').expect("two more");
    assert!(metrics.starts_with("200 # "), "what a ServiceMonitor reads: {metrics}");
    assert!(decision.starts_with("200 {") && decision.contains("\"OK\"") && decision.contains("global"), "{decision}");
}

/// What the kernel says of the rights of a process.
fn assert_confined(server: &Process) {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("the kernel tells");
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("a field");
        value.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let program = fs::read_link(format!("/proc/{}/exe", server.pid())).expect("the kernel tells");
    assert!(program.ends_with("bin/tidegate"), "{}", program.display());
    for name in ["Uid", "Gid"] {
        assert_eq!(field(name), [USER.to_string(), USER.to_string(), USER.to_string(), USER.to_string()], "{name}");
    }
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(name), ["0000000000000000"], "{name}");
    }
    assert_eq!(field("NoNewPrivs"), ["1"]);
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", server.pid())).expect("the kernel tells");
    for mount in mounts.lines() {
        let fields: Vec<_> = mount.split(' ').collect();
        let (at, options) = (fields[4], fields[5]);
        assert!(at.starts_with("/proc") || options.split(',').any(|option| option == "ro"), "{at} may be written");
    }
}

/// What the kernel says of the sockets of a process: it listens where its start says, and has connected to Redis alone.
fn assert_reaches_only(server: &Process, has_redis: bool) {
    let pid = server.pid();
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("the kernel tells").flatten();
    let own: BTreeSet<String> = descriptors
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect();
    let (mut listening, mut connected) = (BTreeSet::new(), BTreeSet::new());
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).expect("the kernel tells");
        for line in text.lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            if !own.contains(fields[9]) {
                continue;
            }
            assert_eq!(table, "tcp", "nothing else is open: {line}");
            let port =
                |address: &str| u16::from_str_radix(address.rsplit(':').next().unwrap_or(""), 16).expect("a port");
            match fields[3] {
                "0A" => drop(
                    listening.insert((fields[1].split(':').next().expect("an address").to_owned(), port(fields[1]))),
                ),
                _ => drop(connected.insert((port(fields[1]), port(fields[2])))),
            }
        }
    }
    // Addresses are in the order of this machine's bytes.
    let loopback = format!("{:08X}", u32::from_ne_bytes([127, 0, 0, 1]));
    let everywhere = "00000000".to_owned();
    assert_eq!(listening, BTreeSet::from([(everywhere.clone(), 8080), (everywhere, 8081), (loopback, 6070)]));
    let outward: BTreeSet<u16> =
        connected.iter().filter(|(here, _)| ![8080, 8081, 6070].contains(here)).map(|(_, there)| *there).collect();
    let expected = if has_redis { BTreeSet::from([6379]) } else { BTreeSet::new() };
    assert_eq!(outward, expected, "it has connected to Redis, and to nobody else: {connected:?}");
}

/// As Istio's sample deploys the reference: by its name, without arguments, on every address, rules by RUNTIME_ROOT.
#[tokio::test]
async fn the_image_serves_gateways_that_start_it_as_the_reference() {
    let volume = "/data/ratelimit/config";
    let Some(host) = Host::new(&["redis".to_owned()], &[volume]).await else { return };
    let rules = "domain: ratelimit\ndescriptors:\n  - key: PATH\n    value: /productpage\n    rate_limit: { unit: minute, requests_per_unit: 1 }\n";
    let rules = Mounted::new(&[("config.yaml".to_owned(), rules.to_owned())]);
    let redis = Process::start(host.beside("redis-server").args(["--save", "", "--protected-mode", "no"]));
    let variables: Vec<_> = ISTIO.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let volumes = [(rules.directory.path().to_owned(), volume)];
    let mut server = host.container(&volumes, &variables, &["/bin/ratelimit"]);
    let line = async |server: &mut Process| {
        server.line().await.unwrap_or_else(|| panic!("it does not start: {}", server.errors()))
    };
    while !line(&mut server).await.contains("HTTP     [::]:8080") {}
    let call =
        ["/bin/tidegate", "call", "--address", "127.0.0.1:8081", "--domain", "ratelimit", "-d", "PATH=/productpage"];
    eventually("the limit of one is used up", async || {
        let (status, said) = host.run(&[], &call).await;
        assert!(status.code() != Some(2) || said.contains("Unavailable"), "Redis may be starting still: {said}");
        (status.code() == Some(1)).then_some(())
    })
    .await;
    assert_confined(&server);
    drop(redis);
}
