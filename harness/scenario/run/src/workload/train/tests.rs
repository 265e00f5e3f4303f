#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use harness_scenario::steps::Action;

use super::*;
use crate::rig::RigOptions;
use crate::workload::tests::{context_on, scenario_in, simulated};

#[test]
fn throughput_counts_the_batch_that_was_trained() {
    let step = "train: { id: t, parameters: 8MiB, layers: 4, activations_per_sample: 4MiB, batch: \
         64, iterations: 5, on_oom: bisect_batch }";
    let scenario = scenario_in("160MiB", step);
    let Action::Train(train) = &scenario.steps[0].action else {
        panic!("{step}")
    };
    let mut ctx = context_on(
        Box::new(simulated(&scenario)),
        &scenario,
        &RigOptions::default(),
    );
    let mut training = Training::new(train, ctx.stream(&train.stream));
    let (mut counts, mut recovery) = (Counts::default(), Recovery::new(train.on_oom.as_ref()));
    assert!(training.build(&mut ctx).is_ok());
    assert!(
        iterate(
            &mut ctx,
            &mut training,
            &mut counts,
            &mut recovery,
            None,
            None
        )
        .unwrap()
        .is_none()
    );
    let trained = recovery.into_record(&ctx).unwrap().trained.unwrap();
    assert!(counts.retries > 0 && counts.iterations == 5);
    assert_eq!(counts.samples, trained.samples);
}
