//! Resolution of plain scalars in YAML 1.1, as in yaml.v2 of Go (its `resolve.go`), the reference's parser.

/// Value of an unquoted scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scalar {
    /// `~`, `null` or an empty scalar.
    Null,
    /// `yes`, `off`, `true`, ...
    Bool(bool),
    /// A whole number of 64 bits.
    Int {
        /// Value, from `i64::MIN` to `u64::MAX`.
        value: i128,
        /// True if only a leading zero makes it octal. Few people who write one intend that.
        leading_zero: bool,
    },
    /// A number with a fraction or an exponent, or a whole number too large for 64 bits.
    Float(f64),
    /// Anything else.
    Text,
}

/// Resolves an unquoted scalar.
pub(crate) fn resolve(plain: &str) -> Scalar {
    match plain {
        "" | "~" | "null" | "Null" | "NULL" => return Scalar::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" | "true" | "True" | "TRUE" => return Scalar::Bool(true),
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" | "false" | "False" | "FALSE" => {
            return Scalar::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" => return Scalar::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return Scalar::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return Scalar::Float(f64::NEG_INFINITY),
        _ => {}
    }
    match plain.bytes().next() {
        Some(b'0'..=b'9' | b'+' | b'-') if plain.contains('_') => number(&plain.replace('_', "")),
        Some(b'0'..=b'9' | b'+' | b'-' | b'.') => number(plain),
        _ => Scalar::Text,
    }
}

/// Returns true if an unquoted scalar is null.
pub(crate) fn is_null(plain: &str) -> bool {
    matches!(plain, "" | "~" | "null" | "Null" | "NULL")
}

fn number(text: &str) -> Scalar {
    if let Some((value, leading_zero)) = integer(text) {
        return Scalar::Int { value, leading_zero };
    }
    match text.parse::<f64>() {
        // Go rejects numbers beyond the range of floats, and yaml.v2 then reads them as texts. `-inf` and `+nan` have no dot, so
        // they are texts too.
        Ok(value) if value.is_finite() => Scalar::Float(value),
        _ => Scalar::Text,
    }
}

fn integer(text: &str) -> Option<(i128, bool)> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = |marks: [&str; 2]| marks.iter().find_map(|mark| digits.strip_prefix(mark));
    let (radix, digits, leading_zero) = if let Some(rest) = prefixed(["0x", "0X"]) {
        (16, rest, false)
    } else if let Some(rest) = prefixed(["0b", "0B"]) {
        (2, rest, false)
    } else if let Some(rest) = prefixed(["0o", "0O"]) {
        (8, rest, false)
    } else if digits.len() > 1 && digits.starts_with('0') {
        (8, digits, true)
    } else {
        (10, digits, false)
    };
    // `from_str_radix` would accept a second sign.
    if !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let size = i128::from(u64::from_str_radix(digits, radix).ok()?);
    let value = if negative { -size } else { size };
    (value >= i128::from(i64::MIN)).then_some((value, leading_zero))
}

#[cfg(test)]
mod tests {
    use super::{Scalar, resolve};

    fn int(text: &str) -> Option<i128> {
        match resolve(text) {
            Scalar::Int { value, .. } => Some(value),
            _ => None,
        }
    }

    #[test]
    fn integers_are_read_in_every_notation_of_yaml_1_1() {
        for (text, value) in [
            ("0", 0),
            ("10", 10),
            ("1_000", 1_000),
            ("1__0_", 10),
            ("0x0c", 12),
            ("0XfF", 255),
            ("0b101", 5),
            ("010", 8),
            ("0o17", 15),
            ("+7", 7),
            ("-7", -7),
            ("-0x10", -16),
            ("18446744073709551615", i128::from(u64::MAX)),
            ("-9223372036854775808", i128::from(i64::MIN)),
        ] {
            assert_eq!(int(text), Some(value), "{text}");
        }
        for text in ["", "0x", "0b2", "08", "_1", "1_a", "--1", "+-1", "0x-1", "18446744073709551616", "1e3", "1.0"] {
            assert_eq!(int(text), None, "{text}");
        }
    }

    #[test]
    fn only_a_leading_zero_is_told_apart_as_octal() {
        assert_eq!(resolve("010"), Scalar::Int { value: 8, leading_zero: true });
        assert_eq!(resolve("0o10"), Scalar::Int { value: 8, leading_zero: false });
        assert_eq!(resolve("0"), Scalar::Int { value: 0, leading_zero: false });
    }

    #[test]
    fn floats_are_numbers_that_are_not_whole() {
        for (text, value) in [
            ("1.5", 1.5),
            ("12e03", 12_000.0),
            (".5", 0.5),
            ("5.", 5.0),
            ("-1.5E-1", -0.15),
            ("08", 8.0),
            ("1_0.5", 10.5),
        ] {
            assert_eq!(resolve(text), Scalar::Float(value), "{text}");
        }
        assert_eq!(resolve("18446744073709551616"), Scalar::Float(18_446_744_073_709_551_616.0));
        assert_eq!(resolve("-.inf"), Scalar::Float(f64::NEG_INFINITY));
    }

    #[test]
    fn other_words_are_text() {
        for text in [
            "inf",
            "nan",
            "infinity",
            "-inf",
            "+nan",
            "1e+",
            "1 ",
            "1e",
            "e5",
            ".",
            "-",
            "+",
            "1.2.3",
            "10.0.0.1",
            "2024-02-29",
            "1e999",
        ] {
            assert_eq!(resolve(text), Scalar::Text, "{text}");
        }
        for text in ["yEs", "oN", "nULL", "hello", " 1"] {
            assert_eq!(resolve(text), Scalar::Text, "{text}");
        }
    }

    #[test]
    fn the_words_of_yaml_1_1_are_booleans_and_null() {
        for text in ["y", "Yes", "ON", "true", "TRUE"] {
            assert_eq!(resolve(text), Scalar::Bool(true), "{text}");
        }
        for text in ["n", "No", "OFF", "false", "False"] {
            assert_eq!(resolve(text), Scalar::Bool(false), "{text}");
        }
        for text in ["", "~", "null", "Null", "NULL"] {
            assert_eq!(resolve(text), Scalar::Null, "{text}");
        }
    }
}
