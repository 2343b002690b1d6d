//! Use of the machine by a process, from Linux' `/proc`: for the metrics of this one, and for `tidegate bench`.

use std::fs::{metadata, read_dir, read_to_string};
use std::io;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::telemetry::Telemetry;
use crate::telemetry::metrics::{
    PROCESS_CPU, PROCESS_MAX_FILES, PROCESS_OPEN_FILES, PROCESS_RESIDENT, PROCESS_VIRTUAL, PROCESS_VIRTUAL_MAX,
};

/// Milliseconds of a tick, the unit of CPU times: Linux shows 100 ticks a second to programs on every machine (`USER_HZ`).
const TICK_MS: u64 = 10;
/// Place of user and system time behind the name of a process in `stat`: the fields 14 and 15 of proc(5), the name is the second.
const USER_TIME: usize = 11;

/// Usage of a process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// CPU time so far of all its threads, those that have ended included.
    pub cpu: Duration,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Virtual memory.
    pub virtual_bytes: u64,
}

impl Usage {
    /// Returns the usage so far of `process`: a process ID, or `self`.
    ///
    /// # Errors
    /// If there is no such process, or it is a thread of the kernel.
    pub fn of(process: &str) -> io::Result<Self> {
        let read = |file: &str| read_to_string(format!("/proc/{process}/{file}"));
        Self::parse(&read("stat")?, &read("status")?).ok_or_else(|| io::Error::other("it has no CPU time or memory"))
    }

    /// Parses the files `stat` and `status` of a process.
    fn parse(stat: &str, status: &str) -> Option<Self> {
        // `schedstat` counts nanoseconds, but those of threads that have ended are not in it. The name may contain spaces and brackets.
        let (_, fields) = stat.rsplit_once(") ")?;
        let ticks = fields.split_whitespace().skip(USER_TIME).take(2).map(str::parse::<u64>);
        let ticks = ticks.sum::<Result<u64, _>>().ok()?;
        let bytes = |name: &str| {
            let kib = status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())?;
            kib.parse::<u64>().ok()?.checked_mul(1_024)
        };
        let (resident_bytes, virtual_bytes) = (bytes("VmRSS:")?, bytes("VmSize:")?);
        Some(Self { cpu: Duration::from_millis(ticks * TICK_MS), resident_bytes, virtual_bytes })
    }
}

/// Adds the metrics of this process to the page, with the names that all libraries of Prometheus use. What the kernel does not tell is
/// left out. Receivers of OTLP do not get them: their own agents have them, under other names.
pub(super) fn metrics(telemetry: &Telemetry) {
    telemetry.also(|page| {
        if page.is_of_points() {
            return;
        }
        let usage = Usage::of("self").ok();
        page.optional(&PROCESS_CPU, usage.map(|usage| usage.cpu.as_secs_f64()));
        page.optional(&PROCESS_OPEN_FILES, open_files().ok());
        let limit = |resource| getrlimit(resource).current.unwrap_or(u64::MAX);
        page.single(&PROCESS_MAX_FILES, limit(Resource::Nofile));
        page.optional(&PROCESS_VIRTUAL, usage.map(|usage| usage.virtual_bytes));
        page.single(&PROCESS_VIRTUAL_MAX, limit(Resource::As));
        page.optional(&PROCESS_RESIDENT, usage.map(|usage| usage.resident_bytes));
    });
}

/// Returns the number of open files of this process. Linux 6.2 and later say it without a list of them all.
fn open_files() -> io::Result<u64> {
    match metadata("/proc/self/fd")?.len() {
        // The list itself is an open file.
        0 => Ok(u64::try_from(read_dir("/proc/self/fd")?.count()).unwrap_or(u64::MAX).saturating_sub(1)),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_that_of_user_and_system() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 50 7 8 20 0";
        let (cpu, mib) = (Duration::from_secs(2), 1_024 * 1_024);
        let usage = Usage { cpu, resident_bytes: 2 * mib, virtual_bytes: 3 * mib };
        assert_eq!(Usage::parse(stat, "Name:\ta\nVmSize:\t    3072 kB\nVmRSS:\t    2048 kB\n"), Some(usage));
        assert_eq!(Usage::parse(stat, "Name:\ta kernel thread\n"), None);
        assert_eq!(Usage::parse("", ""), None);
    }

    #[test]
    fn an_open_file_is_counted() {
        let before = open_files().unwrap();
        let files: Vec<_> = (0..100).map(|_| std::fs::File::open("/proc/self/stat").unwrap()).collect();
        // Other tests open and close files meanwhile.
        let grown = open_files().unwrap().saturating_sub(before);
        assert!((60..140).contains(&grown), "{grown}");
        drop(files);
    }
}
