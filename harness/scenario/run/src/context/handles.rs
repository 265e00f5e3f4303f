use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorSpec, PrivatePoolId};
use harness_allocator::device::{EventId, StreamId};
use harness_scenario::{
    EventName, PoolName, ProgramName, Scenario, StepName, StreamName, steps::Action,
};

use crate::rig::{ProgramId, Rig, Stop};

/// The streams, events, programs and private pools that the scenario names.
pub(crate) struct Handles {
    /// By index of the name; index 0 is the default stream.
    streams: Vec<StreamId>,
    events: BTreeMap<EventName, EventId>,
    /// By index of the name.
    pub(super) programs: Vec<ProgramId>,
    /// The programs of the ranks of each data-parallel training, without the first rank.
    pub(crate) ranks: BTreeMap<StepName, Vec<ProgramId>>,
    /// Each program numbers its own private pools.
    pools: BTreeMap<(ProgramId, PoolName), PrivatePoolId>,
}

impl Handles {
    /// Creates the streams and programs. `streams` are those of [`create_streams`].
    pub(super) fn new(
        rig: &mut Rig,
        scenario: &Scenario,
        arm: &AllocatorSpec,
        streams: Vec<StreamId>,
    ) -> Self {
        let programs = scenario.programs.iter();
        Self {
            streams,
            events: BTreeMap::new(),
            programs: programs.map(|_| rig.add_program(arm.build())).collect(),
            ranks: add_ranks(rig, scenario, arm),
            pools: BTreeMap::new(),
        }
    }

    pub(crate) fn stream(&self, name: &StreamName) -> StreamId {
        self.streams[name.index()]
    }

    pub(super) fn event(&mut self, name: &EventName, rig: &mut Rig) -> Result<EventId, Stop> {
        if let Some(&event) = self.events.get(name) {
            return Ok(event);
        }
        let event = rig.create_event()?;
        self.events.insert(name.clone(), event);
        Ok(event)
    }

    pub(super) fn program(&self, name: Option<&ProgramName>) -> ProgramId {
        name.map_or(ProgramId::FIRST, |name| self.programs[name.index()])
    }

    pub(super) fn pool(&mut self, name: &PoolName, rig: &mut Rig) -> PrivatePoolId {
        *self
            .pools
            .entry((rig.entered(), name.clone()))
            .or_insert_with(|| rig.name_private_pool())
    }

    pub(super) fn close(self, rig: Rig) -> Result<(), Stop> {
        let streams = self.streams.into_iter().skip(1).collect();
        rig.close(streams, self.events.into_values().collect())
    }
}

/// Creates the streams that the scenario names, after the default one.
pub(super) fn create_streams(
    rig: &mut Rig,
    names: &[StreamName],
    streams: &mut Vec<StreamId>,
) -> Result<(), Stop> {
    if let Some(default) = names.first() {
        rig.name_stream(StreamId::DEFAULT, &default.to_string());
    }
    for name in names.iter().skip(1) {
        let stream = rig.create_stream()?;
        rig.name_stream(stream, &name.to_string());
        streams.push(stream);
    }
    Ok(())
}

/// Adds the programs of each data-parallel training's ranks, without the first rank.
fn add_ranks(
    rig: &mut Rig,
    scenario: &Scenario,
    arm: &AllocatorSpec,
) -> BTreeMap<StepName, Vec<ProgramId>> {
    let trainings = scenario.all_steps().into_iter();
    let trainings = trainings.filter_map(|step| match &step.action {
        Action::Train(train) => Some((train.id.clone(), train.ranks.as_ref()?.count())),
        _ => None,
    });
    trainings
        .map(|(id, count)| {
            let programs = (1..count).map(|_| rig.add_program(arm.build()));
            (id, programs.collect())
        })
        .collect()
}
