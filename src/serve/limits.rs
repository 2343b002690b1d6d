//! Limits of connections: timeouts, file descriptors and memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// File descriptors reserved for the store, the rule files and the log: 64 (`docs/decisions/0003`). Half of the limit
/// if the limit is below 128.
pub const DESCRIPTOR_RESERVE: u64 = 64;

/// Memory of an idle gRPC connection: 36 KiB, measured (`docs/decisions/0025`).
pub const IDLE_CONNECTION_BYTES: u64 = 36 << 10;
/// Memory of an idle gRPC connection over TLS: 48 KiB. rustls holds 8 KiB of it, and 10 KiB with a client certificate, measured
/// (`docs/decisions/0043`).
pub const IDLE_TLS_CONNECTION_BYTES: u64 = 48 << 10;
/// Divisor of the process's memory: idle connections take at most a quarter of it.
pub const IDLE_MEMORY_SHARE: u64 = 4;
/// Number of idle connections that are kept however little memory there is: 1,024, which take 36 MiB.
pub const LEAST_IDLE: usize = 1_024;
/// Memory of a connection of the HTTP listener whose request has a head of 64 KiB, the largest that is read: 84 KiB, measured. With
/// an ordinary head it takes 16 KiB.
pub const HTTP_CONNECTION_BYTES: u64 = 84 << 10;
/// Divisor of the process's memory: connections of the HTTP listener take at most a quarter of it.
pub const HTTP_MEMORY_SHARE: u64 = 4;
/// Number of connections of the HTTP listener however little memory there is: 1,024, which take at most 84 MiB. Further
/// ones wait.
pub const LEAST_HTTP: usize = 1_024;
/// Memory that is assumed if the kernel reports none: 512 MiB, the chart's default.
const UNKNOWN_MEMORY: u64 = 512 << 20;

/// Value of [`ConnectionLimits::keep_alive`] where gateways ask: 75 s. NGINX keeps its idle connections for 60 s
/// (`keepalive_timeout` of an `upstream`), and so do the other examples, so that no check meets a connection that Tidegate is closing.
pub const GATEWAY_KEEP_ALIVE: Duration = Duration::from_secs(75);

/// Timeouts of one connection. Every value is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Time from accept to the HTTP/2 preface and the first frame, or to a whole HTTP/1 request head: 5 s. Later heads of
    /// HTTP/1, and where the first bytes choose the version the first one too, have the same time from their first byte.
    pub handshake: Duration,
    /// Time without a request on an HTTP/1 connection that had one: 5 s, and [`GATEWAY_KEEP_ALIVE`] on the HTTP listener.
    pub keep_alive: Duration,
    /// Time from the first wait for a request's body to the body's end, or from 64 KiB of it to the next: 10 s, as for
    /// a stall. With less, a Tidegate with more calls than it can decide would fail those whose bodies its own windows
    /// delay, and an error is an admission to Envoy.
    pub body: Duration,
    /// Time without the peer taking a byte while there is something to write: 10 s, the same as `ping_answer`.
    pub stall: Duration,
    /// Time without a frame from an HTTP/2 peer before a ping: 30 s.
    pub ping_after: Duration,
    /// Time without an answer to that ping before the connection is dropped: 10 s.
    pub ping_answer: Duration,
    /// Age at the GOAWAY, from accept: 24 h, plus or minus 10 % by connection (gRFC A9). `Duration::MAX` is never. From this age on
    /// an answer over HTTP/1 announces that its connection ends.
    pub age: Duration,
    /// Time from that GOAWAY until the connection is cut: 1 h.
    pub grace: Duration,
    /// Time from the stop of the service until every connection is cut: 5 s.
    pub drain: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            keep_alive: Duration::from_secs(5),
            body: Duration::from_secs(10),
            stall: Duration::from_secs(10),
            ping_after: Duration::from_secs(30),
            ping_answer: Duration::from_secs(10),
            age: Duration::from_secs(24 * 3_600),
            grace: Duration::from_secs(3_600),
            drain: Duration::from_secs(5),
        }
    }
}

/// Connection slots. Clones share them: listeners with one `ConnectionSlots` have one cap together.
#[derive(Clone, Debug)]
pub struct ConnectionSlots(Arc<Semaphore>);

impl ConnectionSlots {
    /// Creates `cap` slots.
    pub fn new(cap: usize) -> Self {
        Self(Arc::new(Semaphore::new(cap.min(Semaphore::MAX_PERMITS))))
    }

    /// Takes a slot, which is free again when the permit is dropped. `None` if all are taken.
    pub(super) fn take(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_owned().ok()
    }

    /// Returns true if a slot is free.
    pub(super) fn is_any_free(&self) -> bool {
        self.0.available_permits() > 0
    }
}

/// Raises this process's soft limit of open files to the hard limit. Returns the limit in force, which is the soft
/// limit if raising it is not permitted.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok();
    let open_files = if raised { limit.maximum } else { limit.current };
    open_files.unwrap_or(u64::MAX)
}

/// Makes Linux give this process memory in small pages only. With huge pages, connections and calls take up to twice
/// the memory that they use (`docs/decisions/0031`). Has no effect if the kernel does not permit it.
pub fn use_small_pages() {
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

/// Returns the number of connections that fit into `open_files`, less [`DESCRIPTOR_RESERVE`].
pub fn connection_cap(open_files: u64) -> usize {
    let reserve = DESCRIPTOR_RESERVE.min(open_files / 2);
    usize::try_from(open_files - reserve).unwrap_or(usize::MAX)
}

/// Returns the number of connections of `bytes_each` that stay open without a call, given the memory of the process and the
/// maximum number of connections. It is at least [`LEAST_IDLE`], but a sixteenth less than `most`: leaving connections need
/// their descriptors for a moment more, and no new connection should be refused while there are idle ones.
pub fn idle_connections(memory_bytes: u64, bytes_each: u64, most: usize) -> usize {
    let by_memory = usize::try_from(memory_bytes / IDLE_MEMORY_SHARE / bytes_each).unwrap_or(usize::MAX);
    below(by_memory.max(LEAST_IDLE), most)
}

/// Returns the maximum number of connections of the HTTP listener, given the memory of the process. Each may have a
/// request in flight, so all of them fit into [`HTTP_MEMORY_SHARE`], and there are at least [`LEAST_HTTP`].
pub fn http_connections(memory_bytes: u64) -> usize {
    let by_memory = memory_bytes / HTTP_MEMORY_SHARE / HTTP_CONNECTION_BYTES;
    usize::try_from(by_memory).unwrap_or(usize::MAX).max(LEAST_HTTP)
}

/// Returns `connections`, but at most a sixteenth less than `most`, and at least 1.
pub fn below(connections: usize, most: usize) -> usize {
    connections.min(most - most / 16).max(1)
}

/// Returns the bytes of memory that this process may use: the minimum of its control groups' limits and of the
/// machine's memory. 512 MiB if the kernel reports neither.
pub fn memory_bytes() -> u64 {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let limits = group_limits(&groups).filter_map(|path| read(&path)?.trim().parse().ok());
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| machine_memory(&text));
    limits.chain(machine).min().unwrap_or(UNKNOWN_MEMORY)
}

/// Returns the files that may hold a memory limit of the control groups in `groups` (`/proc/self/cgroup`), including
/// each group's parents. In a container the group itself is mounted at the root, whatever its name.
fn group_limits(groups: &str) -> impl Iterator<Item = PathBuf> {
    groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { return Vec::new() };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        let parents = Path::new(group).ancestors().map(|group| group.strip_prefix("/").unwrap_or(group));
        parents.map(|group| Path::new(root).join(group).join(file)).collect()
    })
}

/// Returns the machine's memory in bytes, from the text of `/proc/meminfo`.
fn machine_memory(text: &str) -> Option<u64> {
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))?;
    kib.parse::<u64>().ok()?.checked_mul(1_024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connections_have_a_quarter_of_the_memory_and_leave_descriptors_to_others() {
        assert_eq!(idle_connections(512 << 20, IDLE_CONNECTION_BYTES, 1_000_000), 3_640);
        assert_eq!(idle_connections(16 << 30, IDLE_CONNECTION_BYTES, 1_000_000), 116_508);
        assert_eq!(idle_connections(16 << 20, IDLE_CONNECTION_BYTES, 1_000_000), LEAST_IDLE);
        assert_eq!(idle_connections(16 << 30, IDLE_CONNECTION_BYTES, 1_024), 960);
        assert_eq!(idle_connections(16 << 30, IDLE_CONNECTION_BYTES, 0), 1);
        assert_eq!(idle_connections(512 << 20, IDLE_TLS_CONNECTION_BYTES, 1_000_000), 2_730);
    }

    #[test]
    fn connections_of_the_http_listener_have_a_quarter_of_the_memory_with_the_largest_heads() {
        assert_eq!([64 << 20, 512 << 20, 2 << 30, 16 << 30].map(http_connections), [LEAST_HTTP, 1_560, 6_241, 49_932]);
    }

    #[test]
    fn the_limit_of_memory_is_looked_for_in_each_group_and_its_parents() {
        let files = |groups| group_limits(groups).map(|path| path.display().to_string()).collect::<Vec<_>>();
        let root = "/sys/fs/cgroup";
        assert_eq!(files("0::/a/b\n"), ["/a/b", "/a", ""].map(|group| format!("{root}{group}/memory.max")));
        let version_1 = "5:cpu,memory:/a\n4:cpuset:/c\n";
        assert_eq!(files(version_1), ["/a", ""].map(|group| format!("{root}/memory{group}/memory.limit_in_bytes")));
        assert_eq!(files("nothing of the kind"), Vec::<String>::new());
        assert_eq!(machine_memory("MemTotal:       1024 kB\nMemFree: 7 kB\n"), Some(1 << 20));
        assert_eq!(machine_memory("MemFree: 7 kB\n"), None);
        assert!(memory_bytes() > 1 << 20);
    }

    #[test]
    fn connections_leave_a_reserve_of_descriptors_and_never_none_for_themselves() {
        assert_eq!(connection_cap(1_048_576), 1_048_512);
        assert_eq!(connection_cap(64), 32);
        assert_eq!(connection_cap(u64::MAX), usize::MAX - 64);
    }
}
