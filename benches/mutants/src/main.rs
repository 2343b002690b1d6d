//! Tries one-line changes of behaviour against the tests and prints those that no test notices. All changes are in one build of a
//! copy of the checkout; a file chooses the one in force.
//!
//! `mutants [--minutes N] [--seed N] [--again] [--seconds N] [--only TEXT]`: see CONTRIBUTING.md.

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

struct Options {
    minutes: u64,
    seed: u64,
    again: bool,
    seconds: u64,
    only: String,
}

fn main() -> Result<(), Failure> {
    let mut options = Options { minutes: 60, seed: 1, again: false, seconds: 30, only: String::new() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--again" => options.again = true,
            "--minutes" => options.minutes = arguments.next().ok_or("--minutes N")?.parse()?,
            "--seconds" => options.seconds = arguments.next().ok_or("--seconds N")?.parse()?,
            "--seed" => options.seed = arguments.next().ok_or("--seed N")?.parse()?,
            "--only" => options.only = arguments.next().ok_or("--only TEXT")?,
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let until = Instant::now() + Duration::from_secs(options.minutes * 60);
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let mut copy = Copy::new(&checkout, checkout.join("target/mutants"))?;
    let state = State::open(&copy)?;
    copy.dropped = state.dropped()?;
    let binaries = copy.build()?;
    state.keep("dropped", &copy.dropped.iter().map(|number| format!("{number}\n")).collect::<String>())?;
    eprintln!("{} changes, of which {} do not compile", copy.changes.len(), copy.dropped.len());

    let Some(tests) = state.tests(&copy.home, &binaries, until)? else {
        eprintln!("the time is over; call again to go on");
        return Ok(());
    };
    let mut results = state.results()?;
    if options.again {
        results.retain(|_, (result, _)| result != "survived");
    }
    let mut numbers: Vec<usize> = (0..copy.changes.len()).filter(|number| !copy.dropped.contains(number)).collect();
    fastrand::Rng::with_seed(options.seed).shuffle(&mut numbers);
    numbers.retain(|number| !results.contains_key(number) && copy.changes[*number].0.contains(&options.only));
    if options.again {
        let survived: BTreeSet<usize> = state.results()?.into_keys().collect();
        numbers.retain(|number| survived.contains(number));
    }
    numbers.reverse();
    let most = Duration::from_secs(options.seconds);
    let (queue, results) = (Mutex::new(numbers), Mutex::new(results));
    std::thread::scope(|scope| {
        let work = || -> Result<(), Failure> {
            while Instant::now() < until {
                let Some(number) = queue.lock().ok().and_then(|mut queue| queue.pop()) else { break };
                let is_lua = copy.changes[number].0.ends_with(".lua");
                let (result, test) = match trial::attempt(&copy.home, &tests, number, is_lua, most)? {
                    Outcome::Passed => ("survived", String::new()),
                    Outcome::Failed(test) => ("noticed", test),
                    Outcome::Hung => ("noticed", "timeout".to_owned()),
                };
                state.add("results", &format!("{number}\t{result}\t{test}\n"))?;
                if let Ok(mut results) = results.lock() {
                    results.insert(number, (result.to_owned(), test));
                }
            }
            Ok(())
        };
        let workers: Vec<_> = (0..JOBS).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked")?)
    })?;
    report(&copy, &results.into_inner()?, &fs::read_to_string(checkout.join("benches/mutants/equivalent.txt"))?);
    Ok(())
}

/// Prints the table by module and the changes that no test noticed.
fn report(copy: &Copy, results: &BTreeMap<usize, (String, String)>, equivalent: &str) {
    let mut table: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    let mut survivors = Vec::new();
    for (number, (result, _)) in results {
        let (file, change) = &copy.changes[*number];
        let module = file.trim_start_matches("src/").split(['.', '/']).take(if file.contains("store") { 2 } else { 1 });
        let line = format!("{file} {}", change.what);
        let kind = match result.as_str() {
            "noticed" => 0,
            _ if equivalent.lines().any(|known| known == line) => 2,
            _ => {
                survivors.push(format!("{file}:{} #{number}\n    {file} {}", change.line, change.what));
                1
            }
        };
        let module = module.collect::<Vec<_>>().join("/");
        for row in [module, "all".to_owned()] {
            table.entry(row).or_default()[kind] += 1;
        }
    }
    println!("| module | noticed | not noticed | change nothing | share noticed |\n|---|---|---|---|---|");
    for (module, [noticed, survived, same]) in table {
        let tenths = noticed * 1000 / (noticed + survived).max(1);
        println!("| {module} | {noticed} | {survived} | {same} | {}.{} % |", tenths / 10, tenths % 10);
    }
    survivors.iter().for_each(|survivor| println!("{survivor}"));
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

    fn results(&self) -> Result<BTreeMap<usize, (String, String)>, Failure> {
        let mut results = BTreeMap::new();
        for line in self.read("results").lines() {
            let mut parts = line.split('\t').map(str::to_owned);
            let (number, result, test) = (parts.next(), parts.next(), parts.next());
            results.insert(number.unwrap_or_default().parse()?, (result.unwrap_or_default(), test.unwrap_or_default()));
        }
        Ok(results)
    }

    /// Returns the tests with the changes that they reach, after a run of each that is new; `None` if the time is over.
    fn tests(&self, home: &Path, binaries: &[PathBuf], until: Instant) -> Result<Option<Vec<Test>>, Failure> {
        let text = self.read("tests");
        let mut known: BTreeMap<String, (u64, Vec<usize>)> = BTreeMap::new();
        for line in text.lines() {
            let mut parts = line.split(' ');
            let (name, time) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default().parse()?);
            known.insert(name.to_owned(), (time, parts.map(str::parse).collect::<Result<_, _>>()?));
        }
        let all = trial::tests(binaries)?;
        let queue: Mutex<Vec<_>> =
            Mutex::new(all.iter().filter(|(_, _, name)| !known.contains_key(name)).cloned().collect());
        let fresh = Mutex::new(&mut known);
        std::thread::scope(|scope| {
            let work = || -> Result<(), Failure> {
                while Instant::now() < until {
                    let Some((binary, _, name)) = queue.lock().ok().and_then(|mut queue| queue.pop()) else { break };
                    let began = Instant::now();
                    let (outcome, reached) = trial::run(home, &binary, &[&name], "record", SLOWEST)?;
                    let millis = u64::try_from(began.elapsed().as_millis())?;
                    // A test that fails or takes too long is not used.
                    let reached = if outcome == Outcome::Passed { reached } else { Vec::new() };
                    if outcome != Outcome::Passed {
                        eprintln!("not used, as it fails or takes more than {SLOWEST:?}: {name}");
                    }
                    let numbers: String = reached.iter().map(|number| format!(" {number}")).collect();
                    self.add("tests", &format!("{name} {millis}{numbers}\n"))?;
                    if let Ok(mut fresh) = fresh.lock() {
                        fresh.insert(name, (millis, reached));
                    }
                }
                Ok(())
            };
            let workers: Vec<_> = (0..JOBS).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked")?)
        })?;
        if all.iter().any(|(_, _, name)| !known.contains_key(name)) {
            return Ok(None);
        }
        let tests = all.into_iter().filter_map(|(binary, is_unit, name)| {
            let (millis, reached) = known.remove(&name)?;
            Some(Test { binary, is_unit, name, time: Duration::from_millis(millis), reached })
        });
        Ok(Some(tests.collect()))
    }
}
