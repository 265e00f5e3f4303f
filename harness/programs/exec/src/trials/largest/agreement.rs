//! What recordings of other GPUs predict for a GPU.

use harness_allocator::units::Bytes;

use super::{
    Evidence, Guess, HOPPER, Known, LargestCase, LargestRow, LargestSearch, Model, Next, is_hopper,
    peak_at,
};

impl<E: Send> LargestSearch<'_, E> {
    /// Predicts a case from models that are evidence for it.
    pub(super) fn predicted(&self, case: &LargestCase, models: &[Model]) -> Option<LargestRow> {
        let guess = *self.agreement(case, models)?.first()?;
        let values = &self.parameter.values;
        Some(LargestRow {
            largest: guess.fitting.checked_sub(1).map(|at| values[at]),
            peak_reserved: guess.peak_reserved.map(|peak| peak.0),
            next: values.get(guess.fitting).map(|value| Next {
                value: *value,
                ..Next::default()
            }),
            basis: Evidence::Predicted,
            doubts: models[guess.model].doubts.clone(),
            ..self.empty_row(case)
        })
    }

    /// Predicts the peak of a value, if all models that are evidence for this case agree.
    pub(super) fn peak(&self, case: &LargestCase, models: &[Model], index: usize) -> Option<Bytes> {
        let guesses = self.agreement(case, models)?;
        let mut peaks = guesses
            .iter()
            .map(|guess| self.replayed_peak(case, &models[guess.model], index));
        let first = peaks.next()??;
        peaks.all(|peak| peak == Some(first)).then_some(first)
    }

    /// Returns the predictions of confirmed models if they are evidence for this case: that of the
    /// same kind of GPU, or equal ones of the nearest compute capabilities that ran.
    fn agreement(&self, case: &LargestCase, models: &[Model]) -> Option<Vec<Guess>> {
        let own = models.iter().position(|model| model.of.is_like(case));
        let near = match own {
            Some(own) => vec![own],
            None => nearest(case, models)?,
        };
        let of_hopper = |at: &usize| is_hopper(&models[*at].of);
        if is_hopper(case) || !near.iter().any(of_hopper) {
            return self.common_guess(case, models, &near);
        }
        // Sizes do not show which requests of a Hopper GPU are workspaces.
        let on_hopper = LargestCase {
            kind: (HOPPER.0, HOPPER.1, case.kind.2),
            ..case.clone()
        };
        self.common_guess(&on_hopper, models, &near)?;
        let others: Vec<usize> = near.into_iter().filter(|at| !of_hopper(at)).collect();
        self.common_guess(case, models, &others)
    }

    /// Returns the predictions of these models if they are confirmed and equal.
    fn common_guess(
        &self,
        case: &LargestCase,
        models: &[Model],
        of: &[usize],
    ) -> Option<Vec<Guess>> {
        let guess = |at: &usize| {
            let guess = self.guess(case, models, *at)?;
            let is_evidence = models[*at].is_confirmed && self.is_recorded(&guess, &models[*at]);
            is_evidence.then_some(guess)
        };
        let guesses: Vec<Guess> = of.iter().map(guess).collect::<Option<_>>()?;
        let first = guesses.first()?;
        let is_equal = |guess: &Guess| {
            (guess.fitting, guess.peak_reserved) == (first.fitting, first.peak_reserved)
        };
        guesses.iter().all(is_equal).then_some(guesses)
    }

    /// Returns whether recordings explain this value: one is not larger, because small values may
    /// have other requests, and refuted models are functions that explain all recordings.
    fn is_recorded(&self, guess: &Guess, of: &Model) -> bool {
        let value = self.parameter.values[guess.fitting.saturating_sub(1)];
        let smallest = of.requests.smallest();
        smallest.is_some_and(|smallest| smallest <= value)
            && (!of.is_refuted || of.requests.is_regular(value))
    }

    /// Returns the peak of a replay; `None` if it runs out of memory.
    fn replayed_peak(&self, case: &LargestCase, model: &Model, index: usize) -> Option<Bytes> {
        let replayed = self.replay(case, model, index)?;
        let peak = Bytes(replayed.stats.reserved_bytes.all.peak);
        replayed.oom.is_none().then_some(peak)
    }
}

/// Returns the models of two compute capabilities: the nearest that is not above the case's, and
/// the nearest above, or below if there is none. A program may take another path on a GPU that is
/// older than all that ran.
fn nearest(case: &LargestCase, models: &[Model]) -> Option<Vec<usize>> {
    let capability = |at: &usize| models[*at].of.capability();
    let mut order: Vec<usize> = (0..models.len())
        .filter(|at| models[*at].of.has_command_of(case))
        .collect();
    order.sort_by_key(capability);
    let groups: Vec<&[usize]> = order
        .chunk_by(|one, other| capability(one) == capability(other))
        .collect();
    let above = groups.partition_point(|group| capability(&group[0]) <= case.capability());
    let last = above.max(1).min(groups.len().checked_sub(1)?);
    (above > 0 && last > 0).then(|| groups[last - 1..=last].concat())
}

/// Returns whether the runs of `tried` met a prediction and the exact peak.
pub(super) fn is_met(guess: &Guess, known: &Known, tried: &[usize]) -> bool {
    let Some(at) = guess.fitting.checked_sub(1) else {
        return true;
    };
    let made = peak_at(known, at).filter(|_| tried.contains(&at));
    made.is_some() && made == guess.peak_reserved
}
