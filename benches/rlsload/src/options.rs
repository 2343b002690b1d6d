//! The command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;

use crate::call;

/// What to send, how fast, and what to watch.
pub struct Options {
    /// `--addr`: the server.
    pub address: String,
    /// `--ca`: speaks TLS, and trusts these certificates for the host of `--addr`.
    pub ca: Option<PathBuf>,
    /// `--hold-ms`: how long an unfinished handshake is held.
    pub hold: Duration,
    /// `--domain`: of every request.
    pub domain: String,
    /// `--d key=value,...`: one descriptor each. `%d` stands for the number of the request's key, `%1` for its last digit.
    pub descriptors: Vec<Vec<(String, String)>>,
    /// `--keys`: how many different requests there are, drawn at random.
    pub keys: usize,
    /// `--in-turn`: sends the keys one after the other instead.
    pub in_turn: bool,
    /// `--zipf`: draws the key of rank k as often as 1/k.
    pub zipf: bool,
    /// `--conns`: connections.
    pub connections: usize,
    /// `--streams`: calls in flight on each connection.
    pub streams: usize,
    /// `--warm`: seconds before the measurement.
    pub warm: Duration,
    /// `--secs`: seconds of the measurement.
    pub length: Duration,
    /// `--count`: ends after so many calls instead.
    pub count: Option<u64>,
    /// `--rate`: calls a second, open loop: latency counts from the moment a call was due.
    pub rate: Option<f64>,
    /// `--hits`: the request's addend.
    pub hits: u64,
    /// `--timeout-ms`: the longest wait for an answer.
    pub timeout: Duration,
    /// `--pid label:pid`: processes whose CPU time and memory are reported.
    pub pids: Vec<(String, u32)>,
    /// What stands behind `--`.
    pub command: Vec<String>,
}

impl Options {
    pub fn parse(arguments: Vec<String>) -> Result<Self, String> {
        let mut options = Self {
            address: "127.0.0.1:8081".into(),
            ca: None,
            hold: Duration::from_secs(60),
            domain: "bench".into(),
            descriptors: Vec::new(),
            keys: 10_000,
            in_turn: false,
            zipf: false,
            connections: 4,
            streams: 32,
            warm: Duration::from_secs(1),
            length: Duration::from_secs(5),
            count: None,
            rate: None,
            hits: 1,
            timeout: Duration::from_secs(1),
            pids: Vec::new(),
            command: Vec::new(),
        };
        let mut arguments = arguments.into_iter();
        while let Some(name) = arguments.next() {
            match name.as_str() {
                "--" => {
                    options.command = arguments.collect();
                    break;
                }
                "--in-turn" => {
                    options.in_turn = true;
                    continue;
                }
                "--zipf" => {
                    options.zipf = true;
                    continue;
                }
                _ => {}
            }
            let value = arguments.next().ok_or(format!("{name} needs a value"))?;
            match name.as_str() {
                "--addr" => options.address = value,
                "--ca" => options.ca = Some(value.into()),
                "--hold-ms" => options.hold = Duration::from_millis(number(&name, &value)?),
                "--domain" => options.domain = value,
                "--d" => options.descriptors.push(descriptor(&value)?),
                "--keys" => options.keys = number(&name, &value)?,
                "--conns" => options.connections = number(&name, &value)?,
                "--streams" => options.streams = number(&name, &value)?,
                "--warm" => options.warm = Duration::from_secs_f64(number(&name, &value)?),
                "--secs" => options.length = Duration::from_secs_f64(number(&name, &value)?),
                "--count" => options.count = Some(number(&name, &value)?),
                "--rate" => options.rate = Some(number(&name, &value)?),
                "--hits" => options.hits = number(&name, &value)?,
                "--timeout-ms" => options.timeout = Duration::from_millis(number(&name, &value)?),
                "--pid" => {
                    let (label, pid) = value.split_once(':').ok_or(format!("{name} {value}: expected label:pid"))?;
                    options.pids.push((label.into(), number(&name, pid)?));
                }
                _ => return Err(format!("there is no option {name}")),
            }
        }
        if options.descriptors.is_empty() {
            options.descriptors.push(descriptor("user=u%d")?);
        }
        Ok(options)
    }

    /// The request with this key, framed as gRPC sends it.
    pub fn body(&self, key: usize) -> Bytes {
        let fill = |text: &str| text.replace("%d", &key.to_string()).replace("%1", &(key % 10).to_string());
        let descriptors = self.descriptors.iter().map(|entries| entries.iter().map(|(k, v)| (fill(k), fill(v))));
        call::body(&self.domain, descriptors, self.hits)
    }
}

fn descriptor(text: &str) -> Result<Vec<(String, String)>, String> {
    let entry = |entry: &str| entry.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    text.split(',').map(entry).collect::<Option<_>>().ok_or(format!("--d {text}: expected key=value,..."))
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name} {value}: expected a number"))
}
