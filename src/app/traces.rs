//! Export of traces: spans wait in a bounded queue, and a separate thread delivers them, so no decision waits for the
//! receiver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry::trace::TraceId;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::TelemetryResourceDetector;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanExporter as _};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::collector;
use crate::settings::{ExportProtocol, Settings, TraceSettings};
use crate::store::clock::SystemClock;
use crate::telemetry::throttle::LogThrottle;
use crate::telemetry::traces::{Sampler, Traces};

/// Capacity of the queue of spans: 2,048, as in OpenTelemetry's own batch processors.
const MOST_WAITING: usize = 2_048;
/// Maximum number of spans in one delivery: 512, as in OpenTelemetry's own batch processors.
const MOST_AT_ONCE: usize = 512;
/// Time that a delivery waits for more spans: 1 s.
const GATHER: Duration = Duration::from_secs(1);
/// Longest wait for the last delivery when the process ends: 1 s.
const FLUSH: Duration = Duration::from_secs(1);

/// Handle of the thread that delivers spans.
pub(super) struct Exporting {
    dropped: Arc<AtomicU64>,
    stop: watch::Sender<bool>,
}

impl Exporting {
    /// Starts the thread. Returns `None` if tracing is off.
    ///
    /// # Errors
    /// If no exporter can be built from the settings, or the thread cannot be started.
    pub(super) fn start(settings: &Settings) -> anyhow::Result<Option<(Arc<Traces>, Self)>> {
        let Some(settings) = &settings.traces else { return Ok(None) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let exporter = {
            // The thread connects later, when it has spans to deliver.
            let _inside = runtime.enter();
            exporter(settings).with_context(|| format!("spans cannot be delivered to {}", settings.endpoint))
        };
        let mut exporter = match exporter {
            Ok(exporter) => exporter,
            Err(error) => {
                // A plain drop would block, which is not allowed inside the calling runtime.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        exporter.set_resource(&resource(&settings.resource));
        let (spans, waiting) = mpsc::channel(MOST_WAITING);
        let (dropped, (stop, stopped)) = (Arc::new(AtomicU64::new(0)), watch::channel(false));
        let sampler = Sampler { ratio: settings.ratio, follows_caller: settings.follows_caller };
        let traces = Traces::new(sampler, Arc::new(SystemClock), spans, Arc::clone(&dropped));
        let timeout = settings.timeout;
        let delivery =
            SpanDelivery { exporter, timeout, dropped: Arc::clone(&dropped), complaints: LogThrottle::new() };
        let started = std::thread::Builder::new().name("spans".to_owned()).spawn(move || {
            runtime.block_on(delivery.run(waiting, stopped));
            runtime.shutdown_background();
        });
        started.context("the thread that delivers spans cannot be started")?;
        Ok(Some((Arc::new(traces), Self { dropped, stop })))
    }

    /// Returns the counter of spans that were not delivered.
    pub(super) fn dropped(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.dropped)
    }

    /// Delivers the queued spans, for at most 1 s.
    pub(super) async fn flush(self) {
        self.stop.send_replace(true);
        let _ = timeout(FLUSH, self.stop.closed()).await;
    }
}

/// State of the delivery thread.
struct SpanDelivery {
    exporter: SpanExporter,
    /// Timeout of one delivery.
    timeout: Duration,
    dropped: Arc<AtomicU64>,
    complaints: LogThrottle,
}

impl SpanDelivery {
    /// Delivers spans until `stopped` is set and the queue is empty.
    async fn run(self, mut waiting: mpsc::Receiver<SpanData>, mut stopped: watch::Receiver<bool>) {
        let (mut batch, mut is_open) = (Vec::new(), true);
        while is_open {
            is_open = tokio::select! {
                is_open = gather(&mut waiting, &mut batch) => is_open,
                // Spans that are already queued are still delivered.
                _ = stopped.wait_for(|stop| *stop), if !waiting.is_closed() => {
                    waiting.close();
                    true
                }
            };
            if !batch.is_empty() {
                self.deliver(std::mem::take(&mut batch)).await;
            }
        }
    }

    async fn deliver(&self, batch: Vec<SpanData>) {
        let count = batch.len();
        // The exporter's own timeout covers the response, but over gRPC not the connection.
        let error = match timeout(self.timeout, self.exporter.export(batch)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("nothing was taken within {:?}", self.timeout),
        };
        self.dropped.fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
        if self.complaints.is_due() {
            tracing::warn!(
                event = "traces.lost",
                spans = count,
                "spans were dropped, because the collector did not accept them: {error}"
            );
        }
    }
}

/// Waits for spans, then up to 1 s for more. Returns false once the queue is closed. Spans in `batch` stay there if the
/// future is dropped.
async fn gather(waiting: &mut mpsc::Receiver<SpanData>, batch: &mut Vec<SpanData>) -> bool {
    let more = async |batch: &mut Vec<SpanData>, waiting: &mut mpsc::Receiver<SpanData>| {
        waiting.recv_many(batch, MOST_AT_ONCE - batch.len()).await > 0
    };
    if batch.is_empty() && !more(batch, waiting).await {
        return false;
    }
    let rest = async {
        while batch.len() < MOST_AT_ONCE {
            if !more(batch, waiting).await {
                return false;
            }
        }
        true
    };
    timeout(GATHER, rest).await.unwrap_or(true)
}

/// Builds the exporter. It reads the other variables of OpenTelemetry, such as headers, itself.
fn exporter(settings: &TraceSettings) -> anyhow::Result<SpanExporter> {
    let TraceSettings { protocol, endpoint, timeout, tls, .. } = settings;
    Ok(match protocol {
        ExportProtocol::Grpc => {
            let channel = collector::channel(endpoint, *timeout, tls.as_ref())?;
            let builder = SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(*timeout);
            builder.with_channel(channel).build()?
        }
        ExportProtocol::Http => {
            let builder = SpanExporter::builder()
                .with_http()
                .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                .with_endpoint(endpoint)
                .with_timeout(*timeout);
            builder.with_http_client(collector::http(*timeout, tls.as_ref())?).build()?
        }
    })
}

/// Returns the resource attributes that describe this process in its spans and metrics: the `given` ones and its own.
pub(super) fn resource(given: &[(String, String)]) -> Resource {
    /// Both kinds of export have the same.
    static INSTANCE: OnceLock<String> = OnceLock::new();
    let instance = INSTANCE.get_or_init(|| uuid(RandomIdGenerator::default().new_trace_id()));
    let given = given.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
    Resource::builder_empty()
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attribute(KeyValue::new("service.instance.id", instance.as_str()))
        .with_attributes(given)
        .build()
}

/// Formats a random UUID (version 4); 122 bits come from `random`.
fn uuid(random: TraceId) -> String {
    let bits = u128::from_be_bytes(random.to_bytes());
    let bits = bits & !(0xf000 << 64) & !(0xc << 60) | (0x4000 << 64) | (0x8 << 60);
    let text = format!("{bits:032x}");
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| text.get(part).unwrap_or_default());
    parts.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_named_by_a_uuid_of_random_bits() {
        assert_eq!(uuid(TraceId::from(u128::MAX)), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(uuid(TraceId::from(0)), "00000000-0000-4000-8000-000000000000");
    }
}
