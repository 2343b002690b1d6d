//! What pages say of each other: links lead to what their text promises, and numbers that stand on two pages are the same.

use super::*;

/// Returns the text and the target of each local link.
fn links_with_text(page: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (at, _) in page.match_indices("](") {
        let text = page[..at].rsplit('[').next().unwrap_or_default();
        let target = page[at + 2..].split(')').next().unwrap_or_default();
        if !target.contains("://") && !text.is_empty() {
            found.push((text.split_whitespace().collect::<Vec<_>>().join(" "), target.to_owned()));
        }
    }
    found
}

/// Returns the words of a text, without the `s` of a plural.
fn words(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.len() > 2);
    words.map(|word| word.to_lowercase().trim_end_matches('s').to_owned()).collect()
}

fn documents() -> Vec<PathBuf> {
    let mut documents = files("docs", "md");
    documents.extend(files("examples", "md"));
    documents.extend(["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(|page| root().join(page)));
    documents
}

/// Returns the anchors of the headings of a page.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#'));
    let kept = |heading: &str| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
    };
    headings.map(kept).collect()
}

#[test]
fn a_link_leads_to_a_heading_or_names_the_page() {
    let mut wrong = Vec::new();
    for path in documents() {
        let page = read(&path);
        for (text, target) in links_with_text(&page) {
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().expect("a directory").join(file) };
            if file.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let linked = read(&file);
            let title = linked.lines().next().unwrap_or_default();
            let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let named = [words(title), words(&stem)].concat();
            // Decisions and the pages of examples have one subject each.
            let is_of_one_subject = stem == "README" || file.components().any(|part| part.as_os_str() == "decisions");
            if !anchor.is_empty() && !anchors(&linked).iter().any(|heading| heading == anchor) {
                wrong.push(format!("{}: no heading is named {target}", name(&path)));
            } else if anchor.is_empty() && !is_of_one_subject && !words(&text).iter().any(|word| named.contains(word)) {
                wrong
                    .push(format!("{}: [{text}]({target}) promises a part of the page: name its heading", name(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Rows of the README, and the beginnings of the rows of docs/performance.md with the same number.
const NUMBERS: [(&str, &str); 8] = [
    ("1 descriptor", "embedded store, 1 descriptor: CPU per decision |"),
    ("4 tiers, all or nothing", "embedded store, 4 tiers all-or-nothing: CPU per decision |"),
    ("1 descriptor, counted in Redis", "Redis, 1 descriptor: CPU per decision |"),
    ("4 tiers, all or nothing, in one step of Redis", "Redis, 4 tiers all-or-nothing: CPU per decision |"),
    (
        "1 descriptor, counted in Redis by leases, 100 counters",
        "Redis, 1 descriptor, leases, 100 counters: CPU per decision |",
    ),
    ("10 descriptors, counted in a Redis cluster of six nodes", "six-node cluster, 10 descriptors: CPU per decision |"),
    ("latency, one call at a time, p50", "latency, one request at a time: p50 |"),
    ("100,000 exact rules instead of 10", "exact rules, 100,000 against 10: CPU per decision |"),
];

#[test]
fn the_numbers_of_the_readme_are_those_that_were_measured_last() {
    let (readme, performance) = (read(&root().join("README.md")), read(&root().join("docs/performance.md")));
    let measured = |row: &str| {
        let line = performance.lines().find_map(|line| line.strip_prefix("| ")?.strip_prefix(row));
        let cells: Vec<&str> = line.unwrap_or_else(|| panic!("no row {row}")).split('|').collect();
        cells[3].split_whitespace().next().expect("a number").to_owned()
    };
    let (_, table) = readme.split_once("| | multiple of the plain server |\n|---|---|\n").expect("the table");
    let rows = table.lines().map_while(|line| line.strip_prefix("| ")?.trim_end_matches(" |").split_once(" | "));
    let shown: Vec<_> = rows.map(|(row, number)| (row, number.split(' ').next().unwrap_or_default())).collect();
    let expected: Vec<_> = NUMBERS.map(|(row, of)| (row, measured(of))).into();
    let shown: Vec<_> = shown.into_iter().map(|(row, number)| (row, number.to_owned())).collect();
    assert_eq!(shown, expected, "left, the numbers of README.md; right, those of docs/performance.md, `measured`");
}
