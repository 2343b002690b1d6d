//! A real Prometheus, on a free port of this machine, that ends with the test that started it.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{list, promtool, text};
use crate::http;
use crate::redis::{Port, bound_to_this_thread};
use crate::support::{Process, eventually, replace_file};

const CONFIGURATION: &str = "global: { scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms }
rule_files: [alerts.yaml]
scrape_configs:
  - job_name: tidegate
    file_sd_configs: [{ files: [targets.json] }]
";

/// What is scraped.
struct Target {
    job: &'static str,
    instance: &'static str,
    address: SocketAddr,
}

/// A `prometheus`.
pub struct Prometheus {
    process: Process,
    port: Port,
    targets: Vec<Target>,
    directory: TempDir,
}

impl Prometheus {
    /// Starts one with these alerts, which knows no target yet.
    pub async fn start(alerts: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |file| directory.path().join(file);
        fs::write(path("prometheus.yaml"), CONFIGURATION).expect("it is written");
        fs::write(path("alerts.yaml"), alerts).expect("it is written");
        fs::write(path("targets.json"), "[]").expect("it is written");
        let configuration = path("prometheus.yaml");
        let (is_well, said) = promtool(&["check", "config", configuration.to_str().expect("a path of text")]).await;
        let rules = alerts.matches("- alert: ").count();
        assert!(is_well && said.contains(&format!("{rules} rules found")), "{said}");
        let port = Port::free();
        let mut command = bound_to_this_thread("prometheus");
        command.args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn"]);
        command.arg(format!("--web.listen-address={}", port.address())).current_dir(&directory);
        let process = Process::start(&mut command);
        let mut started = Self { process, port, targets: Vec::new(), directory };
        eventually("Prometheus is ready", async || {
            assert!(!started.process.has_ended(), "Prometheus does not start: {}", started.process.errors());
            let answer = http::get(started.port.address(), "/-/ready").sent().await.ok()?;
            (answer.status == 200).then_some(())
        })
        .await;
        started
    }

    /// From now on it scrapes this address as this instance of this job, whose name `tidegate-` begins.
    pub fn scrape(&mut self, job: &'static str, instance: &'static str, address: SocketAddr) {
        self.targets.retain(|target| (target.job, target.instance) != (job, instance));
        self.targets.push(Target { job, instance, address });
        let target = |target: &Target| {
            let labels = json!({ "job": format!("tidegate-{}", target.job), "instance": target.instance });
            json!({ "targets": [target.address.to_string()], "labels": labels })
        };
        let targets: Vec<_> = self.targets.iter().map(target).collect();
        replace_file(&self.directory.path().join("targets.json"), &Value::from(targets).to_string());
    }

    /// What it answers.
    async fn ask(&self, path: &str) -> Value {
        let answer = http::get(self.port.address(), path).await;
        assert_eq!(answer.status, 200, "{path}: {answer}");
        answer.json()
    }

    /// The values of the series that a query finds.
    pub async fn query(&self, query: &str) -> Vec<f64> {
        let answer = self.ask(&format!("/api/v1/query?query={}", encoded(query))).await;
        let value = |series: &Value| text(&series["value"][1]).parse().expect("a number");
        list(&answer["data"]["result"]).iter().map(value).collect()
    }

    /// The alerts that fire, or have in this time, each with its job without the `tidegate-`.
    pub async fn fired(&self, since: Duration) -> BTreeSet<(String, String)> {
        let query = format!("max_over_time(ALERTS{{alertstate=\"firing\"}}[{}ms])", since.as_millis().max(1));
        let answer = self.ask(&format!("/api/v1/query?query={}", encoded(&query))).await;
        let of = |series: &Value| {
            let job = series["metric"]["job"].as_str().unwrap_or("");
            let job = job.strip_prefix("tidegate-").unwrap_or(job);
            (text(&series["metric"]["alertname"]).to_owned(), job.to_owned())
        };
        list(&answer["data"]["result"]).iter().map(of).collect()
    }
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02X}")).collect()
}
