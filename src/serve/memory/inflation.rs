//! Turns to inflate large messages.

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::{bodies, running};

/// Turns of the process: 4. A turn is kept until the answer or its delay, so the messages of all of them hold 16 MiB.
static TURNS: Semaphore = Semaphore::const_new(4);

/// Turn to inflate a large message, on the connection and in the process.
#[derive(Debug, Default)]
pub(crate) struct InflationTurn {
    _of_connection: Option<OwnedSemaphorePermit>,
    _of_process: Option<SemaphorePermit<'static>>,
}

impl InflationTurn {
    /// Waits for the turn of the running call's connection.
    pub(crate) async fn on_connection() -> Self {
        let turns = bodies();
        let turn = async { turns?.acquire_owned().await.ok() };
        Self { _of_connection: turn.await, _of_process: None }
    }

    /// Waits for a turn of the process too.
    pub(crate) async fn and_in_process(self) -> Self {
        Self { _of_process: TURNS.acquire().await.ok(), ..self }
    }

    /// Keeps the turn until the running call ends, or is held back.
    pub(crate) fn keep(self) {
        let _ = running(|call| call.inflation = Some(self));
    }

    /// Ends the turn of the running call, if it has one. Its message is not needed any more.
    pub(crate) fn end() {
        let _ = running(|call| call.inflation = None);
    }
}
