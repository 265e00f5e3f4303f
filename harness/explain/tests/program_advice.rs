//! Each change of a program that `harness advise` proposes, on a small program that needs it: the change is told, and a replay of the changed program
//! gets by with the memory that is told, which is not enough for the program as it is.

use std::fmt::Write as _;

use harness_allocator::units::Bytes;
use harness_explain::grid::{Configuration, Grid, UNLIMITED};
use harness_explain::program_advice::{self, ProgramAdvice};
use harness_explain::requests::Requests;
use harness_trace::program::RecordedProgram;
use harness_trace::snapshot::Snapshot;
use harness_trace::trace;

const MIB: u64 = 1 << 20;

/// A program, as a trace with the place of each allocation behind it.
fn program(text: &str) -> (RecordedProgram, Snapshot) {
    let operations = text.lines().zip(1..).map(|(line, number)| {
        let event = trace::parse(line).expect("an operation")[0];
        (event, number, line.split_once("# ").map(|(_, place)| place))
    });
    Requests::of_trace("program.trace", operations).program_with_places().expect("a program")
}

/// Activations that grow, and a feature of each that is kept: it lands in the freed activation and pins its segment.
fn kept_features() -> String {
    (0..12).fold(String::new(), |mut text, step| {
        let (activation, feature) = (2 * step, 2 * step + 1);
        let size = (20 + 4 * step) * MIB;
        writeln!(text, "a {activation} {size} 0 # model.py:8 forward\nf {activation}").expect("a string can be written");
        writeln!(text, "a {feature} {} 0 # extract.py:3 main", size / 5 * 3).expect("a string can be written");
        text
    })
}

fn own() -> Configuration {
    Configuration::of_settings("").expect("no settings")
}

fn least(program: &RecordedProgram) -> Bytes {
    let prepared = program.prepare().expect("it can run");
    Grid::new(&prepared, UNLIMITED).least(&own()).expect("it can run").0.enough
}

/// The advice whose sentence begins in this way. Its program fits in the memory that it tells, and the program as it is does not.
fn advice(text: &str, begins: &str) -> ProgramAdvice {
    let (program, snapshot) = program(text);
    let own_least = least(&program);
    let all = program_advice::program_advice(program_advice::changes(&program, &snapshot), &own(), own_least, &|| {}).expect("it can run");
    let sentences: Vec<&str> = all.iter().map(|advice| advice.sentence.as_str()).collect();
    let found = sentences.iter().position(|sentence| sentence.starts_with(begins));
    let advice = all[found.unwrap_or_else(|| panic!("{begins} of {own_least}: {sentences:#?}"))].clone();
    let fits = |program: &RecordedProgram| {
        let prepared = program.prepare().expect("it can run");
        Grid::new(&prepared, UNLIMITED).replay(&own(), advice.least.enough).expect("it can run").oom.is_none()
    };
    assert!(fits(&advice.program) && !fits(&program), "{}", advice.sentence);
    assert_eq!(advice.saves, own_least.saturating_sub(advice.least.enough));
    advice
}

#[test]
fn blocks_that_pin_segments_are_better_kept_in_a_pool_of_their_own() {
    let advice = advice(&kept_features(), "a pool of its own (torch.cuda.MemPool) for the 12 blocks of extract.py:3 main lets it run in ");
    assert!(advice.saves > Bytes::mib(50), "{}", advice.sentence);
}

#[test]
fn blocks_that_are_kept_are_better_allocated_before_the_loop() {
    let begins = "allocating the 12 blocks that extract.py:3 main keeps before everything else, the largest first, lets it run in ";
    assert!(advice(&kept_features(), begins).saves > Bytes::mib(100));
}

#[test]
fn a_cache_that_is_emptied_before_blocks_that_are_kept_is_not_pinned_by_them() {
    let advice = advice(&kept_features(), "torch.cuda.empty_cache() in front of extract.py:3 main lets it run in ");
    assert!(advice.sentence.ends_with("for 9 calls of empty_cache"), "{}", advice.sentence);
}

#[test]
fn a_block_that_is_replaced_is_better_freed_before_the_next_one_is_made() {
    let replaced = (1..8).fold(format!("a 0 {} 0 # loop.py:5 step\n", 40 * MIB), |mut text, step| {
        writeln!(text, "a {step} {} 0 # loop.py:5 step\nf {}", 40 * MIB, step - 1).expect("a string can be written");
        text
    });
    let advice = advice(&replaced, "freeing each block of loop.py:5 step before the next one is made there lets it run in ");
    assert_eq!((advice.least.enough, advice.saves), (Bytes::mib(40), Bytes::mib(40)));
}

#[test]
fn a_program_that_fits_can_be_limited_to_a_share_of_the_device() {
    let (program, _) = program(&kept_features());
    let told = program_advice::fraction_advice(&program, &own(), least(&program), Bytes::gib(4)).expect("it can run").expect("it fits");
    assert!(told.starts_with("torch.cuda.set_per_process_memory_fraction("), "{told}");
    assert!(told.ends_with("of 4 GiB, and nothing is refused"), "{told}");
}
