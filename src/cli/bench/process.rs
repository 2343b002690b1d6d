//! CPU time and memory of the processes in `--process`.

use anyhow::Context;

use crate::app::process::Usage;

/// Process in `--process NAME=PID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    /// Name in the results.
    pub(super) name: String,
    pub(super) pid: u32,
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
        Usage::of(&pid.to_string()).with_context(|| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_name_and_a_pid() {
        assert_eq!(parse("a=b=42"), Ok(Process { name: "a=b".to_owned(), pid: 42 }));
        assert_eq!(parse("init=1"), Ok(Process { name: "init".to_owned(), pid: 1 }));
        for wrong in ["42", "=42", "server=", "server=0", "server=-1", "server=x"] {
            assert_eq!(parse(wrong), Err("write NAME=PID, such as server=4242"), "{wrong}");
        }
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
