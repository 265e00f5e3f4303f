//! Explains every real snapshot and checks that the bytes add up.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_explain::causes::{self, ByteCause, Explanation, Options, TotalKnown};
use harness_explain::state::{At, History, MomentKind};
use harness_trace::snapshot::Snapshot;
use serde_json::Value;

use crate::shared::{self, Test};

pub(crate) const WITH_DATA: [Test; 4] = [
    (
        "most_memory_of_real_programs_has_a_purpose",
        most_memory_of_real_programs_has_a_purpose,
    ),
    (
        "explanations_of_snapshots_add_up_to_the_byte",
        explanations_of_snapshots_add_up_to_the_byte,
    ),
    (
        "figures_match_pytorchs_own_message",
        figures_match_pytorchs_own_message,
    ),
    (
        "complete_recordings_start_empty_and_have_the_measured_peak",
        complete_recordings_start_empty_and_have_the_measured_peak,
    ),
];

fn side_car(file: &Path) -> Value {
    let name = file
        .file_name()
        .expect("a file")
        .to_string_lossy()
        .replace(".pickle.gz", ".json");
    let text =
        std::fs::read_to_string(file.with_file_name(name)).expect("every snapshot has a side car");
    serde_json::from_str(&text).expect("the side car is JSON")
}

/// Checks that each byte counts once and that sites are consistent.
fn check_sums(explanation: &Explanation, of: &str) {
    let sum: Bytes = explanation.causes.iter().map(|cause| cause.bytes).sum();
    assert_eq!(sum, explanation.device_total, "{of}");
    for cause in &explanation.causes {
        let named: Bytes = cause.sites.iter().map(|site| site.bytes).sum();
        let is_complete = matches!(
            cause.cause,
            ByteCause::Allocated
                | ByteCause::Rounding
                | ByteCause::PendingFree
                | ByteCause::InactiveSplit
        );
        assert!(
            if is_complete {
                named == cause.bytes
            } else {
                named <= cause.bytes
            },
            "{of}: {:?}",
            cause.cause
        );
    }
    let pinned: Bytes = explanation.pinned.iter().map(|segment| segment.free).sum();
    let free = explanation
        .accounts
        .reserved
        .saturating_sub(explanation.accounts.active);
    assert!(pinned <= free, "{of}: {pinned} pinned of {free} free");
}

fn explained(snapshot: &Snapshot, options: Options, of: &str) -> Vec<Explanation> {
    let devices = snapshot.devices();
    assert!(!devices.is_empty(), "{of}");
    let explain = |&device: &u32| {
        causes::explain(snapshot, device, options).unwrap_or_else(|error| panic!("{of}: {error}"))
    };
    let explanations: Vec<Explanation> = devices.iter().map(explain).collect();
    explanations
        .iter()
        .for_each(|explanation| check_sums(explanation, of));
    explanations
}

fn explanations_of_snapshots_add_up_to_the_byte() {
    for file in shared::snapshots("snapshots")
        .into_iter()
        .chain(shared::snapshots("real-snapshots"))
    {
        let of = file.display().to_string();
        let snapshot = Snapshot::read(&file).unwrap_or_else(|error| panic!("{of}: {error}"));
        for explanation in explained(&snapshot, Options::default(), &of) {
            let reserved: Bytes = snapshot
                .segments
                .iter()
                .filter(|segment| segment.device == explanation.device)
                .map(|segment| segment.size)
                .sum();
            assert_eq!(explanation.accounts.reserved, reserved, "{of}");
            assert!(
                explanation.headline.ends_with('.') && !explanation.headline.contains('\n'),
                "{of}: {}",
                explanation.headline
            );
            let events = explanation.moment.events;
            let large = Options {
                memory: Some(Bytes::gib(80)),
                at: At::End,
            };
            let with_memory =
                causes::explain(&snapshot, explanation.device, large).expect("80 GiB are enough");
            check_sums(&with_memory, &of);
            assert_eq!(
                (with_memory.device_total, with_memory.device_total_is),
                (Bytes::gib(80), TotalKnown::Given),
                "{of}"
            );
            if events > 0 {
                for at in [At::Peak, At::Event(0), At::Event(events / 2)] {
                    let options = Options { memory: None, at };
                    check_sums(
                        &causes::explain(&snapshot, explanation.device, options)
                            .expect("the event is there"),
                        &of,
                    );
                }
            }
        }
    }
}

/// Prints the categories at the peak of each recording.
fn most_memory_of_real_programs_has_a_purpose() {
    let mut others = Vec::new();
    for file in shared::snapshots("real-snapshots") {
        let of = file.display().to_string();
        let snapshot = Snapshot::read(&file).unwrap_or_else(|error| panic!("{of}: {error}"));
        let explanations = explained(&snapshot, Options::default(), &of);
        let explanation = explanations
            .iter()
            .max_by_key(|explanation| explanation.accounts.reserved)
            .expect("it has a device");
        let total: Bytes = explanation
            .categories
            .iter()
            .map(|category| category.peak_bytes)
            .sum();
        let share = |bytes: Bytes| bytes.get() as f64 / total.get() as f64 * 100.0;
        let named = |name: &str| {
            explanation
                .categories
                .iter()
                .filter(|of| of.category == name)
                .map(|of| of.peak_bytes)
                .sum::<Bytes>()
        };
        let all: Vec<String> = explanation
            .categories
            .iter()
            .map(|of| format!("{} {:.1} %", of.about, share(of.peak_bytes)))
            .collect();
        println!("{of}: {total}: {}", all.join(", "));
        others.push(share(named("other")));
    }
    others.sort_by(f64::total_cmp);
    let (median, nine_of_ten) = (
        others[others.len() / 2],
        others[(others.len() * 9).div_ceil(10) - 1],
    );
    assert!(median <= 10.0 && nine_of_ten <= 25.0, "{others:?}");
}

fn figures_match_pytorchs_own_message() {
    for file in shared::snapshots("snapshots") {
        let (of, side_car) = (file.display().to_string(), side_car(&file));
        let snapshot = Snapshot::read(&file).unwrap_or_else(|error| panic!("{of}: {error}"));
        let bytes = |value: &Value| value.as_u64().map(Bytes);
        let memory = bytes(&side_car["capacity"]);
        let [explanation] = &explained(
            &snapshot,
            Options {
                memory,
                at: At::Automatic,
            },
            &of,
        )[..] else {
            panic!("{of}: one device")
        };
        assert_eq!(Some(explanation.device_total), memory, "{of}");
        assert_eq!(
            Some(explanation.accounts.allocated),
            bytes(&side_car["allocated_at_dump"]),
            "{of}"
        );
        assert_eq!(
            Some(explanation.accounts.reserved),
            bytes(&side_car["reserved_at_dump"]),
            "{of}"
        );
        assert_eq!(
            side_car["ooms_survived"].as_u64(),
            Some(explanation.survived_ooms as u64),
            "{of}"
        );
        let oom = &side_car["oom"];
        assert_eq!(
            explanation.moment.at == MomentKind::Oom,
            side_car["outcome"] == "oom",
            "{of}"
        );
        if let Some(request) = &explanation.request {
            assert_eq!(Some(request.asked), bytes(&oom["request"]), "{of}");
            assert_eq!(
                explanation.accounts.device_free,
                bytes(&oom["device_free"]),
                "{of}"
            );
            assert_eq!(
                Some(explanation.accounts.allocated),
                bytes(&oom["allocated"]),
                "{of}"
            );
            let error = side_car["error"].as_str().expect("a message");
            let accounts = &explanation.accounts;
            let unallocated = accounts.reserved.saturating_sub(accounts.allocated);
            let unallocated = unallocated.get() as f64 / (1 << 20) as f64;
            let shown = |mib: f64| {
                if mib >= 1024.0 {
                    format!("{:.2} GiB", mib / 1024.0)
                } else {
                    format!("{mib:.2} MiB")
                }
            };
            assert!(
                error.contains(&format!(
                    "and {} is reserved by PyTorch but unallocated",
                    shown(unallocated)
                )),
                "{of}: {error}"
            );
            assert!(
                !explanation.why.is_empty(),
                "{of}: a reason is found: {:?}",
                explanation.failed_request
            );
        }
        // Without the option, the OOM shows the same total, because no other process used this
        // device.
        if explanation.request.is_some() {
            let alone =
                causes::explain(&snapshot, 0, Options::default()).expect("the moment is there");
            assert_eq!(
                (Some(alone.device_total), alone.device_total_is),
                (memory, TotalKnown::AtOom),
                "{of}"
            );
        }
    }
}

fn complete_recordings_start_empty_and_have_the_measured_peak() {
    for file in shared::snapshots("snapshots") {
        let (of, side_car) = (file.display().to_string(), side_car(&file));
        if side_car["recording"]["complete"] != true {
            continue;
        }
        let snapshot = Snapshot::read(&file).unwrap_or_else(|error| panic!("{of}: {error}"));
        let begin = History::new(&snapshot, 0, causes::config(&snapshot)).state(None);
        assert_eq!(
            begin.segments,
            [],
            "{of}: nothing is held before the first event"
        );
        let [peak] = &explained(
            &snapshot,
            Options {
                memory: None,
                at: At::Peak,
            },
            &of,
        )[..] else {
            panic!("{of}: one device")
        };
        assert_eq!(
            Some(peak.accounts.allocated.get()),
            side_car["peak_allocated"].as_u64(),
            "{of}"
        );
    }
}
