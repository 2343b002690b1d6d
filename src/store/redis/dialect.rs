//! The commands that a server, or a proxy in front of servers, understands. The normal way is RESP3 with `SCRIPT LOAD` and `EVALSHA`.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use redis::{ServerError, Value};

use super::script::By;

/// Bits of a dialect in [`KnownDialect`]; the first says that one is known.
const IS_KNOWN: u8 = 1;
const RESP2: u8 = 2;
const NO_SCRIPT: u8 = 4;
const NO_EVALSHA: u8 = 8;
/// Text after which servers repeat the arguments of a command that they do not know.
const ARGUMENTS: &str = ", with args";
/// Most bytes of a server's text in a log line: 128.
const LONGEST_TEXT: usize = 128;

/// Commands that a connection has to do without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// True without `HELLO 3`: RESP2 is spoken. What answers may be a proxy that spreads the keys over several servers, so a script has one
    /// key, and runs where that key is. `EVAL` loads the script there; a proxy may send `SCRIPT LOAD` to other servers.
    pub is_resp2: bool,
    /// True without `SCRIPT`, which is tried in RESP3 only: `EVAL` loads the script.
    pub lacks_script: bool,
    /// True without `EVALSHA`: each call is an `EVAL`, with the text of the script.
    pub lacks_evalsha: bool,
}

/// The dialect of the last connection to a server that was made, so that the next ones begin with it.
#[derive(Debug, Default)]
pub struct KnownDialect {
    /// Bits of the dialect; 0 before the first connection.
    last: AtomicU8,
    /// The same, but 0 again when a connection was lost or not made: the server may be another one then.
    next: AtomicU8,
}

impl Dialect {
    /// Returns true if scripts may have several keys, and calls of several requests share a script.
    pub const fn is_together(self) -> bool {
        !self.is_resp2
    }

    /// Returns true if `EVAL` loads the script, and `SCRIPT LOAD` does not.
    pub const fn loads_by_eval(self) -> bool {
        self.is_resp2 || self.lacks_script || self.lacks_evalsha
    }

    /// Returns the way in which calls name the script.
    pub const fn by(self) -> By {
        if self.lacks_evalsha { By::Text } else { By::Hash }
    }

    const fn bits(self) -> u8 {
        let Self { is_resp2, lacks_script, lacks_evalsha } = self;
        IS_KNOWN
            | if is_resp2 { RESP2 } else { 0 }
            | if lacks_script { NO_SCRIPT } else { 0 }
            | if lacks_evalsha { NO_EVALSHA } else { 0 }
    }

    const fn of_bits(bits: u8) -> Self {
        Self { is_resp2: bits & RESP2 != 0, lacks_script: bits & NO_SCRIPT != 0, lacks_evalsha: bits & NO_EVALSHA != 0 }
    }
}

impl fmt::Display for Dialect {
    /// Writes what is missing and what that means.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (
                self.is_resp2,
                "no HELLO 3: RESP2 is spoken, EVAL loads the script, and each counter is charged by a script of its own, because this may be a proxy in front of several servers",
            ),
            (self.lacks_script && !self.lacks_evalsha, "no SCRIPT LOAD: EVAL loads the script"),
            (self.lacks_evalsha, "no EVALSHA: each call sends the text of the script with EVAL"),
        ];
        let parts: Vec<&str> = parts.into_iter().filter(|(is_so, _)| *is_so).map(|(_, part)| part).collect();
        f.write_str(&parts.join("; "))
    }
}

impl KnownDialect {
    /// Returns the dialect to begin a connection with: that of the last one, unless the server may have changed since.
    pub fn next(&self) -> Dialect {
        Dialect::of_bits(self.next.load(Ordering::Relaxed))
    }

    /// Notes the dialect of a new connection. Returns true if it differs from the one before.
    pub fn learn(&self, dialect: Dialect) -> bool {
        self.next.store(dialect.bits(), Ordering::Relaxed);
        self.last.swap(dialect.bits(), Ordering::Relaxed) != dialect.bits()
    }

    /// Notes that a connection was lost or not made.
    pub fn forget(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    /// Returns true if the last connection takes scripts with several keys; false if there was none.
    pub fn is_together(&self) -> bool {
        let bits = self.last.load(Ordering::Relaxed);
        bits & (IS_KNOWN | RESP2) == IS_KNOWN
    }
}

/// Returns true if a server says that it does not know a command. Proxies have texts of their own; a missing right (`NOPERM`) is none of them.
pub fn is_unknown(reply: &Value) -> bool {
    let Value::ServerError(error) = reply else { return false };
    let (code, said) = (error.code(), error.details().unwrap_or_default().to_ascii_lowercase());
    match code {
        "ERR" => ["unknown command", "unsupported command", "not supported"].iter().any(|text| said.contains(text)),
        "unknown" | "unsupported" => said.starts_with("command"),
        _ => false,
    }
}

/// Returns true if a server answers `HELLO 3` so that RESP2 is to be tried.
pub fn refuses_resp3(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.code() == "NOPROTO") || is_unknown(reply)
}

/// Returns true for an error that a proxy makes where one of its servers does not answer (`upstream failure`): codes of Redis are in capitals.
pub fn is_of_proxy(error: &ServerError) -> bool {
    error.code().starts_with(|letter: char| letter.is_ascii_lowercase())
}

/// Returns the text of a server's error for a log line: without arguments that it repeats, and without what begins with a brace, as names of
/// counters do.
pub fn said(error: &ServerError) -> String {
    let details = error.details().unwrap_or_default();
    let end = [details.find(ARGUMENTS), details.find('{')].into_iter().flatten().min().unwrap_or(details.len());
    let text = details.get(..end).unwrap_or_default().chars().filter(|letter| matches!(letter, ' '..='~'));
    text.take(LONGEST_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> Value {
        redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("an error")
    }

    #[test]
    fn a_command_that_is_unknown_is_told_from_one_that_is_not_permitted() {
        for unknown in [
            "ERR unknown command 'HELLO', with args beginning with: '3' ",
            "ERR unknown command `HELLO`, with args beginning with: `3`, ",
            "ERR unsupported command 'HELLO'",
            "unsupported command 'hello'",
            "ERR Command HELLO is not supported by the proxy",
        ] {
            assert!(is_unknown(&error(unknown)) && refuses_resp3(&error(unknown)), "{unknown}");
        }
        let protocol = error("NOPROTO unsupported protocol version");
        assert!(refuses_resp3(&protocol) && !is_unknown(&protocol));
        for other in [
            "NOPERM this user has no permissions to run the 'hello' command",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "NOAUTH HELLO must be called with the client already authenticated",
            "ERR max number of clients reached",
            "LOADING Redis is loading the dataset in memory",
            "upstream failure",
        ] {
            assert!(!is_unknown(&error(other)) && !refuses_resp3(&error(other)), "{other}");
        }
        assert!(!is_unknown(&Value::Okay) && !refuses_resp3(&Value::Nil));
    }

    #[test]
    fn the_text_of_an_error_is_short_and_has_no_arguments_and_no_counter() {
        let told = |line: &str| {
            let Value::ServerError(error) = error(line) else { panic!("an error") };
            said(&error)
        };
        assert_eq!(
            told("ERR unknown command 'EVALSHA', with args beginning with: '0123' '1' 'a:{d|user}' "),
            "unknown command 'EVALSHA'"
        );
        assert_eq!(told("ERR no such key a:{d|user}gcra"), "no such key a:");
        assert_eq!(told(&format!("ERR {}", "x".repeat(1_000))).len(), LONGEST_TEXT);
        assert_eq!(told("ERR"), "");
    }

    #[test]
    fn a_dialect_is_remembered_until_a_connection_is_lost_and_before_the_first_scripts_have_one_key() {
        let known = KnownDialect::default();
        assert_eq!((known.next(), known.is_together()), (Dialect::default(), false), "nothing is known");
        let plain = Dialect::default();
        assert!(known.learn(plain) && known.is_together());
        let other = Dialect { is_resp2: true, lacks_script: true, lacks_evalsha: false };
        assert!(known.learn(other) && !known.learn(other), "it is told once");
        assert_eq!((known.next(), known.is_together()), (other, false));
        known.forget();
        assert_eq!((known.next(), known.is_together()), (plain, false), "HELLO 3 is tried again");
        assert!(!known.learn(other), "and what was told is not told again");
    }
}
