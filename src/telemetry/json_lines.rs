//! Log lines for programs, in the reference's format: one flat JSON object per line.

use std::io::{self, Write};
use std::sync::Arc;

use json_subscriber::JsonLayer;
use tracing::{Level, Subscriber};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::time::SystemTime;
use tracing_subscriber::registry::LookupSpan;

use super::escape::escaped_json;

/// Returns a layer that writes each event as one line of JSON to a writer of `make_writer`, in one write.
pub fn layer<S, W>(make_writer: W) -> JsonLayer<S, impl for<'a> MakeWriter<'a> + Send + Sync + 'static>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let make_writer = Arc::new(make_writer);
    let mut layer = JsonLayer::new(move || EscapedWriter(Arc::clone(&make_writer)));
    layer.with_timer("@timestamp", SystemTime).with_target("target");
    layer.add_dynamic_field("level", |event, _| Some(level(*event.metadata().level())));
    layer.with_flattened_event_with_renames(|name, ()| renamed(name), ());
    layer
}

/// Returns the key of an event's field. A field with the name of another key of the line gets the prefix `fields.`, as in the reference.
fn renamed(name: &str) -> &str {
    match name {
        "message" => "@message",
        "@timestamp" => "fields.@timestamp",
        "@message" => "fields.@message",
        "level" => "fields.level",
        "target" => "fields.target",
        name => name,
    }
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

/// Escapes the characters of a line of JSON that change how it is displayed. Each write is one line.
struct EscapedWriter<W>(Arc<W>);

impl<W: for<'a> MakeWriter<'a>> Write for EscapedWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let json = escaped_json(text.trim_end_matches('\n').to_owned()) + "\n";
        self.0.make_writer().write_all(json.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.make_writer().flush()
    }
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

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(log: impl FnOnce()) -> String {
        let written = Written::default();
        let writer = written.clone();
        let layer = layer(move || writer.clone());
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
