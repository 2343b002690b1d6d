//! Parses descriptors on the command line: `key=value,key=value`.

use clap::Arg;

use crate::model::{Descriptor, Entry};

/// Returns the argument for a descriptor.
pub(super) fn argument() -> Arg {
    Arg::new("descriptor")
        .long("descriptor")
        .short('d')
        .value_name("KEY=VALUE,...")
        .required(true)
        .value_parser(parse)
        .help("Descriptor: its entries, outermost first. In a value, write \\, for a comma and \\\\ for a backslash")
}

/// Parses a descriptor.
fn parse(text: &str) -> Result<Descriptor, String> {
    let entries = split(text).into_iter().map(|entry| {
        let (key, value) =
            entry.split_once('=').ok_or_else(|| format!("'{entry}' is not an entry: write KEY=VALUE"))?;
        if key.is_empty() {
            return Err(format!("'{entry}' has no key: write KEY=VALUE"));
        }
        Ok(Entry::new(key.to_owned(), value.to_owned()))
    });
    Ok(Descriptor { entries: entries.collect::<Result<_, _>>()?, ..Descriptor::default() })
}

/// Splits `text` at the commas, except at commas after a backslash, and removes the backslashes.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            ',' => parts.push(String::new()),
            other => {
                let plain = if other == '\\' { characters.next().unwrap_or('\\') } else { other };
                if let Some(part) = parts.last_mut() {
                    part.push(plain);
                }
            }
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn entries_are_split_at_bare_commas() {
        let descriptor = parse(r"user=a\,b,path=/x=y,empty=").expect("a descriptor");
        let entries: Vec<_> = descriptor.entries.iter().map(|entry| (&entry.key[..], &entry.value[..])).collect();
        assert_eq!(entries, [(&b"user"[..], &b"a,b"[..]), (b"path", b"/x=y"), (b"empty", b"")]);
        assert!(parse("user").is_err());
        assert!(parse("=x").is_err());
    }
}
