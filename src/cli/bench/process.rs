//! CPU time and memory of the processes in `--process`, from Linux' `/proc`.

use std::fs::read_to_string;
use std::io;
use std::time::Duration;

use anyhow::Context;

/// Milliseconds of a tick, the unit of CPU times: Linux shows 100 ticks a second to programs on every machine (`USER_HZ`).
const TICK_MS: u64 = 10;
/// Place of user and system time behind the name of a process in `stat`: the fields 14 and 15 of proc(5), the name is the second.
const USER_TIME: usize = 11;

/// Process in `--process NAME=PID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    /// Name in the results.
    pub(super) name: String,
    pub(super) pid: u32,
}

/// Usage of a process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    /// CPU time so far of all its threads, those that have ended included.
    pub(super) cpu: Duration,
    /// Resident memory.
    pub(super) resident_bytes: u64,
}

/// Usage of a process during the measurement.
pub(super) struct Used {
    pub(super) process: Process,
    /// CPU time in the measurement, and resident memory at its end; `None` if the process ended before.
    pub(super) usage: Option<Usage>,
}

/// Parses `NAME=PID`.
pub(super) fn parse(text: &str) -> Result<Process, &'static str> {
    let process = text.rsplit_once('=').and_then(|(name, pid)| {
        let pid = pid.parse().ok().filter(|pid| *pid > 0)?;
        (!name.is_empty()).then(|| Process { name: name.to_owned(), pid })
    });
    process.ok_or("write NAME=PID, such as server=4242")
}

impl Process {
    /// Returns its usage so far.
    ///
    /// # Errors
    /// If there is no such process.
    pub(super) fn usage(&self) -> anyhow::Result<Usage> {
        let Self { name, pid } = self;
        let read = |file: &str| read_to_string(format!("/proc/{pid}/{file}"));
        let usage = read("stat").and_then(|stat| {
            Usage::of(&stat, &read("status")?).ok_or_else(|| io::Error::other("it has no CPU time or memory"))
        });
        usage.with_context(|| {
            format!(
                "--process {name}={pid}: /proc/{pid}/stat cannot be read; set the PID of a running process, on Linux"
            )
        })
    }

    /// Returns its usage in the measurement that began with `before`.
    pub(super) fn used_since(&self, before: Usage) -> Used {
        let usage = self.usage().ok();
        let usage = usage.map(|now| Usage { cpu: now.cpu.saturating_sub(before.cpu), ..now });
        Used { process: self.clone(), usage }
    }
}

impl Usage {
    /// Parses the files `stat` and `status` of a process.
    fn of(stat: &str, status: &str) -> Option<Self> {
        // `schedstat` counts nanoseconds, but those of threads that have ended are not in it. The name may contain spaces and brackets.
        let (_, fields) = stat.rsplit_once(") ")?;
        let ticks = fields.split_whitespace().skip(USER_TIME).take(2).map(str::parse::<u64>);
        let ticks = ticks.sum::<Result<u64, _>>().ok()?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        let kib: u64 = kib?.parse().ok()?;
        Some(Self { cpu: Duration::from_millis(ticks * TICK_MS), resident_bytes: kib * 1_024 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_name_and_a_pid() {
        assert_eq!(parse("a=b=42"), Ok(Process { name: "a=b".to_owned(), pid: 42 }));
        for wrong in ["42", "=42", "server=", "server=0", "server=-1", "server=x"] {
            assert_eq!(parse(wrong), Err("write NAME=PID, such as server=4242"), "{wrong}");
        }
    }

    #[test]
    fn cpu_time_is_that_of_user_and_system() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 50 7 8 20 0";
        let usage = Usage { cpu: Duration::from_secs(2), resident_bytes: 2_048 * 1_024 };
        assert_eq!(Usage::of(stat, "Name:\ta\nVmRSS:\t    2048 kB\n"), Some(usage));
        assert_eq!(Usage::of(stat, "Name:\ta kernel thread\n"), None);
        assert_eq!(Usage::of("", ""), None);
    }

    #[test]
    fn a_process_that_does_not_exist_is_an_error_that_names_it() {
        // The largest PID that Linux gives is 2^22.
        let error = Process { name: "server".to_owned(), pid: u32::MAX }.usage().expect_err("no process");
        let text = format!("{error:#}");
        assert!(text.contains("--process server=4294967295") && text.contains("No such file"), "{text}");
    }

    #[test]
    fn a_process_that_ended_in_the_measurement_has_no_usage() {
        let own = Process { name: "own".to_owned(), pid: std::process::id() };
        let before = own.usage().expect("it runs");
        assert!(before.resident_bytes > 0);
        assert!(own.used_since(before).usage.is_some());
        let ended = Process { pid: u32::MAX, ..own };
        assert_eq!(ended.used_since(before).usage, None);
    }
}
