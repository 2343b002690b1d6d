//! Files of test cases, which `tidegate test` runs.

use super::compile::InvalidRules;
use super::document;
pub use super::document::cases::{Case, CaseFile, Expected, NO_RULE, Step};
use super::documents::File;
use super::problem::Report;

/// Maximum size of a file of test cases: 4 MiB, about 20,000 steps.
pub const MAX_CASES_BYTES: usize = 4 << 20;

/// Reads a file of test cases.
///
/// # Errors
/// Every error of the file with its place.
///
/// ```
/// use tidegate::rulefile::File;
/// use tidegate::rulefile::cases::read;
///
/// let file = |text: &str| File { name: "cases.yaml".into(), bytes: text.into() };
/// let right = "domain: edge\ncases: [{ name: one, steps: [{ descriptors: [{ user: ann }], expect: ok }] }]\n";
/// assert_eq!(read(&file(right))?.cases[0].steps[0].request.domain(), "edge");
///
/// let problems = read(&file(&right.replace("expect", "expects"))).unwrap_err().to_string();
/// assert!(problems.contains("did you mean `expect`?"), "{problems}");
/// # Ok::<(), tidegate::rulefile::InvalidRules>(())
/// ```
pub fn read(file: &File) -> Result<CaseFile, InvalidRules> {
    // A case that does not count as written could never fail, so every loss is an error.
    let mut report = Report::strict(&file.name);
    let (cases, text) = document::read_cases(&file.bytes, &mut report);
    let has_error = report.has_error();
    let mut problems = Vec::new();
    report.finish(text, &mut problems);
    if has_error { Err(InvalidRules { problems }) } else { Ok(cases) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Hits, Micros, Outcome, Override};

    fn read_text(text: &str) -> Result<CaseFile, InvalidRules> {
        read(&File { name: "cases.yaml".into(), bytes: text.into() })
    }

    fn in_case(steps: &str) -> String {
        format!("domain: d\ncases:\n  - name: n\n    steps:\n{steps}")
    }

    #[test]
    fn a_file_is_read_as_written() {
        let text = "rules: [a.yaml, ../b]\ndomain: d\ncases:\n  - name: n\n    steps:\n      - { at: 1s, descriptors: [{ user: 42, path: }, 'a=1,a=2'], hits: [0, -3], limit: 5/minute, times: 2, expect: { code: over_limit, rule: none, remaining: 3, retry_after: 1m30s, descriptors: [ok, { limit: l }] } }\n      - { after: 500ms, domain: e, descriptors: [k=v] }\n";
        let file = read_text(text).unwrap();
        let rules: Vec<&str> = file.rules.iter().map(|path| &*path.value).collect();
        assert_eq!(rules, ["a.yaml", "../b"]);
        let [first, second] = &file.cases[0].steps[..] else { panic!("two steps") };
        assert_eq!((first.at, second.at), (Micros::from_secs(1), Micros::from_millis(1_500)));
        assert_eq!((first.times, second.times), (2, 1));
        assert_eq!((first.request.domain(), second.request.domain()), ("d", "e"));
        let [one, two] = first.request.descriptors() else { panic!("two descriptors") };
        let entries = |of: &crate::model::Descriptor| {
            let spelled = of.entries.iter().map(|entry| format!("{:?}={:?}", entry.key, entry.value));
            spelled.collect::<Vec<_>>().join(",")
        };
        assert_eq!(
            (entries(one), entries(two)),
            (r#"b"user"=b"42",b"path"=b"""#.into(), r#"b"a"=b"1",b"a"=b"2""#.into())
        );
        assert_eq!((first.request.hits(one), first.request.hits(two)), (Hits::LOOK, Hits::give_back(3)));
        assert_eq!((one.limit, two.limit), (Override::parse("5/minute"), Override::parse("5/minute")));
        let expected = first.expected.as_ref().unwrap();
        assert_eq!(expected.code.as_ref().map(|code| code.value), Some(Outcome::Refused));
        assert_eq!(expected.retry_after.as_ref().map(|retry| retry.value), Some(Micros::from_secs(90)));
        assert_eq!(expected.rule.as_ref().map(|rule| &*rule.value), Some(NO_RULE));
        let descriptors = &expected.descriptors.as_ref().unwrap().value;
        assert_eq!(descriptors[0].code.as_ref().map(|code| code.value), Some(Outcome::Admitted));
        assert_eq!(descriptors[1].limit.as_ref().map(|limit| &*limit.value), Some("l"));
        assert!(second.expected.is_none());
    }

    #[test]
    fn errors_name_the_place_and_what_to_write() {
        let step = |step: &str| in_case(&format!("      - {step}\n"));
        for (text, place, says) in [
            (String::new(), "1:1", "must be a mapping"),
            ("[]".into(), "1:1", "must be a mapping"),
            ("domain: d\n".into(), "1:1", "no `cases`"),
            ("cases: []\n".into(), "1:1", "`cases` is empty"),
            ("case: []\n".into(), "1:1", "did you mean `cases`?"),
            ("cases:\n  - steps: []\n".into(), "2:5", "no `name`"),
            ("domain: d\ncases:\n  - name: n\n    steps: []\n".into(), "3:5", "can never fail"),
            (step("{ descriptors: [a=b] }"), "3:5", "can never fail"),
            (step("{ expect: ok }"), "5:9", "sends no descriptor"),
            (step("{ descriptors: [], expect: ok }"), "5:9", "sends no descriptor"),
            (step("{ descriptors: [a], expect: ok }"), "5:25", "'a' is not an entry"),
            (step("{ descriptors: [{ a: [b] }], expect: ok }"), "5:30", "must be a text, but this one is a list"),
            (step("{ descriptors: [{ a: b, a: c }], expect: ok }"), "5:33", "already a key of this descriptor"),
            (step("{ descriptors: a=b, expect: ok }"), "5:24", "a list, of which each item"),
            (step("{ descriptors: [a=b], expect: okay }"), "5:39", "did you mean `ok`?"),
            (step("{ descriptors: [a=b], expect: }"), "5:", "`expect` must be"),
            (step("{ descriptors: [a=b], expect: { remaning: 3 } }"), "5:41", "did you mean `remaining`?"),
            (step("{ descriptors: [a=b], expect: { remaining: } }"), "5:41", "`remaining` is empty"),
            (step("{ descriptors: [a=b], expect: { retry_after: 3 } }"), "5:54", "not a valid length of time"),
            (
                step("{ descriptors: [a=b], expect: { descriptors: [ok, ok] } }"),
                "5:54",
                "has 2 items, and the request 1",
            ),
            (step("{ descriptors: [a=b], expect: {} }"), "5:39", "expects nothing, so it can never fail"),
            (step("{ descriptors: [a=b], expect: { descriptors: [{}] } }"), "5:39", "expects nothing"),
            (step("{ descriptors: [a=b], domain: '', expect: ok }"), "5:39", "`domain` is empty"),
            (
                "domain: ''\ncases: [{ name: n, steps: [{ descriptors: [a=b], expect: ok }] }]\n".into(),
                "1:9",
                "`domain` is empty",
            ),
            (step("{ descriptors: [a=b], expect: ok, time: 3 }"), "5:43", "did you mean `times`?"),
            (step("{ descriptors: [a=b], expect: ok, times: 0 }"), "5:50", "from 1 to 1000000"),
            (step("{ descriptors: [a=b], expect: ok, hits: [1, 2] }"), "5:49", "`hits` has 2 values for 1 descriptors"),
            (step("{ descriptors: [a=b], expect: ok, hits: many }"), "5:49", "`hits` must be a whole number"),
            (step("{ descriptors: [a=b], expect: ok, limit: 5/fortnight }"), "5:50", "a limit like `5/minute`"),
            (step("{ at: 1s, after: 1s, descriptors: [a=b], expect: ok }"), "5:26", "both `at` and `after`"),
            (
                step("{ at: 1s, descriptors: [a=b], expect: ok }\n      - { at: 999ms, descriptors: [a=b] }"),
                "6:15",
                "in the order of their times",
            ),
            (step("{ at: 600w, descriptors: [a=b], expect: ok }"), "5:15", "a case can last 3650d at most"),
            ("cases: [{ name: n, steps: [{ descriptors: [a=b], expect: ok }] }]\n".into(), "1:28", "no domain"),
            (
                "domain: d\ncases:\n  - name: n\n    expect: ok\n".into(),
                "4:5",
                "`expect` does not belong in an item of `cases`",
            ),
            ("domain: d\ndomain: e\ncases: []\n".into(), "2:1", "already set on line 1"),
        ] {
            let found = read_text(&text).unwrap_err().to_string();
            let is_there =
                found.lines().any(|line| line.starts_with(&format!("cases.yaml:{place}")) && line.contains(says));
            assert!(is_there, "{text:?}: expected {place} {says}, got\n{found}");
        }
    }

    #[test]
    fn a_rule_loader_says_what_such_a_file_is() {
        let file =
            File { name: "cases.yaml".into(), bytes: in_case("      - { descriptors: [a=b], expect: ok }\n").into() };
        let found = crate::rulefile::load(&[file], crate::rulefile::Options::default()).unwrap_err().to_string();
        assert!(found.contains("a file of test cases, and no rule file"), "{found}");
    }
}
