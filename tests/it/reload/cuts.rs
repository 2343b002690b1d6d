//! A rule file that is cut at every byte: taken whole or not at all, by the judge of `tidegate check`.

use tidegate::rulefile::{CompiledRules, InvalidRules, compile};
use tidegate::rules::RuleSet;
use tidegate::source::file::find::Location;
use tidegate::source::file::load::{Loader, Look};

use super::*;

/// The larger of two files: lists, nesting, limits of two kinds, comments, and a character of two bytes.
const EDGE: &str = "# Guests of the café
domain: edge
charging: all_or_nothing
descriptors:
  - key: plan
    value: café # é is two bytes
    rate_limit: { unit: minute, requests_per_unit: 250 }
  - key: plan
    rate_limits:
      - { name: burst, unit: second, requests_per_unit: 20, algorithm: gcra, burst: 40 }
      - name: long
        unit: day
        requests_per_unit: 100000
  - key: path
    value: '/login*'
    descriptors:
      - { key: user, rate_limit: { unit: hour, requests_per_unit: 12 } }
";
/// The file beside it, as short as a domain may be.
const INNER: &str =
    "domain: inner\ndescriptors:\n- key: job\n  rate_limit:\n    unit: hour\n    requests_per_unit: 60\n";

/// All that the rules say of limits, in words.
fn said(rules: &RuleSet) -> String {
    let said = |rule: &Rule| format!("{}: {:?}\n", rule.path(), rule.limits());
    rules.rules().into_iter().map(said).collect()
}

/// What became of a change.
#[derive(Debug)]
enum Outcome {
    Loaded { loaded: CompiledRules, files: usize },
    Refused(InvalidRules),
    Restored,
}

/// Two files that a loader follows.
struct Desk {
    directory: TempDir,
    loader: Loader,
    /// What is enforced.
    in_force: String,
}

impl Desk {
    fn new() -> Self {
        let directory = directory([("edge.yaml", EDGE), ("inner.yaml", INNER)]);
        let source = Location::Paths(vec![directory.path().to_owned()]);
        let (loader, documents) = Loader::open(source, None).expect("they are there");
        let loaded = compile(documents, &Options::default()).expect("they are whole");
        Self { directory, loader, in_force: said(&loaded.rules) }
    }

    /// Writes over a file in place, looks, and compiles what has changed.
    fn write(&mut self, file: &str, text: &[u8]) -> Outcome {
        fs::write(self.directory.path().join(file), text).expect("it is written");
        match self.loader.look() {
            Look::Changed(documents) => {
                let files = documents.len();
                match compile(documents, &Options::default()) {
                    Ok(loaded) => {
                        self.loader.accepted();
                        self.in_force = said(&loaded.rules);
                        Outcome::Loaded { loaded, files }
                    }
                    Err(invalid) => Outcome::Refused(invalid),
                }
            }
            Look::Restored => Outcome::Restored,
            look => panic!("{look:?}"),
        }
    }

    /// What `tidegate check` says of the files as they are.
    fn judged(&self) -> Result<CompiledRules, String> {
        let read = Location::Paths(vec![self.directory.path().to_owned()]).read().expect("they are there");
        load(&read, Options::default()).map_err(|invalid| invalid.to_string())
    }
}

#[test]
fn a_file_cut_at_any_byte_is_enforced_whole_or_leaves_the_last_whole_in_force() {
    for (file, whole, least_taken) in [("edge.yaml", EDGE, 4), ("inner.yaml", INNER, 2)] {
        let mut desk = Desk::new();
        let mut last_whole = desk.in_force.clone();
        let (mut taken, mut refused) = (0, 0);
        // Growing, as it is read while it is written; what was whole last is then often a cut as well.
        for end in 0..=whole.len() {
            let look = desk.write(file, &whole.as_bytes()[..end]);
            match (desk.judged(), look) {
                (Ok(judged), Outcome::Loaded { loaded, files }) => {
                    last_whole = said(&judged.rules);
                    assert_eq!((said(&loaded.rules), files), (last_whole.clone(), 2), "{file} cut at {end}");
                    taken += 1;
                }
                (Err(judged), Outcome::Refused(why)) => {
                    assert_eq!(why.to_string(), judged, "{file} cut at {end}");
                    refused += 1;
                }
                (judged, look) => panic!("{file} cut at {end}: {look:?} where it is {judged:?}"),
            }
            assert_eq!(desk.in_force, last_whole, "{file} cut at {end}");
        }
        assert!(taken >= least_taken && refused > whole.len() / 2, "{file}: {taken} taken, {refused} refused");
        assert_eq!(desk.in_force, Desk::new().in_force, "at the end all of {file} is there");
    }
}

#[test]
fn after_a_cut_at_any_byte_the_whole_is_in_force_again() {
    let mut desk = Desk::new();
    let before = desk.in_force.clone();
    for end in 0..EDGE.len() {
        let is_taken = matches!(desk.write("edge.yaml", &EDGE.as_bytes()[..end]), Outcome::Loaded { .. });
        assert_eq!(is_taken, desk.judged().is_ok(), "cut at {end}");
        assert!(is_taken || desk.in_force == before, "cut at {end}");
        let look = desk.write("edge.yaml", EDGE.as_bytes());
        // What was in force all the time need not be loaded again.
        assert!(
            matches!((&look, is_taken), (Outcome::Loaded { .. }, true) | (Outcome::Restored, false)),
            "{end}: {look:?}"
        );
        assert_eq!(desk.in_force, before, "cut at {end}");
    }
}
