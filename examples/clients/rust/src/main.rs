//! A service with limits and its caller.

mod tidegate;

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::{Form, Router};
use axum::body::Body;
use axum::extract::{ConnectInfo, Path, State};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use http::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tidegate::{Descriptor, Pacer, RateLimit, Tidegate, Unit, retry};
use tokio::net::TcpListener;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

const USAGE: &str = "A service with limits and its caller.

limited serve 127.0.0.1:8081 open 100         a service on a free port, with 100 ms for Tidegate; closed: fail closed
          ... open 100 CA [CERT KEY]          the same over TLS, with these PEM files
limited retry http://127.0.0.1:PORT/search    two calls; each is repeated while it is refused
limited pace http://127.0.0.1:PORT/feed       six calls, none too early

The callers print a line for each HTTP request: status, Retry-After, and when it began and ended in ms.
";

type Failed = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address, fail, timeout_ms] => {
            let timeout = Duration::from_millis(timeout_ms.parse()?);
            serve(Tidegate::new(address, "shop", timeout, fail == "open")?).await
        }
        ["serve", address, fail, timeout_ms, ref files @ ..] => {
            let timeout = Duration::from_millis(timeout_ms.parse()?);
            serve(Tidegate::with_tls(address, "shop", timeout, fail == "open", tls(files)?)?).await
        }
        [how, url] => call(how, url).await,
        _ => Err(USAGE.into()),
    }
}

/// Reads the files of a CA, and of a client certificate and its key if there is one.
fn tls(files: &[&str]) -> Result<ClientTlsConfig, Failed> {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(std::fs::read(files[0])?));
    Ok(match files[1..] {
        [certificate, key] => tls.identity(Identity::from_pem(std::fs::read(certificate)?, std::fs::read(key)?)),
        _ => tls,
    })
}

/// Limits each path for each user. An export costs 5; a trial costs 2 and brings a limit of its own.
fn describe(request: &Request<Body>) -> (u32, Vec<Descriptor>) {
    let user = request.headers().get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    let path = request.uri().path();
    let by_path = Descriptor::new([("path", path), ("user", user)]);
    match path {
        "/login" | "/undecided" => (0, vec![]),
        "/export" => (5, vec![by_path]),
        "/trial" => (1, vec![Descriptor::new([("trial", user)]).with_hits(2).with_limit(4, Unit::Day)]),
        _ => (1, vec![by_path]),
    }
}

async fn serve(tidegate: Tidegate) -> Result<(), Failed> {
    let undecided = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&undecided);
    let tidegate = tidegate.on_undecided(move |_| drop(counted.fetch_add(1, Ordering::Relaxed)));
    let count = async move || undecided.load(Ordering::Relaxed).to_string();
    let done = async |Path(path): Path<String>| format!("{path}: done\n");
    let router = Router::new().route("/undecided", get(count)).route("/{path}", get(done));
    let router = router.route("/login", post(login)).with_state(tidegate.clone());
    let router = router.layer(RateLimit::new(tidegate, describe));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await?)
}

/// A stand-in for your lookup and its hash.
fn is_right(account: &str, password: &str) -> bool {
    !account.is_empty() && password == "right"
}

async fn login(
    State(tidegate): State<Tidegate>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    Form(form): Form<HashMap<String, String>>,
) -> axum::response::Response {
    let field = |name: &str| form.get(name).map_or("", String::as_str);
    // Behind a proxy, the address that the proxy vouches for.
    let address = Descriptor::new([("path", "/login"), ("remote_address", &client.ip().to_string())]);
    let account = Descriptor::new([("path", "/login"), ("account", field("account"))]);
    let decision = tidegate.decide(1, vec![address, account.clone()]).await;
    if decision.error.is_some() {
        // Also where others fail open: without a decision, guesses would have no limit.
        return (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], "Try again later.\n").into_response();
    }
    if decision.status != StatusCode::OK {
        return decision.into_response();
    }
    let mut response = if is_right(field("account"), field("password")) {
        // The hit of the account only: whoever knows one password must not get more guesses at others from an address.
        tidegate.give_back(&decision, vec![account]).await;
        "Welcome.\n".into_response()
    } else {
        (StatusCode::UNAUTHORIZED, "Wrong account or password.\n").into_response()
    };
    decision.add_headers(response.headers_mut());
    response
}

async fn call(how: &str, url: &str) -> Result<(), Failed> {
    let began = Instant::now();
    let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
    let send = async || send(&client, how, url, began).await;
    if how == "retry" {
        retry(send).await?;
        retry(send).await?;
        return Ok(());
    }
    let pacer = Pacer::default();
    let paced = || pacer.call(send);
    tokio::try_join!(paced(), paced(), paced(), paced(), paced(), paced())?;
    Ok(())
}

async fn send(
    client: &Client<HttpConnector, Body>,
    how: &str,
    url: &str,
    began: Instant,
) -> Result<Response<()>, Failed> {
    let start = began.elapsed().as_millis();
    let request = Request::get(url).header("x-user", how).body(Body::empty())?;
    let (head, body) = client.request(request).await?.into_parts();
    axum::body::to_bytes(Body::new(body), 65_536).await?;
    let retry_after = head.headers.get("retry-after").map_or("-", |value| value.to_str().unwrap_or("-"));
    println!("{} {retry_after} {start} {}", head.status.as_u16(), began.elapsed().as_millis());
    Ok(Response::from_parts(head, ()))
}
