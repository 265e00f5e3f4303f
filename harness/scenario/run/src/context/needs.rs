use harness_scenario::steps::{Action, free::FreeStep};
use harness_scenario::{Account, Amount, Chain, Metric, PolicyKind, Scenario, Step, Unit};

pub(super) fn evicts(scenario: &Scenario) -> bool {
    let steps = scenario.all_steps();
    let mut policies = steps
        .iter()
        .filter_map(|step| step.action.on_oom())
        .flat_map(Chain::policies);
    policies.any(|policy| policy.kind() == PolicyKind::Evict)
}

pub(super) const fn looks_at_sites(action: &Action) -> bool {
    matches!(action, Action::Compare(_)) || action.leak_check().is_some()
}

pub(super) fn sizes_use_measured_memory(steps: &[Step]) -> bool {
    let of = |amount: &Amount| {
        amount
            .quantities()
            .into_iter()
            .any(|metric| matches!(metric, Metric::At(..)) && asks_for_memory(metric))
    };
    steps.iter().any(|step| {
        let own = match &step.action {
            Action::Alloc(alloc) => of(&alloc.size),
            Action::ExternalMemory(memory) => of(memory),
            Action::Free(FreeStep::Pinning { request, .. }) => of(request),
            _ => false,
        };
        own || sizes_use_measured_memory(step.action.steps())
            || sizes_use_measured_memory(&step.meanwhile)
    })
}

pub(crate) fn asks_for_memory(metric: &Metric) -> bool {
    let metric = if let Metric::Arm(_, metric) = metric {
        metric
    } else {
        metric
    };
    // Every size of the device comes from this query, and nothing else does.
    matches!(metric.account(), Some(Account::Device(metric)) if metric.unit() == Unit::Bytes)
}
