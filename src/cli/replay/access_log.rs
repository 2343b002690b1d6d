//! An access log of Envoy in JSON, read as a recording: fields of a line make the descriptors of its request.

use anyhow::{Context, ensure};
use clap::{Arg, ArgAction, ArgMatches};
use serde_json::Value;

use super::recording::{By, Doubt, Recorded};
use super::time;
use crate::cli::descriptor;
use crate::model::{Descriptor, Entry, Micros, Outcome, Provenance, Request};

/// Flag of Envoy for a request that the rate limit filter refused.
const LIMITED: &str = "RL";
/// Flag of Envoy for a request whose call of the rate limit service failed.
const SERVICE_ERROR: &str = "RLSE";
/// Status code of a refused request, if the line has no flags.
const TOO_MANY_REQUESTS: &str = "429";

/// Fields of the lines, and the descriptors that they make.
#[derive(Debug)]
pub(super) struct AccessLog {
    domain: String,
    /// Descriptors with `{FIELD}` in their values.
    descriptors: Vec<Descriptor>,
    time: String,
    code: String,
    flags: String,
}

/// Returns the arguments.
pub(super) fn arguments() -> [Arg; 5] {
    let field = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("FIELD").default_value(default).requires("domain").help(help)
    };
    [
        Arg::new("domain")
            .long("domain")
            .requires("descriptor")
            .help("Read an access log of Envoy in JSON: domain of its requests"),
        descriptor::argument()
            .required(false)
            .requires("domain")
            .action(ArgAction::Append)
            .help("Descriptor of each request of an access log, with {FIELD} for a field of the line, such as user={x_user_id}. It is left out of a request without the field. Can be repeated"),
        field("time-field", "start_time", "Field with the time of a request: RFC 3339, or a number of seconds, milliseconds or microseconds since 1970"),
        field("code-field", "response_code", "Field with the status code. 429 is a refusal if the line has no flags"),
        field("flags-field", "response_flags", "Field with Envoy's response flags. RL is a refusal"),
    ]
}

impl AccessLog {
    /// Returns the fields that the arguments name; `None` if the files are recordings.
    ///
    /// # Errors
    /// If the name of a field does not end.
    pub(super) fn new(matches: &ArgMatches) -> anyhow::Result<Option<Self>> {
        let descriptors: Vec<Descriptor> = matches.get_many("descriptor").into_iter().flatten().cloned().collect();
        for entry in descriptors.iter().flat_map(|descriptor| &descriptor.entries) {
            let value = String::from_utf8_lossy(&entry.value);
            let last = value.rsplit('{').next().filter(|last| last.len() < value.len());
            ensure!(last.is_none_or(|last| last.contains('}')), "'{value}' has no }} after the name of a field");
        }
        let text = |name: &str| matches.get_one::<String>(name).cloned();
        let fields = (text("domain"), text("time-field"), text("code-field"), text("flags-field"));
        let (Some(domain), Some(time), Some(code), Some(flags)) = fields else { return Ok(None) };
        Ok(Some(Self { domain, descriptors, time, code, flags }))
    }

    /// Returns the decision of a line; `None` for a request without a descriptor.
    ///
    /// # Errors
    /// If the line is not JSON or has no time.
    pub(super) fn read(&self, line: &str) -> anyhow::Result<Option<Recorded>> {
        let line: Value = serde_json::from_str(line).context("it is not JSON")?;
        let time = time_of(line.get(&self.time))
            .with_context(|| format!("its field `{}` is no time: name the field with --time-field", self.time))?;
        let flags = line.get(&self.flags).and_then(Value::as_str);
        let code = field(&line, &self.code);
        ensure!(
            flags.is_some() || code.is_some(),
            "it has neither `{}` nor `{}`, so its outcome is unknown: name the fields with --flags-field and --code-field",
            self.flags,
            self.code
        );
        let has_flag = |flag: &str| flags.is_some_and(|flags| flags.split(',').any(|found| found.trim() == flag));
        let is_refused = has_flag(LIMITED) || (flags.is_none() && code.as_deref() == Some(TOO_MANY_REQUESTS));
        let descriptors: Vec<Descriptor> =
            self.descriptors.iter().filter_map(|template| filled(template, &line)).collect();
        let Some(first) = descriptors.first() else { return Ok(None) };
        let by = By { descriptor: descriptor::spelled(first), ..By::default() };
        Ok(Some(Recorded {
            time,
            request: Some(Request::new(self.domain.clone(), descriptors, 0)?),
            outcome: Outcome::admitted_if(!is_refused),
            doubt: has_flag(SERVICE_ERROR).then(|| Doubt::Policy(Provenance::Error.name())),
            changed: Vec::new(),
            readings: Vec::new(),
            by,
            generation: None,
        }))
    }
}

/// Returns the descriptor with the fields of a line; `None` if the line lacks one. Envoy leaves out such a descriptor too.
fn filled(template: &Descriptor, line: &Value) -> Option<Descriptor> {
    let entries = template.entries.iter().map(|entry| {
        let value = filled_text(std::str::from_utf8(&entry.value).ok()?, line)?;
        Some(Entry::new(entry.key.clone(), value))
    });
    Some(Descriptor { entries: entries.collect::<Option<_>>()?, ..Descriptor::default() })
}

fn filled_text(template: &str, line: &Value) -> Option<String> {
    let Some((before, rest)) = template.split_once('{') else { return Some(template.to_owned()) };
    let Some((name, after)) = rest.split_once('}') else { return Some(template.to_owned()) };
    Some(format!("{before}{}{}", field(line, name)?, filled_text(after, line)?))
}

/// Returns a field as text; `None` if it is absent, null, or `-`, which Envoy writes for nothing.
fn field(line: &Value, name: &str) -> Option<String> {
    match line.get(name)? {
        Value::String(text) => (text != "-").then(|| text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// Returns the time in a field. A number is seconds, milliseconds or microseconds, by its size.
fn time_of(value: Option<&Value>) -> Option<Micros> {
    match value? {
        Value::String(text) => time::parse(text),
        Value::Number(number) => Some(match number.as_u64()? {
            seconds @ 0..100_000_000_000 => Micros::from_secs(seconds),
            millis @ 100_000_000_000..100_000_000_000_000 => Micros::from_millis(millis),
            micros => Micros::new(micros),
        }),
        _ => None,
    }
}
