//! The end of a run: the final checks, and the release of everything.

use harness_allocator::allocator::{AllocatorError, MemoryFraction, OomCause, Request};
use harness_allocator::device::{EventId, StreamId, faulty::Injector};
use harness_allocator::units::Bytes;

use super::{Audit, Finding, Rig, Stop};
use crate::control::BlockingCall;
use harness_base::words::count;
use harness_record::Invariant;

impl Rig {
    /// Checks the end state after everything was freed. Compares outstanding reads and releases
    /// private pools and caches. Then, in each program, all free memory must fit in one allocation.
    pub fn finish(&mut self) -> Result<(), Stop> {
        if self.is_asleep() {
            self.wake(None)?;
        }
        self.synchronize()?;
        self.control.calls(BlockingCall::ExternalMemory);
        self.device.set_external_memory(Bytes::ZERO)?;
        self.in_each_program(Self::release_cache)?;
        if !self.host.is_empty() {
            let seen = format!("{} of host memory", count(self.host.len(), "allocation"));
            return self.violated(
                Invariant::EverythingGoesBack,
                "no host memory held after the last free",
                seen,
            );
        }
        if self.is_timed() {
            Ok(())
        } else {
            self.without_faults(|rig| rig.in_each_program(Self::check_whole_limit_fits))
        }
    }

    fn release_cache(&mut self) -> Result<(), Stop> {
        self.release_private_pools()?;
        self.set_memory_fraction(MemoryFraction::ALL);
        self.control.calls(BlockingCall::EmptyCache);
        let (program, device) = self.program_on_device();
        program.allocator.empty_cache(device)?;
        let reserved = self.stats().reserved_bytes.all.current;
        if reserved != 0 {
            let segments = self.snapshot();
            let first = segments
                .first()
                .map(|segment| format!(", the first of {} at {}", segment.size, segment.address))
                .unwrap_or_default();
            let seen = format!(
                "{reserved} B ({}) reserved in {}{first}",
                Bytes(reserved),
                count(segments.len(), "segment")
            );
            return self.violated(
                Invariant::EverythingGoesBack,
                "0 B reserved after the last free and empty_cache",
                seen,
            );
        }
        self.check(Audit::everything)
    }

    /// Allocates all free memory in one request, in whole reserve units.
    fn check_whole_limit_fits(&mut self) -> Result<(), Stop> {
        let free = self.device.free_memory()?;
        self.control.calls(BlockingCall::Allocate);
        let (program, device) = self.program_on_device();
        let whole = program.allocator.largest_request(device, free);
        // Another process may take memory in the meantime.
        let is_less = |cause: &OomCause| match cause {
            OomCause::Device { free: left } => *left < free,
            OomCause::Fraction { .. } | OomCause::Allocator { .. } => false,
        };
        match program.allocator.allocate(device, Request::new(whole)) {
            Ok(allocation) => program.allocator.free(device, allocation)?,
            Err(AllocatorError::Device(error)) => return Err(error.into()),
            Err(AllocatorError::OutOfMemory(oom)) if is_less(&oom.cause) => {}
            Err(error) => {
                let expected = format!("all free memory, {whole}, in one allocation");
                return self.violated(
                    Invariant::WholeLimitFitsAtTheEnd,
                    expected,
                    error.to_string(),
                );
            }
        }
        self.control.calls(BlockingCall::EmptyCache);
        let (program, device) = self.program_on_device();
        Ok(program.allocator.empty_cache(device)?)
    }

    /// Releases everything of all programs, however the run ended. Fails if something could not be
    /// released, or leaked.
    pub fn close(mut self, streams: Vec<StreamId>, events: Vec<EventId>) -> Result<(), Stop> {
        // The end of the run may already have made the same calls.
        self.faults.iter().for_each(Injector::state_changed);
        self.control.calls(BlockingCall::Synchronize);
        self.device.synchronize()?;
        self.control.calls(BlockingCall::ExternalMemory);
        self.device.set_external_memory(Bytes::ZERO)?;
        self.programs
            .iter_mut()
            .try_for_each(|program| program.allocator.close(&mut *self.device))?;
        std::mem::take(&mut self.host)
            .into_iter()
            .try_for_each(|id| self.device.host_free(id))?;
        events
            .into_iter()
            .try_for_each(|event| self.device.destroy_event(event))?;
        streams
            .into_iter()
            .try_for_each(|stream| self.device.destroy_stream(stream))?;
        let leaks = self.device.leaks();
        if leaks.is_empty() {
            return Ok(());
        }
        let expected = "no memory or handles left on the device";
        Err(Stop::Violated(vec![Finding::new(
            Invariant::NothingLeaks,
            expected,
            leaks.to_string(),
        )]))
    }

    fn violated(
        &self,
        invariant: Invariant,
        expected: impl Into<String>,
        seen: String,
    ) -> Result<(), Stop> {
        Err(Stop::Violated(self.name_program(vec![Finding::new(
            invariant, expected, seen,
        )])))
    }
}
