//! Buffers of workloads, whose allocation may fail.

use harness_allocator::allocator::{AllocatorError, Request};
use harness_allocator::{device::StreamId, units::Bytes};
use harness_record::FailedRequest;

use crate::context::RunContext;
use crate::rig::{Buffer, Stop};

/// Why an operation was not completed.
#[derive(Debug)]
pub(super) enum Failed {
    /// An OOM, which is data.
    OutOfMemory(AllocatorError, Option<Box<FailedRequest>>),
    Stop(Stop),
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Separates OOM, which is data, from other failures. Counts it, and keeps its facts.
pub(super) fn answer<T>(
    done: Result<T, Failed>,
    ooms: &mut u64,
    failed_request: &mut Option<FailedRequest>,
) -> Result<Result<T, AllocatorError>, Stop> {
    match done {
        Ok(value) => Ok(Ok(value)),
        Err(Failed::Stop(stop)) => Err(stop),
        Err(Failed::OutOfMemory(error, facts)) => {
            *ooms += 1;
            *failed_request = facts.map(|facts| *facts);
            Ok(Err(error))
        }
    }
}

/// Allocates and fills a buffer. On OOM, collects the facts before anything is freed.
pub(super) fn make(ctx: &mut RunContext, size: Bytes, stream: StreamId) -> Result<Buffer, Failed> {
    let mut buffer = take(ctx, size, stream)?;
    ctx.rig.fill(&mut buffer, stream)?;
    Ok(buffer)
}

/// Like [`make`], without filling.
pub(super) fn take(ctx: &mut RunContext, size: Bytes, stream: StreamId) -> Result<Buffer, Failed> {
    let request = Request { size, stream };
    let answer = ctx.rig.allocate(request)?;
    answered(ctx, request, answer)
}

/// Returns the buffer of a served request. After an OOM, collects the facts.
pub(super) fn answered(
    ctx: &mut RunContext,
    request: Request,
    answer: Result<Buffer, AllocatorError>,
) -> Result<Buffer, Failed> {
    match answer {
        Ok(buffer) => Ok(buffer),
        Err(error) => {
            let failed_request = ctx.rig.failed_request(request, &error)?;
            Err(Failed::OutOfMemory(error, failed_request.map(Box::new)))
        }
    }
}

pub(super) fn free_all(
    ctx: &mut RunContext,
    buffers: impl IntoIterator<Item = Buffer>,
) -> Result<(), Stop> {
    buffers
        .into_iter()
        .try_for_each(|buffer| ctx.rig.free(buffer))
}
