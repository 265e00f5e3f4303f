//! Work that runs between the operations of a step.

use crate::{context::RunContext, rig::Stop};

/// A callback that runs between the operations of a step: it checks the scenario's own invariants
/// and runs `meanwhile` steps.
pub(crate) type Between<'a> = Option<&'a mut dyn FnMut(&mut RunContext) -> Result<(), Stop>>;

pub(crate) fn pause(between: &mut Between<'_>, ctx: &mut RunContext) -> Result<(), Stop> {
    between.as_mut().map_or(Ok(()), |act| act(ctx))
}
