//! One runtime per core. A connection and its calls never change threads, so no core waits for another's lock
//! (`docs/decisions/0003`).

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

use super::waiting;

/// Threads that serve connections. Clones share the threads, which end with [`Workers::stop`] or with the last clone.
#[derive(Clone, Debug)]
pub struct Workers {
    runtimes: Arc<[Handle]>,
    stop: Arc<watch::Sender<bool>>,
}

impl Workers {
    /// Starts `count` threads, each with a runtime of its own.
    ///
    /// # Errors
    /// Returns an error if the system has no thread or no descriptor left for one of them. Those already started end.
    pub fn start(count: NonZeroUsize) -> io::Result<Self> {
        Self::start_as("worker", count)
    }

    /// Starts `count` threads with this name and a number, each with a runtime of its own.
    ///
    /// # Errors
    /// As [`Workers::start`].
    pub(super) fn start_as(name: &str, count: NonZeroUsize) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let start = |number| start_one(format!("{name}-{number}"), stopped.clone());
        let runtimes = (0..count.get()).map(start).collect::<Result<_, _>>()?;
        Ok(Self { runtimes, stop: Arc::new(stop) })
    }

    /// Creates workers with the caller's runtime as the only one, for listeners whose answers may take long, such as
    /// the admin's.
    ///
    /// # Panics
    /// Panics outside of a tokio runtime.
    pub fn here() -> Self {
        Self { runtimes: Arc::new([Handle::current()]), stop: Arc::new(watch::channel(false).0) }
    }

    /// Runs a future of `make` on each thread, and waits for all of them.
    pub async fn on_each<F: Future<Output = ()> + Send + 'static>(&self, make: impl Fn() -> F) {
        let runs: Vec<_> = self.runtimes.iter().map(|runtime| runtime.spawn(make())).collect();
        for run in runs {
            // A thread that has ended runs nothing.
            let _ = run.await;
        }
    }

    /// Ends the threads and everything that still runs on them, and waits for it at most for `bound`. Returns false if
    /// a thread is still busy then; it is left behind.
    pub async fn stop(&self, bound: Duration) -> bool {
        self.stop.send_replace(true);
        tokio::time::timeout(bound, self.stop.closed()).await.is_ok()
    }

    /// Creates slots for the connections of one listener.
    pub(super) fn slots(&self) -> WorkerSlots {
        WorkerSlots {
            runtimes: Arc::clone(&self.runtimes),
            taken: self.runtimes.iter().map(|_| AtomicUsize::new(0)).collect(),
        }
    }
}

/// Number of one listener's connections on each worker.
pub(super) struct WorkerSlots {
    runtimes: Arc<[Handle]>,
    taken: Arc<[AtomicUsize]>,
}

impl WorkerSlots {
    /// Takes a slot at the worker with the fewest connections: in turn while none leaves, and even again after some
    /// did.
    pub(super) fn take(&self) -> (Handle, WorkerSlot) {
        let fewest = self.taken.iter().zip(self.runtimes.iter()).enumerate();
        let fewest = fewest.min_by_key(|(_, (taken, _))| taken.load(Ordering::Relaxed));
        let (worker, runtime) =
            fewest.map_or_else(|| (0, Handle::current()), |(worker, (_, runtime))| (worker, runtime.clone()));
        if let Some(taken) = self.taken.get(worker) {
            taken.fetch_add(1, Ordering::Relaxed);
        }
        (runtime, WorkerSlot { taken: Arc::clone(&self.taken), worker })
    }
}

/// Place of one connection at a worker, which is free again when this is dropped.
pub(super) struct WorkerSlot {
    taken: Arc<[AtomicUsize]>,
    worker: usize,
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.get(self.worker) {
            taken.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn start_one(name: String, mut stopped: watch::Receiver<bool>) -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().on_thread_unpark(waiting::was_idle).build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new().name(name).spawn(move || {
        // An error means that the last `Workers` is gone, which counts as a stop.
        let _ = runtime.block_on(stopped.wait_for(|stop| *stop));
        runtime.shutdown_background();
        drop(stopped);
    })?;
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_are_seated_evenly_and_a_free_seat_is_taken_first() {
        let workers = Workers::start(NonZeroUsize::new(2).unwrap()).unwrap();
        let slots = workers.slots();
        let (_, first) = slots.take();
        let (_, second) = slots.take();
        let (_, third) = slots.take();
        assert_eq!((first.worker, second.worker, third.worker), (0, 1, 0));
        drop(first);
        drop(third);
        let (_, fourth) = slots.take();
        let (_, fifth) = slots.take();
        assert_eq!((fourth.worker, fifth.worker), (0, 0));
        assert!(workers.stop(Duration::from_secs(30)).await);
    }

    #[tokio::test]
    async fn a_worker_that_is_stuck_does_not_hold_up_the_stop() {
        let workers = Workers::start(NonZeroUsize::MIN).unwrap();
        let (release, stuck) = std::sync::mpsc::channel::<()>();
        let (runtime, _seat) = workers.slots().take();
        let (started, is_stuck) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            started.send(()).unwrap();
            let _ = stuck.recv();
        });
        is_stuck.await.unwrap();
        assert!(!workers.stop(Duration::from_millis(50)).await);
        drop(release);
        assert!(workers.stop(Duration::from_secs(30)).await);
    }
}
