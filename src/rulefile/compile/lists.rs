//! Compiler for `entries` (normalisation of values) and for the values and lists of items.

use std::sync::Arc;

use foldhash::{HashMap, HashSet};

use super::{Compiler, Inherited};
use crate::normalize::digest::Digester;
use crate::normalize::network::{InvalidNetwork, Network};
use crate::normalize::pattern::Pattern;
use crate::normalize::{Form, Normalizer, Normalizers, Others, V4_PREFIX, V6_PREFIX};
use crate::rulefile::document::{DescriptorNode, Document, EntryNode, FormWord, ValueListNode};
use crate::rulefile::documents::{OverlayRules, list_path};
use crate::rulefile::problem::{Placed, Report, quoted};
use crate::rules::list::{self, ListValue};
use crate::rules::tree::{Listed, Position, TreeLevel, Values};

/// Maximum prefix length of an IPv6 address, in bits.
const MOST_V6: u8 = 128;

/// Maximum number of list values that a rule's name shows: 3.
const MOST_SHOWN: usize = 3;

/// Maximum length of a list's text in a shared counter key: 80 bytes. A longer one is hashed.
const LONGEST_COUNTED: usize = 80;

impl Compiler<'_> {
    /// Returns the normalizers of each domain's entries, by domain name.
    pub(crate) fn normalizers(
        &mut self,
        documents: &[(usize, Document)],
        overlays: &[OverlayRules],
    ) -> HashMap<String, Normalizers> {
        let mut domains: HashMap<String, Normalizers> = HashMap::default();
        let mut said: HashSet<(&str, &str)> = HashSet::default();
        let mut keys: HashMap<&str, Keys<'_>> = HashMap::default();
        for document in documents.iter().map(|(_, document)| document).chain(overlays.iter().map(|own| &own.document)) {
            keys.entry(&document.domain.value).or_default().gather(&document.descriptors);
        }
        for (file, document) in documents {
            let domain = document.domain.value.as_str();
            for node in &document.entries {
                let (key, place) = (node.key.value.as_str(), node.key.place);
                if !said.insert((domain, key)) {
                    let message = format!(
                        "{} is already in `entries` of an earlier file of this domain: write it in one file only",
                        quoted(key)
                    );
                    self.error(*file, place, message);
                }
                if !keys.get(domain).is_some_and(|keys| keys.has(key)) {
                    let message = format!(
                        "no descriptor of this domain has the key {}, so this entry has no effect: check the spelling",
                        quoted(key)
                    );
                    self.warning(*file, place, message);
                }
                let normalizer = match node.is_laid {
                    true => self.valid_normalizer(*file, node),
                    false => self.normalizer(*file, node),
                };
                domains.entry(domain.to_owned()).or_default().insert(key, normalizer);
            }
        }
        for (_, Document { domain, requests, .. }) in documents {
            for key in requests.iter().flat_map(|requests| requests.address_keys()) {
                domains.entry(domain.value.clone()).or_default().default_to_addresses(key);
            }
        }
        domains
    }

    /// Returns the normalizer of an entry without errors.
    pub(super) fn valid_normalizer(&self, file: usize, node: &EntryNode) -> Normalizer {
        let bits = |prefix: &Option<Placed<u32>>, default| {
            prefix.as_ref().and_then(|prefix| u8::try_from(prefix.value).ok()).unwrap_or(default)
        };
        let form = match node.form {
            None => Form::Text,
            Some(FormWord::Path) => Form::Path,
            Some(FormWord::Ip) => Form::Ip {
                v4_prefix: bits(&node.v4_prefix, V4_PREFIX).min(V4_PREFIX),
                v6_prefix: bits(&node.v6_prefix, V6_PREFIX).min(MOST_V6),
            },
        };
        let digester = node.sensitive.map(|_| Digester(self.options.key_secret));
        let others = match &node.refuses_others {
            Some(Placed { value: true, place }) if node.form == Some(FormWord::Ip) => {
                Others::Refused { file: u32::try_from(file).unwrap_or(u32::MAX), line: place.line }
            }
            Some(_) => Others::Counted,
            None => Others::Unset,
        };
        Normalizer { form, is_lower: node.is_lower, digester, others }
    }

    /// Returns the normalizer of an entry. Reports settings that are wrong or have no effect.
    pub(super) fn normalizer(&mut self, file: usize, node: &EntryNode) -> Normalizer {
        let normalizer = self.valid_normalizer(file, node);
        let form = &normalizer.form;
        if matches!(form, Form::Ip { .. }) {
            self.prefix(file, node.v4_prefix.as_ref(), V4_PREFIX);
            self.prefix(file, node.v6_prefix.as_ref(), MOST_V6);
        } else {
            let place = |prefix: &Option<Placed<u32>>| prefix.as_ref().map(|prefix| prefix.place);
            let refuses_others = node.refuses_others.as_ref().map(|refuses| refuses.place);
            for (key, place) in [
                ("v4_prefix", place(&node.v4_prefix)),
                ("v6_prefix", place(&node.v6_prefix)),
                ("not_an_address", refuses_others),
            ] {
                if let Some(place) = place {
                    self.error(
                        file,
                        place,
                        format!("`{key}` applies only to addresses: write `as: ip` beside it, or remove it"),
                    );
                }
            }
        }
        if node.is_lower && matches!(form, Form::Ip { .. }) {
            self.warning(
                file,
                node.key.place,
                "`case` has no effect beside `as: ip`, because an address has one spelling: remove it".to_owned(),
            );
        }
        let has_prefix = node.v4_prefix.is_some() || node.v6_prefix.is_some() || node.refuses_others.is_some();
        if node.form.is_none() && !node.is_lower && node.sensitive.is_none() && !has_prefix {
            let message = "the entry has no setting: write `as: ip`, `as: path`, `case: lower` or `sensitive: true`";
            self.warning(file, node.key.place, message.to_owned());
        }
        if let Some(place) = node.sensitive
            && self.options.key_secret.is_none()
        {
            let message = "`sensitive: true` needs a secret, and Tidegate does not start without one: set the environment variable `KEY_SECRET_FILE` to the path of a file with at least 16 random bytes".to_owned();
            if self.options.needs_secret {
                self.error(file, place, message);
            } else {
                self.warning(file, place, message);
            }
        }
        normalizer
    }

    /// Reports a prefix length above `most`.
    fn prefix(&mut self, file: usize, found: Option<&Placed<u32>>, most: u8) {
        if let Some(Placed { value, place }) = found
            && *value > u32::from(most)
        {
            let message = format!("the prefix length {value} is too large: write a number from 0 to {most}");
            self.error(file, *place, message);
        }
    }

    /// Returns the values that an item matches.
    pub(crate) fn values(
        &mut self,
        item: &DescriptorNode,
        value_list: Option<&ValueListNode>,
        key: &str,
        normalizers: &Normalizers,
        file: usize,
    ) -> Values {
        let normalizer = normalizers.of(key.as_bytes()).map(AsRef::as_ref);
        if let Some(value_list) = value_list {
            if let Some(value) = &item.value {
                let message = format!(
                    "the item has both `value` and a list: write {} into `values` instead",
                    quoted(&value.value)
                );
                self.error(file, value.place, message);
            }
            if key.contains('*') {
                let message = format!(
                    "a list needs a key without a wildcard, but {} is a wildcard: write the whole key, or `value` instead of the list",
                    quoted(key)
                );
                self.error(file, item.place, message);
            }
            return Values::Listed(Box::new(listed(value_list, normalizer)));
        }
        let Some(value) = &item.value else { return Values::Any };
        if key.contains('*')
            && let Some(of) = normalizers.key_that_matches(&Pattern::new(key.to_owned()))
        {
            let message = format!(
                "the wildcard key {} matches {}, whose values `entries` normalises, so this value may never match: write a separate item for that key",
                quoted(key),
                quoted(&of)
            );
            self.error(file, value.place, message);
        }
        let Some(normalizer) = normalizer else { return Values::Pattern(Pattern::new(value.value.clone())) };
        if value.value.contains('*') {
            return Values::Pattern(Pattern::new(normalizer.wildcard(&value.value)));
        }
        if normalizer.is_of_addresses() {
            match Network::parse(&value.value) {
                Some(Ok(network)) if network.is_single() => {}
                Some(Err(error @ InvalidNetwork::Zone { network })) if network.is_single() => {
                    self.error(file, value.place, invalid(&quoted(&value.value), error));
                }
                Some(_) => {
                    let message = format!(
                        "{} is a network: write `cidr: [{}]` instead of `value`",
                        quoted(&value.value),
                        value.value
                    );
                    self.error(file, value.place, message);
                }
                None => {
                    let message = format!(
                        "{} is not an address, but values of {} are read as addresses: write an address, or a list of networks in `cidr`",
                        quoted(&value.value),
                        quoted(key)
                    );
                    self.warning(file, value.place, message);
                }
            }
        }
        if normalizer.is_of_addresses() && value.value.contains(',') {
            // `read` would take the last address of a list, as it does for a client's value.
            return Values::Pattern(Pattern::new(value.value.clone()));
        }
        let read = normalizer.normalize(value.value.as_bytes()).text().into_owned();
        Values::Pattern(Pattern::new(String::from_utf8(read).unwrap_or_else(|_| value.value.clone())))
    }

    /// Offers to refuse values that are no address, once for each key, where a list denies addresses: such a value is in no list.
    pub(super) fn offer_to_refuse(
        &mut self,
        key: &str,
        place: Position,
        normalizer: &Normalizer,
        inherited: Inherited<'_>,
    ) {
        let is_open = normalizer.is_of_addresses() && normalizer.others == Others::Unset;
        if is_open && self.offered.insert((inherited.domain.to_owned(), key.to_owned())) {
            let message = format!(
                "a value of {} that is not an address is in no list, so it is not denied but counted as text: write `not_an_address: refuse` beside `as: ip`, \
                 or `not_an_address: count` to keep it so",
                quoted(key)
            );
            self.warning(inherited.file, place, message);
        }
    }

    /// Registers the list values of the item that was added last.
    pub(crate) fn list_values(
        &mut self,
        node: &mut TreeLevel,
        value_list: &ValueListNode,
        normalizer: Option<&Normalizer>,
        inherited: Inherited<'_>,
    ) {
        let file = inherited.file;
        for Placed { value, place } in &value_list.cidr {
            match Network::parse(value) {
                Some(Ok(network)) => self.list_value(node, ListValue::Network(network), *place, file),
                Some(Err(error)) => self.error(file, *place, invalid(&quoted(value), error)),
                None => {
                    let message = format!(
                        "{} is not a network: write one like `10.0.0.0/8`, `2001:db8::/32` or `192.0.2.1`",
                        quoted(value)
                    );
                    self.error(file, *place, message);
                }
            }
        }
        for Placed { value, place } in &value_list.values {
            if value.contains('*') {
                let message = format!(
                    "{} contains a `*`, but `values` has no wildcards: write a separate item with `value:` for the wildcard",
                    quoted(value)
                );
                self.error(file, *place, message);
                continue;
            }
            match ListValue::parse(value.as_bytes(), normalizer) {
                Ok(ListValue::Text(_)) if normalizer.is_some_and(Normalizer::is_of_addresses) => {
                    self.warning(file, *place, nobody_meets(&quoted(value)));
                }
                Ok(list_value) => self.list_value(node, list_value, *place, file),
                Err(error) => self.error(file, *place, invalid(&quoted(value), error)),
            }
        }
        if let Some(named) = &value_list.file {
            self.list_values_of_file(node, named, normalizer, file);
        }
    }

    fn list_value(&mut self, node: &mut TreeLevel, list_value: ListValue, place: Position, file: usize) {
        if let Err(earlier) = node.add_list_value(list_value)
            && let Some(earlier) = node.children.get(earlier)
        {
            let line = earlier.place.line;
            let first =
                self.files.get(usize::try_from(earlier.file).unwrap_or(usize::MAX)).map_or("", |file| &file.name);
            let message = format!("the item on line {line} of {first} already has this value: remove one of the two");
            self.error(file, place, message);
        }
    }

    fn list_values_of_file(
        &mut self,
        node: &mut TreeLevel,
        named: &Placed<String>,
        normalizer: Option<&Normalizer>,
        file: usize,
    ) {
        let path = list_path(&self.files[file].name, &named.value);
        let lists = self.lists;
        let bytes = match lists.get(&path) {
            Some(Ok(bytes)) => bytes,
            Some(Err(why)) => return self.error(file, named.place, format!("the list {} {why}", path.display())),
            None => {
                let message =
                    format!("the list {} cannot be read: these rules do not come from a file", path.display());
                return self.error(file, named.place, message);
            }
        };
        let name: Arc<str> = path.to_string_lossy().into();
        let mut report = Report::new(&name);
        let mut is_empty = true;
        for (line, text) in list::lines(bytes) {
            is_empty = false;
            let place = Position { line, column: 1 };
            // A list may be any file that somebody who writes rules can name.
            let shown = || format!("the line ({} bytes, not shown)", text.len());
            match ListValue::parse(text, normalizer) {
                Ok(ListValue::Text(_)) if normalizer.is_some_and(Normalizer::is_of_addresses) => {
                    report.warning(place, || nobody_meets(&shown()));
                }
                // Duplicates are no error here: other people and tools produce these files.
                Ok(list_value) => {
                    let _ = node.add_list_value(list_value);
                }
                Err(InvalidNetwork::Beyond { masked }) => {
                    report.warning(place, || {
                        format!(
                            "{} is an address with a prefix length, not a network: it is read as its network",
                            shown()
                        )
                    });
                    let _ = node.add_list_value(ListValue::Network(masked));
                }
                Err(InvalidNetwork::Zone { network }) => {
                    report.warning(place, || {
                        format!(
                            "{} has a zone id, which is not part of a client's address: it is read without it, and matches on every interface",
                            shown()
                        )
                    });
                    let _ = node.add_list_value(ListValue::Network(network));
                }
                Err(error) => report.error(place, || invalid(&shown(), error)),
            }
        }
        if is_empty {
            let message = format!(
                "{} has no values, so the item matches nothing: add values, or remove the item",
                quoted(&named.value)
            );
            self.warning(file, named.place, message);
        }
        report.finish_hidden(&mut self.of_lists);
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

fn listed(value_list: &ValueListNode, normalizer: Option<&Normalizer>) -> Listed {
    let own = || value_list.cidr.iter().chain(&value_list.values).map(|text| text.value.as_str());
    let file = value_list.file.as_ref().map(|file| file.value.as_str());
    let is_hidden = normalizer.is_some_and(|normalizer| normalizer.digester.is_some());
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
        has_file: value_list.file.is_some(),
    }
}

/// Returns the warning for `value`, as a message shows it, that is no address in a list of addresses.
fn nobody_meets(value: &str) -> String {
    format!(
        "{value} is neither an address nor a network, so it matches nothing in a list of addresses: correct it, or remove it"
    )
}

/// Returns the error for `text`, as a message shows it.
pub(super) fn invalid(text: &str, error: InvalidNetwork) -> String {
    match error {
        InvalidNetwork::Bits { most } => {
            format!("{text} is not a network: the prefix length after the slash must be a number from 0 to {most}")
        }
        InvalidNetwork::Mapped => {
            format!(
                "{text} is larger than all of IPv4, because the IPv4 address begins after 96 bits in IPv6 notation: write an IPv4 network like `10.0.0.0/8`"
            )
        }
        InvalidNetwork::Beyond { masked } => {
            format!(
                "{text} is an address with a prefix length, not a network: write the network `{masked}`, or the address without a prefix length"
            )
        }
        InvalidNetwork::Zone { network } => {
            format!(
                "{text} has a zone id, but client addresses are compared without their zone id: write `{network}`, which matches on every interface"
            )
        }
    }
}
