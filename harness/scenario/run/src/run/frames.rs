//! Converts steps to the stack frames of a recording: file, line and a short name.

use std::path::Path;

use harness_scenario::steps::{Action, Step};
use harness_trace::snapshot::{ExtraId, Frame};

/// The frames of a step and of the blocks around it, the innermost first.
pub(super) fn frames<'s>(
    path: &Path,
    step: &'s Step,
    around: impl Iterator<Item = &'s Step>,
) -> Vec<Frame> {
    std::iter::once(step)
        .chain(around)
        .map(|step| frame(path, step))
        .collect()
}

fn frame(path: &Path, step: &Step) -> Frame {
    Frame {
        name: name(step),
        file: path.to_string_lossy().into_owned(),
        line: step.position.line,
        extra: ExtraId::NONE,
    }
}

fn name(step: &Step) -> String {
    let kind = step.action.kind().name();
    let about = match &step.action {
        Action::Alloc(alloc) => Some(alloc.buffer.to_string()),
        Action::Storm(storm) => Some(storm.id.to_string()),
        Action::Replay(replay) => Some(replay.id.to_string()),
        Action::PrivatePool(block) => Some(block.name.to_string()),
        Action::Process(block) => Some(block.name.to_string()),
        Action::Program(block) => Some(block.name.to_string()),
        _ => step.id.as_ref().map(ToString::to_string),
    };
    about.map_or_else(|| kind.to_owned(), |about| format!("{kind} {about}"))
}
