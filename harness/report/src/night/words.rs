//! How figures of a night are put into words, the same in every format.

use harness_allocator::device::Clock;
use harness_allocator::units::Bytes;

use harness_bench::record::{Build, ChangeFigures, CommonDrift, EntryOutcome, Machine, NightRecord, Quantity, Stopped};

/// Units of time from the largest, each with its picoseconds.
const UNITS: [(&str, f64); 5] = [("s", 1e12), ("ms", 1e9), ("µs", 1e6), ("ns", 1e3), ("ps", 1.0)];

/// A figure with its unit, three significant digits for times: `4.23 ns`, `850 ps`, `2 MiB`.
pub(crate) fn amount(quantity: Quantity, value: u64) -> String {
    match quantity {
        Quantity::Memory => Bytes(value).to_string(),
        Quantity::HostTime | Quantity::DeviceTime | Quantity::ModelTime => time(value),
    }
}

/// Picoseconds, with three significant digits and the fitting unit.
pub(super) fn time(picoseconds: u64) -> String {
    let value = picoseconds as f64;
    // What three digits would round up to the next unit is told in that.
    let (unit, size) = UNITS.into_iter().find(|&(_, size)| value >= size * 0.9995).unwrap_or(("ps", 1.0));
    let value = value / size;
    let decimals = if unit == "ps" || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.decimals$} {unit}")
}

/// What figures are, as a heading says it. Model times are never called measured.
pub(super) fn heading(quantity: Quantity, machine: &Machine) -> String {
    match quantity {
        Quantity::HostTime => match &machine.cpu {
            Some(cpu) => format!("Host times, measured on this CPU ({cpu})"),
            None => "Host times, measured on this CPU".to_owned(),
        },
        Quantity::DeviceTime => format!("Device times, measured on {}", machine.device),
        Quantity::ModelTime => match &machine.cost_model {
            Some(model) => format!("Model times (simulated clock, cost model {model}), not measured"),
            None => "Model times (simulated clock), not measured".to_owned(),
        },
        Quantity::Memory => "Memory".to_owned(),
    }
}

/// The same for axes and columns.
pub(crate) const fn short(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::HostTime => "host time, measured",
        Quantity::DeviceTime => "device time, measured",
        Quantity::ModelTime => "model time (simulated clock), not measured",
        Quantity::Memory => "memory",
    }
}

/// The same where there is little room.
pub(super) const fn shortest(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::ModelTime => "model time, not measured",
        Quantity::HostTime | Quantity::DeviceTime | Quantity::Memory => short(quantity),
    }
}

/// A name for files and links.
pub(super) const fn slug(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::HostTime => "host",
        Quantity::DeviceTime => "device",
        Quantity::ModelTime => "model",
        Quantity::Memory => "memory",
    }
}

/// `1.31×`, with a digit more close to one.
pub(super) fn ratio(ratio: f64) -> String {
    match ratio {
        ratio if !ratio.is_finite() => super::super::words::NOTHING.to_owned(),
        ratio if (0.95..1.05).contains(&ratio) => format!("{ratio:.3}×"),
        // Two significant digits.
        ratio if ratio > 0.0 && ratio < 0.095 => format!("{ratio:.*}×", (1.0 - ratio.log10().floor()) as usize),
        ratio => super::super::words::multiple(Some(ratio)),
    }
}

/// A ratio with its confidence interval; to nothing, and of nothing, there is none.
pub(super) fn change(figures: &ChangeFigures) -> String {
    match (figures.base, figures.new) {
        (0, 0) => return "both 0".to_owned(),
        (0, _) => return "from 0".to_owned(),
        (_, 0) => return "to 0".to_owned(),
        _ => {}
    }
    format!("{} ({} to {})", ratio(figures.ratio), ratio(figures.low), ratio(figures.high))
}

/// What all allocators of a suite changed by together, and what follows. `suite`: its name as it is written there.
pub(super) fn drift(suite: &str, drift: &CommonDrift) -> String {
    let together = format!(
        "all {} allocators of {suite} became {} or more ({}): the machine did that, or code that all share",
        drift.allocators,
        slower_by(drift.ratio),
        short(drift.quantity)
    );
    match drift.untold {
        0 => together,
        1 => format!("{together}. Of 1 entry that moved with them it cannot be told whether it changed"),
        untold => format!("{together}. Of {untold} entries that moved with them it cannot be told whether they changed"),
    }
}

fn slower_by(ratio: f64) -> String {
    let word = if ratio < 1.0 { "faster" } else { "slower" };
    format!("{} {word}", percent((ratio - 1.0).abs()))
}

/// A probability.
pub(super) fn probability(p: f64) -> String {
    match p {
        p if p < 0.001 => "< 0.001".to_owned(),
        p => format!("{p:.3}"),
    }
}

/// A share, as `5 %`.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() >= 9.95 || (percent - percent.round()).abs() < 0.05 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

/// A ratio as a change: `+12.4 %`, `-3.0 %`, `0.0 %`.
pub(super) fn changed_by(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    if percent.abs() < 0.05 { "0.0 %".to_owned() } else { format!("{percent:+.1} %") }
}

/// `2026-11-20 02:17 UTC`; what is written otherwise stays as it is.
pub(super) fn moment(started: &str) -> String {
    match (started.split_once('T'), started.ends_with('Z')) {
        (Some((date, time)), true) if time.is_char_boundary(5) && time.len() >= 5 => format!("{date} {} UTC", &time[..5]),
        _ => started.to_owned(),
    }
}

/// `2026-11-20`
pub(super) fn date(started: &str) -> &str {
    started.split_once('T').map_or(started, |(date, _)| date)
}

/// Ten digits of the commit, and whether there was more.
pub(super) fn commit(build: &Build) -> String {
    let Some(commit) = &build.commit else { return "an unknown commit".to_owned() };
    let short: String = commit.chars().take(10).collect();
    let changes = if build.dirty == Some(true) { " with changes beside it" } else { "" };
    format!("commit `{short}`{changes}")
}

/// A duration of milliseconds, as people say it.
pub(super) fn took(milliseconds: u64) -> String {
    let seconds = milliseconds / 1_000;
    match (seconds / 3_600, seconds / 60 % 60) {
        (0, 0) => format!("{}.{} s", seconds, milliseconds % 1_000 / 100),
        (0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

/// Why there were no more rounds.
pub(super) const fn stopped(stopped: Stopped) -> &'static str {
    match stopped {
        Stopped::Precise => "every confidence interval was as narrow as the suite asks",
        Stopped::Budget => "the time or the number of rounds allowed was used up",
        Stopped::Deterministic => "the clock is virtual and gives the same figures each time",
        Stopped::Interrupted => "the user stopped it",
    }
}

/// Whose clock the device runs on.
pub(super) fn clock(machine: &Machine) -> String {
    match (machine.clock, &machine.cost_model) {
        (Clock::Measured, _) => "measured".to_owned(),
        (Clock::Simulated, Some(model)) => format!("simulated, cost model {model}"),
        (Clock::Simulated, None) => "simulated".to_owned(),
    }
}

/// The device as a sentence names it.
pub(super) fn device(machine: &Machine) -> String {
    if machine.device == "simulated" { "the simulated device".to_owned() } else { machine.device.clone() }
}

/// `on`, `off`, or nothing known.
pub(super) fn on(value: Option<bool>) -> &'static str {
    match value {
        Some(true) => "on",
        Some(false) => "off",
        None => super::super::words::NOTHING,
    }
}

/// `1 entry`, `2 entries`.
pub(super) fn entries(number: usize) -> String {
    if number == 1 { "1 entry".to_owned() } else { format!("{number} entries") }
}

/// How many entries came out how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcomes {
    pub(super) measured: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
}

impl Outcomes {
    pub(super) fn of(night: &NightRecord) -> Self {
        let mut outcomes = Self::default();
        for entry in night.suites.iter().flat_map(|suite| &suite.entries) {
            *match entry.outcome {
                EntryOutcome::Measured(_) => &mut outcomes.measured,
                EntryOutcome::Failed { .. } => &mut outcomes.failed,
                EntryOutcome::Skipped { .. } => &mut outcomes.skipped,
            } += 1;
        }
        outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_the_fitting_unit() {
        let told = [0, 999, 1_000, 4_234, 99_949, 99_960, 123_456, 999_499, 999_600, 7_500_000_000, 3_600_000_000_000_000].map(time);
        let expected = ["0 ps", "999 ps", "1.00 ns", "4.23 ns", "99.9 ns", "100 ns", "123 ns", "999 ns", "1.00 µs", "7.50 ms", "3600 s"];
        assert_eq!(told, expected);
    }

    #[test]
    fn model_times_are_never_called_measured() {
        assert!(short(Quantity::ModelTime).contains("not measured") && !short(Quantity::HostTime).contains("not measured"));
    }

    #[test]
    fn moments_ratios_and_shares_read_well() {
        assert_eq!([moment("2026-11-20T02:17:33Z"), moment("yesterday")], ["2026-11-20 02:17 UTC", "yesterday"]);
        assert_eq!([1.3149, 1.0041, 0.5, 0.000_147, f64::NAN].map(ratio), ["1.31×", "1.004×", "0.50×", "0.00015×", "–"]);
        assert_eq!([0.05, 0.012, 0.31].map(percent), ["5 %", "1.2 %", "31 %"]);
        let zero = |base, new| change(&ChangeFigures { base, new, ratio: 1.0, low: 1.0, high: 1.0, p: 0.0 });
        assert_eq!([zero(0, 0), zero(0, 5), zero(5, 0), zero(5, 5)], ["both 0", "from 0", "to 0", "1.000× (1.000× to 1.000×)"]);
        assert_eq!([1.1238, 0.97, 0.9999].map(changed_by), ["+12.4 %", "-3.0 %", "0.0 %"]);
        assert_eq!([4_200, 62_000, 3_720_000].map(took), ["4.2 s", "1 min 2 s", "1 h 2 min"]);
    }
}
