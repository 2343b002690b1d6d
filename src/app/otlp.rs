//! Export of metrics over OTLP: a separate thread sends the values of the metrics page at an interval, so no decision waits for the
//! collector.
//!
//! The values are cumulative. A collector that is away or late loses nothing: the next delivery has all that the lost one had.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request};
use opentelemetry_http::HttpClient;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use prost::Message;
use tokio::sync::{oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

use super::collector;
use super::traces::resource;
use crate::model::Clock;
use crate::settings::{ExportProtocol, OtlpSettings, Settings};
use crate::store::clock::SystemClock;
use crate::telemetry::Telemetry;
use crate::telemetry::throttle::LogThrottle;

/// Longest wait for the last delivery when the process ends: 1 s, as for spans.
const FLUSH: Duration = Duration::from_secs(1);
/// Media type of OTLP over HTTP.
const PROTOBUF: HeaderValue = HeaderValue::from_static("application/x-protobuf");

/// Handle of the thread before it has metrics to deliver. The thread ends if this is dropped.
pub(super) struct Exporter {
    telemetry: oneshot::Sender<Arc<Telemetry>>,
    stop: watch::Sender<bool>,
}

/// Handle of the thread that delivers metrics.
pub(super) struct Otlp {
    stop: watch::Sender<bool>,
}

enum Client {
    Grpc(MetricsServiceClient<Channel>),
    Http(Box<dyn HttpClient>),
}

impl Exporter {
    /// Prepares the export, in a thread of its own. It connects later, at the first delivery. Returns `None` if it is off.
    ///
    /// # Errors
    /// If no client can be built from the settings, or the thread cannot be started.
    pub(super) fn build(settings: &Settings) -> anyhow::Result<Option<Self>> {
        let Some(settings) = settings.otlp.clone() else { return Ok(None) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = {
            let _inside = runtime.enter();
            Client::new(&settings).with_context(|| format!("metrics cannot be delivered to {}", settings.endpoint))
        };
        let client = match client {
            Ok(client) => client,
            Err(error) => {
                // A plain drop would block, which is not allowed inside the calling runtime.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let attributes = ResourceAttributesWithSchema::from(&resource(&settings.resource)).attributes.0;
        let resource = Resource { attributes, ..Resource::default() };
        let (telemetry, given) = oneshot::channel();
        let (stop, stopped) = watch::channel(false);
        let started = std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
            runtime.block_on(async {
                if let Ok(telemetry) = given.await {
                    let complaints = LogThrottle::new();
                    Delivery { telemetry, client, settings, resource, complaints }.run(stopped).await;
                }
            });
            // Do not wait for a name that is still being looked up.
            runtime.shutdown_background();
        });
        started.context("the thread that delivers metrics cannot be started")?;
        Ok(Some(Self { telemetry, stop }))
    }

    /// Starts to deliver the metrics of `telemetry`.
    pub(super) fn start(self, telemetry: Arc<Telemetry>) -> Otlp {
        // The thread lives as long as this handle.
        let _ = self.telemetry.send(telemetry);
        Otlp { stop: self.stop }
    }
}

impl Otlp {
    /// Delivers the last values, for at most 1 s.
    pub(super) async fn flush(self) {
        self.stop.send_replace(true);
        let _ = timeout(FLUSH, self.stop.closed()).await;
    }
}

/// State of the delivery thread.
struct Delivery {
    telemetry: Arc<Telemetry>,
    client: Client,
    settings: OtlpSettings,
    resource: Resource,
    complaints: LogThrottle,
}

impl Delivery {
    /// Delivers at each interval until `stopped` is set, and a last time then. A delivery that is under way at that time is given up,
    /// because the last one has all that it had.
    async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let mut due = interval(self.settings.interval);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once, when there is nothing to send.
        due.tick().await;
        let deliveries = async {
            loop {
                due.tick().await;
                self.deliver().await;
            }
        };
        tokio::select! {
            () = deliveries => {}
            _ = stopped.wait_for(|stop| *stop) => {}
        }
        self.deliver().await;
    }

    async fn deliver(&mut self) {
        let whole = async {
            let mut result = anyhow::Ok(());
            for request in self.telemetry.points(SystemClock.now(), &self.resource) {
                // One that is rejected does not keep back the others.
                result = result.and(self.client.send(request, &self.settings).await);
            }
            result
        };
        let limit = self.settings.timeout;
        let error = match timeout(limit, whole).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("not everything was taken within {limit:?}"),
        };
        if self.complaints.is_due() {
            tracing::warn!(
                event = "metrics.undelivered",
                collector = self.settings.endpoint,
                "the collector did not accept all metrics; nothing is lost, because the next delivery, after OTEL_METRIC_EXPORT_INTERVAL, has the sums since the start: {error}"
            );
        }
    }
}

impl Client {
    fn new(settings: &OtlpSettings) -> anyhow::Result<Self> {
        let OtlpSettings { protocol, endpoint, request_timeout, tls, .. } = settings;
        Ok(match protocol {
            ExportProtocol::Grpc => {
                let channel = collector::channel(endpoint, *request_timeout, tls.as_ref())?;
                Self::Grpc(MetricsServiceClient::new(channel))
            }
            ExportProtocol::Http => Self::Http(Box::new(collector::http(*request_timeout, tls.as_ref())?)),
        })
    }

    /// Sends one request.
    async fn send(&mut self, request: ExportMetricsServiceRequest, settings: &OtlpSettings) -> anyhow::Result<()> {
        let headers: HeaderMap = settings.headers.iter().cloned().collect();
        let limit = settings.request_timeout;
        let sent = async {
            match self {
                Self::Grpc(client) => {
                    let mut request = tonic::Request::new(request);
                    *request.metadata_mut() = MetadataMap::from_headers(headers);
                    Ok(client.export(request).await?.into_inner())
                }
                Self::Http(client) => {
                    let mut post = Request::post(&settings.endpoint).body(Bytes::from(request.encode_to_vec()))?;
                    *post.headers_mut() = headers;
                    post.headers_mut().insert(CONTENT_TYPE, PROTOBUF);
                    let answer = client.send_bytes(post).await.map_err(anyhow::Error::from_boxed)?;
                    anyhow::ensure!(answer.status().is_success(), "its answer is {}", answer.status());
                    Ok(ExportMetricsServiceResponse::decode(answer.into_body())?)
                }
            }
        };
        // The time that the transport allows itself covers over gRPC not the connection.
        let answer = timeout(limit, sent).await.with_context(|| format!("nothing was taken within {limit:?}"))??;
        let rejected = answer.partial_success.filter(|partial| partial.rejected_data_points > 0);
        match rejected {
            None => Ok(()),
            Some(partial) => {
                let (points, why) = (partial.rejected_data_points, partial.error_message);
                Err(anyhow::anyhow!("{points} data points were rejected: {why}"))
            }
        }
    }
}
