//! Load for any `envoy.service.ratelimit.v3` server, over HTTP/2 in plaintext or TLS with requests of its own encoding, so
//! that it shares no code with what it measures.
//!
//! ```text
//! rlsload --addr 127.0.0.1:8081 [OPTIONS]        calls in a closed or open loop, then one line of numbers
//! rlsload first-answer [OPTIONS] -- COMMAND ...  starts a server and prints the milliseconds to its first answer
//! rlsload half-open --ca FILE [OPTIONS]          begins TLS handshakes and never finishes them
//! rlsload free-port                              prints a TCP port that nobody listens on
//! ```
//!
//! `options.rs` lists the options. Linux only: it reads `/proc`.

mod call;
mod load;
mod options;
mod process;
mod tls;

use std::error::Error;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use call::{Client, Outcome};
use options::Options;
use tls::Server;

/// How long a server may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("free-port") => println!("{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()),
        Some("first-answer") => {
            let options = Options::parse(arguments.split_off(1))?;
            println!("{:.1}", first_answer(&options).await?.as_secs_f64() * 1e3);
        }
        Some("half-open") => println!("{}", tls::half_open(Options::parse(arguments.split_off(1))?).await?),
        _ => println!("{}", load::run(Options::parse(arguments)?).await?),
    }
    Ok(())
}

/// The time from starting the command to its first answer, asking every half millisecond; the server is killed then.
async fn first_answer(options: &Options) -> Result<Duration, Box<dyn Error>> {
    let (program, arguments) = options.command.split_first().ok_or("first-answer needs -- COMMAND")?;
    let at = Server::of(options)?;
    let start = Instant::now();
    let mut server = Command::new(program).args(arguments).stdout(Stdio::null()).spawn()?;
    let answered = loop {
        if let Ok(mut client) = Client::connect(&at).await
            && let Outcome::Ok | Outcome::OverLimit = client.call(options.body(0), options.timeout).await
        {
            break Ok(start.elapsed());
        }
        if start.elapsed() > PATIENCE || server.try_wait()?.is_some() {
            break Err("the server did not answer".into());
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    };
    server.kill()?;
    server.wait()?;
    answered
}
