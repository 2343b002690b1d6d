//! A copy of the checkout with all changes in one build.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::changes::{Found, Site};
use crate::lua;

/// Files whose behaviour is changed: those below these paths.
const CHANGED: [&str; 11] = [
    "src/limiter.rs",
    "src/limiter/",
    "src/algorithm.rs",
    "src/algorithm/",
    "src/store/guard.rs",
    "src/store/known.rs",
    "src/store/known/",
    "src/store/redis.rs",
    "src/store/redis/",
    "src/rules.rs",
    "src/rules/",
];

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
            let is_changed = CHANGED.iter().any(|changed| name.starts_with(changed)) && !name.ends_with("tests.rs");
            if is_changed && name.ends_with(".rs") {
                let text = fs::read_to_string(checkout.join(name))?;
                let sites = found.read(&text).map_err(|error| format!("{name}: {error}"))?;
                sources.push(Source { name: name.to_owned(), text, sites });
            } else {
                put(&home.join("checkout").join(name), &fs::read(checkout.join(name))?)?;
                fs::set_permissions(
                    home.join("checkout").join(name),
                    fs::metadata(checkout.join(name))?.permissions(),
                )?;
                if is_changed && name.ends_with(".lua") {
                    let text = fs::read_to_string(checkout.join(name))?;
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
        let library = home.join("checkout/src/lib.rs");
        let text = fs::read_to_string(&library)?;
        put(&library, (text + "\n#[allow(missing_docs)]\nmod mutants;\n").as_bytes())?;
        Ok(Self { home, changes, dropped: BTreeSet::new(), sources })
    }

    /// Builds the tests without the changes that do not compile. Returns the test binaries.
    pub fn build(&mut self) -> Result<Vec<PathBuf>, Failure> {
        for command in [&["check", "--lib"][..], &["test", "--no-run", "--lib", "--test", "it"]] {
            loop {
                let ranges = self.write()?;
                let mut cargo = Command::new("cargo");
                cargo.current_dir(self.home.join("checkout")).env("CARGO_TARGET_DIR", self.home.join("build"));
                cargo.args(command).args(["--locked", "--message-format", "short"]);
                let output = cargo.output()?;
                let text = String::from_utf8(output.stderr)?;
                if output.status.success() {
                    if command[0] == "test" {
                        let binaries = text
                            .lines()
                            .filter_map(|line| line.trim().strip_prefix("Executable")?.split(['(', ')']).nth(1));
                        return Ok(binaries.map(|path| self.home.join("checkout").join(path)).collect());
                    }
                    break;
                }
                let before = self.dropped.len();
                for line in text.lines().filter(|line| line.contains(": error")) {
                    self.drop_change(line, &ranges);
                }
                eprintln!("{} changes do not compile", self.dropped.len());
                if self.dropped.len() == before {
                    let errors: Vec<&str> = text.lines().filter(|line| line.contains("error")).collect();
                    return Err(format!("the copy does not compile:\n{}", errors.join("\n")).into());
                }
            }
        }
        Err("no binaries".into())
    }

    /// Drops the smallest change that contains the place of an error, `FILE:LINE:COLUMN: error...`.
    fn drop_change(&mut self, error: &str, ranges: &[Vec<(Range<usize>, Vec<usize>)>]) {
        let mut parts = error.split(':');
        let (Some(name), Some(line), Some(column)) = (parts.next(), parts.next(), parts.next()) else { return };
        let (Ok(line), Ok(column)) = (line.parse::<usize>(), column.parse::<usize>()) else { return };
        let Some(index) = self.sources.iter().position(|source| source.name == name) else { return };
        let text = fs::read_to_string(self.home.join("checkout").join(name)).unwrap_or_default();
        let start: usize = text.split_inclusive('\n').take(line - 1).map(str::len).sum();
        let place = start + text[start..].chars().take(column - 1).map(char::len_utf8).sum::<usize>();
        let around = ranges[index].iter().filter(|(range, _)| range.contains(&place));
        // A block that no longer ends in a `return` is the error, and stands outside of the change.
        let is_end = |number: &usize| {
            let what = &self.changes[*number].1.what;
            what.ends_with("left out") && (what.contains("`return") || what.contains("`continue"))
        };
        let near = ranges[index].iter().filter(|(_, numbers)| numbers.iter().any(is_end));
        let smallest = around
            .min_by_key(|(range, _)| range.len())
            .or_else(|| near.min_by_key(|(range, _)| range.start.abs_diff(place)));
        self.dropped.extend(smallest.into_iter().flat_map(|(_, numbers)| numbers));
    }

    /// Writes the changed files. Returns the ranges of their changes, by file.
    fn write(&self) -> Result<Vec<Vec<(Range<usize>, Vec<usize>)>>, Failure> {
        let mut all = Vec::new();
        for source in &self.sources {
            let (mut text, ranges) = render(&source.text, &source.sites, &self.dropped);
            if source.name.ends_with("redis/script.rs") {
                text = text.replacen("LazyLock::new(|| {", "LazyLock::new(|| crate::mutants::lua({", 1);
                text = text.replacen("twins.concat())\n});", "twins.concat())\n}));", 1);
            }
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
