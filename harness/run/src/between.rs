//! What goes on between the operations of a step.

use crate::rig::Stop;
use crate::world::World;

/// What is done between the operations of a storm or a replay, between the iterations of a training, between the steps of an inference, and when a program has started: the scenario's own
/// invariants, and steps that run meanwhile. Whoever enters another program in it goes back to the one that was entered. `None`: nothing, at no cost.
pub(crate) type Between<'a> = Option<&'a mut dyn FnMut(&mut World) -> Result<(), Stop>>;

/// Does what is to be done between two operations.
pub(crate) fn pause(between: &mut Between<'_>, world: &mut World) -> Result<(), Stop> {
    between.as_mut().map_or(Ok(()), |act| act(world))
}
