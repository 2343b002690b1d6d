//! Tries one-line changes of behaviour against the tests and prints those that no test notices. All changes are in one build of a
//! copy of the checkout; a file chooses the one in force.
//!
//! `mutants [--minutes N] [--seed N] [--again] [--seconds N] [--only TEXT] [--check]`: see CONTRIBUTING.md.

mod changes;
mod copy;
mod lua;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use copy::Copy;
use trial::{Outcome, SLOWEST, Test};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Changes tried at the same time: one per core of a small machine.
const JOBS: usize = 2;
/// Changes that `--check` tries.
const CHECKED: usize = 40;

struct Options {
    minutes: u64,
    seed: u64,
    again: bool,
    seconds: u64,
    only: String,
    check: bool,
}

fn main() -> Result<(), Failure> {
    let mut options = Options { minutes: 60, seed: 1, again: false, seconds: 30, only: String::new(), check: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--again" => options.again = true,
            "--check" => options.check = true,
            "--minutes" => options.minutes = arguments.next().ok_or("--minutes N")?.parse()?,
            "--seconds" => options.seconds = arguments.next().ok_or("--seconds N")?.parse()?,
            "--seed" => options.seed = arguments.next().ok_or("--seed N")?.parse()?,
            "--only" => options.only = arguments.next().ok_or("--only TEXT")?,
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let mut copy = Copy::new(&checkout, checkout.join("target/mutants"))?;
    let state = State::open(&copy)?;
    copy.dropped = state.dropped()?;
    let built = copy.build();
    state.keep("dropped", &copy.dropped.iter().map(|number| format!("{number}\n")).collect::<String>())?;
    let binaries = built?;
    eprintln!("{} changes, of which {} do not compile", copy.changes.len(), copy.dropped.len());
    copy.expect("no change compiles", |_, number| !copy.dropped.contains(&number))?;

    let mut all = trial::tests(&binaries)?;
    all.retain(|(_, is_unit, _)| *is_unit || !options.check);
    let tests = state.tests(&copy.home, &all)?;
    let reached: BTreeSet<usize> = tests.iter().flat_map(|test| test.reached.iter().copied()).collect();
    copy.expect("the script does not have its text", |name, number| {
        !name.ends_with(".lua") || reached.contains(&number)
    })?;

    let mut order: Vec<usize> = (0..copy.changes.len()).filter(|number| !copy.dropped.contains(number)).collect();
    fastrand::Rng::with_seed(options.seed).shuffle(&mut order);
    order.retain(|number| copy.changes[*number].0.contains(&options.only));
    if options.check {
        order.retain(|number| reached.contains(number));
        order.truncate(CHECKED);
    }
    let results = if options.check { BTreeMap::new() } else { state.results()? };
    let mut queue = order.clone();
    queue.retain(|number| results.get(number).map_or(!options.again, |result| options.again && result == "survived"));
    let results = Mutex::new(results);
    let until = Instant::now() + Duration::from_secs(options.minutes * 60);
    each(queue, Some(until), |number| {
        let is_lua = copy.changes[number].0.ends_with(".lua");
        let outcome = trial::attempt(&copy.home, &tests, number, is_lua, Duration::from_secs(options.seconds))?;
        let (result, test) = match outcome {
            Outcome::Passed => ("survived", String::new()),
            Outcome::Failed(test) => ("noticed", test),
            Outcome::Hung => ("noticed", "timeout".to_owned()),
        };
        if !options.check {
            state.add("results", &format!("{number}\t{result}\t{test}\n"))?;
        }
        results.lock().map_err(|_| "a worker panicked")?.insert(number, result.to_owned());
        Ok(())
    })?;
    let results = results.into_inner()?;
    let sample = order.into_iter().map_while(|number| Some((number, results.get(&number)?.as_str())));
    let equivalent = fs::read_to_string(checkout.join("benches/mutants/equivalent.txt"))?;
    let noticed = report(&copy, sample, &equivalent);
    let names: BTreeSet<&str> = tests.iter().map(|test| test.name.as_str()).collect();
    let mut unused: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, _, name) in all.iter().filter(|(_, _, name)| !names.contains(name.as_str())) {
        *unused.entry(name.split("::").next().unwrap_or_default()).or_default() += 1;
    }
    println!("tests that fail in the copy or take more than {SLOWEST:?}, by module: {unused:?} of {}", all.len());
    if noticed == 0 { Err("no change was noticed".into()) } else { Ok(()) }
}

/// Works on the items in order, several at the same time; begins none at or after `until`.
fn each<T: Send>(
    items: Vec<T>,
    until: Option<Instant>,
    work: impl Fn(T) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let queue = Mutex::new(items.into_iter());
    let run = || {
        while until.is_none_or(|until| Instant::now() < until)
            && let Some(item) = queue.lock().ok().and_then(|mut queue| queue.next())
        {
            work(item)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..JOBS).map(|_| scope.spawn(run)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked")?)
    })
}

/// Prints the table by module and the changes that no test noticed. Returns the number of those noticed.
fn report<'a>(copy: &Copy, sample: impl Iterator<Item = (usize, &'a str)>, equivalent: &str) -> usize {
    let mut table: BTreeMap<&str, [usize; 3]> = BTreeMap::from([("all", [0; 3])]);
    let mut survivors = Vec::new();
    for (number, result) in sample {
        let (file, change) = &copy.changes[number];
        let line = format!("{file} {}", change.what);
        let kind = match result {
            "noticed" => 0,
            _ if equivalent.lines().any(|known| known == line) => 1,
            _ => {
                survivors.push(format!("{file}:{} #{number}\n    {line}", change.line));
                2
            }
        };
        for row in [copy::module(file).unwrap_or_default().trim_start_matches("src/"), "all"] {
            table.entry(row).or_default()[kind] += 1;
        }
    }
    println!("| module | tried | noticed | change nothing | not noticed | share noticed |\n|---|---|---|---|---|---|");
    for (module, [noticed, same, survived]) in &table {
        let (tried, tenths) = (noticed + same + survived, noticed * 1000 / (noticed + survived).max(1));
        println!("| {module} | {tried} | {noticed} | {same} | {survived} | {}.{} % |", tenths / 10, tenths % 10);
    }
    survivors.iter().for_each(|survivor| println!("{survivor}"));
    table["all"][0]
}

/// Results of earlier runs on the same changes.
struct State(PathBuf);

impl State {
    fn open(copy: &Copy) -> Result<Self, Failure> {
        let mut hasher = DefaultHasher::new();
        copy.changes.iter().for_each(|(file, change)| (file, &change.what).hash(&mut hasher));
        let directory = copy.home.join(format!("state-{:016x}", hasher.finish()));
        fs::create_dir_all(&directory)?;
        Ok(Self(directory))
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }

    fn keep(&self, name: &str, text: &str) -> Result<(), Failure> {
        Ok(fs::write(self.0.join(name), text)?)
    }

    fn add(&self, name: &str, line: &str) -> Result<(), Failure> {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.0.join(name))?;
        Ok(file.write_all(line.as_bytes())?)
    }

    fn dropped(&self) -> Result<BTreeSet<usize>, Failure> {
        Ok(self.read("dropped").lines().map(str::parse).collect::<Result<_, _>>()?)
    }

    fn results(&self) -> Result<BTreeMap<usize, String>, Failure> {
        let mut results = BTreeMap::new();
        for line in self.read("results").lines() {
            let mut parts = line.split('\t');
            let (number, result) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            results.insert(number.parse()?, result.to_owned());
        }
        Ok(results)
    }

    /// Returns the tests that can be used, with the changes that they reach, after a run of each that is new.
    fn tests(&self, home: &Path, all: &[(PathBuf, bool, String)]) -> Result<Vec<Test>, Failure> {
        let known = self.read("tests");
        let known: BTreeSet<&str> = known.lines().filter_map(|line| line.split(' ').next()).collect();
        let fresh: Vec<_> = all.iter().filter(|(_, _, name)| !known.contains(name.as_str())).collect();
        each(fresh, None, |(binary, _, name)| {
            let Some((time, reached)) = trial::record(home, binary, name)? else {
                eprintln!("not used, as it fails or takes more than {SLOWEST:?}: {name}");
                return self.add("tests", &format!("{name}\n"));
            };
            let numbers: String = reached.iter().map(|number| format!(" {number}")).collect();
            self.add("tests", &format!("{name} {}{numbers}\n", time.as_millis()))
        })?;
        let mut known: BTreeMap<String, (u64, Vec<usize>)> = BTreeMap::new();
        for line in self.read("tests").lines() {
            if let Some((name, numbers)) = line.split_once(' ') {
                let (time, reached) = numbers.split_once(' ').unwrap_or((numbers, ""));
                let reached = reached.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
                known.insert(name.to_owned(), (time.parse()?, reached));
            }
        }
        let tests = all.iter().filter_map(|(binary, is_unit, name)| {
            let (millis, reached) = known.remove(name)?;
            let (binary, name) = (binary.clone(), name.clone());
            Some(Test { binary, is_unit: *is_unit, name, time: Duration::from_millis(millis), reached })
        });
        Ok(tests.collect())
    }
}
