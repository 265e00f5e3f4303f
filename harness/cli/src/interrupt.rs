use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;

use super::{error::CliError, exit::Exit, terminal};

/// `true` after the first Ctrl-C.
pub(crate) type Interrupt = Arc<AtomicBool>;

/// Handles Ctrl-C. The first one prints, above the progress bar, that the command stops after the
/// current piece of work.
pub(crate) fn watch_with(bar: &ProgressBar, current: &'static str) -> Result<Interrupt, CliError> {
    let bar = bar.clone();
    watch(move || {
        bar.suspend(|| {
            terminal::message(format_args!(
                "interrupted: stopping after the current {current}; \
                 press Ctrl-C again to stop immediately"
            ))
        })
    })
}

pub(crate) fn watch(on_interrupt: impl Fn() + Send + 'static) -> Result<Interrupt, CliError> {
    let interrupt = Interrupt::default();
    let is_set = Arc::clone(&interrupt);
    let handler = move || {
        if is_set.swap(true, Ordering::Relaxed) {
            std::process::exit(Exit::Interrupted as i32);
        }
        on_interrupt();
    };
    ctrlc::set_handler(handler).map_err(|error| {
        let message = format!("the handler for Ctrl-C cannot be installed: {error}");
        CliError::internal(message, "check this machine's limits on threads and pipes")
    })?;
    Ok(interrupt)
}
