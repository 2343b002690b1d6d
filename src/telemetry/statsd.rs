//! Lines for statsd and DogStatsD, with the names and tags of the reference.

use std::fmt::Write;

use regex::{Captures, Regex};

/// Maximum number of lines for the times of calls in one flush: 1,000. Above it, each line stands for several calls and says so
/// with its sample rate.
const MOST_TIMES: u64 = 1_000;

/// Rule that renames a statistic and turns parts of its name into tags (`DOG_STATSD_MOGRIFIER_*`).
#[derive(Clone, Debug)]
pub struct Mogrifier {
    pattern: Regex,
    name: String,
    tags: Vec<(String, String)>,
}

impl Mogrifier {
    /// Creates a mogrifier. `name` and the values of `tags` may refer to groups of `pattern`: `$0` is the whole match.
    ///
    /// # Errors
    /// Names the group that `pattern` does not have.
    pub fn new(pattern: Regex, name: String, tags: Vec<(String, String)>) -> Result<Self, String> {
        let groups = pattern.captures_len();
        let used = std::iter::once(&name).chain(tags.iter().map(|(_, value)| value));
        let missing = used.flat_map(|text| pieces(text)).find_map(|(_, group)| group.filter(|group| *group >= groups));
        match missing {
            Some(group) => Err(format!("${group}")),
            None => Ok(Self { pattern, name, tags }),
        }
    }
}

/// Splits `text` at its references to groups: each piece is plain text and the number of the group that follows it.
fn pieces(text: &str) -> Vec<(&str, Option<usize>)> {
    let mut all = Vec::new();
    let (mut plain, mut from) = (0, 0);
    while let Some(at) = text.get(from..).and_then(|rest| rest.find('$')).map(|at| from + at) {
        let digits = text.bytes().skip(at + 1).take_while(u8::is_ascii_digit).count();
        from = at + 1 + digits;
        if digits > 0 {
            let group = text.get(at + 1..from).and_then(|digits| digits.parse().ok());
            all.push((text.get(plain..at).unwrap_or_default(), Some(group.unwrap_or(usize::MAX))));
            plain = from;
        }
    }
    all.push((text.get(plain..).unwrap_or_default(), None));
    all
}

fn filled(text: &str, found: &Captures<'_>) -> String {
    pieces(text).into_iter().fold(String::new(), |mut all, (plain, group)| {
        all.push_str(plain);
        all.push_str(group.and_then(|group| found.get(group)).map_or("", |found| found.as_str()));
        all
    })
}

/// Format of the lines.
#[derive(Clone, Debug)]
pub enum Format {
    /// statsd: tags are part of the name, as in the reference.
    Statsd {
        /// Tags of every statistic.
        tags: Vec<(String, String)>,
    },
    /// DogStatsD: tags stand behind the value.
    Dog {
        /// Tags of every statistic that stand first, as they are sent: `KEY:VALUE`.
        global: Vec<String>,
        /// Tags of every statistic.
        tags: Vec<(String, String)>,
        /// Renaming rules; the first that matches applies.
        mogrifiers: Vec<Mogrifier>,
    },
}

impl Format {
    /// Adds the line of a counter that grew by `grown`.
    pub fn counter(&self, name: &str, grown: u64, lines: &mut Vec<u8>) {
        self.line(name, &format!("{grown}|c"), lines);
    }

    /// Adds the lines of calls: `times` has milliseconds and the number of calls that took them.
    pub fn times(&self, name: &str, times: &[(u64, u64)], lines: &mut Vec<u8>) {
        let calls: u64 = times.iter().map(|(_, calls)| calls).sum();
        let shown = calls.min(MOST_TIMES);
        let rate = if shown < calls { format!("|@{}", share(shown, calls)) } else { String::new() };
        let scaled = |calls_before: u64| u128::from(calls_before) * u128::from(shown) / u128::from(calls.max(1));
        let mut before = 0;
        for (millis, count) in times {
            let value = match self {
                Self::Statsd { .. } => format!("{millis}|ms{rate}"),
                Self::Dog { .. } => format!("{millis}.000000|ms{rate}"),
            };
            for _ in scaled(before)..scaled(before + count) {
                self.line(name, &value, lines);
            }
            before += count;
        }
    }

    fn line(&self, name: &str, value: &str, lines: &mut Vec<u8>) {
        let mut text = String::new();
        let _ = match self {
            Self::Statsd { tags } => {
                text.push_str(name);
                for (key, value) in tags {
                    let _ = write!(text, ".__{key}={}", plain(value));
                }
                write!(text, ":{value}")
            }
            Self::Dog { global, tags, mogrifiers } => {
                let found = mogrifiers.iter().find_map(|rule| Some((rule, rule.pattern.captures(name)?)));
                let (name, more) = match &found {
                    Some((rule, groups)) => {
                        let tags = rule.tags.iter().map(|(key, value)| (key.as_str(), filled(value, groups)));
                        (filled(&rule.name, groups), tags.collect())
                    }
                    None => (name.to_owned(), Vec::new()),
                };
                let tags = tags.iter().map(|(key, value)| (key.as_str(), plain(value)));
                let tags = tags.chain(more).map(|(key, value)| format!("{key}:{value}"));
                let tags: Vec<_> = global.iter().cloned().chain(tags).collect();
                let mark = if tags.is_empty() { "" } else { "|#" };
                write!(text, "{name}:{value}{mark}{}", tags.join(","))
            }
        };
        text.push('\n');
        lines.extend_from_slice(text.as_bytes());
    }
}

/// Returns the value of a tag as the reference writes it: `.`, `:` and `|` become underscores.
fn plain(value: &str) -> String {
    value.replace(['.', ':', '|'], "_")
}

fn share(shown: u64, calls: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a sample rate needs no more than 15 digits")]
    let (shown, calls) = (shown as f64, calls as f64);
    shown / calls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(fill: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut lines = Vec::new();
        fill(&mut lines);
        String::from_utf8(lines).unwrap()
    }

    fn tag(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    #[test]
    fn statsd_has_its_tags_in_the_name_and_dogstatsd_behind_the_value() {
        let tags = vec![tag("az", "eu.1")];
        let statsd = Format::Statsd { tags: tags.clone() };
        assert_eq!(text(|lines| statsd.counter("a.b", 3, lines)), "a.b.__az=eu_1:3|c\n");
        assert_eq!(
            text(|lines| statsd.times("t", &[(0, 1), (7, 2)], lines)),
            "t.__az=eu_1:0|ms\nt.__az=eu_1:7|ms\nt.__az=eu_1:7|ms\n"
        );
        let dog = Format::Dog { global: vec!["env:a.b".to_owned()], tags, mogrifiers: Vec::new() };
        assert_eq!(text(|lines| dog.counter("a.b", 3, lines)), "a.b:3|c|#env:a.b,az:eu_1\n");
        assert_eq!(text(|lines| dog.times("t", &[(7, 1)], lines)), "t:7.000000|ms|#env:a.b,az:eu_1\n");
        assert_eq!(
            text(|lines| {
                let dog = Format::Dog { global: Vec::new(), tags: Vec::new(), mogrifiers: Vec::new() };
                dog.counter("a", 1, lines);
            }),
            "a:1|c\n"
        );
    }

    #[test]
    fn the_first_mogrifier_that_matches_renames_and_makes_tags() {
        let rule = |pattern, name: &str, tags| Mogrifier::new(Regex::new(pattern).unwrap(), name.to_owned(), tags);
        let by_place = rule(
            r"^ratelimit\.service\.rate_limit\.(.*)\.(.*)\.(.*)$",
            "ratelimit.service.rate_limit.$3",
            vec![tag("domain", "$1"), tag("descriptor", "$2")],
        );
        let mogrifiers = vec![by_place.unwrap(), rule("^ratelimit", "x$0", Vec::new()).unwrap()];
        let dog = Format::Dog { global: Vec::new(), tags: vec![tag("az", "1")], mogrifiers };
        assert_eq!(
            text(|lines| dog.counter("ratelimit.service.rate_limit.mongo_cps.database_users.within_limit", 1, lines)),
            "ratelimit.service.rate_limit.within_limit:1|c|#az:1,domain:mongo_cps,descriptor:database_users\n"
        );
        assert_eq!(text(|lines| dog.counter("ratelimit.x", 1, lines)), "xratelimit:1|c|#az:1\n");
        assert_eq!(text(|lines| dog.counter("other", 1, lines)), "other:1|c|#az:1\n");
        assert_eq!(rule("(a)", "$1$2", Vec::new()).unwrap_err(), "$2");
        assert_eq!(rule("a", "$", vec![tag("k", "$1x")]).unwrap_err(), "$1");
    }

    #[test]
    fn many_calls_are_a_thousand_lines_that_say_what_they_stand_for() {
        let statsd = Format::Statsd { tags: Vec::new() };
        let lines = text(|lines| statsd.times("t", &[(0, 3_990), (9, 10)], lines));
        assert_eq!(lines.lines().count(), 1_000);
        assert_eq!(lines.lines().filter(|line| *line == "t:9|ms|@0.25").count(), 3);
        assert!(lines.starts_with("t:0|ms|@0.25\n"), "{lines}");
    }
}
