//! Tests each kind of change that `harness advise` recommends on a small program. The changed
//! program must succeed with the reported memory, and the unchanged program must fail with it.

use std::fmt::Write as _;

use harness_allocator::allocator::{AllocatorKind, caching::TorchVersion};
use harness_allocator::units::Bytes;
use harness_explain::grid::{Configuration, Grid, UNLIMITED};
use harness_explain::least::Least;
use harness_explain::program_advice::{self, ProgramAdvice, Unchanged};
use harness_explain::requests::Requests;
use harness_trace::{program::RecordedProgram, snapshot::Snapshot, trace};

const MIB: u64 = 1 << 20;

/// A program as a trace with sites in comments.
fn program(text: &str) -> (RecordedProgram, Snapshot) {
    let operations = text.lines().zip(1..).map(|(line, number)| {
        let event = trace::parse(line).expect("an operation")[0];
        (event, number, line.split_once("# ").map(|(_, place)| place))
    });
    Requests::of_trace("program.trace", operations)
        .program_with_places()
        .expect("a program")
}

/// Growing activations, each with a kept feature that is placed in the freed activation and pins
/// its segment.
fn kept_features() -> String {
    (0..12).fold(String::new(), |mut text, step| {
        let (activation, feature) = (2 * step, 2 * step + 1);
        let size = (20 + 4 * step) * MIB;
        writeln!(
            text,
            "a {activation} {size} 0 # model.py:8 forward\nf {activation}"
        )
        .expect("a string can be written");
        writeln!(text, "a {feature} {} 0 # extract.py:3 main", size / 5 * 3)
            .expect("a string can be written");
        text
    })
}

fn own() -> Configuration {
    Configuration::of_settings(TorchVersion::default(), "").expect("no settings")
}

fn least(program: &RecordedProgram) -> Bytes {
    let prepared = program.prepare().expect("it can run");
    Grid::new(&prepared, UNLIMITED)
        .least(&own())
        .expect("it can run")
        .0
        .enough
}

#[test]
fn the_least_memory_of_an_allocator_that_reserves_a_part_at_the_start_is_exact_to_half_a_percent() {
    let (program, _) = program(&kept_features());
    let prepared = program.prepare().expect("it can run");
    let grid = Grid::new(&prepared, UNLIMITED);
    for kind in [
        AllocatorKind::RmmPool,
        AllocatorKind::RmmArena,
        AllocatorKind::RmmBinning,
        AllocatorKind::XlaBfc,
    ] {
        let configuration = Configuration::of_allocator(kind);
        let (Least { enough, .. }, _) = grid.least(&configuration).expect("it can run");
        let step = Bytes(enough.0 / 100).max(Bytes::mib(2));
        let fits = |memory| {
            let replayed = grid.replay(&configuration, memory);
            replayed.is_ok_and(|replayed| replayed.oom.is_none())
        };
        assert_eq!(
            [fits(enough), fits(enough.saturating_sub(step))],
            [true, false],
            "{kind:?}: {enough}"
        );
    }
}

#[test]
fn bins_that_a_device_cannot_hold_are_not_tried_with_its_memory() {
    let (program, _) = program("a 0 1024 0 # model.py:8 forward\n");
    let prepared = program.prepare().expect("it can run");
    let configurations = [AllocatorKind::RmmPool, AllocatorKind::RmmBinning];
    let (rows, not_tried) = Grid::new(&prepared, Bytes::mib(512))
        .run(
            &configurations.map(Configuration::of_allocator),
            false,
            &|| {},
        )
        .expect("the pool can run");
    let why = &not_tried[0].why;
    assert_eq!((rows.len(), not_tried.len()), (1, 1));
    assert!(
        why.starts_with("the bins need 992 MiB at the start"),
        "{why}"
    );
}

/// Finds the advice by its first words, and checks its reported memory with replays.
fn advice(text: &str, begins: &str) -> ProgramAdvice {
    let (program, snapshot) = program(text);
    let own_least = least(&program);
    let without = Unchanged {
        memory: UNLIMITED,
        least: own_least,
        reserved: None,
    };
    let all = program_advice::program_advice(&program, &snapshot, &own(), without, &|| {})
        .expect("it can run");
    let sentences: Vec<&str> = all.iter().map(|advice| advice.sentence.as_str()).collect();
    let found = sentences
        .iter()
        .position(|sentence| sentence.starts_with(begins));
    let advice =
        all[found.unwrap_or_else(|| panic!("{begins} of {own_least}: {sentences:#?}"))].clone();
    let fits = |program: &RecordedProgram| {
        let prepared = program.prepare().expect("it can run");
        Grid::new(&prepared, UNLIMITED)
            .replay(&own(), advice.least.enough)
            .expect("it can run")
            .oom
            .is_none()
    };
    assert!(
        fits(&advice.program) && !fits(&program),
        "{}",
        advice.sentence
    );
    assert_eq!(advice.saves, own_least.saturating_sub(advice.least.enough));
    advice
}

#[test]
fn advice_moves_pinning_blocks_to_a_separate_pool() {
    let advice = advice(
        &kept_features(),
        "a separate pool (torch.cuda.MemPool) for the 12 blocks of extract.py:3 main reduces the \
         required memory from ",
    );
    assert!(advice.saves > Bytes::mib(50), "{}", advice.sentence);
}

#[test]
fn advice_allocates_kept_blocks_before_the_loop() {
    let begins = "allocating the 12 blocks that extract.py:3 main keeps first, in order of falling \
         size, reduces the required memory from ";
    assert!(advice(&kept_features(), begins).saves > Bytes::mib(100));
}

#[test]
fn advice_empties_the_cache_before_kept_blocks() {
    let advice = advice(
        &kept_features(),
        "torch.cuda.empty_cache() before extract.py:3 main reduces the required memory from ",
    );
    assert!(
        advice.sentence.ends_with("with 9 calls of empty_cache"),
        "{}",
        advice.sentence
    );
}

#[test]
fn advice_frees_a_block_before_its_replacement() {
    let replaced = (1..8).fold(
        format!("a 0 {} 0 # loop.py:5 step\n", 40 * MIB),
        |mut text, step| {
            writeln!(
                text,
                "a {step} {} 0 # loop.py:5 step\nf {}",
                40 * MIB,
                step - 1
            )
            .expect("a string can be written");
            text
        },
    );
    let advice = advice(
        &replaced,
        "freeing each block of loop.py:5 step before it allocates the next one reduces the \
         required memory from ",
    );
    assert_eq!(
        (advice.least.enough, advice.saves),
        (Bytes::mib(40), Bytes::mib(40))
    );
}

#[test]
fn advice_limits_a_fitting_program_to_a_fraction() {
    let (program, _) = program(&kept_features());
    let told = program_advice::fraction_advice(&program, &own(), least(&program), Bytes::gib(4))
        .expect("it can run")
        .expect("it fits");
    assert!(
        told.starts_with("torch.cuda.set_per_process_memory_fraction("),
        "{told}"
    );
    assert!(
        told.ends_with("of 4 GiB, and every request still succeeds"),
        "{told}"
    );
}
