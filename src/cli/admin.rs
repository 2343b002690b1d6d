//! Requests to the debug listeners of several instances at the same time.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use axum::body::{Body, to_bytes};
use clap::{Arg, ArgAction, ArgMatches};
use futures_util::future::join_all;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::time::timeout;

use super::server;
use crate::model::Micros;

/// Maximum size of an answer: 16 MiB, more than an instance keeps.
const MOST: usize = 16 << 20;

/// Answer of an instance, or the reason why there is none.
pub(super) type Answer = (String, anyhow::Result<Value>);

/// Returns the arguments for the instances and for how long to wait.
pub(super) fn arguments() -> [Arg; 2] {
    [
        Arg::new("instance")
            .long("instance")
            .value_name("HOST:PORT")
            .action(ArgAction::Append)
            .default_value("127.0.0.1:6070")
            .help("Debug listener of an instance. A name with several addresses is all of them. Can be repeated"),
        server::duration("timeout", "2s").help("Longest wait for each instance. Those that do not answer are named"),
    ]
}

/// Asks all instances at the same time for `path`.
pub(super) async fn ask(matches: &ArgMatches, path: &str) -> Vec<Answer> {
    let wait = matches.get_one::<Micros>("timeout").copied().unwrap_or(Micros::from_secs(2));
    let wait = Duration::from_micros(wait.get());
    let names = matches.get_many::<String>("instance").into_iter().flatten();
    let answers = names.map(|name| async move {
        match timeout(wait, addresses(name)).await {
            Ok(Ok(found)) => {
                join_all(found.into_iter().map(|(label, address)| async move {
                    let answer = timeout(wait, get(address, path)).await;
                    (label, answer.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {wait:?}"))))
                }))
                .await
            }
            Ok(Err(error)) => vec![(name.clone(), Err(error))],
            Err(_) => vec![(name.clone(), Err(anyhow::anyhow!("its name was not resolved within {wait:?}")))],
        }
    });
    join_all(answers).await.into_iter().flatten().collect()
}

/// Returns the addresses of an instance, each with its label.
async fn addresses(name: &str) -> anyhow::Result<Vec<(String, SocketAddr)>> {
    let expected = || format!("'{name}' is not the address of a debug listener: write HOST:PORT");
    ensure!(
        name.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()),
        expected()
    );
    let found: Vec<SocketAddr> = tokio::net::lookup_host(name)
        .await
        .with_context(|| format!("the name in {name} cannot be resolved"))?
        .collect();
    let label = |address: &SocketAddr| match found.len() {
        1 => name.to_owned(),
        _ => format!("{name} ({address})"),
    };
    Ok(found.iter().map(|address| (label(address), *address)).collect())
}

async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Value> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    // The address and not the name: the listener refuses other names.
    let response =
        client.get(format!("http://{address}{path}").parse()?).await.context("no debug listener answers there")?;
    let status = response.status();
    let body = to_bytes(Body::new(response.into_body()), MOST).await.context("its answer was cut off")?;
    let text = String::from_utf8_lossy(&body);
    ensure!(status.is_success(), "it answered {status}: {}", text.trim());
    serde_json::from_str(&text).context("its answer is not that of a debug listener")
}
