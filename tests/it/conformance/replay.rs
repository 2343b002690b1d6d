//! Recorded answers of the reference to random rules and requests, asked again: no difference but those of a named rule.

use std::collections::BTreeSet;

use serde_json::Value;
use tempfile::TempDir;
use tidegate::model::{Request, Role};
use tidegate::rulefile::Options;
use tidegate::rules::Rule;
use tokio::process::Command;
use tonic::Response;

use rules::{RULES, Reason};

use crate::grpc;
use crate::redis::Single;
use crate::redis::clock::Clock;
use crate::redis::cluster::Cluster;
use crate::redis::user::PREFIX;
use crate::support::{Tidegate, directory, in_time, output, repository};
use crate::world::{file, load};

mod form;
mod rules;

/// One server of the reference: its variables, its rule files, and what was asked there, in order.
struct Round(Value);

impl Round {
    /// All rounds, in order.
    async fn all() -> Vec<Self> {
        let file = repository("tests/conformance/recorded-answers.jsonl.gz");
        let (status, lines, errors) = output(Command::new("gzip").arg("-dc").arg(file)).await;
        assert!(status.success(), "{errors}");
        lines.lines().map(|line| Self(serde_json::from_str(line).expect("a round"))).collect()
    }

    fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        texts(&self.0["env"])
    }

    fn exchanges(&self) -> &[Value] {
        list(&self.0["exchanges"])
    }

    /// Starts a server with the rules of this round, in a directory that it watches.
    async fn serve(&self, variables: &[(&str, &str)]) -> (Tidegate, TempDir) {
        let rules = directory(texts(&self.0["files"]));
        let variables: Vec<_> = self.variables().chain(variables.iter().copied()).collect();
        (Tidegate::start(rules.path(), &variables).await, rules)
    }
}

/// The texts of an object, by name.
fn texts(object: &Value) -> impl Iterator<Item = (&str, &str)> {
    let fields = object.as_object().expect("an object").iter();
    fields.map(|(name, text)| (name.as_str(), text.as_str().expect("a text")))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn number<T: TryFrom<u64>>(value: &Value) -> T {
    value.as_u64().and_then(|number| T::try_from(number).ok()).unwrap_or_else(|| panic!("not such a number: {value}"))
}

/// The microsecond of the epoch at which the request was sent.
#[expect(clippy::cast_possible_truncation, reason = "a moment of this century")]
fn moment(exchange: &Value) -> i64 {
    (exchange["at"].as_f64().expect("seconds") * 1e6) as i64
}

/// One request with both answers, and what was asked before.
struct Scene<'a> {
    round: &'a Round,
    /// Its place among the exchanges of the round.
    index: usize,
    reference: &'a Value,
    tidegate: &'a Value,
}

impl Scene<'_> {
    fn request(&self) -> &Value {
        &self.round.exchanges()[self.index]["request"]
    }

    fn descriptors(&self) -> &[Value] {
        list(&self.request()["descriptors"])
    }

    /// The hits of a descriptor of this request.
    fn hits(&self, index: usize) -> u64 {
        hits(self.request(), &self.descriptors()[index])
    }

    /// The statuses of a descriptor: of the reference and of Tidegate.
    fn statuses(&self, index: usize) -> [&Value; 2] {
        [self.reference, self.tidegate].map(|answer| &answer["statuses"][index])
    }

    /// The role of the rule that answers for each descriptor, if one does and the request sends no limit.
    fn roles(&self) -> Vec<Option<Role>> {
        let files: Vec<_> = texts(&self.round.0["files"]).map(|(name, text)| file(name, text)).collect();
        let options = Options { quota_mode: true, merge_domains: true, ..Options::default() };
        let rules = load(&files, options).unwrap_or_else(|invalid| panic!("{invalid}")).rules;
        let request = Request::try_from(form::request(self.request())).expect("it was answered");
        let matched = rules.find(&request);
        let rules = matched.items.iter().map(|item| item.rule.filter(|_| !item.is_overridden));
        rules.map(|rule| rule.map(Rule::role)).collect()
    }

    /// The hits on the counter of this descriptor that such a limit has refused in the reference, up to this descriptor.
    fn hits_refused(&self, index: usize, by: impl Fn(u64) -> bool) -> u64 {
        let counter = |request: &Value, descriptor: &Value, status: &Value| {
            (request["domain"].clone(), descriptor["entries"].clone(), status["limit"][1].clone())
        };
        let own = counter(self.request(), &self.descriptors()[index], &self.reference["statuses"][index]);
        let mut sum = 0;
        for (place, exchange) in self.round.exchanges()[..=self.index].iter().enumerate() {
            let (request, statuses) = (&exchange["request"], exchange["answer"]["statuses"].as_array());
            let descriptors = list(&request["descriptors"]).iter().zip(statuses.into_iter().flatten());
            let before = if place == self.index { index } else { usize::MAX };
            for (descriptor, status) in descriptors.take(before) {
                let Some(limit) = status["limit"][0].as_u64() else { continue };
                let is_refused = status["code"] == "OVER_LIMIT" || limit == 0;
                if is_refused && by(limit) && counter(request, descriptor, status) == own {
                    sum += hits(request, descriptor);
                }
            }
        }
        sum
    }
}

fn hits(request: &Value, descriptor: &Value) -> u64 {
    let own = descriptor["hits"].as_u64();
    own.unwrap_or_else(|| request["hits"].as_u64().unwrap_or(0).max(1))
}

/// Two values at one place of two answers that are not the same.
struct Difference {
    /// The place, as a JSON pointer.
    place: String,
    reference: Value,
    tidegate: Value,
}

impl Difference {
    /// The place, as names and indices.
    fn steps(&self) -> Vec<&str> {
        self.place.split('/').skip(1).collect()
    }
}

/// Collects each place at which two answers differ.
fn compare(place: &str, reference: &Value, tidegate: &Value, found: &mut Vec<Difference>) {
    match (reference, tidegate) {
        (Value::Object(of_one), Value::Object(of_other)) => {
            let names: BTreeSet<_> = of_one.keys().chain(of_other.keys()).collect();
            for name in names {
                let step = name.replace('~', "~0").replace('/', "~1");
                compare(&format!("{place}/{step}"), &reference[name], &tidegate[name], found);
            }
        }
        (Value::Array(of_one), Value::Array(of_other)) if of_one.len() == of_other.len() => {
            for (index, (one, other)) in of_one.iter().zip(of_other).enumerate() {
                compare(&format!("{place}/{index}"), one, other, found);
            }
        }
        _ if reference != tidegate => {
            let (reference, tidegate) = (reference.clone(), tidegate.clone());
            found.push(Difference { place: place.to_owned(), reference, tidegate });
        }
        _ => {}
    }
}

/// Asks everything again, at the recorded times of all these clocks. `variables` are those of each server, with the first of the
/// clocks.
async fn replay(clocks: &[&Clock], variables: &[(&str, &str)]) {
    let (mut unexplained, mut recognised) = (Vec::new(), BTreeSet::new());
    for (number, round) in Round::all().await.iter().enumerate() {
        let set_clocks = |exchange| clocks.iter().for_each(|clock| clock.stop(moment(exchange)));
        set_clocks(&round.exchanges()[0]);
        // Each round begins with empty counters.
        let own = round.variables().find_map(|(name, value)| (name == "CACHE_KEY_PREFIX").then_some(value));
        let prefix = format!("{PREFIX}{number}:{}", own.unwrap_or_default());
        let variables = variables.iter().copied().chain(clocks[0].variables()).chain([("CACHE_KEY_PREFIX", &*prefix)]);
        let (server, _rules) = round.serve(&variables.collect::<Vec<_>>()).await;
        let mut client = grpc::client(server.grpc).await;
        for (index, exchange) in round.exchanges().iter().enumerate() {
            set_clocks(exchange);
            let asked = client.should_rate_limit(form::request(&exchange["request"]));
            let answer = form::recorded(in_time("it is answered", asked).await.map(Response::into_inner));
            let scene = Scene { round, index, reference: &exchange["answer"], tidegate: &answer };
            let mut found = Vec::new();
            compare("", scene.reference, scene.tidegate, &mut found);
            for difference in found {
                match RULES.iter().find(|rule| (rule.recognises)(&scene, &difference)) {
                    Some(rule) => _ = recognised.insert(rule.name),
                    None => unexplained.push(format!(
                        "round {number}, exchange {index}, {}: {} by the reference, {} here\n  {}\n",
                        difference.place, difference.reference, difference.tidegate, exchange["request"]
                    )),
                }
            }
        }
    }
    let count = unexplained.len();
    assert!(
        unexplained.is_empty(),
        "{count} differences that no rule of tests/it/conformance/replay/rules.rs recognises; the first ones:\n{}",
        unexplained.iter().take(20).cloned().collect::<String>()
    );
    let is_redis = variables.iter().any(|(name, _)| *name == "REDIS_URL");
    let possible = RULES.iter().filter(|rule| is_redis || !rule.needs_redis).map(|rule| rule.name);
    let unused: Vec<_> = possible.filter(|name| !recognised.contains(name)).collect();
    assert!(unused.is_empty(), "rules of differences that there are no more: {unused:?}");
}

/// Variables of a server whose counters are in a Redis.
fn in_redis<'a>(shape: &'a str, url: &'a str) -> [(&'a str, &'a str); 3] {
    // On a busy machine a test would fail on time; this one is about answers.
    [("REDIS_TYPE", shape), ("REDIS_URL", url), ("STORE_DEADLINE", "5s")]
}

#[tokio::test]
async fn the_embedded_store_answers_as_the_reference_did() {
    replay(&[&Clock::new()], &[]).await;
}

#[tokio::test]
async fn one_redis_server_answers_as_the_reference_did() {
    let server = Single::with_clock(&[]).await;
    replay(&[server.clock()], &in_redis("single", &server.address().to_string())).await;
}

#[tokio::test]
async fn a_redis_cluster_answers_as_the_reference_did() {
    // Longer than the record: the clocks jump from round to round.
    let cluster = Cluster::with_clocks(&["--cluster-node-timeout", "600000"]).await;
    let clocks: Vec<_> = cluster.nodes().iter().map(Single::clock).collect();
    replay(&clocks, &in_redis("cluster", &cluster.addresses())).await;
}

#[test]
fn every_named_difference_is_told_to_those_who_move_here() {
    let page = std::fs::read_to_string(repository("docs/compatibility.md")).expect("it reads");
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for rule in RULES {
        match rule.reason {
            Reason::Told(sentence) => {
                assert!(page.contains(sentence), "docs/compatibility.md does not say: {sentence}");
            }
            Reason::Inexact(why) => assert!(why.ends_with('.'), "a sentence: {why}"),
        }
    }
}
