//! Rule files: what is written, compiled to the rules in force, with the place of every problem.

pub mod callers;
pub mod cases;
mod compile;
mod cycles;
pub mod document;
mod overlay;
pub mod problem;
mod push;
pub(crate) mod yaml;

mod documents;

pub use compile::{CompiledRules, InvalidRules, Options, compile};
pub use documents::{Documents, File};
pub use overlay::{Overlay, OverlayEffect};
pub use push::recorded_push;

/// Compiles rule files that name no lists, in the given order.
///
/// # Errors
/// Returns every error of every file with its place, and the warnings with them.
///
/// ```
/// use tidegate::rulefile::{File, Options, load};
///
/// let file = |text: &str| File { name: "rules.yaml".into(), bytes: text.into() };
/// let right = file("domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 9 } }]\n");
/// assert_eq!(load(&[right], Options::default())?.rules.rules()[0].path().to_string(), "edge.user");
///
/// let wrong = file("domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: dy, requests_per_unit: 9 } }]\n");
/// let problems = load(&[wrong], Options::default()).unwrap_err().to_string();
/// assert!(problems.starts_with("rules.yaml:2:"), "{problems}");
/// # Ok::<(), tidegate::rulefile::InvalidRules>(())
/// ```
pub fn load(files: &[File], options: Options) -> Result<CompiledRules, InvalidRules> {
    compile(Documents::parse(files.to_vec()), &options)
}
