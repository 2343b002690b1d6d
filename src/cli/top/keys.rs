//! The keys that a person presses in a terminal, each at once and without an echo.

use std::io::{self, IsTerminal, Read};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

/// The keys of the terminal at standard input. Dropping it sets the terminal back.
pub(super) struct Keys {
    before: Termios,
    pressed: mpsc::UnboundedReceiver<u8>,
}

impl Keys {
    /// Starts to read keys. `None` if standard input is no terminal.
    pub(super) fn open() -> Option<Self> {
        let input = io::stdin();
        let before = input.is_terminal().then(|| tcgetattr(&input).ok()).flatten()?;
        let mut single = before.clone();
        // Ctrl-C is a signal still.
        single.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(&input, OptionalActions::Now, &single).ok()?;
        let (sender, pressed) = mpsc::unbounded_channel();
        // It ends with the process: nothing wakes a thread that reads a terminal.
        std::thread::spawn(move || {
            io::stdin().lock().bytes().map_while(Result::ok).try_for_each(|key| sender.send(key))
        });
        Some(Self { before, pressed })
    }

    /// Waits for the next key.
    pub(super) async fn next(&mut self) -> Option<u8> {
        self.pressed.recv().await
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}
