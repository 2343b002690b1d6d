//! What a process has used.

use std::fs;

/// Microseconds of a tick: Linux shows 100 ticks a second to programs on every machine.
const TICK_US: f64 = 1e4;

/// A reading of one process.
pub struct Usage {
    /// CPU time of its threads.
    pub cpu_us: f64,
    /// Memory that is resident.
    pub resident_mib: f64,
}

impl Usage {
    /// Reads `/proc`; zeros for a process that is gone.
    ///
    /// `stat` counts ticks of 10 ms. `schedstat` counts nanoseconds, but those of threads that have ended are not in it.
    pub fn of(pid: u32) -> Self {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name may contain spaces and brackets. Behind it, user and system time are the 12th and the 13th field.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split_whitespace();
        let ticks = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        Self {
            cpu_us: ticks * TICK_US,
            resident_mib: resident.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0,
        }
    }
}
