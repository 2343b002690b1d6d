//! The known word that a mistyped word is nearest to.

/// Length above which words are not compared: 40 characters. The longest key has 17.
const MAX_WORD: usize = 40;

/// Returns the known word with the fewest mistakes against `word`; `None` if even that has too many.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.chars().nth(MAX_WORD).is_some() {
        return None;
    }
    let word = letters(word);
    known
        .filter_map(|candidate| {
            let letters = letters(candidate);
            let allowed = (word.len().min(letters.len()) / 3).max(1);
            let is_part = word.len() >= 3 && (letters.starts_with(&word) || word.starts_with(&letters));
            let mistakes = mistakes(&word, &letters).min(if is_part { 1 } else { usize::MAX });
            (mistakes <= allowed && mistakes < word.len()).then_some((mistakes, candidate))
        })
        .min_by_key(|(mistakes, _)| *mistakes)
        .map(|(_, candidate)| candidate)
}

/// Normalises a word: `requestsPerUnit`, `requests-per-unit` and `requests_per_unit` are equal.
fn letters(word: &str) -> Vec<char> {
    word.chars().filter(|c| !matches!(c, '_' | '-' | ' ')).flat_map(char::to_lowercase).collect()
}

/// Returns the number of letters to add, remove, change, or swap with their neighbour to turn `b` into `a`.
fn mistakes(a: &[char], b: &[char]) -> usize {
    let mut two_back: Vec<usize> = Vec::new();
    let mut back: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let at = |row: &[usize], column: usize| row.get(column).copied().unwrap_or(usize::MAX / 2);
            let mut least = at(&back, j) + usize::from(from != to);
            least = least.min(at(&back, j + 1) + 1).min(at(&row, j) + 1);
            let is_swap = i > 0 && j > 0 && a.get(i - 1) == Some(to) && b.get(j - 1) == Some(from);
            if is_swap {
                least = least.min(at(&two_back, j - 1) + 1);
            }
            row.push(least);
        }
        two_back = std::mem::replace(&mut back, row);
    }
    back.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::{letters, mistakes};

    #[test]
    fn a_swap_of_neighbours_is_one_mistake() {
        let count = |a, b| mistakes(&letters(a), &letters(b));
        assert_eq!(count("domian", "domain"), 1);
        assert_eq!(count("odmain", "domain"), 1);
        assert_eq!(count("doman", "domain"), 1);
        assert_eq!(count("domains", "domain"), 1);
        assert_eq!(count("", "abc"), 3);
        assert_eq!(count("abc", "abc"), 0);
    }
}
