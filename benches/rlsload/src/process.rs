//! What a process has used.

use std::fs;

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
    /// `schedstat` counts nanoseconds, `stat` only ticks of 10 ms; it covers one thread, so the threads are summed.
    pub fn of(pid: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let of_thread = |thread: fs::DirEntry| {
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<f64>().ok()
        };
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        Self {
            cpu_us: threads.filter_map(of_thread).sum::<f64>() / 1e3,
            resident_mib: resident.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0,
        }
    }
}
