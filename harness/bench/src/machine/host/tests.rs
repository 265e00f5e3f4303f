use super::*;

#[test]
fn time_that_the_kernel_does_not_count_is_not_known() {
    let mut known = KernelStats::current().expect("Linux has the file").total;
    let all = [
        known.user,
        known.nice,
        known.system,
        known.irq.unwrap_or_default(),
        known.softirq.unwrap_or_default(),
    ];
    let stolen = known.steal.expect("every supported kernel counts it");
    assert_eq!(
        cores_use(&known),
        Some((all.into_iter().sum::<u64>() + stolen, stolen))
    );
    known.steal = None;
    assert_eq!(cores_use(&known), None);
}

#[test]
fn shares_are_those_between_two_readings() {
    let first = HostUse {
        thread: Some(500),
        cores: Some((10, 10)),
    };
    let last = HostUse {
        thread: Some(600),
        cores: Some((10, 10)),
    };
    assert_eq!(
        first.until(&last, Duration::from_nanos(1_000)),
        Waiting {
            thread: Some(0.1),
            stolen: None
        }
    );
    assert_eq!(
        first.until(&HostUse::default(), Duration::from_nanos(1_000)),
        Waiting::default()
    );
}

#[test]
fn every_sign_of_other_work_is_told_in_one_sentence() {
    let told = |thread, stolen| contended(&Waiting { thread, stolen });
    assert_eq!(
        (told(Some(0.001), Some(0.0)), told(None, None)),
        (None, None),
        "a quiet host, and an unknown one"
    );
    let sentence = "the processor was busy with other work: the harness waited for a core 12 % of \
         its time; the hypervisor took 3 % of the time";
    assert_eq!(told(Some(0.12), Some(0.03)).as_deref(), Some(sentence));
}
