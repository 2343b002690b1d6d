//! Log lines for programs, in the reference's format: one flat JSON object per line.

use std::fmt::{self, Debug, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::escape::escaped_json;

/// Keys of every line. A field with one of these names gets the prefix `fields.`, as in the reference.
const OWN: [&str; 4] = ["@timestamp", "@message", "level", "target"];

/// Formats an event as a line of JSON.
#[derive(Clone, Copy, Debug, Default)]
pub struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        writeln!(writer, "{}", line(&time, event))
    }
}

fn line(time: &str, event: &Event<'_>) -> String {
    let mut fields = EventFields::default();
    event.record(&mut fields);
    let about = event.metadata();
    let mut line = String::from("{");
    add(&mut line, "@timestamp", &quoted(time));
    add(&mut line, "level", &quoted(level(*about.level())));
    add(&mut line, "@message", &quoted(&fields.message));
    add(&mut line, "target", &quoted(about.target()));
    line + &fields.others + "}"
}

/// Returns the reference's name of a level.
fn level(level: Level) -> &'static str {
    match level {
        Level::TRACE => "trace",
        Level::DEBUG => "debug",
        Level::INFO => "info",
        Level::WARN => "warning",
        Level::ERROR => "error",
    }
}

/// Fields of an event.
#[derive(Default)]
struct EventFields {
    message: String,
    /// Fields other than the message, as JSON.
    others: String,
}

impl EventFields {
    fn add(&mut self, field: &Field, value: &str) {
        let name = field.name();
        self.others.push(',');
        if OWN.contains(&name) {
            add(&mut self.others, &format!("fields.{name}"), value);
        } else {
            add(&mut self.others, name, value);
        }
    }
}

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            _ => self.add(field, &quoted(value)),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, &value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, &value.to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, &value.to_string());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, &serde_json::Value::from(value).to_string());
    }
}

/// Appends `"key":value` to `line`, after a comma if another member precedes it.
fn add(line: &mut String, key: &str, value: &str) {
    let comma = if line.ends_with(['{', ',']) || line.is_empty() { "" } else { "," };
    let _ = write!(line, "{comma}{}:{value}", quoted(key));
}

/// Formats text as a JSON string without characters that end the line or change how it is displayed.
fn quoted(text: &str) -> String {
    escaped_json(serde_json::Value::from(text).to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::{Value, json};
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn written(log: impl FnOnce()) -> String {
        let written = Written::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().event_format(JsonLines).with_writer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer.boxed()), log);
        String::from_utf8(written.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_line_has_the_references_keys_and_its_fields_beside_them() {
        let said = written(|| {
            tracing::warn!(count = 3, share = 0.5, is_on = true, server = "a:1", level = "mine", "what {}", "happened");
        });
        let mut line: Value = serde_json::from_str(&said).unwrap();
        let time = line["@timestamp"].take();
        let time = time.as_str().unwrap();
        // 2026-11-22T00:46:38.123456Z
        assert!(time.len() == 27 && time.ends_with('Z') && &time[10..11] == "T" && &time[19..20] == ".", "{time}");
        assert_eq!(
            line,
            json!({
                "@timestamp": null, "level": "warning", "@message": "what happened", "target": module_path!(),
                "count": 3, "share": 0.5, "is_on": true, "server": "a:1", "fields.level": "mine",
            })
        );
    }

    #[test]
    fn every_level_has_the_references_name() {
        let said = written(|| {
            tracing::error!("e");
            tracing::info!("i");
            tracing::debug!("d");
        });
        let levels = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["level"].clone());
        assert_eq!(levels.collect::<Vec<_>>(), ["error", "info", "debug"]);
    }

    #[test]
    fn nothing_in_a_message_or_a_field_begins_a_second_line() {
        let nasty = "a\nb\r\n\u{1b}[31m\0\"}\n{\"level\":\"error\"}\u{2028}\u{7f}\u{9b}\u{202e}\u{2066}\u{61c}";
        let said = written(|| tracing::info!(nasty, debug = ?nasty, not_a_number = f64::NAN, "{nasty}"));
        assert_eq!(said.matches('\n').count(), 1, "{said:?}");
        assert!(!said.trim_end().chars().any(crate::telemetry::escape::is_hidden), "{said:?}");
        let line: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((&line["@message"], &line["nasty"], &line["level"]), (&json!(nasty), &json!(nasty), &json!("info")));
        assert_eq!(line["not_a_number"], Value::Null);
    }
}
