//! Compiler for `entries` (normalisation of values) and for the values and lists of items.

use std::path::Path as FilePath;
use std::rc::Rc;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};

use super::{Compiler, Inherited};
use crate::rules::document::{AmongNode, DescriptorNode, Document, FormWord, ReadingNode};
use crate::rules::list::{self, Member};
use crate::rules::problem::{Place, Placed, Report, quoted};
use crate::rules::reading::{Form, InvalidNetwork, Network, Reading, Readings, Sensitive, V4_PREFIX, V6_PREFIX};
use crate::rules::tree::{Listed, Node, Pattern, Values};

/// Maximum number of list values that a rule's name shows: 3.
const MOST_SHOWN: usize = 3;

/// Maximum length of a list's text in a shared counter key: 80 bytes. A longer one is hashed.
const LONGEST_COUNTED: usize = 80;

/// Maximum total size of all list files of one load: 256 MiB, 16 million addresses. They stay in memory until the load ends.
const MAX_LIST_BYTES: usize = 256 << 20;

impl Compiler<'_> {
    /// Returns the readings of each domain's entries, by domain name.
    pub(super) fn readings(&mut self, documents: &[(usize, Document)]) -> HashMap<String, Readings> {
        let mut domains: HashMap<String, Readings> = HashMap::default();
        let mut said: HashSet<(&str, &str)> = HashSet::default();
        let mut keys: HashMap<&str, Keys<'_>> = HashMap::default();
        for (_, document) in documents {
            keys.entry(&document.domain.value).or_default().gather(&document.descriptors);
        }
        for (file, document) in documents {
            let domain = document.domain.value.as_str();
            for node in &document.entries {
                let (key, place) = (node.key.value.as_str(), node.key.place);
                if !said.insert((domain, key)) {
                    let message =
                        format!("{} is in `entries` of an earlier file of this domain: say it once", quoted(key));
                    self.error(*file, place, message);
                }
                if !keys.get(domain).is_some_and(|keys| keys.has(key)) {
                    let message = format!(
                        "no descriptor of this domain has the key {}, so this is for nothing: check its spelling",
                        quoted(key)
                    );
                    self.warning(*file, place, message);
                }
                let reading = self.reading(*file, node);
                domains.entry(domain.to_owned()).or_default().insert(key, reading);
            }
        }
        domains
    }

    fn reading(&mut self, file: usize, node: &ReadingNode) -> Reading {
        let form = match node.form {
            None => Form::Text,
            Some(FormWord::Path) => Form::Path,
            Some(FormWord::Ip) => Form::Ip {
                v4_prefix: self.prefix(file, node.v4_prefix.as_ref(), V4_PREFIX, V4_PREFIX),
                v6_prefix: self.prefix(file, node.v6_prefix.as_ref(), 128, V6_PREFIX),
            },
        };
        if !matches!(form, Form::Ip { .. }) {
            for (key, prefix) in [("v4_prefix", &node.v4_prefix), ("v6_prefix", &node.v6_prefix)] {
                if let Some(prefix) = prefix {
                    self.error(
                        file,
                        prefix.place,
                        format!("`{key}` belongs to addresses: write `as: ip` beside it, or remove it"),
                    );
                }
            }
        }
        if node.is_lower && matches!(form, Form::Ip { .. }) {
            self.warning(
                file,
                node.key.place,
                "`case` changes nothing beside `as: ip`: an address has one spelling".to_owned(),
            );
        }
        let has_prefix = node.v4_prefix.is_some() || node.v6_prefix.is_some();
        if node.form.is_none() && !node.is_lower && node.sensitive.is_none() && !has_prefix {
            let message =
                "nothing is said of this entry: write `as: ip`, `as: path`, `case: lower` or `sensitive: true`";
            self.warning(file, node.key.place, message.to_owned());
        }
        if let Some(place) = node.sensitive
            && self.options.key_secret.is_none()
        {
            let message = "`sensitive: true` needs a secret, without which Tidegate does not start: set the environment variable KEY_SECRET_FILE to the path of a file with at least 16 random bytes".to_owned();
            if self.options.needs_secret {
                self.error(file, place, message);
            } else {
                self.warning(file, place, message);
            }
        }
        Reading { form, is_lower: node.is_lower, sensitive: node.sensitive.map(|_| Sensitive(self.options.key_secret)) }
    }

    fn prefix(&mut self, file: usize, found: Option<&Placed<u32>>, most: u8, default: u8) -> u8 {
        let Some(Placed { value, place }) = found else { return default };
        match u8::try_from(*value).ok().filter(|bits| *bits <= most) {
            Some(bits) => bits,
            None => {
                self.error(file, *place, format!("an address has no {value} bits: write a number from 0 to {most}"));
                default
            }
        }
    }

    /// Returns the values that an item matches.
    pub(super) fn values(
        &mut self,
        item: &DescriptorNode,
        among: Option<&AmongNode>,
        key: &str,
        readings: &Readings,
        file: usize,
    ) -> Values {
        let reading = readings.of(key.as_bytes()).map(AsRef::as_ref);
        if let Some(among) = among {
            if let Some(value) = &item.value {
                let message = format!("`value` stands beside a list: write {} into `values` too", quoted(&value.value));
                self.error(file, value.place, message);
            }
            if key.contains('*') {
                let message = format!(
                    "a list belongs to one key, and {} is a wildcard: write the whole key, or `value` in place of the list",
                    quoted(key)
                );
                self.error(file, item.place, message);
            }
            return Values::Listed(Box::new(listed(among, reading)));
        }
        let Some(value) = &item.value else { return Values::Any };
        if key.contains('*')
            && let Some(of) = readings.key_that_matches(&Pattern::new(key.to_owned()))
        {
            let message = format!(
                "the key {} is a wildcard, and `entries` says how values of {} are read, so this value may never be met: write an item for that key",
                quoted(key),
                quoted(&of)
            );
            self.error(file, value.place, message);
        }
        let Some(reading) = reading else { return Values::Pattern(Pattern::new(value.value.clone())) };
        if value.value.contains('*') {
            return Values::Pattern(Pattern::new(reading.wildcard(&value.value)));
        }
        if reading.is_of_addresses() {
            match Network::parse(&value.value) {
                Some(Ok(network)) if network.is_single() => {}
                Some(Err(error @ InvalidNetwork::Zone { network })) if network.is_single() => {
                    self.error(file, value.place, invalid(&value.value, error));
                }
                Some(_) => {
                    let message = format!(
                        "{} is a network: write `cidr: [{}]` in place of `value`",
                        quoted(&value.value),
                        value.value
                    );
                    self.error(file, value.place, message);
                }
                None => {
                    let message = format!(
                        "{} is no address, and {} is read as one: write an address, or a list of networks as `cidr`",
                        quoted(&value.value),
                        quoted(key)
                    );
                    self.warning(file, value.place, message);
                }
            }
        }
        if reading.is_of_addresses() && value.value.contains(',') {
            // `read` would take the last address of a list, as it does for a client's value.
            return Values::Pattern(Pattern::new(value.value.clone()));
        }
        let read = reading.read(value.value.as_bytes()).text().into_owned();
        Values::Pattern(Pattern::new(String::from_utf8(read).unwrap_or_else(|_| value.value.clone())))
    }

    /// Registers the list values of the item that was added last.
    pub(super) fn members(
        &mut self,
        node: &mut Node,
        among: &AmongNode,
        reading: Option<&Reading>,
        inherited: Inherited<'_>,
    ) {
        let file = inherited.file;
        for Placed { value, place } in &among.cidr {
            match Network::parse(value) {
                Some(Ok(network)) => self.member(node, Member::Network(network), *place, file),
                Some(Err(error)) => self.error(file, *place, invalid(value, error)),
                None => {
                    let message = format!(
                        "{} is no network: write one like `10.0.0.0/8`, `2001:db8::/32` or `192.0.2.1`",
                        quoted(value)
                    );
                    self.error(file, *place, message);
                }
            }
        }
        for Placed { value, place } in &among.values {
            if value.contains('*') {
                let message = format!(
                    "{} has a `*`, and `values` are taken as they stand: write an item with `value:` for a wildcard",
                    quoted(value)
                );
                self.error(file, *place, message);
                continue;
            }
            match Member::parse(value.as_bytes(), reading) {
                Ok(Member::Text(_)) if reading.is_some_and(Reading::is_of_addresses) => {
                    self.warning(file, *place, nobody_meets(value));
                }
                Ok(member) => self.member(node, member, *place, file),
                Err(error) => self.error(file, *place, invalid(value, error)),
            }
        }
        if let Some(named) = &among.file {
            self.members_of_file(node, named, reading, file);
        }
    }

    fn member(&mut self, node: &mut Node, member: Member, place: Place, file: usize) {
        if let Err(earlier) = node.add_member(member)
            && let Some(earlier) = node.children.get(earlier)
        {
            let line = earlier.place.line;
            let first =
                self.files.get(usize::try_from(earlier.file).unwrap_or(usize::MAX)).map_or("", |file| &file.name);
            let message =
                format!("the item on line {line} of {first} answers for this value already: remove one of the two");
            self.error(file, place, message);
        }
    }

    fn members_of_file(&mut self, node: &mut Node, named: &Placed<String>, reading: Option<&Reading>, file: usize) {
        let beside = FilePath::new(&*self.files[file].name).parent().unwrap_or(FilePath::new(""));
        let path = beside.join(&named.value);
        let Some(bytes) = self.list_file(&path, named, file) else { return };
        let name: Arc<str> = path.to_string_lossy().into();
        let mut report = Report::new(&name);
        let mut is_empty = true;
        let is_hidden = reading.is_some_and(|reading| reading.sensitive.is_some());
        for (line, text) in list::lines(&bytes) {
            is_empty = false;
            let shown = || if is_hidden { "***".to_owned() } else { String::from_utf8_lossy(text).into_owned() };
            match Member::parse(text, reading) {
                Ok(Member::Text(_)) if reading.is_some_and(Reading::is_of_addresses) => {
                    report.warning(Place { line, column: 1 }, || nobody_meets(&shown()));
                }
                // Duplicates are no error here: other people and tools produce these files.
                Ok(member) => {
                    let _ = node.add_member(member);
                }
                Err(InvalidNetwork::Beyond { masked }) => {
                    report.warning(Place { line, column: 1 }, || {
                        let taken = if is_hidden { "the network".to_owned() } else { format!("`{masked}`") };
                        format!("{} is an address within a network: it is taken as {taken}", quoted(&shown()))
                    });
                    let _ = node.add_member(Member::Network(masked));
                }
                Err(InvalidNetwork::Zone { network }) => {
                    report.warning(Place { line, column: 1 }, || {
                        format!(
                            "{} has a zone id, which is not part of a client's address: it is taken as `{network}`, on every interface",
                            quoted(&shown())
                        )
                    });
                    let _ = node.add_member(Member::Network(network));
                }
                Err(error) => report.error(Place { line, column: 1 }, || invalid(&shown(), error)),
            }
        }
        if is_empty {
            let message = format!("{} has no values, so the item answers for nothing", quoted(&named.value));
            self.warning(file, named.place, message);
        }
        if is_hidden {
            report.finish_hidden(&mut self.of_lists);
        } else {
            report.finish_bytes(&bytes, &mut self.of_lists);
        }
    }

    fn list_file(&mut self, path: &FilePath, named: &Placed<String>, file: usize) -> Option<Rc<Vec<u8>>> {
        if let Some(read) = self.list_files.get(path) {
            return read.clone();
        }
        let read = match (self.options.read_list)(path) {
            Ok(bytes) if self.list_bytes + bytes.len() > MAX_LIST_BYTES => {
                let message = format!(
                    "the lists up to {} are larger than {} MiB together, the most that one load reads",
                    path.display(),
                    MAX_LIST_BYTES >> 20
                );
                self.error(file, named.place, message);
                None
            }
            Ok(bytes) => {
                self.list_bytes += bytes.len();
                Some(Rc::new(bytes))
            }
            Err(error) => {
                let message = format!("the list {} cannot be read: {error}", path.display());
                self.error(file, named.place, message);
                None
            }
        };
        self.list_files.insert(path.to_owned(), read.clone());
        read
    }
}

/// The keys that the descriptors of a domain can have.
#[derive(Default)]
struct Keys<'a> {
    literal: HashSet<&'a str>,
    wild: Vec<Pattern>,
}

impl<'a> Keys<'a> {
    fn gather(&mut self, items: &'a [DescriptorNode]) {
        for item in items {
            match &item.key {
                Some(key) if key.value.contains('*') => self.wild.push(Pattern::new(key.value.clone())),
                Some(key) => drop(self.literal.insert(&key.value)),
                None => {}
            }
            self.gather(&item.descriptors);
        }
    }

    fn has(&self, key: &str) -> bool {
        self.literal.contains(key) || self.wild.iter().any(|pattern| pattern.matches(key.as_bytes()))
    }
}

fn listed(among: &AmongNode, reading: Option<&Reading>) -> Listed {
    let own = || among.cidr.iter().chain(&among.values).map(|text| text.value.as_str());
    let file = among.file.as_ref().map(|file| file.value.as_str());
    let is_hidden = reading.is_some_and(|reading| reading.sensitive.is_some());
    let mut shown: Vec<&str> = own().take(MOST_SHOWN).collect();
    if is_hidden {
        shown = vec!["***"];
    } else if own().nth(MOST_SHOWN).is_some() {
        shown.push("…");
    }
    shown.extend(file);
    // Commas in values are escaped. The `\@` prefix marks a file name.
    let mut counted: Vec<String> = own().map(|text| text.replace('\\', "\\\\").replace(',', "\\,")).collect();
    counted.extend(file.map(|name| format!("\\@{name}")));
    let mut counted = counted.join(",");
    // The text goes into the key of every request, or into its digest, so it must be short.
    if counted.len() > LONGEST_COUNTED {
        counted = format!("{} values {}", own().count(), &blake3::hash(counted.as_bytes()).to_hex()[..32]);
    }
    let example = own().next().filter(|_| !is_hidden);
    let address = |text: &str| {
        Network::parse(text).and_then(Result::ok).map_or(text.to_owned(), |network| network.address.to_string())
    };
    Listed {
        counted: counted.into(),
        shown: format!("[{}]", shown.join(", ")).into(),
        example: example.map(|text| address(text).into()),
        has_file: among.file.is_some(),
    }
}

/// Returns the warning for a value that is no address in a list of addresses.
fn nobody_meets(text: &str) -> String {
    format!("{} is no address and no network, and the list is one of addresses: nobody meets it", quoted(text))
}

fn invalid(text: &str, error: InvalidNetwork) -> String {
    let text = quoted(text);
    match error {
        InvalidNetwork::Bits { most } => {
            format!("{text} is no network: behind the slash stands a number from 0 to {most}")
        }
        InvalidNetwork::Mapped => {
            format!(
                "{text} is larger than all of IPv4, for in IPv6 notation 96 bits stand before its address: write an IPv4 network like `10.0.0.0/8`"
            )
        }
        InvalidNetwork::Beyond { masked } => {
            format!("{text} is an address within a network, not a network: write `{masked}`, or the address alone")
        }
        InvalidNetwork::Zone { network } => {
            format!(
                "{text} has a zone id, and the zone id of a client's address is cut off before it is compared: write `{network}`, which answers for that address on every interface"
            )
        }
    }
}
