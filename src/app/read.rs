//! Files that are read before the service starts, and by `tidegate check`.

use std::sync::Arc;

use anyhow::Context;

use super::SENT_TWICE;
use super::inputs::{Inputs, OverlayState};
use super::otlp::Exporter;
use super::store::RedisFiles;
use super::traces::Exporting;
use crate::file::{MAX_SECRET, Named, apart};
use crate::model::Charging;
use crate::normalize::digest::KeySecret;
use crate::rulefile::{self, CompiledRules, Documents, InvalidRules, Options, Overlay, OverlayEffect};
use crate::rules::RuleSet;
use crate::settings::{HeaderStyle, Settings};
use crate::source::file::FileSource;
use crate::source::file::find::Location;
use crate::source::{Source, SourceChoice};
use crate::telemetry::escape::escaped;
use crate::telemetry::traces::Traces;

/// Settings that apply to rule files.
pub const RULE_SETTINGS: [&str; 7] = [
    "RULES_OVERLAY",
    "MERGE_DOMAIN_CONFIG",
    "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT",
    "ON_STORE_FAILURE",
    "SHADOW_MODE",
    "QUOTA_MODE",
    "KEY_SECRET_FILE",
];

/// Everything that a start reads from files.
pub(super) struct Read {
    /// Source that offers documents later, when they have changed.
    pub(super) source: Source,
    /// Options for every load.
    pub(super) options: Options,
    /// The rules; `None` if the source offers even the first ones later.
    pub(super) rules: Option<RuleSet>,
    /// Source of the overlay, and the inputs of the load, if an overlay is set.
    pub(super) overlay: Option<(FileSource, Inputs)>,
    /// State of the overlay.
    pub(super) overlay_state: OverlayState,
    /// Credentials and certificates for Redis, if counters are in Redis.
    pub(super) redis: Option<RedisFiles>,
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
        let (source, documents) = Source::open(choice)?;
        let overlay_state = OverlayState::default();
        let opened = open_overlay(settings, &options)?;
        let overlay = opened.map(|(file, overlay)| (file, Inputs { source: documents.clone(), overlay }));
        let laid_over = overlay.as_ref().map(|(_, inputs)| &inputs.overlay);
        let compiled = match (documents, laid_over) {
            (Some(documents), overlay) => Some(compile(documents, overlay, &options)?),
            // Own rules of the overlay are in force before the source has offered any.
            (None, Some(overlay)) => Some(overlay.compile(None, &options)?),
            (None, None) => None,
        };
        let rules = compiled.map(|(CompiledRules { rules, warnings }, effect)| {
            *overlay_state.effect.lock() = effect;
            warnings.iter().for_each(|warning| eprintln!("{}", escaped(&warning.to_string(), false)));
            rules
        });
        // An overlay without rules of its own waits for the source.
        let rules = rules.filter(|rules| !rules.awaits_source || !rules.is_empty());
        if settings.response_headers == HeaderStyle::XRateLimit {
            eprintln!("{SENT_TWICE}");
        }
        let (redis, spans) = (RedisFiles::read(settings)?, Exporting::start(settings)?);
        let metrics = Exporter::build(settings)?;
        Ok(Self { source, options, rules, overlay, overlay_state, redis, spans, metrics })
    }
}

/// Reads and compiles the rule files of `location` as the service does, for a command. Returns the number of files and
/// the compiled rules or their errors. Reports a read of more than 10 s on standard error.
///
/// # Errors
/// If files cannot be read.
pub fn load(settings: Settings, location: Location) -> anyhow::Result<(usize, Result<CompiledRules, InvalidRules>)> {
    let load = move || {
        let (_, documents) = FileSource::open(location)?;
        let options = options(&settings)?;
        let overlay = open_overlay(&settings, &options)?.map(|(_, overlay)| overlay);
        let files = documents.len();
        let compiled = compile(documents, overlay.as_ref(), &options).map(|(compiled, _)| compiled);
        anyhow::Ok((files, compiled))
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(apart(load, |passed| {
        eprintln!("still reading the files after {} s: their file system may be stuck", passed.as_secs());
    }))?
}

/// Opens the overlay that the settings name. Returns `None` if they name none.
fn open_overlay(settings: &Settings, options: &Options) -> anyhow::Result<Option<(FileSource, Overlay)>> {
    if settings.rules_overlay.is_empty() {
        return Ok(None);
    }
    let (source, documents) = FileSource::open(Location::Paths(vec![(&settings.rules_overlay).into()]))
        .context("RULES_OVERLAY cannot be read")?;
    let overlay = Overlay::new(documents, options).context("RULES_OVERLAY has errors")?;
    Ok(Some((source, overlay)))
}

/// Compiles `documents`, with `overlay` laid over them.
fn compile(
    documents: Documents,
    overlay: Option<&Overlay>,
    options: &Options,
) -> Result<(CompiledRules, OverlayEffect), InvalidRules> {
    match overlay {
        Some(overlay) => overlay.compile(Some(documents), options),
        None => rulefile::compile(documents, options).map(|compiled| (compiled, OverlayEffect::default())),
    }
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
