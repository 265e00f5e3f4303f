//! Allocators with one lie each. Each invariant has a lie that violates only this invariant.

use std::collections::BTreeSet;

use harness_allocator::stats::StatFamily;
use harness_allocator::units::{Bytes, Nanos};
use harness_record::Invariant;
use harness_run::rig::Stop;

use crate::lying::{Lie, Lying, TOLD};
use crate::program::{Machine, Op, Stopped};

const TELL: Op = Op::Alloc(9, TOLD, 0);
const AGAIN: Op = Op::Alloc(8, Bytes::mib(3), 0);
const TOO_MUCH: Op = Op::Alloc(7, Bytes::mib(80), 0);

/// Gives every lie an opportunity: hits, misses, a block that waits for an event, an OOM, external
/// memory, a memory fraction.
const PROGRAM: &[Op] = &[
    Op::Alloc(0, Bytes(512), 0),
    Op::Fill(0),
    Op::Alloc(1, Bytes(512), 0),
    Op::Fill(1),
    Op::Alloc(2, Bytes::mib(3), 0),
    Op::Fill(2),
    Op::HandOver(2, 1),
    Op::EndStep,
    TELL,
    Op::EndStep,
    Op::Work(1, Nanos::millis(5)),
    Op::Free(2),
    AGAIN,
    Op::Fill(8),
    Op::EndStep,
    Op::Free(0),
    TOO_MUCH,
    Op::Synchronize,
    Op::ExternalMemory(Bytes::mib(8)),
    Op::Fraction(0.25),
    Op::EndStep,
];

/// How the audit detects a lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// By comparing live allocations with the segment that the operation touched.
    Touched,
    /// By reading the whole structure and the device, because the driver was called or a counter
    /// changed unexpectedly.
    Whole,
    /// By reading the whole structure at the end of a step or of the program.
    TheEnd,
    /// By verifying the contents of memory.
    Contents,
}

struct Case {
    lie: Lie,
    found: &'static [Invariant],
    at: String,
    by: By,
}

fn case(lie: Lie, found: &'static [Invariant], at: Op, by: By) -> Case {
    Case {
        lie,
        found,
        at: format!("{at:?}"),
        by,
    }
}

fn at_the_end(lie: Lie, found: &'static [Invariant], at: &str) -> Case {
    Case {
        lie,
        found,
        at: at.to_owned(),
        by: By::TheEnd,
    }
}

/// Lies that violate exactly this invariant. A new invariant does not compile without one.
fn lies_against(invariant: Invariant) -> Vec<Case> {
    match invariant {
        Invariant::AccountsAreOrdered => vec![case(
            Lie::ChargesPending,
            &[Invariant::AccountsAreOrdered],
            Op::Free(2),
            By::Whole,
        )],
        Invariant::CountersEqualStructure => {
            let found = &[Invariant::CountersEqualStructure];
            let counters = StatFamily::ALL.iter().map(|&family| {
                // One active block too many makes the audit read everything.
                let by = if family == StatFamily::Active {
                    By::Whole
                } else {
                    By::Touched
                };
                case(Lie::Counter(family), found, TELL, by)
            });
            let others =
                [Lie::Peak, Lie::SumOfIncreases].map(|lie| case(lie, found, TELL, By::Touched));
            counters.chain(others).collect()
        }
        Invariant::BlocksTileSegments => [Lie::Gap, Lie::Overlap, Lie::HoldsABlockOfAnotherStream]
            .map(|lie| case(lie, &[Invariant::BlocksTileSegments], TELL, By::Touched))
            .into(),
        Invariant::FreeNeighboursAreMerged => {
            vec![case(
                Lie::Unmerged,
                &[Invariant::FreeNeighboursAreMerged],
                TELL,
                By::Touched,
            )]
        }
        Invariant::AllocationsAreDisjoint => {
            let about_requests = [
                Lie::HandedOutTwice,
                Lie::TooSmall,
                Lie::WrongStream,
                Lie::Null,
            ];
            let about_blocks = [Lie::SwappedRequests, Lie::ListedForAnotherStream];
            let lies = about_requests.into_iter().chain(about_blocks);
            lies.map(|lie| case(lie, &[Invariant::AllocationsAreDisjoint], TELL, By::Touched))
                .collect()
        }
        Invariant::DeviceUsedFollowsReserved => {
            vec![case(
                Lie::Hoards,
                &[Invariant::DeviceUsedFollowsReserved],
                TELL,
                By::Whole,
            )]
        }
        Invariant::ContentsAreIntact => vec![
            case(
                Lie::LosesContents,
                &[Invariant::ContentsAreIntact],
                Op::Free(0),
                By::Contents,
            ),
            case(
                Lie::ForgetsStreams,
                &[Invariant::ContentsAreIntact],
                Op::Fill(8),
                By::Contents,
            ),
        ],
        Invariant::OomChangesOnlyTheCache => {
            vec![case(
                Lie::OomUncounted,
                &[Invariant::OomChangesOnlyTheCache],
                TOO_MUCH,
                By::Whole,
            )]
        }
        // A policy violates it, not an allocator: see
        // `a_policy_that_changes_nothing_makes_no_progress` and the tests of recovery.
        Invariant::RetryMakesProgress
        | Invariant::AttemptsAreBounded
        | Invariant::RecoveryIsRepeatable => Vec::new(),
        // Ranks violate it, not an allocator: see the tests of `workload::train::ranks`.
        Invariant::CollectivesMatch => Vec::new(),
        Invariant::EverythingGoesBack => vec![at_the_end(
            Lie::KeepsTheCache,
            &[Invariant::EverythingGoesBack],
            "the end",
        )],
        Invariant::WholeLimitFitsAtTheEnd => vec![at_the_end(
            Lie::KeepsTheFraction,
            &[Invariant::WholeLimitFitsAtTheEnd],
            "the end",
        )],
        Invariant::NothingLeaks => [Lie::LeaksAnEvent, Lie::LeaksAStream]
            .map(|lie| at_the_end(lie, &[Invariant::NothingLeaks], "closing"))
            .into(),
    }
}

/// Runs the program with a lie, checks how it is detected, and returns the message.
fn check(case: &Case) -> String {
    let Case { lie, found, at, by } = case;
    let (allocator, reads) = Lying::new(*lie);
    let mut machine = Machine::new(Box::new(allocator));
    let mut whole_before = 0;
    let mut stopped = None;
    for &op in PROGRAM {
        whole_before = reads.whole();
        if let Err(stop) = machine.op(op) {
            stopped = Some(Stopped {
                at: format!("{op:?}"),
                stop,
            });
            break;
        }
    }
    let stopped = stopped.unwrap_or_else(|| {
        whole_before = reads.whole();
        machine
            .finish()
            .expect_err(&format!("{lie:?} is not found"))
    });
    assert_eq!(stopped.at, *at, "{lie:?}: {stopped:?}");
    let seen: BTreeSet<Invariant> = stopped
        .findings()
        .iter()
        .map(|finding| finding.invariant)
        .collect();
    assert_eq!(
        seen,
        found.iter().copied().collect(),
        "{lie:?}: {:#?}",
        stopped.findings()
    );
    let read_whole = reads.whole() > whole_before;
    match by {
        By::Touched | By::Contents => assert!(
            !read_whole,
            "{lie:?} was found by reading the whole structure"
        ),
        By::Whole => assert!(
            read_whole,
            "{lie:?} was found without reading the whole structure"
        ),
        By::TheEnd => {}
    }
    let said = stopped.findings().iter().map(|finding| {
        format!(
            "  expected {}\n  seen     {}\n",
            finding.expected, finding.seen
        )
    });
    format!("{lie:?}\n{}", said.collect::<String>())
}

#[test]
fn an_allocator_that_does_not_lie_is_not_accused() {
    let (allocator, _) = Lying::new(Lie::Nothing);
    assert_eq!(Machine::new(Box::new(allocator)).run(PROGRAM), Ok(()));
}

#[test]
fn each_lie_violates_exactly_its_invariant() {
    let mut said = String::new();
    for &invariant in Invariant::ALL {
        let cases = lies_against(invariant);
        let of_policies = [
            Invariant::RetryMakesProgress,
            Invariant::AttemptsAreBounded,
            Invariant::RecoveryIsRepeatable,
        ];
        let of_others =
            of_policies.contains(&invariant) || invariant == Invariant::CollectivesMatch;
        assert!(!cases.is_empty() || of_others, "{invariant} has no lie");
        said.extend(cases.iter().map(check));
    }
    insta::assert_snapshot!(said);
}

#[test]
fn an_allocation_over_a_part_of_another_one_is_found() {
    let program = [
        Op::Alloc(0, Bytes(512), 0),
        Op::Alloc(1, Bytes(512), 0),
        Op::Free(0),
        TELL,
    ];
    let (allocator, _) = Lying::new(Lie::HandedOutOverlapping);
    let stopped = Machine::new(Box::new(allocator)).run(&program).unwrap_err();
    assert_eq!(stopped.at, format!("{TELL:?}"));
    assert!(
        stopped
            .findings()
            .iter()
            .all(|finding| finding.invariant == Invariant::AllocationsAreDisjoint),
        "{stopped:?}"
    );
}

/// Memory that is not there breaks two promises at once: it is more than the device has given, and
/// the device did not move with it. A segment is counted and the driver was not called: that alone
/// makes the audit read everything. What others hold must not hide it.
#[test]
fn unaccounted_memory_is_found_immediately_even_under_external_memory() {
    for program in [
        &[AGAIN, Op::EndStep][..],
        &[Op::ExternalMemory(Bytes::mib(48)), AGAIN, Op::EndStep],
    ] {
        let (allocator, _) = Lying::new(Lie::FromNowhere);
        let stopped = Machine::new(Box::new(allocator)).run(program).unwrap_err();
        let found: Vec<Invariant> = stopped
            .findings()
            .iter()
            .map(|finding| finding.invariant)
            .collect();
        assert_eq!(
            (stopped.at, found),
            (
                format!("{AGAIN:?}"),
                vec![
                    Invariant::AccountsAreOrdered,
                    Invariant::DeviceUsedFollowsReserved
                ]
            )
        );
    }
}

#[test]
fn an_oom_that_drops_live_memory_is_found_immediately() {
    let (allocator, _) = Lying::new(Lie::OomDropsLive);
    let stopped = Machine::new(Box::new(allocator))
        .run(&[AGAIN, TOO_MUCH])
        .unwrap_err();
    assert_eq!(stopped.at, format!("{TOO_MUCH:?}"));
    let found: BTreeSet<Invariant> = stopped
        .findings()
        .iter()
        .map(|finding| finding.invariant)
        .collect();
    assert_eq!(
        found,
        BTreeSet::from([
            Invariant::AllocationsAreDisjoint,
            Invariant::OomChangesOnlyTheCache
        ])
    );
}

#[test]
fn segments_that_an_allocator_forgets_when_it_is_closed_are_a_leak() {
    let (allocator, _) = Lying::new(Lie::LeaksItsSegments);
    let mut machine = Machine::new(Box::new(allocator));
    machine.op(TELL).unwrap();
    let Err(Stop::Violated(findings)) = machine.close() else {
        panic!("the leak is not found")
    };
    let [finding] = findings.as_slice() else {
        panic!("{findings:?}")
    };
    assert_eq!(
        (finding.invariant, finding.seen.as_str()),
        (Invariant::NothingLeaks, "2 MiB in 1 allocation")
    );
}
