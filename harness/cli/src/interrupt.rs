//! Ctrl-C: the first one asks to stop, the second one ends the program at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::CliError;
use super::exit::Exit;

/// Set when the user wants to stop.
pub(crate) type Interrupt = Arc<AtomicBool>;

/// Watches for Ctrl-C. `on_interrupt` is called at the first one, in another thread.
pub(crate) fn watch(on_interrupt: impl Fn() + Send + 'static) -> Result<Interrupt, CliError> {
    let interrupt = Interrupt::default();
    let seen = Arc::clone(&interrupt);
    let handler = move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(Exit::Interrupted as i32);
        }
        on_interrupt();
    };
    ctrlc::set_handler(handler).map_err(|error| CliError::Internal {
        message: format!("Ctrl-C cannot be watched for: {error}"),
        help: "this machine refuses signal handlers: see its limits on threads and pipes",
    })?;
    Ok(interrupt)
}
