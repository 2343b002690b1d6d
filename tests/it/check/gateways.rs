//! A real NGINX, a real Caddy and a real Traefik with the files of `examples/`, on other ports.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use super::CLIENT;
use super::smuggling::finds_none_admitted;
use crate::http::{self, Answer};
use crate::redis::Port;
use crate::support::{Process, Tidegate, answering, eventually, repository, tool};

/// Addresses in the examples: the door, the application, Traefik's own entry point for checks, and Tidegate.
const DOOR: &str = "127.0.0.1:8000";
const APPLICATION: &str = "127.0.0.1:8001";
const CHECK: &str = "127.0.0.1:8002";
const TIDEGATE: &str = "127.0.0.1:8080";

/// Requests of one address at once, in the rules of the examples.
const BURST: usize = 20;
/// The time for which the gateways of the examples wait for Tidegate, at least.
const LATE: Duration = Duration::from_millis(200);

/// Another client that no example trusts.
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

/// A gateway that asks a Tidegate.
pub struct Asking {
    pub tidegate: Tidegate,
    pub at: SocketAddr,
    _gateway: Process,
    _directory: TempDir,
}

impl Asking {
    /// Starts `example` with its `files`, of which the first has the door, each changed by `change`.
    async fn start(
        example: &str,
        files: &[&str],
        change: impl Fn(String) -> String,
        command: impl FnOnce(&Path) -> Command,
    ) -> Self {
        let variables = [("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json")];
        let tidegate = Tidegate::start(super::example(example).path(), &variables).await;
        let (at, directory) = (Port::free().address(), tempfile::tempdir().expect("a directory"));
        let addresses = [
            (DOOR, at),
            (APPLICATION, Port::free().address()),
            (CHECK, Port::free().address()),
            (TIDEGATE, tidegate.http),
        ];
        for file in files {
            let text = std::fs::read_to_string(repository(&format!("examples/{example}/{file}"))).expect("the example");
            let moved = |text: String, (from, to): (&str, SocketAddr)| text.replace(from, &to.to_string());
            let text = addresses.into_iter().fold(change(text), moved);
            std::fs::write(directory.path().join(file), text).expect("it is written");
        }
        let mut gateway = Process::start(&mut command(directory.path()));
        eventually("the gateway listens", async || {
            assert!(!gateway.has_ended(), "{}", gateway.errors());
            TcpStream::connect(at).await.ok()
        })
        .await;
        Self { tidegate, at, _gateway: gateway, _directory: directory }
    }

    pub async fn nginx(change: impl Fn(String) -> String) -> Self {
        // In one process: workers would outlive a master that is killed.
        let alone = |text: String| {
            assert!(text.contains("daemon off;"), "{text}");
            text.replace("daemon off;", "daemon off;\nmaster_process off;")
        };
        Self::start(
            "nginx",
            &["nginx.conf"],
            |text| change(alone(text)),
            |directory| {
                let mut command = Command::new("nginx");
                command.arg("-p").arg(directory).args(["-c", "nginx.conf", "-e", "stderr"]);
                command
            },
        )
        .await
    }

    pub async fn caddy(change: impl Fn(String) -> String) -> Self {
        Self::start("caddy", &["Caddyfile"], change, |directory| {
            let mut command = Command::new("caddy");
            command.args(["run", "--adapter", "caddyfile", "--config"]).arg(directory.join("Caddyfile"));
            command.env("HOME", directory).env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME");
            command
        })
        .await
    }

    /// Starts Traefik in front of an application that answers `hello` and the head of the request.
    pub async fn traefik(change: impl Fn(String) -> String) -> Self {
        let application = answering(echoes).await;
        let change = |text: String| {
            let text = change(text).replace(&format!("http://{APPLICATION}"), &format!("http://{application}"));
            // Without a directory: Traefik runs where its files are.
            text.replace("examples/traefik/dynamic.yaml", "dynamic.yaml")
        };
        let asking = Self::start("traefik", &["traefik.yaml", "dynamic.yaml"], change, |directory| {
            let mut command = Command::new(tool("traefik"));
            command.arg("--configFile=traefik.yaml").current_dir(directory);
            command
        })
        .await;
        // It listens before it has read its routers.
        let has_routers = async || (http::request(asking.at, "PUT", "/").await.status == 200).then_some(());
        eventually("Traefik has its routers", has_routers).await;
        asking
    }

    /// Starts NGINX so that it fails open, with its file changed by `change`.
    pub async fn open_nginx(change: impl Fn(String) -> String) -> Self {
        Self::nginx(|text| {
            change(text).replace("# proxy_intercept", "proxy_intercept").replace("# error_page 500", "error_page 500")
        })
        .await
    }

    /// Starts Caddy so that it fails open, with what stands before that changed by `change`.
    pub async fn open_caddy(change: impl Fn(String) -> String) -> Self {
        let uncommented = |line: &str| line.replacen("\t# ", "\t", 1);
        Self::caddy(|text| {
            let (before, after) = text.split_once("# handle_errors").expect("the comment");
            let after: Vec<_> = after
                .lines()
                .enumerate()
                .map(|(number, line)| if number < 3 { uncommented(line) } else { line.to_owned() })
                .collect();
            format!("{}handle_errors{}\n", change(before.to_owned()), after.join("\n"))
        })
        .await
    }

    /// Starts Traefik so that it fails open, with its files changed by `change`.
    pub async fn open_traefik(change: impl Fn(String) -> String) -> Self {
        Self::traefik(|text| change(text).replace("# middlewares: [admit]", "middlewares: [admit]")).await
    }

    /// Three logins pass, whatever the client forges, and the fourth is refused with headers and body.
    async fn limits_logins(&self, body: &str) {
        let forged = [
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-uri", "/free"),
            ("x-forwarded-method", "GET"),
            ("x-original-uri", "/free"),
            ("x-original-method", "GET"),
            ("ratelimit", "forged"),
        ];
        for target in ["/login", "/login?next=/", "/%6cogin"] {
            let Answer { status, head, body: answer } =
                http::request(self.at, "POST", target).headers(&forged).from(CLIENT).await;
            assert!(status == 200 && answer.contains("hello"), "{head} {answer}");
            // Traefik hands them to the application, in place of forged ones, which answers with what it got.
            let shown = if answer.contains("HTTP/1.1") { answer.to_lowercase() } else { head };
            assert!(shown.contains("\r\nratelimit: \"remote_address\";r=") && !shown.contains("forged"), "{shown}");
        }
        for headers in [&forged[..], &[]] {
            let Answer { status, head, body: answer } =
                http::request(self.at, "POST", "/login").headers(headers).from(CLIENT).await;
            assert!(status == 429 && answer.contains(body), "{head} {answer}");
            assert!(head.contains("\r\nretry-after: ") && head.contains("\r\nratelimit: "), "{head}");
        }
        assert_eq!(
            http::request(self.at, "POST", "/login").headers(&[("a", ""); 900]).from(CLIENT).await.status,
            429,
            "many headers are read"
        );
        // More than Tidegate reads. A gateway that fails open passes what was answered late.
        for headers in [3_500, 3_900].repeat(30) {
            let began = Instant::now();
            let Answer { status, head, .. } =
                http::request(self.at, "POST", "/login").headers(&vec![("a", ""); headers]).from(CLIENT).await;
            assert!(matches!(status, 400 | 431 | 500) || began.elapsed() >= LATE, "{head}");
        }
        assert_eq!(http::get(self.at, "/login").from(CLIENT).await.status, 200, "another method is not limited");
        finds_none_admitted(CLIENT, self.at, &format!("POST /login HTTP/1.1\r\nhost: {}\r\n", self.at)).await;
    }

    /// An address that is no proxy is limited, whatever it says of itself.
    async fn limits_addresses(&self) {
        let mut statuses = Vec::new();
        for number in 0..=BURST {
            let claimed = format!("198.51.100.{number}");
            statuses.push(http::get(self.at, "/").headers(&[("x-forwarded-for", &claimed)]).from(OTHER).await.status);
        }
        assert_eq!(statuses, [vec![200; BURST], vec![429]].concat());
    }

    /// The status while Tidegate is away.
    async fn without_tidegate(mut self) -> u16 {
        self.tidegate.kill();
        self.tidegate.ended().await;
        http::get(self.at, "/").await.status
    }
}

/// Two requests of one API key pass, and the third is refused; other keys, and none, are counted apart.
pub async fn limits_api_keys(at: SocketAddr) {
    let with = async |key: &str| http::get(at, "/").headers(&[("x-api-key", key)]).await.status;
    for (key, status) in [("limited", 200), ("limited", 200), ("limited", 429), ("other", 200)] {
        assert_eq!(with(key).await, status, "{key}");
    }
    assert_eq!(http::get(at, "/").await.status, 200);
}

/// Answers one request with `hello` and its head.
async fn echoes(mut stream: TcpStream) -> std::io::Result<()> {
    let (mut head, mut part) = (Vec::new(), [0; 4_096]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part).await? {
            0 => return Ok(()),
            bytes => head.extend_from_slice(&part[..bytes]),
        }
    }
    let length = b"hello\n".len() + head.len();
    let answer = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\nhello\n");
    stream.write_all(&[answer.as_bytes(), &head].concat()).await
}

#[tokio::test]
async fn nginx_limits_as_its_example_says_and_fails_closed_or_open() {
    let asking = Asking::nginx(|text| text).await;
    asking.limits_logins("too many requests").await;
    limits_api_keys(asking.at).await;
    asking.limits_addresses().await;
    assert_eq!(asking.without_tidegate().await, 500);
    let open = Asking::open_nginx(|text| text).await;
    open.limits_logins("too many requests").await;
    assert_eq!(open.without_tidegate().await, 200);
}

#[tokio::test]
async fn a_request_that_nginx_redirects_inside_is_charged_once() {
    let www = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(www.path().join("static")).expect("a directory");
    for file in ["static/index.html", "static/page.html"] {
        std::fs::write(www.path().join(file), "a page\n").expect("it is written");
    }
    let locations = format!(
        "root {};
        location /static/ {{ LIMIT index index.html; error_page 404 /static/page.html; }}
        location /application/ {{ LIMIT try_files $uri /static/; }}
        location / {{",
        www.path().display()
    );
    let change = |text: String| {
        let (before, rest) = text.split_once("location / {").expect("the location");
        let (limit, _) = rest.split_once("proxy_pass").expect("the application");
        format!("{before}{}{rest}", locations.replace("LIMIT", limit))
    };
    let asking = Asking::nginx(change).await;
    for (number, (target, status)) in
        [("/static/page.html", 200), ("/static/", 200), ("/application/route", 200), ("/static/none", 404)]
            .iter()
            .enumerate()
    {
        let Answer { status: found, head, body } = http::get(asking.at, target).from(CLIENT).await;
        assert_eq!((found, body.as_str()), (*status, "a page\n"), "{target}");
        let page = asking.tidegate.metrics().await;
        let asked = format!("\ntidegate_requests_total{{interface=\"check\"}} {}\n", number + 1);
        assert!(page.contains(&asked), "{target}: {page}");
        assert!(*status == 404 || head.contains(&format!(";r={};", BURST - 1 - number)), "{target}: {head}");
    }
}

#[tokio::test]
async fn caddy_limits_as_its_example_says_and_fails_closed_or_open() {
    let asking = Asking::caddy(|text| text).await;
    asking.limits_logins("rate_limited").await;
    limits_api_keys(asking.at).await;
    asking.limits_addresses().await;
    assert_eq!(asking.without_tidegate().await, 502);
    let open = Asking::open_caddy(|before| {
        // Larger than what Tidegate reads, so that it answers and closes while Caddy is sending.
        assert!(before.contains("max_header_size 16KB"), "{before}");
        before.replace("max_header_size 16KB", "max_header_size 2MB")
    })
    .await;
    open.limits_logins("rate_limited").await;
    let large = "y".repeat(300_000);
    for _ in 0..60 {
        let began = Instant::now();
        let Answer { status, head, .. } = http::request(open.at, "POST", "/login").headers(&[("a", &large)]).await;
        assert!(status == 431 || began.elapsed() >= LATE, "{head}");
    }
    assert_eq!(open.without_tidegate().await, 200);
}

/// A Tidegate that closes each connection at its second request, as one that needs room may, and counts these requests.
pub async fn forgetful() -> (SocketAddr, Arc<AtomicUsize>) {
    let lost = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&lost);
    let answer = move |mut stream: TcpStream| {
        let counted = Arc::clone(&counted);
        async move {
            let mut request = [0; 16_384];
            if stream.read(&mut request).await? > 0 {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
            }
            if stream.read(&mut request).await? > 0 {
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, std::io::Error>(())
        }
    };
    (answering(answer).await, lost)
}

#[tokio::test]
async fn a_gateway_repeats_a_check_that_a_closed_connection_lost() {
    let (at, lost) = forgetful().await;
    let change = |text: String| text.replace(TIDEGATE, &at.to_string());
    for asking in [Asking::nginx(change).await, Asking::caddy(change).await, Asking::traefik(change).await] {
        let before = lost.load(Ordering::Relaxed);
        for number in 0..6 {
            // A check is a GET without a body, whatever the client sends.
            let Answer { status, head, .. } =
                http::request(asking.at, "POST", "/").headers(&[("content-length", "0")]).await;
            assert_eq!(status, 200, "{number}: {head}");
        }
        assert!(lost.load(Ordering::Relaxed) > before, "no check was lost");
    }
}

#[tokio::test]
async fn traefik_limits_as_its_example_says_and_fails_closed_or_open() {
    let asking = Asking::traefik(|text| text).await;
    asking.limits_logins("rate_limited").await;
    limits_api_keys(asking.at).await;
    asking.limits_addresses().await;
    assert_eq!(asking.without_tidegate().await, 502);
    let open = Asking::open_traefik(|text| text).await;
    open.limits_logins("rate_limited").await;
    assert_eq!(open.without_tidegate().await, 200);
}
