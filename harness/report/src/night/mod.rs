//! The report of a night of benchmarks, and the index of all nights: pure functions of their records.
//!
//! A night's first screen answers whether something changed, what most, and what was left out; then comes each suite with its pictures;
//! figures stand in folds. Figures of different quantities never share a table, and model times are headed as such.

mod ci;
mod compared;
mod important;
mod index;
mod series;
mod suite;
mod top;
mod words;

mod picture;

pub use self::ci::{annotations, smaller_is_better, summary};
pub use self::compared::comparison;
pub use self::important::verdict;
pub use self::index::index;

pub(super) use self::ci::in_figures;
pub(super) use self::words::{amount, short};
use super::escape::prose;
use super::page::Page;
use super::words::{Align, Grid, NOTHING, or_nothing, size};
use harness_bench::nights::REPORT;
use harness_bench::record::{GpuState, Machine, NightRecord};

/// Renders a night: [`REPORT`], and the pictures that it links to before it. `earlier` holds earlier nights of the same machine, the oldest
/// first: trends are drawn from them, everything else from the night alone.
#[must_use]
pub fn render(night: &NightRecord, earlier: &[NightRecord]) -> Vec<(String, String)> {
    let nights: Vec<&NightRecord> = earlier.iter().chain([night]).collect();
    let mut page = Page::default();
    top::write(&mut page, night);
    for suite in &night.suites {
        suite::write(&mut page, night, suite, &nights);
    }
    machine(&mut page, night);
    how_to_read(&mut page, night);
    page.end();
    let pictures = page.pictures.into_iter().map(|picture| (picture.file_name, picture.svg));
    pictures.chain([(REPORT.to_owned(), page.text)]).collect()
}

/// Where it was measured, in what state, and how to do it again.
fn machine(page: &mut Page, night: &NightRecord) {
    page.anchor("machine");
    page.block("## The machine");
    let mut grid = Grid::new([("what must be equal for two nights to be compared", Align::Left), ("here", Align::Left)]);
    grid.rows = machine_rows(&night.machine).map(|(what, value)| vec![what.to_owned(), value]).to_vec();
    page.grid(&grid);
    let free = or_nothing(night.conditions.free_at_start.map(size));
    page.block(format!("Free memory of the device at the start: {}. Seed: {}. Reproduce this night:", prose(&free), night.seed));
    page.command(&night.reproduce);
    gpu(page, &night.conditions.gpu);
    cost_model(page, night);
}

/// What must be equal for two nights to be compared, in words.
fn machine_rows(machine: &Machine) -> [(&'static str, String); 12] {
    [
        ("device", machine.device.clone()),
        ("clock", words::clock(machine)),
        ("memory", or_nothing(machine.memory.map(size))),
        ("hash of the UUID", or_nothing(machine.uuid_hash.as_deref())),
        ("driver", or_nothing(machine.driver.as_deref())),
        ("CUDA", or_nothing(machine.cuda.as_deref())),
        ("multi-instance mode", words::on(machine.mig).to_owned()),
        ("error correction", words::on(machine.ecc).to_owned()),
        ("processor", or_nothing(machine.cpu.as_deref())),
        ("processors of this process", machine.cores.to_string()),
        ("kernel", or_nothing(machine.kernel.as_deref())),
        ("compiler", machine.compiler.clone()),
    ]
}

/// Clocks, power and temperature over the night.
fn gpu(page: &mut Page, states: &[GpuState]) {
    if states.is_empty() {
        return;
    }
    page.fold("State of the GPU over the night", |page| {
        let heads = ["after", "SM clock", "memory clock", "power", "temperature"].map(|head| (head, Align::Right));
        let rest = [("clocks held down by", Align::Left), ("other processes", Align::Right)];
        let mut grid = Grid::new(heads.into_iter().chain(rest));
        grid.rows = states.iter().map(gpu_cells).collect();
        page.grid(&grid);
    });
}

fn gpu_cells(state: &GpuState) -> Vec<String> {
    let megahertz = |clock: Option<u32>| or_nothing(clock.map(|clock| format!("{clock} MHz")));
    vec![
        words::took(state.at_ms),
        megahertz(state.sm_mhz),
        megahertz(state.memory_mhz),
        or_nothing(state.power_mw.map(|power| format!("{:.1} W", f64::from(power) / 1e3))),
        or_nothing(state.temperature.map(|celsius| format!("{celsius} °C"))),
        if state.throttle_reasons.is_empty() { NOTHING.to_owned() } else { state.throttle_reasons.join(", ") },
        or_nothing(state.other_processes),
    ]
}

fn cost_model(page: &mut Page, night: &NightRecord) {
    let figures = &night.conditions.cost_figures;
    if figures.is_empty() {
        return;
    }
    let name = night.machine.cost_model.as_deref().unwrap_or("without a name");
    page.fold(&format!("Cost model {}: what each operation is charged, and why", prose(name)), |page| {
        let mut grid = Grid::new([("operation", Align::Left), ("charge", Align::Right), ("source", Align::Left)]);
        grid.rows = figures.iter().map(|figure| vec![figure.name.clone(), figure.value.clone(), figure.source.clone()]).collect();
        page.grid(&grid);
    });
}

fn how_to_read(page: &mut Page, night: &NightRecord) {
    page.block("## How to read this");
    let lines = [
        ("case, arm, entry", "what is timed, at one point of its axis; what does it; a case done by an arm."),
        ("round", "every entry of the suite once, arms in turns, so that what drifts on the machine hits all alike."),
        ("median, MAD, p99", "the middle sample, the median distance from it (unscaled), and the 99th percentile by nearest rank."),
        ("n", "how many samples there were; each is the mean of a batch of operations."),
        (
            "worse, better",
            "the ratio to the night compared with differs from 1 by more than the suite's threshold, its 95 % confidence interval does not \
             contain 1, and p is below 0.01: the probability of such a difference between nights of one build, corrected for the number of \
             entries.",
        ),
        (
            "÷ an arm",
            "the median as a multiple of that arm's, which is `direct` where it ran: it asks the driver every time. Below 1 is better.",
        ),
        ("host time", "picoseconds of this machine's monotonic clock: our own code, measured."),
        ("device time", "time between two events of a real device, measured."),
        ("model time", "a simulated device's virtual clock, moved by a cost model: not measured, and never compared with measured times."),
        ("yardstick", "a fixed piece of integer arithmetic, timed each round: what clocks and other programs did to the figures."),
        ("contended", "something else used the machine: such a night is no baseline for later ones."),
        ("change point", "a night from which on the figures of an entry stand on another level."),
    ];
    page.list(&lines.map(|(word, meaning)| format!("**{word}**: {meaning}")));
    page.block(format!("Written from the record of harness {}.", prose(&night.harness)));
}

#[cfg(test)]
pub(crate) mod examples;
#[cfg(test)]
mod tests;
