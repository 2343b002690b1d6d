//! The house checks itself: who may import whom, and what every file owes its reader.

use std::fs;
use std::path::{Path, PathBuf};

mod pages;

/// Each module and what it may import from this crate. A store never sees a rule, a rule never sees a store, and of the modules above
/// the listeners only `source` sees the protocol.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("model", &[]),
    ("algorithm", &["model"]),
    ("normalize", &["model"]),
    ("rules", &["model", "algorithm", "normalize"]),
    ("rulefile", &["model", "algorithm", "normalize", "rules"]),
    ("telemetry", &["model"]),
    ("file", &[]),
    ("dial", &["file"]),
    ("store", &["model", "algorithm", "telemetry", "file", "dial"]),
    ("source", &["model", "rules", "rulefile", "proto", "file", "dial"]),
    ("limiter", &["model", "algorithm", "rules", "store"]),
    ("embedded", &["model", "file", "rules", "rulefile", "store", "limiter"]),
    ("serve", &["model", "proto", "telemetry"]),
    ("edge", &["model", "proto", "limiter", "telemetry", "serve"]),
    ("admin", &["model", "limiter", "telemetry", "edge"]),
    ("settings", &["model", "file", "dial", "store", "source", "telemetry"]),
    (
        "app",
        &[
            "model",
            "algorithm",
            "normalize",
            "rules",
            "rulefile",
            "file",
            "dial",
            "store",
            "source",
            "limiter",
            "serve",
            "edge",
            "admin",
            "telemetry",
            "settings",
        ],
    ),
    ("cli", &["app", "settings", "rules", "rulefile", "source", "model", "proto", "file", "dial"]),
];

/// Crates that do I/O or speak a protocol, and the modules of values and logic, which do neither.
const NOT_IN_LOGIC: &[&str] = &["tokio", "tonic", "redis", "axum", "hyper", "opentelemetry"];
const LOGIC: &[&str] = &["model", "algorithm", "normalize", "rules", "rulefile"];

/// Files of `src` that read files by themselves: the one place for all that an operator names, and files of the kernel.
const READERS: &[&str] = &["src/file.rs", "src/serve/limits.rs", "src/app/process.rs"];

/// Directories below `examples/` that a test builds or reads as a whole.
const TRIED_AS_A_WHOLE: &[&str] =
    &["gateways", "library", "clients/go", "clients/java", "clients/node", "clients/python", "clients/rust"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(below: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![root().join(below)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.ends_with("node_modules") && !path.ends_with("venv") {
                directories.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn name(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The module that a file below `src/` belongs to: its first part.
fn module(path: &Path) -> String {
    let path = module_path(path);
    path.split_once("::").map_or(path.clone(), |(first, _)| first.to_owned())
}

/// The modules named behind `crate::`, in code and in grouped imports, comments left out.
fn imports(text: &str) -> Vec<String> {
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let grouped = rest.starts_with('{');
        let end = if grouped { rest.find('}') } else { rest.find(|c: char| !c.is_alphanumeric() && c != '_') };
        let names = rest[..end.unwrap_or(rest.len())].trim_start_matches('{');
        let first = |name: &str| name.trim().split("::").next().unwrap_or("").to_owned();
        if grouped { found.extend(names.split(',').map(first)) } else { found.push(first(names)) }
    }
    found
}

#[test]
fn modules_import_only_from_the_layers_above_them() {
    for path in files("src", "rs") {
        let module = module(&path);
        if matches!(module.as_str(), "lib" | "main") {
            continue;
        }
        let row = MAY_IMPORT.iter().find(|(name, _)| *name == module);
        let (_, allowed) =
            row.unwrap_or_else(|| panic!("the module {module} has no row in MAY_IMPORT: say what it may import"));
        for import in imports(&read(&path)) {
            assert!(
                import == module || allowed.contains(&import.as_str()),
                "{} imports crate::{import}, but {module} may import only from {allowed:?}: move the code to the layer it belongs to, or change the table here and say why in docs/decisions",
                name(&path)
            );
        }
    }
}

/// The `event` and the level of each log line in `src`, sorted.
fn events() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for path in files("src", "rs").iter().filter(|path| !name(path).ends_with("tests.rs")) {
        let text = read(path);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (at, _) in code.match_indices("tracing::") {
            let rest = &code[at + "tracing::".len()..];
            let Some((level, call)) = rest.split_once("!(").filter(|(level, _)| LEVELS.contains(level)) else {
                continue;
            };
            let line = call.split_once(";").map_or(call, |(line, _)| line);
            let event =
                line.split_once("event = \"").and_then(|(_, rest)| rest.split_once('"')).map(|(event, _)| event);
            let event = event.unwrap_or_else(|| {
                panic!(
                    "{} logs without an event: add `event = \"area.what\"`, and a row to docs/operations.md",
                    name(path)
                )
            });
            found.push((event.to_owned(), level.to_owned()));
        }
    }
    found.sort();
    found
}

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

#[test]
fn each_log_event_has_its_row_in_the_documentation() {
    let page = read(&root().join("docs/operations.md"));
    let (_, section) = page.split_once("## Log events").expect("the section about log events");
    let (section, _) = section.split_once("\n## ").expect("a section after it");
    let mut rows: Vec<(String, String)> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|row| row.split_once("` | "))
        .map(|(event, rest)| (event.to_owned(), rest.split(' ').next().unwrap_or_default().to_owned()))
        .collect();
    rows.sort();
    assert_eq!(rows, events(), "left: docs/operations.md, right: the log lines of src");
}

/// The path of the module in a file below `src/`: `store::redis` for `src/store/redis.rs`.
fn module_path(path: &Path) -> String {
    let below = path.strip_prefix(root().join("src")).expect("a file of src").with_extension("");
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("::")
}

/// The code of a file in front of its tests, without comments.
fn code(path: &Path) -> String {
    let text = read(path);
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The paths that `use` declarations name, groups taken apart.
fn used(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("use ").filter(|(at, _)| *at == 0 || code[..*at].ends_with(['\n', ' '])) {
        let declaration: String = code[at + 4..].split(';').next().unwrap_or("").split_whitespace().collect();
        take_apart("", &declaration, &mut found);
    }
    found
}

/// Adds the paths of `rest`, which may end in a group, each behind `prefix`.
fn take_apart(prefix: &str, rest: &str, found: &mut Vec<String>) {
    let Some((before, group)) = rest.split_once('{') else { return found.push(format!("{prefix}{rest}")) };
    let group = group.strip_suffix('}').unwrap_or(group);
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                take_apart(&format!("{prefix}{before}"), &group[begin..at], found);
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// The module files that the module `own` imports from, except its own ancestors and descendants: a module and its
/// children are one.
fn imported(own: &str, code: &str, modules: &[String]) -> Vec<String> {
    let absolute = |path: String| {
        if let Some(rest) = path.strip_prefix("crate::") {
            return rest.to_owned();
        }
        let (mut base, mut rest) = (own.to_owned(), path.as_str());
        while let Some(behind) = rest.strip_prefix("super::") {
            base = base.rsplit_once("::").map_or(String::new(), |(above, _)| above.to_owned());
            rest = behind;
        }
        format!("{base}::{}", rest.strip_prefix("self::").unwrap_or(rest))
    };
    let is_inside = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}::"));
    let target =
        |path: String| modules.iter().filter(|module| is_inside(&path, module)).max_by_key(|module| module.len());
    let found = used(code).into_iter().map(absolute).filter_map(target);
    let mut found: Vec<String> =
        found.filter(|module| !is_inside(module, own) && !is_inside(own, module)).cloned().collect();
    found.sort();
    found.dedup();
    found
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let paths = files("src", "rs");
    let modules: Vec<String> = paths.iter().map(|path| module_path(path)).filter(|module| module != "lib").collect();
    let imports: std::collections::BTreeMap<String, Vec<String>> = paths
        .iter()
        .filter(|path| !name(path).ends_with("tests.rs"))
        .map(|path| (module_path(path), imported(&module_path(path), &code(path), &modules)))
        .collect();
    assert!(imports.values().map(Vec::len).sum::<usize>() > 300, "the imports are found: {imports:?}");
    for start in imports.keys() {
        let mut seen = vec![start.clone()];
        let mut ways = vec![vec![start.clone()]];
        while let Some(way) = ways.pop() {
            for next in imports.get(&way[way.len() - 1]).into_iter().flatten() {
                assert!(
                    next != start,
                    "files import each other in a circle: {} -> {start}; move what they share below both",
                    way.join(" -> ")
                );
                if !seen.contains(next) {
                    seen.push(next.clone());
                    ways.push([&way[..], std::slice::from_ref(next)].concat());
                }
            }
        }
    }
}

/// Words with which no doc comment begins: say what the thing is or does.
const QUESTIONS: [&str; 7] = ["What ", "How ", "Whether ", "Where ", "Who ", "When ", "Which "];

/// Old words for ideas that have a term of the field, which the message names.
const OLD_WORDS: [(&str, &str); 11] = [
    ("errand", "ScriptCall"),
    ("heard", "reply"),
    ("manner", "mode"),
    ("ballot", "ChargeOutcome"),
    ("patience", "timeout"),
    ("bell", "notify"),
    ("told", "reply, or the name of the value"),
    ("signs", "HealthState"),
    ("seats", "permits"),
    ("circle", "cycle"),
    ("among_node", "value_list"),
];

#[test]
fn comments_and_names_use_plain_words() {
    let mut wrong = Vec::new();
    for path in files("src", "rs") {
        let text = read(&path);
        let mut is_inside = false;
        for (number, line) in text.lines().enumerate() {
            let comment = ["/// ", "//! "].into_iter().find_map(|mark| line.trim_start().strip_prefix(mark));
            let begins = comment.filter(|_| !is_inside);
            if let Some(word) = begins.and_then(|text| QUESTIONS.into_iter().find(|word| text.starts_with(word))) {
                let place = format!("{}:{}", name(&path), number + 1);
                wrong.push(format!("{place}: a doc comment begins with `{word}`: begin with a noun or a verb"));
            }
            is_inside = line.trim_start().starts_with("//");
        }
        let code = code(&path).to_lowercase();
        let words: Vec<&str> = code.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        for (old, term) in OLD_WORDS {
            if words.contains(&old) && !name(&path).ends_with("tests.rs") {
                wrong.push(format!("{}: `{old}` is an old word: say {term}", name(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn values_and_logic_do_no_io() {
    for path in files("src", "rs").iter().filter(|path| LOGIC.contains(&module(path).as_str())) {
        let text = read(path);
        for external in NOT_IN_LOGIC {
            let used = text.contains(&format!("use {external}::")) || text.contains(&format!(" {external}::"));
            assert!(!used, "{} uses {external}, which belongs to a layer that does I/O", name(path));
        }
    }
}

#[test]
fn files_are_read_in_one_place_with_a_bound() {
    for path in files("src", "rs").iter().filter(|path| !READERS.contains(&name(path).as_str())) {
        let text = read(path);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        if name(path).ends_with("tests.rs") {
            continue;
        }
        for call in ["fs::read(", "read_to_string(", "File::open(", "OpenOptions"] {
            assert!(
                !code.contains(call),
                "{} reads a file by `{call}`: use crate::file::read, which takes regular files of a bounded size only",
                name(path)
            );
        }
    }
}

#[test]
fn only_the_wiring_names_the_concrete_store() {
    for path in files("src", "rs") {
        if !matches!(module(&path).as_str(), "app" | "store" | "lib") {
            assert!(!read(&path).contains("Memory::"), "{} names a concrete store; only app.rs may", name(&path));
        }
    }
}

#[test]
fn every_algorithm_says_what_it_counts_and_when_to_choose_another() {
    let algorithms = files("src/algorithm", "rs");
    assert!(!algorithms.is_empty());
    // Limit and charge are what every algorithm is called with.
    for path in algorithms.iter().filter(|path| !path.ends_with("charge.rs") && !path.ends_with("limit.rs")) {
        let text = read(path);
        let head: Vec<_> = text.lines().take_while(|line| line.starts_with("//!")).collect();
        assert!(
            head.len() >= 5
                && head[0].starts_with("//! Counts")
                && head.iter().any(|line| line.starts_with("//! Choose")),
            "{} must open with five lines: what it counts; where it comes from; what it remembers, in bytes; how wrong it can be; when to choose another",
            name(path)
        );
    }
}

#[test]
fn decisions_are_numbered_without_gaps() {
    // README.md is the index.
    let records = files("docs/decisions", "md").into_iter().filter(|path| !path.ends_with("README.md"));
    for (index, path) in records.enumerate() {
        let number = format!("{:04}-", index + 1);
        let file = path.file_name().expect("a name").to_string_lossy();
        assert!(file.starts_with(&number), "{file}: decisions are numbered without gaps; expected {number}");
    }
}

#[test]
fn every_setting_is_in_the_operators_table() {
    let table = read(&root().join("docs/settings.md"));
    for row in tidegate::settings::Settings::table() {
        let default = if row.default.is_empty() { "(empty)" } else { row.default };
        let line = format!("| `{}` | `{default}` | {}. |", row.variable, row.does);
        assert!(table.contains(&line), "docs/settings.md lacks this row:\n{line}");
    }
    let rows = table.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(
        rows,
        tidegate::settings::Settings::table().count(),
        "docs/settings.md has rows for settings that do not exist"
    );
}

#[test]
fn every_variable_without_effect_is_in_the_table_of_compatibility_with_its_reason() {
    let page = read(&root().join("docs/compatibility.md"));
    let (_, section) = page.split_once("\n## Variables without effect").expect("the page has this section");
    let section = section.split("\n## ").next().expect("a first part");
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| `")).collect();
    let row = |unused: &tidegate::settings::UnusedVariable| format!("| `{}` | {} |", unused.variable, unused.why);
    let of_libraries = tidegate::settings::OF_LIBRARIES.iter().map(|(_, unused)| unused);
    let expected: Vec<_> = tidegate::settings::UNUSED.iter().chain(of_libraries).map(row).collect();
    assert_eq!(rows, expected, "left, the rows of docs/compatibility.md; right, the table of the code");
}

/// The first columns of the rows of a section of the operators' page, without their marks.
fn rows_of_operations(section: &str) -> Vec<Vec<String>> {
    let page = read(&root().join("docs/operations.md"));
    let (_, section) = page.split_once(&format!("\n## {section}")).expect("the page has this section");
    let section = section.split("\n## ").next().expect("a first part");
    let cells = |row: &str| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    section.lines().filter(|line| line.starts_with("| `")).map(cells).collect()
}

#[test]
fn every_metric_is_explained_to_operators_and_no_other() {
    let label = |label: &&str| format!("`{label}`");
    let row = |metric: &&tidegate::telemetry::metrics::Metric| {
        let labels: Vec<_> = metric.labels.iter().map(label).collect();
        (format!("`{}`", metric.name), labels.join(", "))
    };
    let expected: Vec<_> = tidegate::telemetry::metrics::TABLE.iter().map(row).collect();
    let rows = rows_of_operations("Metrics");
    let explained: Vec<_> = rows.iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(explained, expected, "left, the rows of docs/operations.md, Metrics; right, the table of metrics");
    assert!(rows.iter().all(|row| row.len() == 3 && row[2].ends_with('.')), "each says what to look for");
}

#[test]
fn every_setting_says_when_to_change_it() {
    let expected: Vec<_> =
        tidegate::settings::Settings::table().map(|setting| format!("`{}`", setting.variable)).collect();
    let rows = rows_of_operations("Settings");
    let explained: Vec<_> = rows.iter().map(|row| row[0].clone()).collect();
    assert_eq!(explained, expected, "left, the rows of docs/operations.md, Settings; right, the settings");
    assert!(rows.iter().all(|row| row.len() == 2 && row[1].ends_with('.')), "each says when");
}

#[test]
fn every_alert_says_what_to_do_and_in_which_order() {
    let alerts = read(&root().join("helm/tidegate/files/alerts.yaml"));
    let names: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let page = read(&root().join("docs/operations.md"));
    let (_, section) = page.split_once("\n## Alerts\n").expect("the page has this section");
    let section = section.split("\n## ").next().expect("a first part");
    let told: Vec<_> = section.split("\n### ").skip(1).collect();
    let named: Vec<_> = told.iter().filter_map(|alert| alert.lines().next()).collect();
    assert_eq!(named, names, "left, the alerts of docs/operations.md; right, those of the chart");
    for alert in told {
        assert!(alert.contains("\n\n1. "), "what to do first about {alert}");
    }
}

/// A promise without a test is a wish: every row of a table in the page names tests, and each of them is there.
#[test]
fn every_guarantee_names_the_tests_that_show_it() {
    let tests: String = files("tests/it", "rs").iter().chain(&files("src", "rs")).map(|path| read(path)).collect();
    let page = read(&root().join("docs/guarantees.md"));
    let rows =
        page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what") && !line.contains("---"));
    for row in rows {
        let shown = row.trim_end_matches(['|', ' ']).rsplit('|').next().expect("a last column");
        let named: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "docs/guarantees.md: no test in this row: {row}");
        for name in named {
            let function = name.rsplit("::").next().expect("a name");
            assert!(tests.contains(&format!("fn {function}(")), "docs/guarantees.md names no test: {name}");
        }
    }
}

#[test]
fn every_algorithm_has_its_section_and_its_picture_on_the_page() {
    let page = read(&root().join("docs/algorithms.md"));
    for (name, _) in tidegate::algorithm::Algorithm::ALL {
        let (_, section) = page
            .split_once(&format!("\n## {name}\n"))
            .unwrap_or_else(|| panic!("docs/algorithms.md has no section {name}"));
        let section = section.split("\n## ").next().expect("a first part");
        assert!(
            section.contains(&format!("](algorithms/{name}.svg)")),
            "docs/algorithms.md: the section {name} has no picture; benches/accuracy draws it"
        );
    }
}

#[test]
fn every_link_in_the_documents_leads_somewhere() {
    let mut documents = files("docs", "md");
    documents.extend(files("examples", "md"));
    documents.extend([root().join("README.md"), root().join("CHANGELOG.md")]);
    for path in documents {
        for (link, target) in links(&read(&path)) {
            let file = path.parent().expect("a directory").join(target.split('#').next().unwrap_or(""));
            assert!(file.exists(), "{}: the link {link} leads nowhere", name(&path));
        }
    }
}

fn links(text: &str) -> Vec<(String, String)> {
    let starts = text.match_indices("](").map(|(at, _)| &text[at + 2..]);
    let targets = starts.filter_map(|rest| rest.split(')').next());
    let local = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
    local.map(|target| (format!("]({target})"), target.to_owned())).collect()
}

/// An example that nothing runs stops working, and nobody notices.
#[test]
fn every_example_is_named_by_a_test_and_by_the_table_of_examples() {
    let tests = files("tests/it", "rs").into_iter().filter(|path| !path.ends_with("house.rs"));
    let tests: Vec<String> = tests.map(|path| read(&path)).collect();
    let is_named = |text: &str| tests.iter().any(|test| test.contains(text));
    let table = read(&root().join("examples/README.md"));
    for example in examples() {
        let (directory, own) = example.rsplit_once('/').unwrap_or(("", example.as_str()));
        let top = example.split('/').next().expect("a first part");
        assert!(table.contains(&format!("({top}")) || table.contains(&format!("/{top}/")), "examples/README.md: {top}");
        let by_path = is_named(&format!("examples/{example}\"")) || is_named(&format!("\"{example}\""));
        let names_directory = is_named(&format!("\"{directory}\"")) || is_named(&format!("examples/{directory}"));
        let by_parts = names_directory && (is_named(&format!("\"{own}\"")) || is_named(&format!("/{own}\"")));
        assert!(by_path || by_parts, "examples/{example}: no test in tests/it names it; let one run it");
    }
}

/// The files below `examples/`, and the directories that are tried as a whole, without pages.
fn examples() -> Vec<String> {
    let (mut found, mut directories) = (Vec::new(), vec![root().join("examples")]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            let example = path.strip_prefix(root().join("examples")).expect("below it").display().to_string();
            let is_page = example.ends_with("README.md");
            if path.is_dir() && !TRIED_AS_A_WHOLE.contains(&example.as_str()) {
                directories.push(path);
            } else if !is_page {
                found.push(example);
            }
        }
    }
    found.sort();
    found
}
