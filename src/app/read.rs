//! Files that are read before the service starts, and by `tidegate check`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;

use super::admin_tokens::TokenFile;
use super::callers::CallersFile;
use super::inputs::{Inputs, OverlayState};
use super::listener_tls::ListenerFiles;
use super::otlp::Exporter;
use super::overlay::EMPTIED;
use super::store::RedisFiles;
use super::traces::Exporting;
use super::{SENT_TWICE, failure};
use crate::file::{self, MAX_SECRET, Named, blocking};
use crate::model::Charging;
use crate::normalize::digest::KeySecret;
use crate::rulefile::document::MAX_FILE_BYTES;
use crate::rulefile::{self, CompiledRules, Documents, File, InvalidRules, Options, Overlay};
use crate::rules::RuleSet;
use crate::settings::{HeaderStyle, LogFormat, Settings};
use crate::source::file::FileSource;
use crate::source::file::find::Location;
use crate::source::{Source, SourceChoice};
use crate::telemetry::escape::escaped;
use crate::telemetry::traces::Traces;

/// Settings that apply to rule files.
pub const RULE_SETTINGS: [&str; 13] = [
    "RULES_OVERLAY",
    "VALUES_ROOT",
    "MERGE_DOMAIN_CONFIG",
    "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT",
    "ON_STORE_FAILURE",
    "SHADOW_MODE",
    "QUOTA_MODE",
    "KEY_SECRET_FILE",
    "RUNTIME_ROOT",
    "RUNTIME_SUBDIRECTORY",
    "RUNTIME_APPDIRECTORY",
    "RUNTIME_IGNOREDOTFILES",
    "RUNTIME_WATCH_ROOT",
];

/// Secret of digests that never leave the process: those of a simulation.
const SIMULATION_SECRET: &[u8] = b"tidegate simulates decisions";

/// Everything that a start reads from files.
pub(super) struct Read {
    /// Source that offers documents later, when they have changed.
    pub(super) source: Source,
    /// Options for every load.
    pub(super) options: Options,
    /// The rules; `None` if the source offers even the first ones later.
    pub(super) rules: Option<RuleSet>,
    /// Source of the overlay, if one is set.
    pub(super) overlay: Option<FileSource>,
    /// Inputs of the load.
    pub(super) inputs: Inputs,
    /// State of the overlay.
    pub(super) overlay_state: OverlayState,
    /// Credentials and certificates for Redis, if counters are in Redis.
    pub(super) redis: Option<RedisFiles>,
    /// Certificates of the gRPC listener, if it serves TLS.
    pub(super) listener_tls: Option<ListenerFiles>,
    /// File of callers, if one is set.
    pub(super) callers: Option<CallersFile>,
    /// File of the tokens of the debug listener, if one is set.
    pub(super) admin_tokens: Option<TokenFile>,
    /// True if the rule files are in the reference's directory.
    pub(super) has_rules_of_reference: bool,
    /// Span recorder and exporter, if tracing is on. The exporter reads the system's certificate authorities.
    pub(super) spans: Option<(Arc<Traces>, Exporting)>,
    /// Exporter of metrics, if that is on. It reads the same authorities.
    pub(super) metrics: Option<Exporter>,
}

impl Read {
    /// Reads all files and prints the warnings about rule files. Blocks while the file system does.
    ///
    /// # Errors
    /// If a file cannot be used; names its path.
    pub(super) fn all(settings: &Settings, choice: SourceChoice) -> anyhow::Result<Self> {
        let options = Options { needs_secret: true, ..options(settings)? };
        let has_rules_of_reference = matches!(choice, SourceChoice::Files(Location::Runtime { .. }));
        let (source, documents) = Source::open(choice, values_root(settings)?)?;
        let overlay_state = OverlayState::default();
        let (overlay, laid_over) = open_overlay(settings, &options)?.unzip();
        let mut inputs = Inputs { source: None, overlay: laid_over };
        let compiled = match (documents, &inputs.overlay) {
            (Some(documents), _) => Some(inputs.compile(documents, &options)?),
            // Own rules of the overlay are in force before the source has offered any.
            (None, Some(overlay)) => Some(overlay.compile(None, &options)?),
            (None, None) => None,
        };
        let is_text = settings.log_format == LogFormat::Text;
        let rules = compiled.map(|(CompiledRules { rules, warnings }, effect)| {
            *overlay_state.effect.lock() = effect;
            for warning in &warnings {
                match is_text {
                    true => eprintln!("{}", escaped(&warning.to_string(), false)),
                    false => failure::warning(warning),
                }
            }
            rules
        });
        // An overlay without rules of its own waits for the source.
        let rules = rules.filter(|rules| !rules.awaits_source || !rules.is_empty());
        if matches!(settings.response_headers, HeaderStyle::XRateLimit | HeaderStyle::XRateLimitAndIetf) {
            match is_text {
                true => eprintln!("warning: {SENT_TWICE}"),
                false => tracing::warn!(event = "settings.headers_twice", "{SENT_TWICE}"),
            }
        }
        let (redis, spans) = (RedisFiles::read(settings)?, Exporting::start(settings)?);
        let metrics = Exporter::build(settings)?;
        let listener_tls = settings.listener_tls.as_ref().map(ListenerFiles::read).transpose()?;
        let callers = CallersFile::read(settings)?;
        let admin_tokens = TokenFile::read(&settings.admin, options.key_secret)?;
        Ok(Self {
            source,
            options,
            rules,
            overlay,
            inputs,
            overlay_state,
            redis,
            listener_tls,
            callers,
            admin_tokens,
            has_rules_of_reference,
            spans,
            metrics,
        })
    }
}

/// Rules that a command reads.
#[derive(Clone, Debug)]
pub enum Given {
    /// Rule files.
    Files(Location),
    /// A recorded push of a control plane.
    Push(PathBuf),
    /// No source: the own rules of the overlay alone.
    Overlay,
}

/// Reads and compiles the rules of `given` as the service does, for a command. Returns the number of files and the compiled rules
/// or their errors. Reports a read of more than 10 s on standard error.
///
/// # Errors
/// If files cannot be read.
pub fn load(settings: Settings, given: Given) -> anyhow::Result<(usize, Result<CompiledRules, InvalidRules>)> {
    load_with(settings, given, |options| options)
}

/// Reads and compiles the rules of `given` as [`load`] does, for a command that decides by them. Without KEY_SECRET_FILE, sensitive
/// values still have digests of their own, and so counters of their own.
///
/// # Errors
/// If files cannot be read.
pub fn load_to_decide(
    settings: Settings,
    given: Given,
) -> anyhow::Result<(usize, Result<CompiledRules, InvalidRules>)> {
    load_with(settings, given, |options| Options {
        key_secret: options.key_secret.or_else(|| KeySecret::new(SIMULATION_SECRET)),
        ..options
    })
}

fn load_with(
    settings: Settings,
    given: Given,
    adapt: fn(Options) -> Options,
) -> anyhow::Result<(usize, Result<CompiledRules, InvalidRules>)> {
    let load = move || {
        let options = adapt(options(&settings)?);
        let documents = match given {
            Given::Files(location) => Some(FileSource::open(location, values_root(&settings)?)?.1),
            Given::Push(path) => Some(push(&path, &options)?),
            Given::Overlay => None,
        };
        let files = documents.as_ref().map_or(0, Documents::len);
        let overlay = read_overlay(&settings)?.map(|(_, documents)| Overlay::new(documents, &options)).transpose();
        let compiled = overlay.and_then(|overlay| match (documents, overlay) {
            (None, Some(overlay)) => overlay.compile(None, &options),
            (documents, overlay) => {
                let documents = documents.unwrap_or_else(|| Documents::parse(Vec::new()));
                Inputs { source: None, overlay }.compile(documents, &options)
            }
        });
        anyhow::Ok((files, compiled.map(|(compiled, _)| compiled)))
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(blocking(load, |passed| {
        eprintln!("still reading the files after {} s: their file system may be stuck", passed.as_secs());
    }))?
}

/// Reads a recorded push of a control plane.
fn push(path: &Path, options: &Options) -> anyhow::Result<Documents> {
    let bytes = file::read(path, MAX_FILE_BYTES).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy().into();
    Ok(rulefile::recorded_push(File { name, bytes }, options.merge_domains))
}

/// Opens the overlay that the settings name. Returns `None` if they name none.
fn open_overlay(settings: &Settings, options: &Options) -> anyhow::Result<Option<(FileSource, Overlay)>> {
    let Some((source, documents)) = read_overlay(settings)? else { return Ok(None) };
    let overlay = Overlay::new(documents, options).context("RULES_OVERLAY has errors")?;
    Ok(Some((source, overlay)))
}

/// Reads the overlay that the settings name, and parses it.
fn read_overlay(settings: &Settings) -> anyhow::Result<Option<(FileSource, Documents)>> {
    if settings.rules_overlay.is_empty() {
        return Ok(None);
    }
    let location = Location::Paths(vec![(&settings.rules_overlay).into()]);
    Ok(Some(
        FileSource::open(location, values_root(settings)?)
            .with_context(|| format!("RULES_OVERLAY cannot be read ({EMPTIED})"))?,
    ))
}

/// Returns the directory below which lists may be, beside those of the rule files. `None` if the settings name none.
fn values_root(settings: &Settings) -> anyhow::Result<Option<PathBuf>> {
    let root = Path::new(&settings.values_root);
    if settings.values_root.is_empty() {
        return Ok(None);
    }
    anyhow::ensure!(root.is_dir(), "VALUES_ROOT is {}: expected a directory", root.display());
    Ok(Some(root.to_owned()))
}

/// Returns the options of the rule compiler that the settings define.
fn options(settings: &Settings) -> anyhow::Result<Options> {
    let charging = match settings.stop_cache_key_increment_when_overlimit {
        true => Charging::AllOrNothing,
        false => Charging::Each,
    };
    Ok(Options {
        merge_domains: settings.merge_domain_config,
        charging,
        policies: settings.policies(),
        lease: settings.lease_default.0,
        shadow_mode: settings.shadow_mode,
        quota_mode: settings.quota_mode,
        key_secret: key_secret(&settings.key_secret_file)?,
        needs_secret: false,
    })
}

/// Reads the secret from the file at `path`. Returns `None` if `path` is empty.
fn key_secret(path: &str) -> anyhow::Result<Option<KeySecret>> {
    if path.is_empty() {
        return Ok(None);
    }
    let file = Named::new("KEY_SECRET_FILE", path.into(), MAX_SECRET);
    Ok(Some(file.read("a file with at least 16 random bytes", KeySecret::new)?))
}
