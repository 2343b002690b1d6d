//! Numbers in sentences.

use std::fmt;

/// Returns a number with its noun, in the plural unless it is 1: `1 rule`, `2 rules`.
pub fn counted<N: Copy + fmt::Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    let ending = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{ending}")
}
