//! Reader for a recorded push of a control plane: a DiscoveryResponse as JSON, as grpcurl prints it.
//!
//! JSON is YAML, so the reader uses the YAML tree and every problem has its line. Keys may be in lowerCamelCase or in snake_case, and
//! unknown ones are ignored, as by a service that receives the push.

use foldhash::{HashMap, HashSet};
use serde_json::{Number, Value};

use super::document::{DescriptorNode, Document, LimitNode, LimitsNode, MAX_METADATA_DEPTH};
use super::documents::{Documents, File};
use super::problem::{Placed, Report, quoted};
use super::yaml::scalar::{Scalar, resolve};
use super::yaml::{self, Content, Node};
use crate::model::Metadata;
use crate::rules::tree::Position;

/// Name of the message in `@type`.
const MESSAGE: &str = "ratelimit.config.ratelimit.v3.RateLimitConfig";

/// Maximum number of resources and descriptors of a recorded push: 400,000, twice as many as the service takes in a response of 4 MiB. They take about
/// 200 MiB.
const MOST_ITEMS: usize = 400_000;

/// Returns the documents of a recorded push. With `merge_domains`, several resources may have one domain.
pub fn recorded_push(file: File, merge_domains: bool) -> Documents {
    let mut report = Report::new(&file.name);
    let text = String::from_utf8_lossy(&file.bytes).into_owned();
    let tree = yaml::parse(&text, &mut report);
    let mut reader = Reader { file: &file, report: &mut report, items: 0 };
    let documents = tree.and_then(|tree| tree.root().map(|root| reader.push(root))).unwrap_or_else(|| {
        let message = "the file is empty: write the JSON of a DiscoveryResponse";
        reader.error(Position { line: 1, column: 1 }, message.to_owned());
        Vec::new()
    });
    let mut known = HashSet::default();
    for (_, document) in &documents {
        if !known.insert(document.domain.value.as_str()) && !merge_domains {
            let message = format!(
                "duplicate domain {}: give each domain one resource, or set `MERGE_DOMAIN_CONFIG=true`",
                quoted(&document.domain.value)
            );
            reader.error(document.domain.place, message);
        }
    }
    let mut problems = Vec::new();
    report.finish(&text, &mut problems);
    Documents::of(vec![file], documents, problems)
}

struct Reader<'a> {
    file: &'a File,
    report: &'a mut Report,
    /// Resources and descriptors so far.
    items: usize,
}

/// The values of a mapping, by their keys in snake_case.
type Fields<'t> = HashMap<String, Node<'t>>;

impl Reader<'_> {
    fn push(&mut self, root: Node<'_>) -> Vec<(usize, Document)> {
        let resources = match root.content() {
            Content::List(resources) => resources.collect(),
            Content::Mapping(_) => {
                let fields = self.fields(root);
                match fields.get("resources") {
                    Some(resources) => self.list(*resources),
                    None if fields.contains_key("domain") => vec![root],
                    None => {
                        let message = "the push has no `resources`: write the JSON of a DiscoveryResponse, as grpcurl prints it, or a list of its resources";
                        self.error(root.place, message.to_owned());
                        Vec::new()
                    }
                }
            }
            _ => {
                self.error(root.place, "expected the JSON of a DiscoveryResponse".to_owned());
                Vec::new()
            }
        };
        let resources = self.bounded(resources);
        resources.into_iter().filter_map(|resource| Some((0, self.resource(resource)?))).collect()
    }

    fn resource(&mut self, resource: Node<'_>) -> Option<Document> {
        let fields = self.fields(resource);
        let name = fields.get("@type").and_then(|node| self.text(*node));
        if let Some(other) = name.filter(|name| !name.value.ends_with(MESSAGE)) {
            let message = format!("{} is not a resource of rate limits: expected {MESSAGE}", quoted(&other.value));
            self.error(other.place, message);
            return None;
        }
        let Some(domain) = fields.get("domain").and_then(|node| self.text(*node)) else {
            let message = "`domain` is empty, so no request matches the rules: give the resource a domain";
            self.error(resource.place, message.to_owned());
            return None;
        };
        Some(Document {
            file: self.file.name.clone(),
            domain,
            charging: None,
            on_store_failure: None,
            on_store_overload: None,
            lease: None,
            colocate: None,
            entries: Vec::new(),
            descriptors: self.descriptors(&fields),
            known_good: Vec::new(),
            requests: None,
            overlay: None,
        })
    }

    fn descriptors(&mut self, fields: &Fields<'_>) -> Vec<DescriptorNode> {
        let items = fields.get("descriptors").map(|items| self.list(*items)).unwrap_or_default();
        let items = self.bounded(items);
        items.into_iter().map(|item| self.descriptor(item)).collect()
    }

    /// Returns `items`, and none with an error where there are too many in all.
    fn bounded<'t>(&mut self, items: Vec<Node<'t>>) -> Vec<Node<'t>> {
        self.items = self.items.saturating_add(items.len());
        match items.first() {
            Some(first) if self.items > MOST_ITEMS => {
                self.error(first.place, format!("the push has more than {MOST_ITEMS} resources and descriptors"));
                Vec::new()
            }
            _ => items,
        }
    }

    fn descriptor(&mut self, item: Node<'_>) -> DescriptorNode {
        let fields = self.fields(item);
        let mut text = |name: &str| fields.get(name).and_then(|node| self.text(*node));
        let (key, value) = (text("key"), text("value"));
        let mut flag = |name: &str| fields.get(name).is_some_and(|node| self.flag(*node));
        let (shadow_mode, quota_mode) = (flag("shadow_mode"), flag("quota_mode"));
        let detailed_metric = flag("detailed_metric");
        let limits = fields.get("rate_limit").filter(|node| !node.is_null()).map(|node| self.limits(*node));
        let metadata = fields.get("metadata").filter(|node| !node.is_null());
        DescriptorNode {
            place: item.place,
            key,
            value,
            limits: limits.unwrap_or_default(),
            shadow_mode,
            quota_mode,
            detailed_metric,
            metadata: metadata.map(|node| self.metadata(*node, MAX_METADATA_DEPTH)),
            descriptors: self.descriptors(&fields),
            ..DescriptorNode::default()
        }
    }

    fn limits(&mut self, node: Node<'_>) -> LimitsNode {
        let fields = self.fields(node);
        // 0 is no unit.
        let unit = fields.get("unit").and_then(|node| self.text(*node)).filter(|unit| unit.value != "UNKNOWN");
        let replaces = fields.get("replaces").map(|node| self.list(*node)).unwrap_or_default();
        let mut name = |replaced| {
            let fields = self.fields(replaced);
            self.text(*fields.get("name")?)
        };
        let replaces = replaces.into_iter().filter_map(&mut name).collect();
        let limit = LimitNode {
            place: node.place,
            unit: unit.map(|unit| Placed { value: unit.value.to_ascii_lowercase(), place: unit.place }),
            requests_per_unit: fields.get("requests_per_unit").map_or(0, |node| self.number(*node)),
            name: fields.get("name").and_then(|node| self.text(*node)),
            replaces,
            ..LimitNode::default()
        };
        match fields.get("unlimited").is_some_and(|node| self.flag(*node)) {
            true => LimitsNode::Unlimited(Box::new(limit)),
            false => LimitsNode::Limited(vec![limit]),
        }
    }

    fn metadata(&mut self, node: Node<'_>, depth: usize) -> Metadata {
        let Content::Mapping(mut pairs) = node.content() else { return Metadata::new() };
        let pairs = std::iter::from_fn(move || pairs.next_pair());
        pairs.filter_map(|(key, value)| Some((plain(key)?.to_owned(), self.value(value, depth)))).collect()
    }

    fn value(&mut self, node: Node<'_>, depth: usize) -> Value {
        match node.content() {
            Content::Text(text) => Value::String(text.to_owned()),
            Content::Plain(text) => match resolve(text) {
                Scalar::Bool(flag) => Value::Bool(flag),
                Scalar::Int { value, .. } => Number::from_i128(value).map_or(Value::Null, Value::Number),
                Scalar::Float(value) => Number::from_f64(value).map_or(Value::Null, Value::Number),
                Scalar::Null => Value::Null,
                Scalar::Text => Value::String(text.to_owned()),
            },
            Content::List(items) if depth > 0 => Value::Array(items.map(|item| self.value(item, depth - 1)).collect()),
            Content::Mapping(_) if depth > 0 => Value::Object(self.metadata(node, depth - 1)),
            Content::List(_) | Content::Mapping(_) | Content::Broken => Value::Null,
        }
    }

    /// Returns the fields of a mapping. Reports anything else.
    fn fields<'t>(&mut self, node: Node<'t>) -> Fields<'t> {
        let Content::Mapping(mut pairs) = node.content() else {
            self.error(node.place, "expected an object like `{\"domain\": \"edge\"}`".to_owned());
            return Fields::default();
        };
        let pairs = std::iter::from_fn(move || pairs.next_pair());
        pairs.filter_map(|(key, value)| Some((snake_case(plain(key)?), value))).collect()
    }

    fn list<'t>(&mut self, node: Node<'t>) -> Vec<Node<'t>> {
        match node.content() {
            Content::List(items) => items.collect(),
            _ if node.is_null() => Vec::new(),
            _ => {
                self.error(node.place, "expected a list".to_owned());
                Vec::new()
            }
        }
    }

    /// Returns a text that is not empty.
    fn text(&mut self, node: Node<'_>) -> Option<Placed<String>> {
        let Some(text) = plain(node) else {
            self.error(node.place, "expected a text".to_owned());
            return None;
        };
        let is_there = !text.is_empty() && !node.is_null();
        is_there.then(|| Placed { value: text.to_owned(), place: node.place })
    }

    fn flag(&mut self, node: Node<'_>) -> bool {
        match plain(node).map(resolve) {
            Some(Scalar::Bool(flag)) => flag,
            Some(Scalar::Null) => false,
            _ => {
                self.error(node.place, "expected `true` or `false`".to_owned());
                false
            }
        }
    }

    /// Returns a number, which may be quoted.
    fn number(&mut self, node: Node<'_>) -> u32 {
        plain(node).and_then(|text| text.parse().ok()).unwrap_or_else(|| {
            self.error(node.place, format!("expected a whole number from 0 to {}", u32::MAX));
            0
        })
    }

    fn error(&mut self, place: Position, message: String) {
        self.report.error(place, || message);
    }
}

/// Returns the text of a scalar.
fn plain(node: Node<'_>) -> Option<&str> {
    match node.content() {
        Content::Plain(text) | Content::Text(text) => Some(text),
        Content::List(_) | Content::Mapping(_) | Content::Broken => None,
    }
}

/// Returns `requests_per_unit` for `requestsPerUnit`.
fn snake_case(key: &str) -> String {
    key.chars().fold(String::new(), |mut snake, c| {
        if c.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
        snake
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rulefile::{CompiledRules, Options, compile};

    const PUSH: &str = r#"{
  "versionInfo": "7",
  "typeUrl": "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig",
  "resources": [
    {
      "@type": "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig",
      "name": "edge",
      "domain": "edge",
      "descriptors": [
        { "key": "user", "value": "", "rateLimit": { "unit": "MINUTE", "requestsPerUnit": 5, "name": "users" },
          "shadowMode": true, "metadata": { "team": "a", "n": [1, true] } },
        { "key": "free", "rate_limit": { "unlimited": true },
          "descriptors": [{ "key": "path", "rateLimit": { "unit": "WEEK", "requestsPerUnit": "7" } }] }
      ]
    }
  ]
}"#;

    fn compiled(text: &str) -> Result<CompiledRules, String> {
        let file = File { name: "push.json".into(), bytes: text.into() };
        compile(recorded_push(file, false), &Options::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_push_as_grpcurl_prints_it_is_read_with_its_places() {
        let CompiledRules { rules, warnings } = compiled(PUSH).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        let [user, free, path] = rules.rules()[..] else { panic!("three rules") };
        assert_eq!(rules.places(user), "push.json:10");
        assert_eq!(user.limits()[0].limit.quota().to_string(), "5 per minute");
        assert!(user.role().is_shadow() && free.is_unlimited());
        assert_eq!(user.about().metadata.as_deref().unwrap()["n"].to_string(), "[1,true]");
        assert_eq!((path.path().to_string().as_str(), rules.places(path).as_str()), ("edge.free.path", "push.json:13"));
    }

    #[test]
    fn a_push_of_too_many_descriptors_is_an_error() {
        let push = |items: usize| format!(r#"{{"domain": "edge", "descriptors": [{}{{}}]}}"#, "{},".repeat(items - 1));
        assert!(!compiled(&push(1_000)).unwrap_err().contains("the push has more than"));
        assert!(compiled(&push(MOST_ITEMS + 1)).unwrap_err().contains("the push has more than 400000"));
    }

    #[test]
    fn a_list_of_resources_or_one_resource_is_a_push() {
        let one = r#"{"domain": "edge", "descriptors": [{"key": "user", "rateLimit": {"unit": "DAY", "requestsPerUnit": 1}}]}"#;
        for text in [one.to_owned(), format!("[{one}]")] {
            assert_eq!(compiled(&text).unwrap().rules.len(), 1, "{text}");
        }
    }

    #[test]
    fn what_is_nested_too_deep_in_metadata_is_left_out() {
        let deep = |levels: usize| format!("{}7{}", "[".repeat(levels), "]".repeat(levels));
        for (levels, expected) in [(16, deep(16)), (17, deep(16).replace('7', "null"))] {
            let CompiledRules { rules, .. } = compiled(&PUSH.replacen("[1, true]", &deep(levels), 1)).unwrap();
            assert_eq!(rules.rules()[0].about().metadata.as_deref().unwrap()["n"].to_string(), expected);
        }
    }

    #[test]
    fn what_is_wrong_in_a_push_is_named_with_its_place() {
        for (from, to, expected) in [
            ("MINUTE", "FORTNIGHT", "push.json:10:"),
            ("\"requestsPerUnit\": 5", "\"requestsPerUnit\": -5", "push.json:10:"),
            ("\"domain\": \"edge\"", "\"domain\": \"\"", "push.json:5:5: error: `domain` is empty"),
            ("v3.RateLimitConfig\",\n      \"name\"", "v3.Other\",\n      \"name\"", "push.json:6:"),
            ("\"resources\"", "\"things\"", "push.json:1:1: error: the push has no `resources`"),
            ("true,", "maybe,", "push.json:11:"),
        ] {
            let error = compiled(&PUSH.replacen(from, to, 1)).unwrap_err();
            assert!(error.starts_with(expected), "{from}: {error}");
        }
        let one = r#"{"domain": "edge", "descriptors": []}"#;
        assert!(compiled(&format!("[{one},\n{one}]")).unwrap_err().starts_with("push.json:2:"));
        assert!(compiled("").unwrap_err().contains("the file is empty"));
    }
}
