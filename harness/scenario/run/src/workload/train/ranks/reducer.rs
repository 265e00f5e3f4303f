//! How a rank averages its gradients: the collectives that it calls, and DDP's buckets.
//!
//! The behavior of DDP is that of PyTorch 2.11 with default settings
//! (`gradient_as_bucket_view=False`, `find_unused_parameters=False`). The sources are
//! `_ddp_init_helper` in
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/nn/parallel/distributed.py>, and
//! `initialize_buckets`, `rebuild_buckets`, `ensure_prior_reduction_finished` and
//! `compute_bucket_assignment_by_size` in
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/reducer.cpp>. The
//! copies of its broadcasts and NCCL's own memory are omitted.

use harness_allocator::{device::StreamId, units::Bytes};

use super::matcher::Purpose;
use crate::context::RunContext;
use crate::rig::{Buffer, Stop};
use crate::workload::memory::{Failed, free_all, make};
use harness_scenario::model::{ModelProgram, ParameterId};
use harness_scenario::steps::ranks::{Ranks, Reduce};

/// The size of the first bucket in the backward pass, small so that its all-reduce starts early:
/// `_DEFAULT_FIRST_BUCKET_BYTES`.
const FIRST_BUCKET: Bytes = Bytes::mib(1);

pub(super) type Call = (Purpose, Bytes);

pub(super) struct Reducer {
    reduce: Reduce,
    /// The sizes at which buckets are closed: the first one, then all others.
    caps: [Bytes; 2],
    sizes: Vec<Bytes>,
    /// The total size of the model's buffers.
    constants: Bytes,
    /// DDP's buckets: the parameters of each, in the order of their gradients.
    buckets: Vec<Vec<ParameterId>>,
    memory: Vec<Buffer>,
    /// The order of gradients in the first iteration. DDP builds its buckets from it before the
    /// second.
    order: Vec<ParameterId>,
    state: State,
}

/// The state of DDP's buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    First,
    /// The first iteration has determined the order.
    OrderKnown,
    /// The ranks have the order of rank 0.
    OrderShared,
    /// The buckets follow the order.
    Rebuilt,
    /// A backward pass began and did not end, so no other one can begin.
    Interrupted,
}

impl Reducer {
    pub(super) fn new(ranks: &Ranks, sizes: &[Bytes], constants: &[Bytes]) -> Self {
        Self {
            reduce: ranks.reduce,
            caps: ranks
                .bucket
                .map_or([FIRST_BUCKET, Ranks::BUCKET], |bucket| [bucket; 2]),
            sizes: sizes.to_vec(),
            constants: constants.iter().copied().sum(),
            buckets: Vec::new(),
            memory: Vec::new(),
            order: Vec::new(),
            state: State::First,
        }
    }

    /// Broadcasts the parameters. DDP makes one bucket for all gradients, because their order is
    /// unknown.
    pub(super) fn build(
        &mut self,
        ctx: &mut RunContext,
        stream: StreamId,
        calls: &mut Vec<Call>,
    ) -> Result<(), Failed> {
        calls.push((Purpose::Parameters, self.sizes.iter().copied().sum()));
        if self.reduce == Reduce::Ddp {
            self.buckets = vec![(0..self.sizes.len()).collect()];
            self.make_buckets(ctx, stream)?;
        }
        Ok(())
    }

    fn make_buckets(&mut self, ctx: &mut RunContext, stream: StreamId) -> Result<(), Failed> {
        for bucket in &self.buckets {
            let size = bucket.iter().map(|&parameter| self.sizes[parameter]).sum();
            self.memory.push(make(ctx, size, stream)?);
        }
        Ok(())
    }

    /// Returns whether DDP refuses the next forward pass, because a backward pass did not end.
    pub(super) fn refuses(&self) -> bool {
        self.state == State::Interrupted
    }

    /// The collectives that DDP calls before a forward pass: the bucket order once, and the model's
    /// buffers each time.
    pub(super) fn opening(&self) -> Vec<Call> {
        if self.reduce != Reduce::Ddp {
            return Vec::new();
        }
        let order = (self.state == State::OrderKnown)
            .then(|| (Purpose::Buckets, Bytes(4 * (self.order.len() as u64 + 1))));
        let buffers = (self.constants > Bytes::ZERO).then_some((Purpose::Buffers, self.constants));
        order.into_iter().chain(buffers).collect()
    }

    /// Rebuilds the buckets once, when the order is known.
    pub(super) fn before_forward(
        &mut self,
        ctx: &mut RunContext,
        stream: StreamId,
    ) -> Result<(), Failed> {
        if matches!(self.state, State::OrderKnown | State::OrderShared) {
            self.state = State::OrderShared;
            free_all(ctx, self.memory.drain(..))?;
            self.buckets = buckets(&self.order, &self.sizes, self.caps);
            if let Err(failed) = self.make_buckets(ctx, stream) {
                free_all(ctx, self.memory.drain(..))?;
                return Err(failed);
            }
            self.state = State::Rebuilt;
        }
        Ok(())
    }

    /// The collectives during the last backward pass of an iteration, or after it, given the
    /// computed gradients.
    pub(super) fn in_backward(
        &mut self,
        program: &ModelProgram,
        arrived: &[ParameterId],
        ended: bool,
    ) -> Vec<Call> {
        let mut ready = ready(program, self.sizes.len(), arrived);
        match self.reduce {
            Reduce::Ddp => return self.fill_buckets(ready, ended),
            Reduce::Hooks => {}
            Reduce::AfterBackward if ended => ready.sort_unstable(),
            Reduce::AfterBackward => ready.clear(),
        }
        ready
            .into_iter()
            .map(|parameter| (Purpose::Gradient(parameter), self.sizes[parameter]))
            .collect()
    }

    /// DDP reduces buckets in order, each when its gradients and all earlier buckets are complete.
    fn fill_buckets(&mut self, ready: Vec<ParameterId>, ended: bool) -> Vec<Call> {
        let is_ready = |parameter: &ParameterId| ready.contains(parameter);
        let full = self
            .buckets
            .iter()
            .enumerate()
            .take_while(|(_, bucket)| ended || bucket.iter().all(is_ready));
        let calls = full
            .zip(&self.memory)
            .map(|((number, _), buffer)| (Purpose::Bucket(number), buffer.requested()))
            .collect();
        match (ended, self.state) {
            (false, _) if !ready.is_empty() => self.state = State::Interrupted,
            (true, State::First) => (self.state, self.order) = (State::OrderKnown, ready),
            _ => {}
        }
        calls
    }

    pub(super) fn free(self, ctx: &mut RunContext) -> Result<(), Stop> {
        free_all(ctx, self.memory)
    }
}

/// The parameters with complete gradients, in order of completion.
fn ready(program: &ModelProgram, parameters: usize, arrived: &[ParameterId]) -> Vec<ParameterId> {
    let mut missing = vec![0_u32; parameters];
    program
        .operations
        .iter()
        .flat_map(|operation| &operation.backward.parameters)
        .for_each(|&parameter| missing[parameter] += 1);
    let completes = |parameter: &ParameterId| {
        missing[*parameter] = missing[*parameter].saturating_sub(1);
        missing[*parameter] == 0
    };
    arrived.iter().copied().filter(completes).collect()
}

/// Splits gradients into buckets. A bucket is closed when it reaches the cap, so its last gradient
/// may exceed it.
fn buckets(
    order: &[ParameterId],
    sizes: &[Bytes],
    [first, others]: [Bytes; 2],
) -> Vec<Vec<ParameterId>> {
    let mut buckets: Vec<Vec<ParameterId>> = Vec::new();
    let (mut bucket, mut size) = (Vec::new(), Bytes::ZERO);
    for &parameter in order {
        bucket.push(parameter);
        size += sizes[parameter];
        if size >= if buckets.is_empty() { first } else { others } {
            buckets.push(std::mem::take(&mut bucket));
            size = Bytes::ZERO;
        }
    }
    buckets.extend((!bucket.is_empty()).then_some(bucket));
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PyTorch 2.11 builds these buckets for sixteen linear layers of 1,024 features (4 MiB and 4
    /// KiB each): 1, 7, 7 and 1 layers.
    #[test]
    fn a_bucket_closes_with_the_gradient_that_reaches_the_cap() {
        let sizes: Vec<Bytes> = (0..32)
            .map(|number| {
                if number % 2 == 0 {
                    Bytes::kib(4)
                } else {
                    Bytes::mib(4)
                }
            })
            .collect();
        let order: Vec<ParameterId> = (0..32).collect();
        let lengths = |caps| {
            buckets(&order, &sizes, caps)
                .iter()
                .map(Vec::len)
                .collect::<Vec<_>>()
        };
        assert_eq!(lengths([FIRST_BUCKET, Ranks::BUCKET]), [2, 14, 14, 2]);
        assert_eq!(lengths([Bytes(1); 2]), [1; 32]);
        assert_eq!(lengths([Bytes::gib(1); 2]), [32]);
    }
}
