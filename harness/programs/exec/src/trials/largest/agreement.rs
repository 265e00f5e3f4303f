//! [`Agreement`]: what recordings of other GPUs predict for a GPU, if their differences do not
//! change the answer.

use std::collections::BTreeSet;

use harness_allocator::units::Bytes;

use super::{
    Evidence, Guess, HOPPER, Known, LargestCase, LargestRow, LargestSearch, Model, Next, Trial,
    peak_at,
};

/// PyTorch's workspace for a handle of cuBLAS on Hopper GPUs, and on others
/// (`CublasHandlePool.cpp` of PyTorch 2.11).
const WORKSPACES: [Bytes; 2] = [Bytes::mib(32), Bytes(8320 << 10)];

/// How much the peak of a run differs from what requests of another GPU predict.
#[derive(Clone, Copy)]
pub(super) struct Difference {
    bytes: Bytes,
    peak: Bytes,
}

impl Difference {
    const fn of(one: Bytes, other: Bytes) -> Self {
        Self {
            bytes: Bytes(one.0.abs_diff(other.0)),
            peak: one,
        }
    }

    /// Returns twice the difference, for a GPU with this memory: it grows with the peak.
    fn margin(self, memory: Bytes) -> Bytes {
        let bytes = u128::from(self.bytes.0) * 2;
        let peak = u128::from(self.peak.0.max(1));
        let grown = bytes * u128::from(memory.0).max(peak) / peak;
        Bytes(u64::try_from(grown).unwrap_or(u64::MAX))
    }
}

/// Predictions of confirmed models, which agree on the largest value, also with `margin` more or
/// less memory.
struct Agreement {
    guesses: Vec<Guess>,
    /// Zero if the recordings are equal, up to that value.
    margin: Bytes,
}

impl<E: Send> LargestSearch<'_, E> {
    /// Predicts a case that is like a confirmed one, or for which all confirmed ones predict the
    /// same value.
    pub(super) fn predicted(&self, case: &LargestCase, models: &[Model]) -> Option<LargestRow> {
        let Agreement { guesses, margin } = self.agreement(case, models)?;
        let first = guesses.first()?;
        let values = &self.parameter.values;
        Some(LargestRow {
            largest: first.fitting.checked_sub(1).map(|at| values[at]),
            peak_reserved: first
                .peak_reserved
                .filter(|_| margin == Bytes::ZERO)
                .map(|peak| peak.0),
            next: values.get(first.fitting).map(|value| Next {
                value: *value,
                ..Next::default()
            }),
            basis: Evidence::Predicted,
            doubts: models[first.model].doubts.clone(),
            ..self.empty_row(case)
        })
    }

    /// Predicts the peak of a value, if all models that are evidence for this case agree.
    pub(super) fn peak(&self, case: &LargestCase, models: &[Model], index: usize) -> Option<Bytes> {
        let agreement = self.agreement(case, models)?;
        let of = |guess: &Guess| self.replayed_peak(case, &models[guess.model], index);
        let peak = of(agreement.guesses.first()?)?;
        let is_sure = agreement.margin == Bytes::ZERO
            && agreement
                .guesses
                .iter()
                .all(|guess| of(guess) == Some(peak));
        is_sure.then_some(peak)
    }

    /// Returns the predictions of confirmed models if they are evidence for this case.
    fn agreement(&self, case: &LargestCase, models: &[Model]) -> Option<Agreement> {
        let is_of_command = |at: &usize| models[*at].of.has_command_of(case);
        let of_command: Vec<usize> = (0..models.len()).filter(is_of_command).collect();
        let is_confirmed = |at: &usize| models[*at].is_confirmed;
        let is_own = |at: &&usize| is_confirmed(at) && models[**at].of.is_like(case);
        if let Some(own) = of_command.iter().find(is_own) {
            let guess = self.guess(case, models, *own)?;
            self.is_recorded(&guess, [&models[*own]]).then_some(())?;
            let difference = models[*own].difference;
            let margin = difference.map_or(Bytes::ZERO, |it| it.margin(case.trial.memory));
            return self
                .holds(case, &models[*own], &guess, margin)
                .then(|| Agreement {
                    guesses: vec![guess],
                    margin,
                });
        }
        let is_evidence = |at: &usize| is_confirmed(at) || models[*at].difference.is_some();
        let all: Vec<usize> = of_command.into_iter().filter(is_evidence).collect();
        let is_hopper = |case: &LargestCase| case.capability() == HOPPER;
        // Workspaces of Hopper GPUs say nothing about others if there is more evidence.
        let is_near = |at: &usize| is_hopper(case) || !is_hopper(&models[*at].of);
        let near: Vec<usize> = all.iter().copied().filter(is_near).collect();
        let capabilities = |of: &[usize]| -> BTreeSet<(u32, u32)> {
            of.iter().map(|at| models[*at].of.capability()).collect()
        };
        let is_enough = capabilities(&near).len() > 1 && near.iter().any(is_confirmed);
        let used = if is_enough { near } else { all };
        let recorded = capabilities(&used);
        // Programs take other paths on GPUs that are older than all that were recorded.
        if recorded.len() < 2 || recorded.first() > Some(&case.capability()) {
            return None;
        }
        let confirmed: Vec<usize> = used.iter().copied().filter(is_confirmed).collect();
        let guesses: Vec<Guess> = confirmed
            .iter()
            .map(|at| self.guess(case, models, *at))
            .collect::<Option<_>>()?;
        let first = *guesses.first()?;
        let used_models = used.iter().map(|at| &models[*at]);
        self.is_recorded(&first, used_models).then_some(())?;
        if guesses.iter().any(|guess| guess.fitting != first.fitting) {
            return None;
        }
        let mut margin = self.margin(case, models, &used, &first)?;
        if confirmed
            .iter()
            .all(|at| is_hopper(&models[*at].of) != is_hopper(case))
        {
            margin += self.workspaces(&models[first.model], &first)?;
        }
        self.holds(case, &models[first.model], &first, margin)
            .then_some(Agreement { guesses, margin })
    }

    /// Returns whether recordings explain this value: one is not larger, because small values may
    /// have other requests, and refuted models are functions that explain all recordings.
    fn is_recorded<'m>(&self, guess: &Guess, of: impl IntoIterator<Item = &'m Model>) -> bool {
        let value = self.parameter.values[guess.fitting.saturating_sub(1)];
        let of: Vec<&Model> = of.into_iter().collect();
        let smallest = of.iter().filter_map(|model| model.requests.smallest());
        smallest.min().is_some_and(|smallest| smallest <= value)
            && of
                .iter()
                .all(|model| !model.is_refuted || model.requests.is_regular(value))
    }

    /// Returns twice the largest difference between the peaks of these models and of a guess, and
    /// at least that of their own predictions.
    fn margin(
        &self,
        case: &LargestCase,
        models: &[Model],
        of: &[usize],
        guess: &Guess,
    ) -> Option<Bytes> {
        let mut margin = Bytes::ZERO;
        for model in of.iter().map(|at| &models[*at]) {
            if let Some(difference) = model.difference {
                margin = margin.max(difference.margin(case.trial.memory));
            }
            // Without a value that fits, there are no peaks to compare.
            if let (true, Some(peak)) = (model.is_confirmed, guess.peak_reserved) {
                let own = self.replayed_peak(case, model, guess.fitting - 1)?;
                margin = margin.max(Bytes(own.0.abs_diff(peak.0) * 2));
            }
        }
        Some(margin)
    }

    /// Returns the most by which workspaces of cuBLAS may differ on a Hopper GPU.
    fn workspaces(&self, model: &Model, guess: &Guess) -> Option<Bytes> {
        let index = guess.fitting.min(self.parameter.values.len() - 1);
        let program = model.requests.at(self.parameter.values[index])?;
        let is_workspace = |size: Bytes| WORKSPACES.contains(&size);
        let sizes = program.allocations.iter().map(|made| made.requested);
        let count = sizes.filter(|size| is_workspace(*size)).count().max(1);
        Some(Bytes(WORKSPACES[0].0 * count as u64))
    }

    /// Returns whether a guess stays the same with more or less memory.
    fn holds(&self, case: &LargestCase, model: &Model, guess: &Guess, margin: Bytes) -> bool {
        if margin == Bytes::ZERO {
            return true;
        }
        let memory = case.trial.memory;
        let less = with_memory(case, memory.saturating_sub(margin));
        let fits = |at: usize| self.replayed_peak(&less, model, at).is_some();
        guess.fitting.checked_sub(1).is_none_or(fits)
            && self.is_too_large(case, model, guess.fitting, margin)
    }

    /// Returns whether a value does not fit with more memory either, or if there is none.
    fn is_too_large(&self, case: &LargestCase, model: &Model, index: usize, more: Bytes) -> bool {
        let more = with_memory(case, Bytes(case.trial.memory.0.saturating_add(more.0)));
        index >= self.parameter.values.len()
            || self
                .replay(&more, model, index)
                .is_some_and(|run| run.oom.is_some())
    }

    /// Returns whether the next value does not fit, although the run with the value of the guess
    /// had another peak than the requests of the other GPU.
    pub(super) fn lacks_clearly(
        &self,
        case: &LargestCase,
        models: &[Model],
        known: &Known,
        guess: &Guess,
    ) -> bool {
        let own = models.iter().find(|model| model.of.is_like(case));
        let is_recorded = own.is_some_and(|own| own.is_usable && !own.requests.is_empty());
        let other = &models[guess.model];
        is_recorded
            && other.is_confirmed
            && self
                .difference(case, other, known)
                .is_some_and(|difference| {
                    let margin = difference.margin(case.trial.memory);
                    self.is_too_large(case, other, guess.fitting, margin)
                })
    }

    /// Keeps the difference between the largest run that fits and requests of another GPU.
    pub(super) fn note_difference(&self, case: &LargestCase, models: &mut [Model], known: &Known) {
        let is_base = |model: &&Model| model.is_confirmed && model.of.has_command_of(case);
        let base = models.iter().find(is_base);
        let difference = base.and_then(|base| self.difference(case, base, known));
        let is_own = |model: &&mut Model| {
            let is_comparable = model.of.trial.alloc_conf == case.trial.alloc_conf;
            model.of.is_like(case) && is_comparable && model.is_usable && !model.is_confirmed
        };
        if let Some(own) = models.iter_mut().find(is_own) {
            own.difference = difference;
        }
    }

    fn difference(&self, case: &LargestCase, base: &Model, known: &Known) -> Option<Difference> {
        let (low, _) = known.open(self.parameter.values.len());
        let at = low.checked_sub(1)?;
        let peak = peak_at(known, at)?;
        Some(Difference::of(peak, self.replayed_peak(case, base, at)?))
    }

    /// Returns the peak of a replay; `None` if it runs out of memory.
    fn replayed_peak(&self, case: &LargestCase, model: &Model, index: usize) -> Option<Bytes> {
        let replayed = self.replay(case, model, index)?;
        let peak = Bytes(replayed.stats.reserved_bytes.all.peak);
        replayed.oom.is_none().then_some(peak)
    }
}

/// Returns the error of a prediction that the runs of `tried` met: `Some(None)` if its peak was
/// exact, `None` if they did not meet it.
pub(super) fn error_of(
    guess: &Guess,
    known: &Known,
    tried: &[usize],
) -> Option<Option<Difference>> {
    let Some(at) = guess.fitting.checked_sub(1) else {
        return Some(None);
    };
    let made = peak_at(known, at).filter(|_| tried.contains(&at))?;
    let difference = Difference::of(made, guess.peak_reserved?);
    Some(Some(difference).filter(|it| it.bytes > Bytes::ZERO))
}

fn with_memory(case: &LargestCase, memory: Bytes) -> LargestCase {
    LargestCase {
        trial: Trial {
            memory,
            ..case.trial.clone()
        },
        ..case.clone()
    }
}
