use super::*;

#[test]
fn a_step_within_its_limit_is_left_alone() {
    let control = Control::default();
    assert_eq!((control.watch(), control.overrun()), (None, None));
    control.enter(Phase::Opening, Duration::from_secs(3600));
    assert_eq!((control.watch(), control.should_stop()), (None, false));
}

#[test]
fn only_the_step_that_exceeds_its_limit_is_asked_to_stop() {
    let control = Control::default();
    control.enter(Phase::Closing, Duration::ZERO);
    control.calls(BlockingCall::Free);
    assert_eq!(control.watch(), None, "it has some time to stop");
    assert!(control.should_stop() && !control.is_interrupted());
    let overrun = control.overrun().expect("the limit is exceeded");
    assert_eq!(
        (overrun.phase, overrun.call),
        (Phase::Closing, Some(BlockingCall::Free))
    );
    control.enter(Phase::Closing, Duration::from_secs(3600));
    assert!(!control.should_stop());
}

#[test]
fn an_overrun_names_the_step_and_the_last_call() {
    let phase = Phase::Step {
        number: 3,
        line: 12,
        text: "free activations".to_owned(),
    };
    let (limit, taken) = (Duration::from_millis(50), Duration::from_secs(2));
    let overrun = Overrun {
        phase,
        limit,
        taken,
        call: Some(BlockingCall::Free),
    };
    assert_eq!(
        overrun.expected(),
        "step 3 (line 12: free activations) to take at most 50.0 ms"
    );
    assert_eq!(
        overrun.seen_stuck(),
        "it has not ended after 2.00 s and does not stop; the last call that it began is the \
         allocator's `free`"
    );
}
