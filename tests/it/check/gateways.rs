//! A real NGINX and a real Caddy with the files of `examples/`, on other ports.

use std::net::SocketAddr;
use std::path::Path;

use tempfile::TempDir;
use tokio::process::Command;

use super::ask;
use super::smuggling::finds_none_admitted;
use crate::redis::Port;
use crate::support::{Process, Tidegate, eventually, repository};

/// Addresses in the examples: the door, the application, and Tidegate.
const DOOR: &str = "127.0.0.1:8000";
const APPLICATION: &str = "127.0.0.1:8001";
const TIDEGATE: &str = "127.0.0.1:8080";

/// A gateway that asks a Tidegate.
struct Asking {
    tidegate: Tidegate,
    at: SocketAddr,
    _gateway: Process,
    _directory: TempDir,
}

impl Asking {
    /// Starts `example` with the file `configuration`, changed by `change`.
    async fn start(
        example: &str,
        configuration: &str,
        change: impl Fn(String) -> String,
        command: impl FnOnce(&Path) -> Command,
    ) -> Self {
        let variables = [("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json")];
        let tidegate = Tidegate::start(super::example(example).path(), &variables).await;
        let (at, application, directory) =
            (Port::free().address(), Port::free().address(), tempfile::tempdir().expect("a directory"));
        let text =
            std::fs::read_to_string(repository(&format!("examples/{example}/{configuration}"))).expect("the example");
        let addresses = [(DOOR, at), (APPLICATION, application), (TIDEGATE, tidegate.http)];
        let moved = |text: String, (from, to): (&str, SocketAddr)| {
            assert!(text.contains(from), "{from}");
            text.replace(from, &to.to_string())
        };
        let text = change(addresses.into_iter().fold(text, moved));
        std::fs::write(directory.path().join(configuration), text).expect("it is written");
        let mut gateway = Process::start(&mut command(directory.path()));
        eventually("the gateway listens", async || {
            assert!(!gateway.has_ended(), "{}", gateway.errors());
            tokio::net::TcpStream::connect(at).await.ok()
        })
        .await;
        Self { tidegate, at, _gateway: gateway, _directory: directory }
    }

    async fn nginx(change: impl Fn(String) -> String) -> Self {
        // In one process: workers would outlive a master that is killed.
        let alone = |text: String| {
            assert!(text.contains("daemon off;"), "{text}");
            text.replace("daemon off;", "daemon off;\nmaster_process off;")
        };
        Self::start(
            "nginx",
            "nginx.conf",
            |text| change(alone(text)),
            |directory| {
                let mut command = Command::new("nginx");
                command.arg("-p").arg(directory).args(["-c", "nginx.conf", "-e", "stderr"]);
                command
            },
        )
        .await
    }

    async fn caddy(change: impl Fn(String) -> String) -> Self {
        Self::start("caddy", "Caddyfile", change, |directory| {
            let mut command = Command::new("caddy");
            command.args(["run", "--adapter", "caddyfile", "--config"]).arg(directory.join("Caddyfile"));
            command.env("HOME", directory).env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME");
            command
        })
        .await
    }

    /// Three logins pass, whatever the client forges, and the fourth is refused with headers and body.
    async fn limits_logins(&self, body: &str) {
        let forged = [
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-uri", "/free"),
            ("x-forwarded-method", "GET"),
            ("x-original-uri", "/free"),
            ("x-original-method", "GET"),
        ];
        for target in ["/login", "/login?next=/", "/%6cogin"] {
            let (status, head, answer) = ask(self.at, "POST", target, &forged).await;
            assert!(status == 200 && answer.contains("hello"), "{head} {answer}");
            assert!(head.contains("\r\nratelimit: \"remote_address\";r="), "{head}");
        }
        for headers in [&forged[..], &[]] {
            let (status, head, answer) = ask(self.at, "POST", "/login", headers).await;
            assert!(status == 429 && answer.contains(body), "{head} {answer}");
            assert!(head.contains("\r\nretry-after: ") && head.contains("\r\nratelimit: "), "{head}");
        }
        assert_eq!(ask(self.at, "GET", "/login", &[]).await.0, 200, "another method is not limited");
        finds_none_admitted(self.at, &format!("POST /login HTTP/1.1\r\nhost: {}\r\n", self.at)).await;
    }

    /// The status while Tidegate is away.
    async fn without_tidegate(mut self) -> u16 {
        self.tidegate.kill();
        self.tidegate.ended().await;
        ask(self.at, "GET", "/", &[]).await.0
    }
}

#[tokio::test]
async fn nginx_limits_as_its_example_says_and_fails_closed_or_open() {
    let asking = Asking::nginx(|text| text).await;
    asking.limits_logins("too many requests").await;
    assert_eq!(asking.without_tidegate().await, 500);
    let open = Asking::nginx(|text| {
        text.replace("# proxy_intercept", "proxy_intercept").replace("# error_page 500", "error_page 500")
    })
    .await;
    open.limits_logins("too many requests").await;
    assert_eq!(open.without_tidegate().await, 200);
}

#[tokio::test]
async fn caddy_limits_as_its_example_says_and_fails_closed_or_open() {
    let asking = Asking::caddy(|text| text).await;
    asking.limits_logins("rate_limited").await;
    assert_eq!(asking.without_tidegate().await, 502);
    let uncommented = |line: &str| line.replacen("\t# ", "\t", 1);
    let open = Asking::caddy(|text| {
        let (before, after) = text.split_once("# handle_errors").expect("the comment");
        let after: Vec<_> = after
            .lines()
            .enumerate()
            .map(|(number, line)| if number < 3 { uncommented(line) } else { line.to_owned() })
            .collect();
        format!("{before}handle_errors{}\n", after.join("\n"))
    })
    .await;
    open.limits_logins("rate_limited").await;
    assert_eq!(open.without_tidegate().await, 200);
}

/// `benches/traefik` tries a real Traefik. Here its rules get the headers that it sends.
#[tokio::test]
async fn the_rules_for_traefik_limit_logins_that_it_asks_about_through_itself() {
    let tidegate = Tidegate::start(super::example("traefik").path(), &[]).await;
    let chain = "198.51.100.1, 127.0.0.1";
    let login = [("x-forwarded-for", chain), ("x-forwarded-uri", "/login"), ("x-forwarded-method", "POST")];
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(ask(tidegate.http, "GET", "/check/edge", &login).await.0);
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
    for (file, addresses) in [("traefik.yaml", [DOOR, APPLICATION]), ("dynamic.yaml", [APPLICATION, TIDEGATE])] {
        let text = std::fs::read_to_string(repository("examples/traefik").join(file)).expect("the example");
        for address in addresses {
            assert!(text.contains(address), "examples/traefik/{file} has no {address}");
        }
    }
}
