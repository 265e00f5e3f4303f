use super::*;

const STAT: &str = "cpu  100 5 20 900 7 1 2 32 0 0\ncpu0 50 0 10 450 0 0 0 16 0 0\ncpu1 50 5 10 450 7 1 2 16 0 0\nintr 12345\nctxt 99\n";

#[test]
fn the_kernels_files_are_read() {
    assert_eq!(cores_use(STAT), Some((128, 32)));
    assert_eq!(thread_use("218908 74658 2\n"), Some((218_908, 74_658)));
    assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Intel(R)  Xeon(R) Processor\n").as_deref(), Some("Intel(R) Xeon(R) Processor"));
    let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
    assert_eq!(cpu_model(arm).as_deref(), Some("ARM implementer 0x41, part 0xd4f"));
}

#[test]
fn what_is_not_as_expected_is_not_known() {
    assert_eq!((cores_use(""), cores_use("cpu  1 2 3\n")), (None, None));
    assert_eq!((thread_use(""), thread_use("0"), thread_use("a b c")), (None, None, None));
    assert_eq!(cpu_model("processor : 0\nCPU part : 1\n"), None);
}

#[test]
fn shares_are_those_between_two_readings() {
    let first = HostUse { thread: Some((1_000, 500)), cores: Some((10, 10)) };
    let last = HostUse { thread: Some((1_900, 600)), cores: Some((10, 10)) };
    assert_eq!(first.until(&last, Duration::from_nanos(1_000)), Waiting { thread: Some(0.1), stolen: None });
    assert_eq!(first.until(&HostUse::default(), Duration::from_nanos(1_000)), Waiting::default());
}

#[test]
fn every_sign_of_other_work_is_told_in_one_sentence() {
    let told = |thread, stolen| contended(&Waiting { thread, stolen });
    assert_eq!((told(Some(0.001), Some(0.0)), told(None, None)), (None, None), "a quiet host, and an unknown one");
    let sentence =
        "the processor was busy with other work: the harness waited for a core 12 % of its time; the hypervisor took 3 % of the time";
    assert_eq!(told(Some(0.12), Some(0.03)).as_deref(), Some(sentence));
}
