//! The chart and the image: what they deploy is valid, confined, and is what runs.

use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde_json::Value;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::support::{output, repository, tool};

/// What a container may do and see, rebuilt with the means of this machine.
mod container;
/// What the page says of gateways, in a real Envoy.
mod gateways;
/// The Dockerfile, as far as it can be held to its word without Docker.
mod image;
/// What every pod of every rendering obeys.
mod pods;
/// The chart's rules and settings, under the real binary, confined as the chart says.
mod runs;
/// Values, their schema and the page that explains them: the same, and typos are named.
mod values;

const CHART: &str = "helm/tidegate";
/// Values that name the callers, without which nothing is rendered.
const CALLERS: &str = "tests/it/helm/callers.yaml";
/// The oldest Kubernetes that Chart.yaml allows and the newest whose schemas there are.
const KUBERNETES: [&str; 2] = ["1.27", "1.37"];
/// The name of the release, and so the first part of every name.
const RELEASE: &str = "t";

/// The values files that come with the chart.
const EXAMPLES: [&str; 7] =
    ["trial", "production-redis-cluster", "envoy-gateway", "istio", "contour", "kgateway", "emissary"];

/// The arguments that make each rendering that the tests look at.
fn renderings() -> Vec<Vec<String>> {
    let examples = EXAMPLES.iter().map(|name| vec!["--values".to_owned(), example(name)]);
    // What no example has: a volume for the bundled Redis, sentinels with secrets, rules from elsewhere, a control plane, TLS for
    // callers with either certificate, everything more.
    let kept = "--values BUNDLED --set redis.bundled.persistence.enabled=true,tracing.enabled=true,tracing.endpoint=http://c:4318,overlay.files.all\\.yaml=overlay:";
    let sentinels = "--set store=redis,onStoreFailure=closed,redis.type=sentinel,redis.url=m\\,s1:26379\\,s2:26379,redis.auth.existingSecret=a,redis.sentinelAuth.existingSecret=b,redis.tls.enabled=true,redis.tls.skipHostnameVerification=true,rules.existingConfigMap=mine,overlay.existingConfigMap=over,serviceAccount.create=false,podDisruptionBudget.enabled=false,image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000,test.httpImage=,replicaCount=2";
    let xds = "--set xds.enabled=true,xds.url=envoy-gateway:18001,xds.nodeId=envoy-ratelimit,xds.tls.existingSecret=envoy-rate-limit";
    let secured = "--set grpc.tls.enabled=true,grpc.tls.existingSecret=mine,grpc.tls.clientCaKey=ca.crt,service.headless.enabled=true,admin.tokens.existingSecret=readers,settings.DEBUG_SERVER_USE_TLS=true,callers.file=callers:";
    let issued = "--set grpc.tls.enabled=true,grpc.tls.certManager.enabled=true,grpc.tls.certManager.issuer=ca,networkPolicy.enabled=false,settings.HTTP_SERVER_USE_TLS=true,serviceMonitor.enabled=true,serviceMonitor.tlsConfig.serverName=tidegate";
    let words = |text: &str| text.replace("BUNDLED", &example("trial")).split(' ').map(str::to_owned).collect();
    [vec![], words(kept), words(sentinels), words(xds), words(secured), words(issued)]
        .into_iter()
        .chain(examples)
        .collect()
}

fn example(name: &str) -> String {
    repository(CHART).join(format!("examples/{name}.yaml")).to_str().expect("a path of text").to_owned()
}

/// `helm`, where there is one.
#[derive(Clone)]
struct Helm(PathBuf);

impl Helm {
    /// Looks where `tests/run` does. Without it a test of the chart says so and passes, unless it must not: in CI.
    fn find() -> Option<Self> {
        static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let go = std::env::home_dir().map(|home| home.join("go/bin"));
            let found = std::env::split_paths(&path).chain(go).map(|directory| directory.join("helm"));
            let found = found.into_iter().find(|program| program.is_file());
            if found.is_none() {
                let must = std::env::var_os("CI").is_some()
                    || std::env::var_os("TIDEGATE_REQUIRE_HELM").is_some_and(|value| value == "1");
                assert!(!must, "helm is missing: it is neither in $PATH nor in ~/go/bin, and CI must test the chart");
                aside("the tests of the chart are SKIPPED: there is no helm in $PATH or ~/go/bin, and no go to install it");
            }
            found
        });
        found.clone().map(Self)
    }

    async fn run(&self, command: &str, more: &[String]) -> Result<String, String> {
        let mut helm = Command::new(&self.0);
        // What `helm` was told on this machine is not what is tested.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HELM_")) {
            helm.env_remove(name);
        }
        let chart = repository(CHART);
        // The one value without a default. Files of values that come later replace it.
        let callers = repository(CALLERS);
        let more = [&["--values".to_owned(), callers.display().to_string()], more].concat();
        match command {
            "template" => helm.arg("template").arg(RELEASE).arg(chart),
            _ => helm.arg(command).arg("--strict").arg(chart),
        };
        let (status, said, errors) = output(helm.args(["--kube-version", KUBERNETES[1]]).args(more)).await;
        if status.success() { Ok(said) } else { Err(format!("{said}{errors}")) }
    }

    /// The objects of a rendering, each of which Kubernetes would take.
    async fn render(&self, more: &[String]) -> Vec<Value> {
        let text = self.run("template", more).await.unwrap_or_else(|error| panic!("{more:?}: {error}"));
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("it is written");
        let path = file.path().to_str().expect("a path of text");
        python(&[&["objects", path], &KUBERNETES[..]].concat()).await
    }

    /// Every rendering that the tests look at: its arguments and its objects.
    async fn rendered(&self) -> &'static [(Vec<String>, Vec<Value>)] {
        static RENDERED: OnceCell<Vec<(Vec<String>, Vec<Value>)>> = OnceCell::const_new();
        let render = async || {
            let mut rendered = Vec::new();
            for values in renderings() {
                let objects = self.render(&values).await;
                rendered.push((values, objects));
            }
            rendered
        };
        RENDERED.get_or_init(render).await
    }

    /// Why a rendering is refused.
    async fn refusal(&self, more: &[&str]) -> String {
        let more: Vec<_> = more.iter().map(ToString::to_string).collect();
        match self.run("template", &more).await {
            Ok(_) => panic!("{more:?} is not refused"),
            Err(error) => error,
        }
    }
}

/// A line that is seen although the test passes.
pub fn aside(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// What `helm.py` says.
pub async fn python(arguments: &[&str]) -> Vec<Value> {
    let mut command = Command::new(tool("python"));
    let (status, said, errors) = output(command.arg(repository("tests/it/helm.py")).args(arguments)).await;
    assert!(status.success(), "{errors}");
    serde_json::from_str(&said).expect("a list")
}

/// The documents of a YAML file of the repository.
async fn yaml(path: &str) -> Vec<Value> {
    python(&["yaml", repository(path).to_str().expect("a path of text")]).await
}

/// The objects of a kind.
fn of<'a>(kind: &str, objects: &'a [Value]) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// The one object of a kind.
fn one<'a>(kind: &str, objects: &'a [Value]) -> &'a Value {
    let found = of(kind, objects);
    assert_eq!(found.len(), 1, "one {kind}: {found:?}");
    found[0]
}

/// The environment of a container: each name, and its text unless it comes from elsewhere.
fn environment(container: &Value) -> Vec<(String, Option<String>)> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
    variables.iter().map(|item| (text(&item["name"]).expect("a name"), text(&item["value"]))).collect()
}

/// What a container is told by a variable.
fn told(container: &Value, variable: &str) -> Option<String> {
    environment(container).into_iter().find(|(name, _)| name == variable)?.1
}

/// The container of the Deployment.
fn server(objects: &[Value]) -> &Value {
    &one("Deployment", objects)["spec"]["template"]["spec"]["containers"][0]
}
