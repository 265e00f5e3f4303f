use harness_allocator::{device::Clock, units::Bytes};
use serde_json::{Value, json};

use super::calls::TURNS;
use super::visit::{Fault, MOST_SAMPLES, Reading, SLICE_NS};
use crate::suite::{Case, LatencyCase, Measure};
use crate::torch::{Pass, Samples, TorchProcess};
use crate::{clock::Stopwatch, record::Quantity};

/// Pairs timed together in a hit. A call from Python takes about a microsecond, and reading its
/// clock a tenth of that.
const PAIRS: u64 = 1000;
/// Cycles with tensors that are timed together; each takes about ten calls.
const CYCLES: u64 = 100;

/// Returns whether PyTorch supports a case.
pub(crate) const fn can(measure: &Measure) -> bool {
    !matches!(
        measure,
        Measure::Scenario(_) | Measure::Threads { .. } | Measure::StartUp
    )
}

pub(crate) const fn quantity(measure: &Measure) -> Quantity {
    match measure {
        Measure::Pipeline { .. } => Quantity::DeviceTime,
        _ => Quantity::HostTime,
    }
}

pub(crate) fn visit(
    torch: &mut TorchProcess,
    suite: &str,
    case: &Case,
    memory: Bytes,
) -> Result<Vec<Reading>, Fault> {
    let (question, batch) = match &case.measure {
        Measure::Latency { size, case } => {
            let batch = if *case == LatencyCase::Hit { PAIRS } else { 1 };
            (
                json!({ "do": "latency", "case": case.name(), "size": size, "batch": batch }),
                batch,
            )
        }
        Measure::EmptyCache { segments, size } => (
            json!({ "do": "empty_cache", "segments": segments, "size": size }),
            1,
        ),
        Measure::Recovery { size } => (json!({ "do": "recovery", "size": size }), 1),
        Measure::RecordStream { streams, size } => (
            json!({ "do": "record_stream", "streams": streams, "size": size, "batch": CYCLES }),
            CYCLES,
        ),
        Measure::Pipeline { size } => (
            json!({ "do": "pipeline", "size": size, "turns": TURNS }),
            TURNS,
        ),
        Measure::Trace { events } => {
            let name = format!("{suite}: {}", case.name());
            torch.load(&name, events)?;
            return trace(torch, &name, memory);
        }
        Measure::Scenario(_) | Measure::Threads { .. } | Measure::StartUp => {
            return Err(Fault::Skipped("PyTorch does not support it".to_owned()));
        }
    };
    let samples = samples(torch, question, memory)?.samples_ps;
    Ok(vec![Reading {
        part: None,
        quantity: quantity(&case.measure),
        batch,
        samples: Ok(samples),
    }])
}

fn samples(torch: &mut TorchProcess, mut question: Value, memory: Bytes) -> Result<Samples, Fault> {
    question["memory"] = json!(memory);
    let watch = Stopwatch::start();
    let mut all = Samples::default();
    while all.samples_ps.is_empty()
        || (all.samples_ps.len() < MOST_SAMPLES && watch.elapsed_ns() < SLICE_NS)
    {
        let Samples { samples_ps, pass } = torch.ask(&question)?;
        if samples_ps.is_empty() {
            return Err(Fault::Failed("PyTorch returned no samples".to_owned()));
        }
        all.samples_ps.extend(samples_ps);
        all.pass = pass;
    }
    Ok(all)
}

fn trace(torch: &mut TorchProcess, name: &str, memory: Bytes) -> Result<Vec<Reading>, Fault> {
    let Samples { samples_ps, pass } =
        samples(torch, json!({ "do": "trace", "trace": name }), memory)?;
    let Some(Pass {
        operations,
        reserved,
        unused,
    }) = pass
    else {
        return Err(Fault::Failed(
            "PyTorch did not report the trace's memory".to_owned(),
        ));
    };
    let time = Reading::time(Clock::Measured, operations.max(1), samples_ps);
    Ok([time]
        .into_iter()
        .chain(Reading::peak(reserved, unused))
        .collect())
}
