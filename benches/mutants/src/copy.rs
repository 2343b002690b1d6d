//! A copy of the checkout with all changes in one build.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::Failure;
use crate::changes::{Found, Site};
use crate::lua;

/// Modules whose behaviour is changed, with those below them.
pub const CHANGED: [&str; 13] = [
    "src/limiter",
    "src/algorithm",
    "src/store/guard",
    "src/store/known",
    "src/store/redis",
    "src/rules",
    "src/rulefile",
    "src/source",
    "src/telemetry",
    "src/serve",
    "src/edge",
    "src/admin",
    "src/cli",
];
/// The function that gets the whole text of the script, and what its body begins with in the copy.
const SCRIPT: (&str, &str, &str) = (
    "src/store/redis/script.rs",
    "fn without_comments(script: &str) -> String {",
    " let script = crate::mutants::lua(script); let script = script.as_str();",
);

/// Returns the module of [`CHANGED`] to which a file belongs.
pub fn module(name: &str) -> Option<&'static str> {
    CHANGED.into_iter().find(|module| name.strip_prefix(module).is_some_and(|rest| rest.starts_with(['.', '/'])))
}

/// A file with changes.
struct Source {
    name: String,
    text: String,
    sites: Vec<Site>,
}

/// The copy, its build and its changes.
pub struct Copy {
    /// Directory of the copy, the build and the state.
    pub home: PathBuf,
    /// File and change, by number.
    pub changes: Vec<(String, crate::changes::Change)>,
    /// Numbers that do not compile.
    pub dropped: BTreeSet<usize>,
    sources: Vec<Source>,
}

impl Copy {
    /// Copies `checkout` to `home` and finds the changes.
    pub fn new(checkout: &Path, home: PathBuf) -> Result<Self, Failure> {
        let listed =
            Command::new("git").current_dir(checkout).args(["ls-files", "-co", "--exclude-standard"]).output()?;
        let (mut found, mut sources, mut changes) = (Found::default(), Vec::new(), Vec::new());
        let mut table = String::from("&[\n");
        let listed = String::from_utf8(listed.stdout)?;
        let mut names: Vec<&str> = listed.lines().filter(|name| checkout.join(name).is_file()).collect();
        names.sort_unstable();
        for name in names {
            let is_changed = module(name).is_some() && !name.ends_with("tests.rs") && !name.contains("/tests/");
            let mut text = if is_changed { fs::read_to_string(checkout.join(name))? } else { String::new() };
            if name == SCRIPT.0 {
                let body = text.find(SCRIPT.1).ok_or_else(|| format!("{name} has no `{}`: see SCRIPT", SCRIPT.1))?;
                text.insert_str(body + SCRIPT.1.len(), SCRIPT.2);
            }
            if is_changed && name.ends_with(".rs") && !text.starts_with("//! Tests of ") {
                let sites = found.read(&text).map_err(|error| format!("{name}: {error}"))?;
                sources.push(Source { name: name.to_owned(), text, sites });
            } else {
                let (from, to) = (checkout.join(name), home.join("checkout").join(name));
                let mut content = fs::read(&from)?;
                if name == "src/lib.rs" {
                    content.extend(b"\n#[allow(missing_docs)]\nmod mutants;\n");
                }
                put(&to, &content)?;
                fs::set_permissions(to, fs::metadata(from)?.permissions())?;
                if name.ends_with(".lua") {
                    let relative = name.trim_start_matches("src/");
                    for (range, new) in lua::changes(&text) {
                        let line = text[..range.start].lines().count();
                        let place = text[..range.start].rfind('\n').map_or(0, |end| end + 1);
                        let whole = text[place..].lines().next().unwrap_or_default();
                        let column = range.start - place;
                        let number = found.change(whole, line, &format!("{new:?} at {column}"));
                        let Range { start, end } = range;
                        table += &format!("({number}, include_str!({relative:?}), {start}, {end}, {new:?}),\n");
                    }
                }
            }
            changes.extend(std::mem::take(&mut found.changes).into_iter().map(|change| (name.to_owned(), change)));
            found.first = changes.len();
        }
        put(&home.join("checkout/src/mutants_lua.rs"), (table + "]\n").as_bytes())?;
        put(&home.join("checkout/src/mutants.rs"), include_bytes!("runtime.rs"))?;
        Ok(Self { home, changes, dropped: BTreeSet::new(), sources })
    }

    /// Fails with `otherwise` and the file if there is a file of whose changes none `is_wanted`.
    pub fn expect(&self, otherwise: &str, is_wanted: impl Fn(&str, usize) -> bool) -> Result<(), Failure> {
        let wanted = self.changes.iter().enumerate().filter(|(number, (file, _))| is_wanted(file, *number));
        let wanted: BTreeSet<&String> = wanted.map(|(_, (file, _))| file).collect();
        let other = self.changes.iter().find(|(file, _)| !wanted.contains(file));
        other.map_or(Ok(()), |(file, _)| Err(format!("{file}: {otherwise}").into()))
    }

    /// Builds the tests without the changes that do not compile. Returns the test binaries.
    pub fn build(&mut self) -> Result<Vec<PathBuf>, Failure> {
        let mut binaries = Vec::new();
        for command in [&["build", "--lib"][..], &["test", "--no-run", "--lib", "--test", "it"]] {
            loop {
                let ranges = self.write()?;
                let mut cargo = Command::new("cargo");
                cargo.current_dir(self.home.join("checkout")).env("CARGO_TARGET_DIR", self.home.join("build"));
                // Nothing of this package is optimised, as its build takes longer than its tests.
                cargo.env("CARGO_PROFILE_DEV_DEBUG", "none");
                cargo.args(["--config", "profile.dev.package.tidegate.opt-level=0"]);
                let output = cargo.args(command).args(["--locked", "--message-format", "json"]).output()?;
                let text = String::from_utf8(output.stdout)?;
                let messages = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
                if output.status.success() {
                    let tests = messages.iter().filter(|message| message["profile"]["test"] == true);
                    binaries = tests.filter_map(|test| Some(test["executable"].as_str()?.into())).collect();
                    break;
                }
                let before = self.dropped.len();
                let errors = messages.iter().map(|message| &message["message"]);
                let errors: Vec<&Value> = errors.filter(|error| error["level"] == "error").collect();
                errors.iter().for_each(|error| self.drop_change(error, &ranges));
                eprintln!("{} changes do not compile", self.dropped.len());
                if self.dropped.len() == before {
                    let errors: String = errors.iter().filter_map(|error| error["rendered"].as_str()).collect();
                    let others = String::from_utf8_lossy(&output.stderr);
                    return Err(format!("the copy does not compile:\n{errors}\n{others}").into());
                }
            }
        }
        Ok(binaries)
    }

    /// Drops the smallest change that contains the place of an error, or else the statement left out that is nearest to it.
    fn drop_change(&mut self, error: &Value, ranges: &[Vec<(Range<usize>, Vec<usize>)>]) {
        // The borrow checker reports the place of a later use; the change is at another place that it names, or is an assignment.
        let code = error["code"]["code"].as_str().unwrap_or_default();
        let is_borrow = code == "E0382" || code == "E0499" || code.starts_with("E05");
        let mut spans: Vec<&Value> = error["spans"].as_array().into_iter().flatten().collect();
        spans.sort_by_key(|span| span["is_primary"] == is_borrow);
        let place = |span: &&Value| {
            let index = self.sources.iter().position(|source| span["file_name"] == source.name)?;
            Some((&ranges[index], usize::try_from(span["byte_start"].as_u64()?).ok()?))
        };
        let places: Vec<_> = spans.iter().filter_map(place).collect();
        let smallest = places.iter().find_map(|(ranges, place)| {
            let around = ranges.iter().filter(|(range, _)| range.contains(place));
            around.min_by_key(|(range, _)| range.len())
        });
        // A block that no longer ends in a `return` is the error, and stands outside of the change.
        let is_cause = |number: &usize| {
            let what = &self.changes[*number].1.what;
            let is_end = what.contains("`return") || what.contains("`continue");
            what.ends_with("left out") && (is_end || is_borrow && what.contains(" = "))
        };
        let nearest = places.first().and_then(|(ranges, place)| {
            let causes = ranges.iter().filter(|(_, numbers)| numbers.iter().any(is_cause));
            causes.min_by_key(|(range, _)| range.start.abs_diff(*place))
        });
        self.dropped.extend(smallest.or(nearest).into_iter().flat_map(|(_, numbers)| numbers));
    }

    /// Writes the changed files. Returns the ranges of their changes, by file.
    fn write(&self) -> Result<Vec<Vec<(Range<usize>, Vec<usize>)>>, Failure> {
        let mut all = Vec::new();
        for source in &self.sources {
            let (text, ranges) = render(&source.text, &source.sites, &self.dropped);
            put(&self.home.join("checkout").join(&source.name), text.as_bytes())?;
            all.push(ranges);
        }
        Ok(all)
    }
}

/// Applies the edits of `sites`. Returns the ranges of the places and of each part with a number.
fn render(text: &str, sites: &[Site], dropped: &BTreeSet<usize>) -> (String, Vec<(Range<usize>, Vec<usize>)>) {
    let alive = |site: &&Site| site.numbers.iter().any(|number| !dropped.contains(number));
    let mut edits: Vec<_> = Vec::new();
    for (order, site) in sites.iter().filter(alive).enumerate() {
        edits.extend(site.edits.iter().map(|edit| {
            // Suffixes close the inner place first, prefixes open the outer one first.
            let order = if edit.rank == 0 { usize::MAX - order } else { order };
            ((edit.range.start, edit.rank, order), edit, site)
        }));
    }
    edits.sort_by_key(|(key, ..)| *key);
    let (mut new, mut ranges, mut read) = (String::new(), Vec::new(), 0);
    let mut places: std::collections::HashMap<*const Site, Range<usize>> = std::collections::HashMap::new();
    for (_, edit, site) in edits {
        new += &text[read..edit.range.start];
        read = edit.range.end;
        let start = new.len();
        for (number, part) in
            edit.parts.iter().filter(|(number, _)| number.is_none_or(|number| !dropped.contains(&number)))
        {
            if let Some(number) = number {
                ranges.push((new.len()..new.len() + part.len(), vec![*number]));
            }
            new += part;
        }
        let place = places.entry(site).or_insert(start..start);
        place.end = new.len();
    }
    new += &text[read..];
    ranges
        .extend(sites.iter().filter(alive).map(|site| (places[&(site as *const Site)].clone(), site.numbers.clone())));
    (new, ranges)
}

/// Writes a file unless it has this content already, so that cargo builds only what is new.
fn put(path: &Path, content: &[u8]) -> Result<(), Failure> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    Ok(fs::write(path, content)?)
}
