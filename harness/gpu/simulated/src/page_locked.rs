//! Requests for page-locked memory on a machine whose GPU shares the host's memory, and what such a
//! machine reports.

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::SharedMemory;

use crate::world::{Machine, State, current_device, machine};
use crate::{code::Code, host::HOST_PAGE};

impl State {
    /// Notes the memory of the machine in use, and counts the processes' resident memory for the
    /// next request if the settings say so.
    pub(crate) fn look_at_machine(&mut self, machine: &Machine) {
        if self.shared.is_read() {
            let holdings = self.holdings(0);
            self.shared.look(&holdings, machine.settings.memory);
        }
    }

    /// Charges page-locked memory to the current device, if it shares the host's memory. Returns
    /// the device.
    pub(crate) fn pin(&mut self, machine: &Machine, size: usize) -> Result<Option<usize>, Code> {
        if machine.settings.shared_memory == SharedMemory::None {
            return Ok(None);
        }
        let index = current_device();
        self.on_device(index, |memory| memory.pin(pages(size)))?;
        self.enter_pinned();
        Ok(Some(index))
    }

    /// Returns the charge of [`State::pin`].
    pub(crate) fn unpin(&mut self, index: usize, size: usize) -> Result<(), Code> {
        self.release(index, |memory| {
            memory.unpin(pages(size));
            Ok(())
        })?;
        self.enter_pinned();
        Ok(())
    }
}

/// The bytes of whole pages.
fn pages(size: usize) -> Bytes {
    Bytes(size.max(1).next_multiple_of(HOST_PAGE) as u64)
}

/// Writes the free and the total memory of a machine whose GPU shares it, as the system reports it
/// to a program (`MemAvailable`). Returns `false` if the GPU has memory of its own. Needs no
/// context.
///
/// # Safety
/// Both places are writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_memory_of_machine(free: *mut u64, total: *mut u64) -> bool {
    let machine = machine();
    if machine.settings.shared_memory == SharedMemory::None {
        return false;
    }
    let mut state = machine.state();
    state.look_at_machine(machine);
    state.shared.write();
    let number = machine.visible.first().copied().unwrap_or(0);
    let held = state
        .holdings(number)
        .iter()
        .map(|holding| holding.held)
        .sum::<Bytes>();
    let used = held + machine.settings.others + state.shared.counted();
    // SAFETY: as the caller promises.
    unsafe {
        free.write(machine.memory().saturating_sub(used).0);
        total.write(machine.memory().0);
    }
    true
}
