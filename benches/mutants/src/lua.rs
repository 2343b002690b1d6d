//! Changes of Lua files, found by their tokens.

use std::ops::Range;

const TOKENS: [(&str, &str); 15] = [
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " ~= "),
    (" ~= ", " == "),
    (" + ", " - "),
    (" - ", " + "),
    (" and ", " or "),
    (" or ", " and "),
    ("not ", ""),
    ("min(", "max("),
    ("max(", "min("),
    ("ceil(", "floor("),
    ("floor(", "ceil("),
];

/// Returns ranges of a Lua file with their replacements.
pub fn changes(text: &str) -> Vec<(Range<usize>, String)> {
    let mut all = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("--").next().unwrap_or_default().trim_end();
        let is_string = |place: usize| code[..place].matches('\'').count() % 2 == 1;
        for (old, new) in TOKENS {
            let places = code.match_indices(old).filter(|(place, _)| !is_string(*place));
            all.extend(places.map(|(place, _)| (start + place..start + place + old.len(), new.to_owned())));
        }
        for (place, digit) in code.match_indices(|letter: char| letter.is_ascii_digit()) {
            let is_alone =
                |letter: Option<char>| !letter.is_some_and(|letter| letter.is_alphanumeric() || "._".contains(letter));
            if is_alone(code[..place].chars().next_back())
                && is_alone(code[place + 1..].chars().next())
                && !is_string(place)
            {
                let more = digit.parse::<u32>().unwrap_or_default() + 1;
                all.push((start + place..start + place + 1, more.to_string()));
            }
        }
        if is_statement(code) {
            all.push((start..start + code.len(), String::new()));
        }
        start += line.len();
    }
    all
}

/// Returns true if the line is one assignment or call that the script can do without.
fn is_statement(code: &str) -> bool {
    let code = code.trim();
    let word = code.split([' ', '(']).next().unwrap_or_default();
    let is_balanced = |open, close| code.matches(open).count() == code.matches(close).count();
    let is_block = ["local", "if", "for", "while", "return", "end", "else", "elseif", "function", "until", "repeat"]
        .contains(&word);
    let is_open = code.ends_with(['=', ',', '(', '{']) || code.contains("function");
    let is_act = code.contains(" = ") || code.ends_with(')');
    !is_block && !is_open && is_act && is_balanced('(', ')') && is_balanced('{', '}') && !code.starts_with(['}', ')'])
}
