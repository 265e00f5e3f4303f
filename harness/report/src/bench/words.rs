use harness_allocator::units::Bytes;

use harness_bench::record::{Build, Change, Entry, EntryResult, MachineInfo, Quantity, Stopped};

use crate::words::{NOTHING, multiple};

/// Time units from the largest, in picoseconds.
const UNITS: [(&str, f64); 5] = [
    ("s", 1e12),
    ("ms", 1e9),
    ("µs", 1e6),
    ("ns", 1e3),
    ("ps", 1.0),
];

/// Formats a figure with its unit; times have three significant digits: `4.23 ns`, `850 ps`, `2
/// MiB`.
pub(crate) fn amount(quantity: Quantity, value: u64) -> String {
    if quantity.is_time() {
        time(value)
    } else {
        Bytes(value).to_string()
    }
}

pub(super) fn time(picoseconds: u64) -> String {
    let value = picoseconds as f64;
    // A value that rounds up to the next unit uses that unit.
    let (unit, size) = UNITS
        .into_iter()
        .find(|&(_, size)| value >= size * 0.9995)
        .unwrap_or(("ps", 1.0));
    let value = value / size;
    let decimals = if unit == "ps" || value >= 99.95 {
        0
    } else {
        1 + usize::from(value < 9.995)
    };
    format!("{value:.decimals$} {unit}")
}

/// A heading for the figures. Model times are never called measured.
pub(super) fn heading(quantity: Quantity, machine: &MachineInfo) -> String {
    match quantity {
        Quantity::HostTime => {
            let cpu = machine
                .cpu
                .as_ref()
                .map_or_else(String::new, |cpu| format!(" ({cpu})"));
            format!("Host times, measured on this CPU{cpu}")
        }
        Quantity::DeviceTime => format!("Device times, measured on {}", machine.device),
        Quantity::ModelTime => {
            let model = machine
                .cost_model
                .as_ref()
                .map_or_else(String::new, |model| format!(", cost model {model}"));
            format!("Model times (simulated clock{model}), not measured")
        }
        Quantity::Memory => "Memory".to_owned(),
    }
}

pub(super) fn figure(entry: &Entry) -> String {
    match &entry.outcome {
        EntryResult::Measured(measured) => amount(entry.quantity, measured.summary.median),
        EntryResult::OutOfMemory { .. } => "out of memory".to_owned(),
        EntryResult::Failed { .. } => "failed".to_owned(),
        EntryResult::Skipped { .. } => NOTHING.to_owned(),
    }
}

pub(crate) const fn short(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::HostTime => "host time, measured",
        Quantity::DeviceTime => "device time, measured",
        Quantity::ModelTime => "model time (simulated clock), not measured",
        Quantity::Memory => "memory",
    }
}

pub(super) const fn slug(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::HostTime => "host",
        Quantity::DeviceTime => "device",
        Quantity::ModelTime => "model",
        Quantity::Memory => "memory",
    }
}

/// Formats a ratio, for example `1.31×`, with more digits close to 1.
pub(super) fn ratio(ratio: f64) -> String {
    match ratio {
        ratio if !ratio.is_finite() => NOTHING.to_owned(),
        ratio if (0.95..1.05).contains(&ratio) => format!("{ratio:.3}×"),
        // Two significant digits of the difference from 1.
        ratio if ratio > 0.0 && ratio < 0.095 => {
            format!("{ratio:.*}×", (1.0 - ratio.log10().floor()) as usize)
        }
        ratio => multiple(Some(ratio)),
    }
}

/// Formats a ratio with its confidence interval; exact figures have none. A ratio to zero does not
/// exist.
pub(super) fn change(change: &Change) -> String {
    let Some(figures) = &change.figures else {
        return NOTHING.to_owned();
    };
    match (figures.base, figures.new) {
        (0, 0) => "both 0".to_owned(),
        (0, _) => "from 0".to_owned(),
        (_, 0) => "to 0".to_owned(),
        _ if change.entry.quantity.is_exact() => exact_ratio(figures.ratio),
        _ => format!(
            "{} ({} to {})",
            ratio(figures.ratio),
            ratio(figures.low),
            ratio(figures.high)
        ),
    }
}

/// Formats a ratio of exact figures. A difference that three digits cannot show is stated in words.
fn exact_ratio(value: f64) -> String {
    let text = ratio(value);
    match value {
        value if text == "1.000×" && value > 1.0 => "above 1.000×".to_owned(),
        value if text == "1.000×" && value < 1.0 => "below 1.000×".to_owned(),
        _ => text,
    }
}

pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() >= 9.95 || (percent - percent.round()).abs() < 0.05 {
        format!("{percent:.0} %")
    } else {
        format!("{percent:.1} %")
    }
}

/// Formats a ratio as a change: `+12.4 %`, `-3.0 %`, `0.0 %`.
pub(super) fn changed_by(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    if percent.abs() < 0.05 {
        "0.0 %".to_owned()
    } else {
        format!("{percent:+.1} %")
    }
}

/// Formats `2026-11-20 02:17 UTC`; other forms are unchanged.
pub(super) fn moment(started: &str) -> String {
    match (started.split_once('T'), started.ends_with('Z')) {
        (Some((date, time)), true) if time.is_char_boundary(5) && time.len() >= 5 => {
            format!("{date} {} UTC", &time[..5])
        }
        _ => started.to_owned(),
    }
}

pub(super) fn date(started: &str) -> &str {
    started.split_once('T').map_or(started, |(date, _)| date)
}

pub(super) fn shortened(commit: &str) -> String {
    commit.chars().take(10).collect()
}

pub(super) fn commit(build: &Build) -> String {
    let Some(commit) = &build.commit else {
        return "an unknown commit".to_owned();
    };
    let changes = if build.dirty == Some(true) {
        " with uncommitted changes"
    } else {
        ""
    };
    format!("commit {}{changes}", shortened(commit))
}

pub(super) fn took(milliseconds: u64) -> String {
    let seconds = milliseconds / 1_000;
    match (seconds / 3_600, seconds / 60 % 60) {
        (0, 0) => format!("{}.{} s", seconds, milliseconds % 1_000 / 100),
        (0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

pub(super) const fn stopped(stopped: Stopped) -> &'static str {
    match stopped {
        Stopped::Precise => "every confidence interval was as narrow as the suite asks",
        Stopped::Budget => "the limit of time or rounds was reached",
        Stopped::Deterministic => "the clock is virtual and gives the same figures each time",
        Stopped::Interrupted => "the user stopped it",
    }
}

pub(super) fn device(machine: &MachineInfo) -> String {
    if machine.device == "simulated" {
        "the simulated device".to_owned()
    } else {
        machine.device.clone()
    }
}

#[cfg(test)]
mod tests;
