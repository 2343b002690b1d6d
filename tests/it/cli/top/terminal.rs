//! `tidegate top` in a terminal, as a person uses it: keys, the table that they change, and the terminal afterwards.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::NamedTempFile;

use super::{CLEAR, call_with, rule_files};
use crate::support::{Tidegate, eventually, tool};

/// Runs its arguments in a new terminal, whose keys and screen are its standard input and output.
const IN_TERMINAL: &str = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
/// Runs its arguments, and shows the settings of the terminal afterwards. An interrupt ends only the command.
const AND_SETTINGS: &str = r#"trap : INT; "$@"; code=$?; stty -a; exit $code"#;

/// `tidegate top` in a terminal of its own.
struct Terminal {
    process: Child,
    keys: ChildStdin,
    screen: NamedTempFile,
}

impl Terminal {
    fn start(instances: &[SocketAddr]) -> Self {
        let screen = NamedTempFile::new().expect("a file");
        let mut command = Command::new(tool("python"));
        command.args(["-c", IN_TERMINAL, "sh", "-c", AND_SETTINGS, "sh", env!("CARGO_BIN_EXE_tidegate"), "top"]);
        command.args(["--interval", "200ms"]);
        for instance in instances {
            command.args(["--instance", &instance.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(screen.reopen().expect("it is there"));
        let mut process = command.spawn().expect("it starts");
        let keys = process.stdin.take().expect("its input is ours");
        Self { process, keys, screen }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("it reads");
    }

    /// All that it has shown.
    fn shown(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.screen.path()).expect("it reads")).replace('\r', "")
    }

    /// Number of the tables that it has shown.
    fn tables(&self) -> usize {
        self.shown().matches(CLEAR).count()
    }

    /// The last table, with the line of keys below it.
    fn last(&self) -> String {
        self.shown().rsplit(CLEAR).next().expect("there is always one").to_owned()
    }

    /// Waits for a table with all of this.
    async fn shows(&self, expected: &[&str]) -> String {
        eventually(&format!("the screen has {expected:?}"), async || {
            let last = self.last();
            expected.iter().all(|text| last.contains(text)).then_some(last)
        })
        .await
    }

    async fn ended(&mut self) -> ExitStatus {
        eventually("it ends", async || self.process.try_wait().expect("it can be asked")).await
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The descriptor of the first line of a table.
fn first(table: &str) -> &str {
    table.lines().nth(1).and_then(|line| line.split_whitespace().nth(4)).unwrap_or_else(|| panic!("{table}"))
}

/// Asserts that the terminal shows letters and takes whole lines, as it did before.
fn assert_is_as_before(shown: &str) {
    let settings = shown.rsplit("speed ").next().expect("stty says it");
    let words: Vec<&str> = settings.split_whitespace().collect();
    assert!(words.contains(&"icanon") && words.contains(&"echo"), "{settings}");
}

#[tokio::test]
async fn keys_sort_filter_freeze_and_quit_in_a_terminal() {
    let rules = rule_files();
    let one = Tidegate::start(rules.path(), &[]).await;
    let other = Tidegate::start(rules.path(), &[]).await;
    call_with(&one, "edge", "8", &["user=ann"]);
    call_with(&other, "edge", "400", &["plan=gold,path=/"]);
    let mut terminal = Terminal::start(&[one.debug, other.debug]);

    let table = terminal.shows(&["2 of 2 instances answered.", "user=ann", "s: sort by asked"]).await;
    assert_eq!(first(&table), "user=ann", "{table}");
    terminal.press("s");
    let table = terminal.shows(&["plan=gold,path=/", "s: sort by refused"]).await;
    assert_eq!(first(&table), "plan=gold,path=/", "{table}");

    terminal.press("/");
    terminal.shows(&["show lines with: _"]).await;
    // Letters that are keys elsewhere, two of them erased, and Enter as a keyboard sends it.
    terminal.press("qs\u{7f}\u{7f}user\r");
    let table = terminal.shows(&["only lines with \"user\"", "user=ann"]).await;
    assert!(!table.contains("plan=gold"), "{table}");

    terminal.press("f");
    let frozen = terminal.shows(&["FROZEN", "f: go on"]).await;
    let tables = terminal.tables();
    call_with(&one, "edge", "3", &["user=ann"]);
    // The table would be shown five times.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((terminal.tables(), terminal.last()), (tables, frozen));
    terminal.press("f");
    eventually("new numbers are shown", async || {
        let refused = terminal.last().lines().nth(1)?.split_whitespace().next()? == "8";
        refused.then_some(())
    })
    .await;

    terminal.press("/x\u{1b}");
    terminal.shows(&["plan=gold,path=/", "s: sort by refused   /: filter"]).await;
    terminal.press("q");
    assert!(terminal.ended().await.success(), "{}", terminal.shown());
    let shown = terminal.shown();
    assert_is_as_before(&shown);
    let ends_as_written = |table: &str| table.ends_with("q: quit") || table.ends_with("Esc: all lines)");
    let tables: Vec<&str> = shown.split(CLEAR).skip(1).collect();
    let (last, before) = tables.split_last().expect("there are some");
    assert!(before.iter().all(|table| ends_as_written(table)), "no key is echoed: {shown}");
    assert!(last.contains("q: quit\n"), "what follows begins on a line of its own: {last}");
}

#[tokio::test]
async fn ctrl_c_leaves_the_terminal_as_it_was() {
    let rules = rule_files();
    let server = Tidegate::start(rules.path(), &[]).await;
    let mut terminal = Terminal::start(&[server.debug]);
    terminal.shows(&["1 of 1 instance answered.", "q: quit"]).await;
    terminal.press("\u{3}");
    assert!(terminal.ended().await.success(), "{}", terminal.shown());
    assert_is_as_before(&terminal.shown());
}
