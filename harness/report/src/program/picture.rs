//! A picture of a program's GPU memory: reserved and allocated over submitted work or memory calls,
//! with failed allocations.

use harness_allocator::units::Bytes;
use harness_exec::timeline::ProgramTimeline;
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome};
use plotters::prelude::*;

use crate::svg::{self, ALLOCATED, Area, Drawn, INK, Key, OOM, Plot, RESERVED, RETRY};
use crate::words;

/// The legend. A refused attempt may be retried.
const KEYS: [(&str, Key); 5] = [
    ("reserved (driver)", Key::Line(RESERVED, 2)),
    ("allocated (torch, sampled)", Key::Line(ALLOCATED, 2)),
    ("refused", Key::Triangle(RETRY)),
    ("injected failure", Key::Circle(INK)),
    ("out of memory error", Key::Cross(OOM)),
];

#[derive(Clone, Copy)]
pub(super) struct Clock {
    /// Completes `Memory over …`.
    pub(super) name: &'static str,
    pub(super) axis: &'static str,
}

pub(super) struct Curve<'a> {
    pub(super) timeline: &'a ProgramTimeline,
    pub(super) device: u32,
    pub(super) title: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    Refused,
    Injected,
    Oom,
}

impl Curve<'_> {
    fn attempts(&self) -> impl Iterator<Item = &Attempt> {
        self.timeline
            .attempts
            .iter()
            .filter(|attempt| self.is_here(attempt))
    }

    fn is_here(&self, attempt: &Attempt) -> bool {
        attempt.device == self.device && attempt.call.requests_device_memory()
    }

    /// Reserved bytes before and after each attempt, and after each free.
    fn reserved(&self) -> Vec<(f64, Bytes)> {
        let after = |attempt: &Attempt| match attempt.outcome {
            AttemptOutcome::Served => {
                attempt.held
                    + attempt
                        .size
                        .checked_round_up(Bytes::mib(2))
                        .unwrap_or(attempt.size)
            }
            AttemptOutcome::Refused | AttemptOutcome::Injected => attempt.held,
        };
        let mut points: Vec<(f64, Bytes)> = vec![(0.0, Bytes::ZERO)];
        let mut frees = self
            .timeline
            .frees
            .iter()
            .filter(|free| free.device == self.device)
            .peekable();
        for (made, attempt) in self.timeline.attempts.iter().enumerate() {
            while let Some(free) = frees.next_if(|free| free.attempts <= made as u64) {
                points.push((free.submitted as f64, free.held));
            }
            if self.is_here(attempt) {
                points.extend(
                    [attempt.held, after(attempt)].map(|held| (attempt.submitted as f64, held)),
                );
            }
        }
        points.extend(frees.map(|free| (free.submitted as f64, free.held)));
        points
    }

    fn allocated(&self) -> impl Iterator<Item = (f64, Bytes)> {
        let of_device = self
            .timeline
            .samples
            .iter()
            .filter(|sample| sample.device == self.device);
        of_device.map(|sample| (sample.submitted as f64, sample.allocated))
    }

    fn marks(&self) -> Vec<(f64, Bytes, Mark)> {
        let failed = self.attempts().filter_map(|attempt| {
            let mark = match attempt.outcome {
                AttemptOutcome::Served => return None,
                AttemptOutcome::Refused => Mark::Refused,
                AttemptOutcome::Injected => Mark::Injected,
            };
            Some((attempt.submitted as f64, attempt.held, mark))
        });
        // Attempts count over all devices; the error follows the last one.
        let ooms = self.timeline.errors.iter().filter_map(|error| {
            let last = self
                .timeline
                .attempts
                .get(usize::try_from(error.attempts).ok()?.checked_sub(1)?)?;
            (last.device == self.device).then_some((last.submitted as f64, last.held, Mark::Oom))
        });
        failed.chain(ooms).collect()
    }

    fn end(&self) -> f64 {
        let ProgramTimeline {
            attempts,
            frees,
            samples,
            ..
        } = self.timeline;
        let attempt = attempts.last().map(|attempt| attempt.submitted);
        attempt
            .max(frees.last().map(|free| free.submitted))
            .max(samples.last().map(|sample| sample.submitted))
            .max(Some(1))
            .unwrap_or(1) as f64
    }

    fn highest(&self) -> Bytes {
        self.reserved()
            .into_iter()
            .chain(self.allocated())
            .map(|point| point.1)
            .max()
            .unwrap_or_default()
    }

    fn in_words(&self) -> String {
        let highest = |bytes: Option<Bytes>| words::size(bytes.unwrap_or_default());
        let count = |mark: Mark| self.marks().iter().filter(|other| other.2 == mark).count();
        format!(
            "{}: at most {} reserved and {} allocated; {} refused, {} injected, {}.",
            self.title,
            highest(self.reserved().into_iter().map(|point| point.1).max()),
            highest(self.allocated().map(|point| point.1).max()),
            words::count(count(Mark::Refused), "attempt"),
            count(Mark::Injected),
            words::count(count(Mark::Oom), "out of memory error"),
        )
    }
}

/// Draws the curves as stacked panels, for devices of this memory. `None` without curves.
pub(super) fn draw(curves: &[Curve<'_>], memory: Bytes, clock: Clock) -> Option<String> {
    let highest = curves.iter().map(Curve::highest).max()?;
    // A limit far above all values would flatten the curves.
    let top = if memory.get() / 4 <= highest.get() {
        memory
    } else {
        highest.max(Bytes::mib(2))
    };
    let described: Vec<String> = curves.iter().map(Curve::in_words).collect();
    let titles = (format!("Memory over {}", clock.name), described.join(" "));
    Some(svg::panels(
        (&titles.0, &titles.1),
        &KEYS,
        curves,
        |area, curve| panel(area, curve, (top, memory), clock),
    ))
}

fn panel(area: &Area<'_>, curve: &Curve<'_>, (top, memory): (Bytes, Bytes), clock: Clock) -> Drawn {
    let plot = Plot {
        title: curve.title.clone(),
        x: clock.axis,
        end: curve.end(),
        top,
    };
    let mut chart = plot.chart(area)?;
    svg::line(&mut chart, curve.allocated(), plot.end, ALLOCATED)?;
    svg::line(&mut chart, curve.reserved(), plot.end, RESERVED)?;
    if top == memory {
        svg::limit(&mut chart, plot.end, svg::mib(memory))?;
    }
    for (x, held, mark) in curve.marks() {
        let at = (x, svg::mib(held));
        match mark {
            Mark::Refused => chart.draw_series([TriangleMarker::new(at, 6, RETRY.filled())])?,
            Mark::Injected => chart.draw_series([Circle::new(at, 5, INK.stroke_width(2))])?,
            Mark::Oom => chart.draw_series([Cross::new(at, 5, OOM.stroke_width(3))])?,
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests;
