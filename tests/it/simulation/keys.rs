//! The keys of a simulated Redis, and the commands that the script of the service uses.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::cluster::{Elsewhere, View, slot};

/// The time for which changes are kept: the longest lag of a replica.
const JOURNAL: Duration = Duration::from_secs(1);

/// The error for a key that another server has, or is about to have.
const NOT_LOCAL: &str = "access a non local key in a cluster node";

/// A reply of the server.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Nothing,
    Number(i64),
    Text(Vec<u8>),
    Status(&'static str),
    List(Vec<Reply>),
    Error(String),
}

/// The values of descriptors: 0, 1 and 2.
pub const VALUES: usize = 3;

/// The name of the counter of a fixed window of a year.
pub fn counter(key: &str, value: &str) -> String {
    format!("{{d|{key}={value}}}fixed_window:365d")
}

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
enum Stored {
    Text(Vec<u8>),
    /// Members by score, and those of one score by their bytes.
    Sorted(Vec<(f64, Vec<u8>)>),
}

#[derive(Clone, Debug)]
pub struct Key {
    stored: Stored,
    /// Milliseconds since the epoch; `None` if it never expires.
    expires: Option<u64>,
}

/// Keys by name.
pub type Stock = BTreeMap<Vec<u8>, Key>;

/// The keys of one server.
#[derive(Default)]
pub struct Keys {
    keys: Stock,
    /// Changed keys: the time of the change and the key before it, oldest first.
    journal: VecDeque<(Instant, Vec<u8>, Option<Key>)>,
    /// Microseconds since the epoch, by the clock of the server.
    pub now: u64,
    /// Commands that need memory are refused.
    pub is_full: bool,
    pub has_written: bool,
    /// The server refuses writes.
    pub is_replica: bool,
    /// The cluster, if the server is in one.
    pub view: Option<View>,
    /// `ASKING` came before the command.
    pub is_asking: bool,
}

impl Keys {
    /// Begins a script, which may write what needs memory as long as it has written nothing.
    pub fn begin(&mut self, now: u64, is_asking: bool) {
        (self.now, self.has_written, self.is_asking) = (now, false, is_asking);
        let due = now / 1_000;
        self.keys.retain(|_, key| key.expires.is_none_or(|expires| expires > due));
    }

    /// The hits on a counter of a fixed window: the second of two numbers of eight bytes.
    pub fn count(&self, name: &[u8]) -> u64 {
        match self.keys.get(name).map(|key| &key.stored) {
            Some(Stored::Text(text)) => u64::from_le_bytes(text[8..16].try_into().expect("a number")),
            _ => 0,
        }
    }

    /// The hits on the counter of `counted`, by its value.
    pub fn counted(&self) -> [u64; VALUES] {
        std::array::from_fn(|value| self.count(counter("counted", &value.to_string()).as_bytes()))
    }

    /// The keys that never expire.
    pub fn endless(&self) -> Vec<String> {
        let endless = self.keys.iter().filter(|(_, key)| key.expires.is_none());
        endless.map(|(name, _)| String::from_utf8_lossy(name).into_owned()).collect()
    }

    /// Takes keys of these slots out, with their copies: each with this chance.
    pub fn take(&mut self, slots: &std::ops::Range<usize>, mut is_taken: impl FnMut() -> bool) -> Stock {
        self.journal.clear();
        self.keys.extract_if(.., |name, _| slots.contains(&slot(name)) && is_taken()).collect()
    }

    pub fn add(&mut self, keys: Stock) {
        self.journal.clear();
        self.keys.extend(keys);
    }

    /// Puts these keys in place of all.
    pub fn replace(&mut self, keys: Stock) {
        self.journal.clear();
        self.keys = keys;
    }

    /// Returns the keys as they were at `moment`, which a replica has got of them.
    pub fn as_of(&self, moment: Instant) -> Stock {
        let mut keys = self.keys.clone();
        for (_, name, before) in self.journal.iter().rev().take_while(|(at, ..)| *at > moment) {
            match before {
                Some(key) => keys.insert(name.clone(), key.clone()),
                None => keys.remove(name),
            };
        }
        keys
    }

    /// Returns true if a key is there.
    pub fn has(&self, name: &[u8]) -> bool {
        self.keys.contains_key(name)
    }

    /// Runs a command.
    pub fn run(&mut self, command: &[Vec<u8>]) -> Reply {
        let (name, arguments) = command.split_first().expect("a command has a name");
        let name = String::from_utf8_lossy(name).to_uppercase();
        if let (Some(view), [key, ..]) = (&self.view, arguments)
            && let Some(elsewhere) = view.elsewhere(&[key], self.is_asking, |key| self.has(key))
        {
            let is_down = elsewhere == Elsewhere::Down;
            let what = if is_down { "execute a command while the cluster is down" } else { NOT_LOCAL };
            return Reply::Error(format!("ERR Script attempted to {what}"));
        }
        let needs_memory = matches!(name.as_str(), "SET" | "ZADD");
        let writes = needs_memory || matches!(name.as_str(), "PEXPIRE" | "ZREMRANGEBYRANK" | "UNLINK");
        if writes && self.is_replica {
            return Reply::Error("READONLY You can't write against a read only replica.".to_owned());
        }
        // As Redis: after a write, what needs memory is taken.
        if needs_memory && self.is_full && !self.has_written {
            return Reply::Error("OOM command not allowed when used memory > 'maxmemory'.".to_owned());
        }
        if let (true, [key, ..]) = (writes, arguments) {
            let now = Instant::now();
            while self.journal.front().is_some_and(|(at, ..)| *at + JOURNAL < now) {
                self.journal.pop_front();
            }
            self.journal.push_back((now, key.clone(), self.keys.get(key).cloned()));
        }
        let reply = self.named(&name, arguments);
        self.has_written |= writes && !matches!(reply, Reply::Nothing | Reply::Error(_));
        reply
    }

    fn named(&mut self, name: &str, arguments: &[Vec<u8>]) -> Reply {
        match (name, arguments) {
            ("TIME", []) => {
                let part = |number: u64| Reply::Text(number.to_string().into_bytes());
                Reply::List(vec![part(self.now / 1_000_000), part(self.now % 1_000_000)])
            }
            ("GET", [key]) => match self.keys.get(key) {
                None => Reply::Nothing,
                Some(Key { stored: Stored::Text(text), .. }) => Reply::Text(text.clone()),
                Some(_) => wrong_type(),
            },
            ("SET", [key, value, options @ ..]) => self.set(key, value, options),
            ("PEXPIRE", [key, length]) => {
                let expires = self.now / 1_000 + number(length);
                Reply::Number(self.keys.get_mut(key).map_or(0, |key| {
                    key.expires = Some(expires);
                    1
                }))
            }
            ("UNLINK", [key]) => Reply::Number(i64::from(self.keys.remove(key).is_some())),
            (_, [key, rest @ ..]) => self.sorted(name, key, rest),
            _ => panic!("the simulated server does not know {name} {arguments:?}"),
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8], options: &[Vec<u8>]) -> Reply {
        let (mut expires, mut only_new) = (None, false);
        let mut options = options.iter().map(|option| option.to_ascii_uppercase());
        while let Some(option) = options.next() {
            match option.as_slice() {
                b"PX" => expires = Some(self.now / 1_000 + number(&options.next().expect("a length"))),
                b"KEEPTTL" => expires = self.keys.get(key).and_then(|key| key.expires),
                b"NX" => only_new = true,
                other => panic!("the simulated server does not know SET {other:?}"),
            }
        }
        if only_new && self.keys.contains_key(key) {
            return Reply::Nothing;
        }
        self.keys.insert(key.to_vec(), Key { stored: Stored::Text(value.to_vec()), expires });
        Reply::Status("OK")
    }

    fn sorted(&mut self, name: &str, key: &[u8], arguments: &[Vec<u8>]) -> Reply {
        let mut none = Vec::new();
        if name == "ZADD" {
            let new = || Key { stored: Stored::Sorted(Vec::new()), expires: None };
            self.keys.entry(key.to_vec()).or_insert_with(new);
        }
        let members = match self.keys.get_mut(key) {
            Some(Key { stored: Stored::Sorted(members), .. }) => members,
            Some(_) => return wrong_type(),
            None => &mut none,
        };
        let reply = match (name, arguments) {
            ("ZADD", pairs) => {
                let mut added = 0;
                for pair in pairs.chunks_exact(2) {
                    let (score, member) = (score(&pair[0]).0, &pair[1]);
                    added += i64::from(!members.iter().any(|(_, there)| there == member));
                    members.retain(|(_, there)| there != member);
                    members.push((score, member.clone()));
                }
                members.sort_by(|(a, left), (b, right)| a.total_cmp(b).then_with(|| left.cmp(right)));
                Reply::Number(added)
            }
            ("ZCARD", []) => count(members.len()),
            ("ZCOUNT", [low, high]) => count(between(members, low, high).count()),
            ("ZRANGE", [from, to, rest @ ..]) => {
                let range = range(members.len(), from, to);
                listed(members[range].iter(), has(rest, b"WITHSCORES"))
            }
            ("ZRANGEBYSCORE", [low, high, rest @ ..]) => {
                let limit = rest.iter().position(|word| word.eq_ignore_ascii_case(b"LIMIT"));
                let (skipped, most) = limit.map_or((0, usize::MAX), |at| {
                    let argument = |at: usize| usize::try_from(number(&rest[at])).expect("it fits");
                    (argument(at + 1), argument(at + 2))
                });
                listed(between(members, low, high).skip(skipped).take(most), has(rest, b"WITHSCORES"))
            }
            ("ZREMRANGEBYRANK", [from, to]) => {
                let range = range(members.len(), from, to);
                count(members.drain(range).count())
            }
            _ => panic!("the simulated server does not know {name} {arguments:?}"),
        };
        if self.keys.get(key).is_some_and(|key| key.stored == Stored::Sorted(Vec::new())) {
            self.keys.remove(key);
        }
        reply
    }
}

fn wrong_type() -> Reply {
    Reply::Error("WRONGTYPE Operation against a key holding the wrong kind of value".to_owned())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("an argument in ASCII")
}

fn number(bytes: &[u8]) -> u64 {
    text(bytes).parse().unwrap_or_else(|_| panic!("no number: {:?}", text(bytes)))
}

fn count(number: usize) -> Reply {
    Reply::Number(i64::try_from(number).expect("it fits"))
}

fn has(words: &[Vec<u8>], word: &[u8]) -> bool {
    words.iter().any(|there| there.eq_ignore_ascii_case(word))
}

/// A score, and whether it is excluded.
fn score(bytes: &[u8]) -> (f64, bool) {
    let (number, is_excluded) = text(bytes).strip_prefix('(').map_or((text(bytes), false), |rest| (rest, true));
    let score = match number {
        "-inf" => f64::NEG_INFINITY,
        "+inf" => f64::INFINITY,
        number => number.parse().unwrap_or_else(|_| panic!("no score: {number:?}")),
    };
    (score, is_excluded)
}

fn between<'a>(
    members: &'a [(f64, Vec<u8>)],
    low: &[u8],
    high: &[u8],
) -> impl Iterator<Item = &'a (f64, Vec<u8>)> + use<'a> {
    let ((low, is_above), (high, is_below)) = (score(low), score(high));
    members.iter().filter(move |(score, _)| {
        let is_high = if is_above { *score > low } else { *score >= low };
        is_high && if is_below { *score < high } else { *score <= high }
    })
}

fn range(length: usize, from: &[u8], to: &[u8]) -> std::ops::Range<usize> {
    let signed = i64::try_from(length).expect("it fits");
    let place = |bytes: &[u8]| {
        let place: i64 = text(bytes).parse().expect("a rank");
        if place < 0 { place + signed } else { place }
    };
    let (from, to) = (place(from).max(0), (place(to) + 1).min(signed));
    let index = |place: i64| usize::try_from(place.max(0)).expect("it fits");
    index(from).min(length)..index(to).max(index(from).min(length))
}

fn listed<'a>(members: impl Iterator<Item = &'a (f64, Vec<u8>)>, with_scores: bool) -> Reply {
    let each = |(score, member): &(f64, Vec<u8>)| {
        let score = with_scores.then(|| Reply::Text(plain(*score).into_bytes()));
        std::iter::once(Reply::Text(member.clone())).chain(score).collect::<Vec<_>>()
    };
    Reply::List(members.flat_map(each).collect())
}

/// A number as Redis writes it, which has no fraction here.
pub fn plain(number: f64) -> String {
    assert!(number.fract() == 0.0 && number.abs() < 9e15, "{number} is not whole, or not exact");
    format!("{number:.0}")
}
