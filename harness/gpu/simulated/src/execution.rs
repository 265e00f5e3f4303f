//! [`Execution`]: the work of one device if kernels execute: queued work by time, the bytes in
//! memory, loaded modules.

use std::collections::BTreeMap;

use harness_allocator::device::{AccessKind, StreamId, TestDevice as _};
use harness_allocator::units::Nanos;
use harness_gpu_settings::{driver::WrongWrite, settings::Settings};

use crate::kernels::{FINDING, Kernel, Work};
use crate::memory::{DeviceMemory, FIRST_ADDRESS};
use crate::{bytes::DeviceBytes, code::Code};

#[derive(Debug)]
pub(crate) struct Execution {
    /// References to the primary context.
    pub(crate) references: u32,
    /// The error of every call after work broke the context.
    broken: Option<Code>,
    pub(crate) bytes: DeviceBytes,
    /// Queued work by start time, then by order of submission.
    queue: BTreeMap<(Nanos, u64), Work>,
    submitted: u64,
    /// Streams that are not destroyed.
    pub(crate) streams: u64,
    modules: BTreeMap<usize, Module>,
    next_handle: usize,
    next_findings: u64,
    wrong_write: Option<WrongWrite>,
    blind_verify: bool,
    fills: u64,
}

/// A loaded module: its text, its kernels by handle, its variable.
#[derive(Debug)]
struct Module {
    text: String,
    kernels: BTreeMap<usize, Kernel>,
    /// Address and size of the variable.
    findings: (u64, u64),
}

/// The name of a module's variable.
const FINDINGS: &str = "harness_findings";
/// The first handle of modules and kernels.
const HANDLES: usize = 4 << 44;
/// The first address of modules' variables, outside of all allocations.
const VARIABLES: u64 = FIRST_ADDRESS - (1 << 46);

impl Execution {
    pub(crate) fn new(index: usize, settings: &Settings) -> Self {
        Self {
            references: 0,
            broken: None,
            bytes: DeviceBytes::default(),
            queue: BTreeMap::new(),
            submitted: 0,
            streams: 0,
            modules: BTreeMap::new(),
            // Devices do not share handles.
            next_handle: HANDLES + (index << 36),
            next_findings: VARIABLES,
            wrong_write: settings.wrong_write,
            blind_verify: settings.blind_verify,
            fills: 0,
        }
    }

    /// Runs the work that is due, in order of time.
    pub(crate) fn settle(&mut self, memory: &mut DeviceMemory, now: Nanos) -> Result<(), Code> {
        memory.sim().wait_until(now);
        while let Some(entry) = self
            .queue
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            let work = entry.remove();
            if self.broken.is_none() {
                self.broken = self.run(memory, &work).err();
            }
        }
        self.broken.map_or(Ok(()), Err)
    }

    /// Queues work after the earlier work of its stream.
    pub(crate) fn submit(
        &mut self,
        memory: &mut DeviceMemory,
        stream: StreamId,
        work: Work,
    ) -> Result<(), Code> {
        let start = memory.sim().stream_done_at(stream)?;
        if let Some(access) = work.touches() {
            self.queue_access(memory, stream, access)?;
        }
        if let Work::Busy(duration) = work {
            memory.sim().busy(stream, duration)?;
        }
        self.queue(start, work);
        Ok(())
    }

    /// Queues an access. An access to unallocated memory, or a race with another stream, breaks the
    /// context.
    pub(crate) fn queue_access(
        &mut self,
        memory: &mut DeviceMemory,
        stream: StreamId,
        (address, len, kind): (u64, u64, AccessKind),
    ) -> Result<(), Code> {
        if self.is_variable(address, len) {
            return Ok(());
        }
        let range = memory.shifted(address, len);
        memory
            .sim()
            .queue_access(stream, range, kind)
            .map_err(|error| {
                eprintln!("simulated GPU: {error}");
                *self.broken.insert(Code::from(error))
            })
    }

    /// Queues work for a time.
    pub(crate) fn queue(&mut self, start: Nanos, work: Work) {
        self.submitted += 1;
        self.queue.insert((start, self.submitted), work);
    }

    fn run(&mut self, memory: &mut DeviceMemory, work: &Work) -> Result<(), Code> {
        if let Work::Free { address, number } = *work {
            if let Some(size) = memory.finish_free(address, number) {
                self.bytes.forget(address, size.0);
            }
            return Ok(());
        }
        if self.blind_verify && matches!(work, Work::Verify { .. }) {
            return Ok(());
        }
        let Some((address, len, _)) = work.touches() else {
            return work.run(&mut self.bytes, None);
        };
        let may_touch = memory.is_accessible(address, len) || self.is_variable(address, len);
        if !may_touch
            || work
                .finds_at()
                .is_some_and(|findings| !self.is_variable(findings, FINDING))
        {
            return Err(Code::IllegalAddress);
        }
        self.fills += u64::from(work.is_fill());
        let wrong = self
            .wrong_write
            .filter(|wrong| work.is_fill() && wrong.nth == self.fills);
        work.run(&mut self.bytes, wrong.map(|wrong| wrong.offset))
    }

    /// The number of pieces of pending work.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Returns whether the bytes are in the variable of a module.
    pub(crate) fn is_variable(&self, address: u64, len: u64) -> bool {
        let contains = |(start, size): (u64, u64)| {
            address >= start && len <= size && address - start <= size - len
        };
        self.modules
            .values()
            .any(|module| contains(module.findings))
    }

    /// The number of loaded modules.
    pub(crate) fn modules(&self) -> usize {
        self.modules.len()
    }

    /// Loads a module from PTX text with 64-bit addresses, and allocates its variable.
    pub(crate) fn load(&mut self, text: &str) -> Result<usize, Code> {
        if ![".version", ".target", ".address_size 64"]
            .iter()
            .all(|needed| text.contains(needed))
        {
            return Err(Code::InvalidPtx);
        }
        let findings = (self.next_findings, declared_size(text));
        self.next_findings += findings.1;
        let handle = self.handle();
        self.modules.insert(
            handle,
            Module {
                text: text.to_owned(),
                kernels: BTreeMap::new(),
                findings,
            },
        );
        Ok(handle)
    }

    pub(crate) fn unload(&mut self, module: usize) -> Result<(), Code> {
        let Module {
            findings: (start, size),
            ..
        } = self.modules.remove(&module).ok_or(Code::InvalidHandle)?;
        self.bytes.forget(start, size);
        Ok(())
    }

    /// The handle of a supported kernel in a module. The text must declare the expected number of
    /// parameters.
    pub(crate) fn function(&mut self, module: usize, name: &str) -> Result<usize, Code> {
        let kernel = Kernel::named(name).ok_or(Code::NotFound)?;
        let handle = self.handle();
        let module = self.modules.get_mut(&module).ok_or(Code::InvalidHandle)?;
        let entry = module
            .text
            .split(&format!(".visible .entry {name}("))
            .nth(1)
            .and_then(|rest| rest.split(')').next());
        if entry.map(|parameters| parameters.matches(".param .u64").count())
            != Some(kernel.parameters())
        {
            return Err(Code::NotFound);
        }
        module.kernels.insert(handle, kernel);
        Ok(handle)
    }

    /// Address and size of a module's variable, if its text declares it.
    pub(crate) fn variable(&self, module: usize, name: &str) -> Result<(u64, u64), Code> {
        let module = self.modules.get(&module).ok_or(Code::InvalidHandle)?;
        Some(module.findings)
            .filter(|findings| name == FINDINGS && findings.1 > 0)
            .ok_or(Code::NotFound)
    }

    /// The kernel of a handle.
    pub(crate) fn kernel(&self, function: usize) -> Result<Kernel, Code> {
        self.modules
            .values()
            .find_map(|module| module.kernels.get(&function))
            .copied()
            .ok_or(Code::InvalidHandle)
    }

    /// A new handle.
    fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }
}

/// Bytes that the text of a module declares for its variable, or zero.
fn declared_size(text: &str) -> u64 {
    let words = text
        .split(&format!(".b64 {FINDINGS}["))
        .nth(1)
        .and_then(|rest| rest.split(']').next());
    words
        .and_then(|words| words.parse::<u64>().ok())
        .map_or(0, |words| 8 * words)
}

#[cfg(test)]
mod tests;
