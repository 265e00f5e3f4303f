use harness_allocator::allocator::{AllocatorError, MemoryFraction, Request};
use harness_allocator::device::{StreamId, Tag, TestDevice, faulty::Injector};
use harness_allocator::units::{Bytes, Nanos};

use super::{Audit, Buffer, ProgramId, Rig, Stop, program::Program};
use crate::control::BlockingCall;

impl Rig {
    /// Runs an operation of the current program, and returns its duration in a timed run.
    fn operate<T>(
        &mut self,
        call: BlockingCall,
        act: impl FnOnce(&mut Program, &mut dyn TestDevice) -> T,
    ) -> Result<(T, Nanos), Stop> {
        self.begin_operation()?;
        self.record_time();
        let start = self.start();
        self.control.calls(call);
        let (program, device) = self.program_on_device();
        let answer = act(program, device);
        let duration = self.since(start);
        if let Some(tracer) = &self.tracer {
            tracer.memory(
                &self.programs[ProgramId::FIRST.index()].allocator.stats(),
                self.device.now(),
            );
        }
        Ok((answer, duration))
    }

    /// Allocates memory. The inner error means that the allocator refused the request.
    pub fn allocate(&mut self, request: Request) -> Result<Result<Buffer, AllocatorError>, Stop> {
        if self.is_interrupted() {
            return Err(Stop::Interrupted);
        }
        let faults = self.faults.clone();
        let (answer, duration) = self.operate(BlockingCall::Allocate, |program, device| {
            faults
                .iter()
                .for_each(|faults| faults.set_request(Some(request)));
            let answer = program.allocator.allocate(device, request);
            faults.iter().for_each(|faults| faults.set_request(None));
            answer
        })?;
        match answer {
            Ok(allocation) => {
                self.timed_allocate(duration);
                if !self.is_timed() && !allocation.is_null() {
                    self.names.allocated(allocation.ptr(), allocation.size());
                }
                self.check(|audit, allocator, device| {
                    audit.allocated(allocator, device, request, &allocation)
                })?;
                Ok(Ok(Buffer::new(allocation, self.entered)))
            }
            Err(AllocatorError::Device(error)) => Err(error.into()),
            Err(answer @ (AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. })) => {
                if let Some(tracer) = &self.tracer {
                    tracer.refused(request.size, self.device.now());
                }
                let counted = matches!(answer, AllocatorError::OutOfMemory(_));
                let (program, _) = self.program_on_device();
                program.retries = program.allocator.stats().num_alloc_retries;
                self.check(|audit, allocator, device| {
                    audit.out_of_memory(allocator, device, counted)
                })?;
                Ok(Err(answer))
            }
        }
    }

    /// Frees a buffer in its own program.
    ///
    /// A checked run first verifies the contents on the buffer's own stream, because the memory is
    /// reused there. A read on the writing stream would hide a missing synchronization. The check
    /// is skipped if it would wait for queued `work`, because that would order streams that the
    /// program did not order.
    pub fn free(&mut self, buffer: Buffer) -> Result<(), Stop> {
        self.within(buffer.program, |rig| rig.free_here(buffer))
    }

    /// Verifies a buffer's contents like [`Rig::free`]. Skipped in timed runs and if it would wait
    /// for queued work.
    pub fn verify_at_rest(&mut self, buffer: &Buffer) -> Result<(), Stop> {
        if let Some((tag, writer)) = buffer.content
            && !self.is_timed()
            && !buffer.shared
            && ![writer, buffer.stream()]
                .iter()
                .any(|stream| self.queued.working.contains(stream))
        {
            self.control.calls(BlockingCall::Verify);
            self.without_faults(|rig| rig.device.verify(buffer.stream(), buffer.range(), tag))?;
        }
        Ok(())
    }

    fn free_here(&mut self, buffer: Buffer) -> Result<(), Stop> {
        self.verify_at_rest(&buffer)?;
        let address = buffer.allocation.ptr();
        let (freed, duration) = self.operate(BlockingCall::Free, |program, device| {
            program.allocator.free(device, buffer.allocation)
        })?;
        if let Err(error) = freed {
            // It is unknown whether the allocator still holds the block, so later audit findings
            // would mean nothing.
            self.program_on_device().0.audit = None;
            return Err(error.into());
        }
        if self.is_timed() {
            self.times.free.push(duration);
        } else {
            self.names.freed(address);
        }
        self.check(|audit, allocator, device| audit.freed(allocator, device, address))
    }

    pub fn fill(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Stop> {
        if buffer.allocation.is_null() {
            return Ok(());
        }
        self.tags += 1;
        // The odd factor spreads the counter over all eight bytes.
        let tag = Tag(self.tags.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // After a failed fill, the contents are unknown.
        buffer.content = None;
        self.control.calls(BlockingCall::Fill);
        self.begin_launch();
        self.device.fill(stream, buffer.range(), tag)?;
        buffer.content = Some((tag, stream));
        Ok(())
    }

    /// Verifies a buffer's contents on a stream. A buffer without contents passes.
    pub fn verify(&mut self, buffer: &Buffer, stream: StreamId) -> Result<(), Stop> {
        let Some((tag, _)) = buffer.content else {
            return Ok(());
        };
        self.control.calls(BlockingCall::Verify);
        self.begin_launch();
        self.device.verify(stream, buffer.range(), tag)?;
        self.stream_is_done(stream)
    }

    /// Queues a verification of a buffer's contents on a stream without waiting.
    pub fn read(&mut self, buffer: &Buffer, stream: StreamId) -> Result<(), Stop> {
        let Some((tag, _)) = buffer.content else {
            return Ok(());
        };
        self.control.calls(BlockingCall::Verify);
        self.begin_launch();
        self.device.verify_later(stream, buffer.range(), tag)?;
        self.queued.reading.insert(stream);
        Ok(())
    }

    pub fn record_stream(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Stop> {
        buffer.shared |= stream != buffer.stream();
        self.faults.iter().for_each(Injector::state_changed);
        let program = &mut self.programs[buffer.program.index()];
        Ok(program
            .allocator
            .record_stream(&buffer.allocation, stream)?)
    }

    pub fn empty_cache(&mut self) -> Result<Bytes, Stop> {
        let before = self.stats().reserved_bytes.all.current;
        let (emptied, duration) = self.operate(BlockingCall::EmptyCache, |program, device| {
            program.allocator.empty_cache(device)
        })?;
        emptied?;
        if self.is_timed() {
            self.times.empty_cache.push(duration);
        } else {
            self.check(Audit::everything)?;
            // A driver pool releases memory without a counted call.
            self.refresh_memory()?;
            self.plot();
        }
        Ok(Bytes(
            before.saturating_sub(self.stats().reserved_bytes.all.current),
        ))
    }

    pub fn reset_peaks(&mut self) {
        self.faults.iter().for_each(Injector::state_changed);
        self.program_on_device().0.allocator.reset_peaks();
    }

    pub fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.faults.iter().for_each(Injector::state_changed);
        let (program, device) = self.program_on_device();
        program.allocator.set_memory_fraction(device, fraction);
    }

    /// Sets the memory used by simulated other processes, and returns the amount they could get.
    pub fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, Stop> {
        self.control.calls(BlockingCall::ExternalMemory);
        self.faults.iter().for_each(Injector::state_changed);
        let held = self.device.set_external_memory(held)?;
        if !self.is_timed() {
            self.refresh_memory()?;
            self.plot();
        }
        Ok(held)
    }
}
