//! Writes each kind of step. A new step does not compile until the match in [`Writer::step`] covers
//! it.

use std::collections::BTreeSet;

use harness_scenario::StepKind;

use super::writer::{Buffer, Gene, Numbered, Picks, STREAMS, State, Storm, Unit, Writer};

/// Quoted if YAML would split it.
fn scalar(text: &str) -> String {
    if text.contains([',', '[', ']', '{', '}', '#', ':']) {
        format!("\"{text}\"")
    } else {
        text.to_owned()
    }
}

/// The allowed growth, for a loop of at least two iterations.
fn leak_check(picks: &mut Picks<'_>) -> &'static str {
    picks.of(&[
        "{ per_iteration: 1TiB, warmup: 1 }",
        "{ warmup: 1 }",
        "{ warmup: 1, every: 1, total: 1MiB }",
        "{ warmup: 1, total: 1MiB, per_iteration: 1 }",
    ])
}

/// The expected end of a request.
enum Ending {
    Fits,
    Oom,
    Perhaps,
}

impl Writer {
    /// Writes a step with its prerequisites, or nothing if it is not allowed here.
    pub(super) fn step(&mut self, gene: &Gene, picks: &mut Picks<'_>) {
        let named_before = self.take_named();
        let steps = gene.inside.as_slice();
        let is_block = match gene.kind {
            StepKind::For => self.write_for(picks, steps),
            StepKind::Repeat => self.write_repeat(picks, steps),
            StepKind::Program => self.write_program(picks, steps),
            StepKind::PrivatePool => self.write_private_pool(picks, steps),
            StepKind::Storm => self.write_storm(picks),
            StepKind::Train => self.write_train(picks),
            StepKind::Infer => self.write_infer(picks),
            kind => {
                self.write_operation(kind, picks);
                false
            }
        };
        // Its report is available only after the `meanwhile` steps have ended.
        let reports = std::mem::take(&mut self.unfinished);
        self.meanwhile(if is_block { &gene.meanwhile } else { &[] }, named_before);
        self.reports.extend(reports);
    }

    fn write_operation(&mut self, kind: StepKind, picks: &mut Picks<'_>) {
        let stream = STREAMS[picks.below(STREAMS.len())];
        match kind {
            StepKind::Alloc => self.write_alloc(picks),
            StepKind::Free => self.write_free(picks),
            StepKind::RecordStream => {
                if let Some(name) = self.buffer(picks, |buffer| buffer.state == State::Live) {
                    self.item(&format!(
                        "record_stream: {{ buffer: {name}, stream: {stream} }}"
                    ));
                }
            }
            StepKind::Fill => self.write_use(picks, "fill", |buffer| buffer.state == State::Live),
            StepKind::Verify => self.write_use(picks, "verify", |buffer| {
                buffer.state == State::Live && buffer.filled
            }),
            StepKind::ReadAsync => self.write_use(picks, "read_async", |buffer| {
                buffer.state == State::Live && buffer.filled
            }),
            StepKind::Busy => {
                let duration = picks.of(&["1ms", "20ns", "3us", "0.5s", "2min"]);
                self.item(&format!(
                    "busy: {{ stream: {stream}, duration: {duration} }}"
                ));
            }
            StepKind::Record => {
                let event = if picks.percent(40) {
                    self.event(picks)
                } else {
                    None
                };
                let event = event.unwrap_or_else(|| self.new_name("e"));
                self.item(&format!("record: {{ event: {event}, stream: {stream} }}"));
                self.events.push(event);
            }
            StepKind::Wait => {
                if let Some(event) = self.event(picks) {
                    self.item(&format!("wait: {{ event: {event}, stream: {stream} }}"));
                }
            }
            StepKind::Synchronize => {
                let event = self.event(picks);
                match (picks.below(3), event) {
                    (1, Some(event)) => self.item(&format!("synchronize: {{ event: {event} }}")),
                    (2, _) => self.item(&format!("synchronize: {{ stream: {stream} }}")),
                    _ => self.item("synchronize: device"),
                }
                if picks.percent(10) {
                    self.beside("timeout: 4min");
                }
            }
            StepKind::EmptyCache => match picks.percent(40) {
                true => {
                    let id = self.id("c", &[("freed_bytes", Unit::Bytes)]);
                    self.item(&format!("empty_cache: {{ id: {id} }}"));
                }
                false => self.item("empty_cache"),
            },
            StepKind::ResetPeakStats => self.item("reset_peak_stats"),
            StepKind::SetMemoryFraction => {
                let fraction = picks.of(&["1", "0.9", "0.5", "0.25", "0", "1.0"]);
                self.item(&format!("set_memory_fraction: {fraction}"));
            }
            StepKind::ExternalMemory => {
                let held = match picks.below(4) {
                    0 => "0B".to_owned(),
                    1 => format!("{}KiB", self.memory / 4),
                    2 => "max(device.free - 4MiB, 0)".to_owned(),
                    _ => self.amount(picks),
                };
                self.item(&format!("external_memory: {}", scalar(&held)));
            }
            StepKind::ReleasePool => {
                if let Some(pool) = self.pools.get(picks.below(self.pools.len())) {
                    let text = format!("release_pool: {pool}");
                    self.item(&text);
                }
            }
            StepKind::Replay => {
                let id = self.id("r", &[("ooms", Unit::Count), ("live_bytes", Unit::Bytes)]);
                let ending = picks.of(&["any", "any", "fits", "oom"]);
                self.item(&format!(
                    "replay: {{ id: {id}, trace: replay.trace, expect: {ending} }}"
                ));
                // In a loop, it would lose the blocks of the previous iteration.
                self.item(&format!("free: {id}"));
            }
            StepKind::Pins => {
                if let Some(storm) = self.storm(picks, |_| true) {
                    let id = self.id(
                        "p",
                        &[
                            ("pinned_segments", Unit::Count),
                            ("pinning_bytes", Unit::Bytes),
                        ],
                    );
                    self.item(&format!("pins: {{ storm: {storm}, id: {id} }}"));
                }
            }
            StepKind::Measure => {
                let measure = self.new_name("m");
                self.item(&format!("measure: {measure}"));
                self.measures.push(measure);
            }
            StepKind::Compare => {
                let since = self
                    .measures
                    .get(picks.below(self.measures.len()))
                    .cloned()
                    .unwrap_or_else(|| "start".to_owned());
                let id = self.id(
                    "d",
                    &[("grown_bytes", Unit::Bytes), ("grown_sites", Unit::Count)],
                );
                self.item(&format!("compare: {{ since: {since}, id: {id} }}"));
            }
            StepKind::Expect => self.write_expect(picks),
            StepKind::Eventually => {
                let expected = if picks.percent(15) {
                    "active == 0".to_owned()
                } else {
                    self.certain(picks)
                };
                self.item(&format!("eventually: {}", scalar(&expected)));
            }
            StepKind::For
            | StepKind::Repeat
            | StepKind::Program
            | StepKind::PrivatePool
            | StepKind::Storm
            | StepKind::Train
            | StepKind::Infer => unreachable!("`step` writes these"),
            StepKind::Exec | StepKind::Process | StepKind::Kill => unreachable!("its weight is 0"),
        }
    }

    fn event(&self, picks: &mut Picks<'_>) -> Option<String> {
        self.events.get(picks.below(self.events.len())).cloned()
    }

    /// A name for the report of the next step.
    fn id(&mut self, prefix: &str, reports: &[(&str, Unit)]) -> String {
        let id = self.new_name(prefix);
        // A loop that ends early, or another step, may have kept it from being reported.
        if self.loops == 0 && !self.until_oom {
            self.unfinished.extend(
                reports
                    .iter()
                    .map(|(report, unit)| (format!("{id}.{report}"), *unit)),
            );
        }
        id
    }

    /// A fixed size that is small compared with the memory.
    fn literal(&self, picks: &mut Picks<'_>) -> String {
        // Small requests fit even if a large segment does not.
        let most = if self.memory < 64 << 10 {
            256
        } else {
            u64::MAX
        };
        let kib = |kib: u64| format!("{}KiB", kib.clamp(1, most));
        match picks.below(12) {
            0 => "512B".to_owned(),
            1 => kib((self.memory / 64).min(1 << 10)),
            2 => kib((self.memory / 32).min(20 << 10)),
            3 => kib((self.memory / 20).min(12_345)),
            4 => kib(self.memory / 16),
            5 => kib(self.memory / 10),
            6 => kib((self.memory / 8).min(10 << 10)),
            7 => kib((self.memory / 4).min(1 << 10)),
            8 => "1".to_owned(),
            9 => "0".to_owned(),
            10 => kib((self.memory / 8).min(1025)),
            _ => kib((self.memory / 8).min(2 << 10)),
        }
    }

    /// Any valid size.
    fn amount(&self, picks: &mut Picks<'_>) -> String {
        let of = |unit: Unit, all: &[(String, Unit)], picks: &mut Picks<'_>| {
            let all: Vec<&String> = all
                .iter()
                .filter(|(_, other)| *other == unit)
                .map(|(name, _)| name)
                .collect();
            all.get(picks.below(all.len())).map(|name| (*name).clone())
        };
        match picks.below(12) {
            5 => "reserved / 4".to_owned(),
            6 => "device.free / 8".to_owned(),
            7 => "max(start.device.free / 16, 3MiB) - 1MiB".to_owned(),
            8 => of(Unit::Bytes, &self.variables, picks)
                .map_or("1MiB + 1B".to_owned(), |name| format!("{name} / 2")),
            9 => of(Unit::Count, &self.variables, picks)
                .map_or("3KiB".to_owned(), |name| format!("4KiB * {name}")),
            10 => of(Unit::Bytes, &self.reports, picks)
                .map_or("7KiB".to_owned(), |report| format!("min({report}, 2MiB)")),
            11 => self.measures.first().map_or("9KiB".to_owned(), |measure| {
                format!("max(allocated - {measure}.allocated, 8KiB)")
            }),
            _ => self.literal(picks),
        }
    }

    /// A size that is large compared with the memory, or does not exist.
    fn much(&self, picks: &mut Picks<'_>) -> String {
        match picks.below(7) {
            0 => format!("{}KiB", self.memory / 2),
            1 => format!("{}KiB", self.memory / 4 * 3),
            2 => "device.free".to_owned(),
            3 => "max(device.free - 2MiB, 1B)".to_owned(),
            4 => "device.total + 1B".to_owned(),
            5 => "8EiB".to_owned(),
            _ => "18446744073709551615".to_owned(),
        }
    }

    /// `expect` of a request, a matching size, and the resulting state.
    fn request(&self, picks: &mut Picks<'_>) -> (String, String, Ending) {
        let unsaid = if self.until_oom {
            Ending::Perhaps
        } else {
            Ending::Fits
        };
        match picks.below(14) {
            0..=5 => (self.literal(picks), String::new(), unsaid),
            6 => (self.amount(picks), String::new(), unsaid),
            7 => (
                self.literal(picks),
                ", expect: fits".to_owned(),
                Ending::Fits,
            ),
            8 => (
                "8EiB".to_owned(),
                ", expect: { oom: too_large }".to_owned(),
                Ending::Oom,
            ),
            9 => (
                "device.total + 1B".to_owned(),
                ", expect: oom".to_owned(),
                Ending::Oom,
            ),
            10 => (
                self.much(picks),
                format!(", expect: {{ {} }}", self.by_arm(picks, "any", "any")),
                Ending::Perhaps,
            ),
            11 => (
                self.amount(picks),
                ", expect: { simulated: any, gpu: fits }".to_owned(),
                Ending::Perhaps,
            ),
            12 => (
                self.amount(picks),
                ", expect: any".to_owned(),
                Ending::Perhaps,
            ),
            _ => (
                self.much(picks),
                ", expect: any".to_owned(),
                Ending::Perhaps,
            ),
        }
    }

    /// A map with a value for one allocator and a value for the others.
    fn by_arm(&self, picks: &mut Picks<'_>, value: &str, others: &str) -> String {
        let arm = &self.arms[picks.below(self.arms.len())];
        let others = if self.arms.len() > 1 {
            format!(", others: {others}")
        } else {
            String::new()
        };
        format!("{arm}: {value}{others}")
    }

    fn write_alloc(&mut self, picks: &mut Picks<'_>) {
        let stream = picks.below(STREAMS.len());
        let (size, expect, ending) = self.request(picks);
        let leak = picks.percent(12);
        if picks.percent(35) && self.write_numbered(picks, stream, &size, &expect) {
            return;
        }
        let loops = self.loops;
        let usable =
            |buffer: &Buffer| buffer.state == State::Dead || (leak && buffer.loops == loops);
        let name = if picks.percent(50) {
            self.buffer(picks, usable)
        } else {
            None
        };
        let name = name.unwrap_or_else(|| self.new_name("b"));
        // The previous buffer loses its name, or keeps it if the request fails. Either way, it
        // belongs to this stream.
        let before = self
            .buffers
            .get(&name)
            .filter(|buffer| buffer.state != State::Dead)
            .map(|buffer| buffer.stream);
        let stream = before.unwrap_or(stream);
        if before.is_some() {
            self.order(picks, &name, stream);
        }
        let policy = self.policy(picks, &name);
        let id = if picks.percent(15) {
            format!(", id: {}", self.id("a", &[("attempts", Unit::Count)]))
        } else {
            String::new()
        };
        let leaks = if leak { ", leak: true" } else { "" };
        self.item(&format!(
            "alloc: {{ buffer: {name}, size: {}, stream: {}{expect}{policy}{leaks}{id} }}",
            scalar(&size),
            STREAMS[stream]
        ));
        let state = match ending {
            Ending::Fits => State::Live,
            Ending::Oom => State::Dead,
            Ending::Perhaps => State::MaybeLive,
        };
        let before = self.buffers.get(&name);
        let leaks = leak && before.is_none_or(|buffer| buffer.leaks);
        self.name(&name);
        self.buffers.insert(
            name,
            Buffer {
                state,
                filled: false,
                stream,
                users: BTreeSet::from([stream]),
                loops,
                leaks,
            },
        );
    }

    /// A recovery policy for the request of a buffer. Afterward, buffers that it may free count as
    /// possibly live.
    fn policy(&mut self, picks: &mut Picks<'_>, requested: &str) -> String {
        match picks.below(27) {
            18 => ", on_oom: give_up".to_owned(),
            19 => ", on_oom: { wait: { first: 1ms, factor: 3, retries: 2 } }".to_owned(),
            20 => ", on_oom: { empty_cache: {} }".to_owned(),
            21 => format!(
                ", on_oom: {{ empty_cache: {{ retries: {} }} }}",
                1 + picks.below(3)
            ),
            22 => format!(
                ", on_oom: {{ synchronize: {{ retries: {} }} }}",
                1 + picks.below(3)
            ),
            23..=24 => {
                let policy = picks.of(&["free", "evict"]);
                let loops = self.loops;
                let Some(name) = self.buffer(picks, |buffer| {
                    buffer.state == State::Live && buffer.loops == loops
                }) else {
                    return String::new();
                };
                if name == requested {
                    return String::new();
                }
                let stream = self.buffers[&name].stream;
                self.order(picks, &name, stream);
                self.buffers.get_mut(&name).expect("it is live").state = State::MaybeLive;
                format!(", on_oom: {{ {policy}: {{ buffers: [{name}] }} }}")
            }
            _ => String::new(),
        }
    }

    /// A numbered buffer, if a number is available.
    fn write_numbered(
        &mut self,
        picks: &mut Picks<'_>,
        stream: usize,
        size: &str,
        expect: &str,
    ) -> bool {
        let Some((variable, _)) = self
            .variables
            .iter()
            .rev()
            .find(|(_, unit)| *unit == Unit::Count)
            .cloned()
        else {
            return false;
        };
        let known = if picks.percent(30) {
            self.numbered(picks)
        } else {
            None
        };
        let Numbered { name, stream } = known.unwrap_or_else(|| {
            let numbered = Numbered {
                name: self.new_name("kv"),
                stream,
            };
            self.numbered.push(numbered.clone());
            numbered
        });
        self.name(&name);
        let leak = if picks.percent(60) {
            ", leak: true"
        } else {
            ""
        };
        let buffer = format!("\"{name}[{variable}]\"");
        self.item(&format!(
            "alloc: {{ buffer: {buffer}, size: {}, stream: {}{expect}{leak} }}",
            scalar(size),
            STREAMS[stream]
        ));
        true
    }

    fn write_free(&mut self, picks: &mut Picks<'_>) {
        let loops = self.loops;
        let number = picks.below(4);
        match picks.below(10) {
            6 => {
                if let Some(Numbered { name, .. }) = self.numbered(picks) {
                    let freed = if number == 0 {
                        format!("free: {name}[{}]", picks.below(4))
                    } else {
                        format!("free: {name}")
                    };
                    self.item(&freed);
                }
            }
            7 => {
                if let Some(storm) = self.storm(picks, |storm| storm.loops == loops) {
                    self.storms.get_mut(&storm).expect("it is live").is_live = false;
                    self.item(&format!("free: [{storm}]"));
                }
            }
            8 => {
                if let Some(storm) = self.storm(picks, |_| true) {
                    let amount = self.amount(picks);
                    let id = self.id(
                        "f",
                        &[("freed_blocks", Unit::Count), ("freed_bytes", Unit::Bytes)],
                    );
                    self.item(&format!(
                        "free: {{ pinning: {storm}, for: {}, id: {id} }}",
                        scalar(&amount)
                    ));
                }
            }
            _ => {
                if let Some(name) = self.buffer(picks, |buffer| {
                    buffer.state != State::Dead && buffer.loops == loops
                }) {
                    self.free(picks, &name);
                }
            }
        }
    }

    /// `fill`, `verify` or `read` of a buffer on a stream that waits for the others.
    fn write_use(&mut self, picks: &mut Picks<'_>, step: &str, wanted: impl Fn(&Buffer) -> bool) {
        let stream = picks.below(STREAMS.len());
        if picks.percent(25)
            && let Some(Numbered { name, stream: own }) = self.numbered(picks)
        {
            let index = match self
                .variables
                .iter()
                .rev()
                .find(|(_, unit)| *unit == Unit::Count)
            {
                Some((variable, _)) if picks.percent(80) => variable.clone(),
                _ => picks.below(3).to_string(),
            };
            let is_foreign = stream != own;
            if is_foreign {
                self.item("synchronize: device");
            }
            self.item(&format!(
                "{step}: {{ buffer: \"{name}[{index}]\", stream: {} }}",
                STREAMS[stream]
            ));
            if is_foreign {
                self.item("synchronize: device");
            }
            return;
        }
        let Some(name) = self.buffer(picks, wanted) else {
            return;
        };
        if picks.percent(20) {
            self.order(picks, &name, 0);
            self.item(&format!("{step}: [{name}]"));
        } else {
            self.order(picks, &name, stream);
            self.item(&format!(
                "{step}: {{ buffer: {name}, stream: {} }}",
                STREAMS[stream]
            ));
        }
        self.buffers.get_mut(&name).expect("it is live").filled |= step == "fill";
    }

    fn write_expect(&mut self, picks: &mut Picks<'_>) {
        let certain = self.certain(picks);
        let one = scalar(&certain);
        let report = self.reports.get(picks.below(self.reports.len())).cloned();
        match (picks.below(10), report) {
            (4, _) => {
                let other = self.certain(picks);
                self.item(&format!("expect: [{one}, {}]", scalar(&other)));
            }
            (5, _) => {
                let cases = self.by_arm(picks, &one, "any");
                self.item(&format!("expect: {{ {cases} }}"));
            }
            (6, _) => self.item(&format!("expect: {{ simulated: [{one}], gpu: any }}")),
            (7, Some((report, Unit::Bytes))) => self.item(&format!("expect: {report} >= 0B")),
            (7, Some((report, Unit::Count))) => self.item(&format!("expect: {report} >= 0")),
            (8, _) if self.program.is_none() => {
                let (left, right) = (picks.below(self.arms.len()), picks.below(self.arms.len()));
                if left != right {
                    let (left, right) = (&self.arms[left], &self.arms[right]);
                    let text =
                        format!("expect: {left}.reserved.peak <= 2 * {right}.reserved.peak + 4MiB");
                    self.item(&text);
                }
            }
            (9, _) => {
                let text = picks.of(&[
                    "any",
                    "num_ooms == 0",
                    "reserved == allocated +- 90%",
                    "growth(allocated) == 0",
                    "device.external_memory < 1MiB",
                ]);
                self.item(&format!("expect: {text}"));
            }
            _ => self.item(&format!("expect: {one}")),
        }
    }

    /// The steps of a loop. Inside, any stream may use earlier buffers: the previous iteration's
    /// stream.
    fn write_iterations(
        &mut self,
        picks: &mut Picks<'_>,
        more: usize,
        until_oom: bool,
        steps: &[Gene],
    ) {
        let outer = self.until_oom;
        self.until_oom |= until_oom;
        self.loops += 1;
        self.blur();
        if until_oom {
            let name = self.new_name("lost");
            let stream = STREAMS[picks.below(STREAMS.len())];
            self.with_indent(more, |writer| {
                let kib = writer.memory / [3, 5, 2][picks.below(3)];
                writer.item(&format!(
                    "alloc: {{ buffer: {name}, size: {kib}KiB, stream: {stream}, leak: true }}"
                ));
            });
        }
        self.items(more, steps);
        self.with_indent(more, |writer| writer.end_iteration(picks));
        self.loops -= 1;
        self.until_oom = outer;
        self.blur();
        let loops = self.loops;
        for buffer in self.buffers.values_mut() {
            buffer.loops = buffer.loops.min(loops);
        }
    }

    fn write_for(&mut self, picks: &mut Picks<'_>, steps: &[Gene]) -> bool {
        let variable = self.new_name("v");
        let (values, unit) = [
            ("1..3", Unit::Count),
            ("2..1 by -1", Unit::Count),
            ("0..4 by 2", Unit::Count),
            ("[1, 1, 7]", Unit::Count),
            ("[1MiB, 12KiB]", Unit::Bytes),
            ("1MiB..3MiB by 1MiB", Unit::Bytes),
        ][picks.below(6)];
        let until_oom = picks.percent(15);
        self.item(&format!(
            "for: {{ {variable}: {} }}",
            if values.starts_with('[') {
                values.to_owned()
            } else {
                scalar(values)
            }
        ));
        let id = self.write_beside(picks, until_oom);
        self.write_leak_check(picks);
        self.variables.push((variable, unit));
        self.beside("steps:");
        self.write_iterations(picks, 4, until_oom, steps);
        self.variables.pop();
        self.reports_iterations(id);
        true
    }

    /// The other keys of a loop. Its report is available after the loop.
    fn write_beside(&mut self, picks: &mut Picks<'_>, until_oom: bool) -> Option<String> {
        if until_oom {
            self.beside("until: oom");
        }
        let id = picks.percent(40).then(|| self.new_name("l"));
        id.iter().for_each(|id| self.beside(&format!("id: {id}")));
        id
    }

    fn write_leak_check(&mut self, picks: &mut Picks<'_>) {
        if picks.percent(20) {
            self.beside(&format!("leak_check: {}", leak_check(picks)));
        }
    }

    fn reports_iterations(&mut self, id: Option<String>) {
        if self.loops == 0 {
            self.unfinished
                .extend(id.map(|id| (format!("{id}.iterations"), Unit::Count)));
        }
    }

    fn write_repeat(&mut self, picks: &mut Picks<'_>, steps: &[Gene]) -> bool {
        let times = [2, 1, 3, 5][picks.below(4)];
        match picks.below(6) {
            4 if self.loops == 0 => {
                self.item("repeat: until oom");
                let id = self.write_beside(picks, false);
                self.write_leak_check(picks);
                self.beside("steps:");
                self.write_iterations(picks, 4, true, steps);
                self.reports_iterations(id);
            }
            5 => {
                self.item(&format!("repeat: {}", 4 * times));
                self.beside("until: oom");
                if picks.percent(20) {
                    self.beside(&format!("leak_check: {}", leak_check(picks)));
                }
                self.beside("steps:");
                self.write_iterations(picks, 4, true, steps);
            }
            _ => {
                self.item(&format!("repeat: {times}"));
                let id = self.write_beside(picks, false);
                if times > 1 {
                    self.write_leak_check(picks);
                }
                self.beside("steps:");
                self.write_iterations(picks, 4, false, steps);
                self.reports_iterations(id);
            }
        }
        true
    }

    fn write_program(&mut self, picks: &mut Picks<'_>, steps: &[Gene]) -> bool {
        let Some(program) = self.programs.get(picks.below(self.programs.len())).cloned() else {
            return false;
        };
        self.item(&format!("program: {program}"));
        self.beside("steps:");
        let outer = self.program.replace(program);
        self.items(4, steps);
        self.program = outer;
        self.is_unsettled |= self.until_oom;
        true
    }

    fn write_private_pool(&mut self, picks: &mut Picks<'_>, steps: &[Gene]) -> bool {
        if !self.has_pools {
            return false;
        }
        let pool = if picks.percent(50) {
            self.pools.get(picks.below(self.pools.len())).cloned()
        } else {
            None
        };
        let pool = pool.unwrap_or_else(|| self.new_name("pool"));
        self.item(&format!("private_pool: {pool}"));
        self.pools.push(pool);
        self.beside("steps:");
        self.items(4, steps);
        true
    }

    fn write_storm(&mut self, picks: &mut Picks<'_>) -> bool {
        let loops = self.loops;
        let kib = self.memory;
        let sizes = match picks.below(5) {
            0 => format!("[{}KiB, 3KiB, 1]", (kib / 32).max(1)),
            1 => format!("{{ min: 1, max: {}KiB }}", (kib / 8).max(1)),
            2 => format!(
                "{{ min: 1, max: {}KiB, distribution: uniform }}",
                (kib / 8).max(1)
            ),
            3 => format!(
                "{{ min: 1, max: {}KiB, distribution: bimodal }}",
                (kib / 8).max(1)
            ),
            _ => format!("{}KiB", (kib / 16).max(1)),
        };
        let live = [kib / 4, kib / 2, kib][picks.below(3)];
        let operations = 10 + picks.below(60);
        let streams = picks.of(&["", ", streams: [default, side]", ", streams: [copy]"]);
        let fill = picks.of(&["", ", fill: false", ", fill: true"]);
        let until = if picks.percent(5) {
            ", until: fragmented"
        } else {
            ""
        };
        let reports = [
            ("failed_request", Unit::Bytes),
            ("live_bytes", Unit::Bytes),
            ("ooms", Unit::Count),
        ];
        let id = self.id("s", &reports);
        let (min, max) = (1 + picks.below(4), 5 + picks.below(30));
        let order = picks.of(&[
            "",
            ", order: lifo",
            ", order: fifo",
            ", order: generational",
        ]);
        self.item(&format!(
            "storm: {{ id: {id}, operations: {operations}, sizes: {sizes}, live: {live}KiB, \
             lifetime: {{ min: {min}, max: {max}{order} }}{streams}{fill}{until} }}"
        ));
        self.name(&id);
        self.storms.insert(
            id,
            Storm {
                is_live: true,
                loops,
            },
        );
        true
    }

    fn write_train(&mut self, picks: &mut Picks<'_>) -> bool {
        let kib = |parts: u64| (self.memory / parts).max(1);
        let batch = 1 + picks.below(8);
        let (layers, iterations) = (1 + picks.below(4), 1 + picks.below(3));
        let policy = match picks.below(13) {
            6 => ", on_oom: shrink_batch".to_owned(),
            7 => format!(
                ", on_oom: {{ bisect_batch: {{ floor: {} }} }}",
                1 + picks.below(batch)
            ),
            8 if batch > 1 => ", on_oom: split_and_accumulate".to_owned(),
            9 if layers > 1 => ", on_oom: checkpoint_more".to_owned(),
            10 => ", on_oom: half_precision".to_owned(),
            11 if layers > 1 => {
                ", on_oom: [ half_precision, checkpoint_more, shrink_batch, give_up ]".to_owned()
            }
            12 => ", on_oom: { wait: { first: 1us, retries: 2 } }".to_owned(),
            2 => ", on_oom: { empty_cache: { retries: 2 } }".to_owned(),
            3 => ", on_oom: { synchronize: {} }".to_owned(),
            4 => format!(
                ", on_oom: {{ halve_batch: {{ floor: {}, retries: 3 }} }}",
                1 + picks.below(batch)
            ),
            5 => ", on_oom: { halve_batch: { empty_cache: true } }".to_owned(),
            _ => String::new(),
        };
        let (parameters, sample) = (
            kib([100, 20, 8][picks.below(3)]),
            kib([200, 30, 7][picks.below(3)]),
        );
        let stream = STREAMS[picks.below(STREAMS.len())];
        let expect = if picks.percent(10) && !self.until_oom {
            ""
        } else {
            ", expect: any"
        };
        let id = self.id("t", &[("final_batch", Unit::Count), ("ooms", Unit::Count)]);
        // Some policies have nothing to do if a training begins with a small plan.
        let is_plain = policy.contains("split")
            || policy.contains("checkpoint")
            || policy.contains("precision");
        let way = match picks.below(6) {
            _ if is_plain => String::new(),
            1 => format!(", accumulate: {}", 1 + picks.below(batch)),
            2 => format!(
                ", checkpoint_every: {}, zero_grad: zero",
                1 + picks.below(3)
            ),
            3 => ", precision: mixed, optimizer: sgd".to_owned(),
            4 => ", retain_graph: true, optimizer: momentum".to_owned(),
            5 if iterations > 1 => {
                format!(", retain_graph: true, leak_check: {}", leak_check(picks))
            }
            _ => String::new(),
        };
        self.item(&format!(
            "train: {{ id: {id}, parameters: {parameters}KiB, layers: {layers}, \
             activations_per_sample: {sample}KiB, batch: {batch}, iterations: {iterations}, \
             stream: {stream}{expect}{policy}{way} }}"
        ));
        true
    }

    fn write_infer(&mut self, picks: &mut Picks<'_>) -> bool {
        let head_dim = (self.memory / [2000, 200, 40][picks.below(3)]).clamp(1, 1024);
        let (layers, requests) = (1 + picks.below(3), 1 + picks.below(6));
        let page = picks.of(&["", ", page: 4"]);
        let on_oom = picks.of(&[
            "",
            ", on_oom: wait",
            ", on_oom: give_up",
            ", max_running: 2",
            ", on_oom: [ evict, wait ]",
            ", on_oom: { synchronize: {} }",
        ]);
        let stream = STREAMS[picks.below(STREAMS.len())];
        let expect = if picks.percent(10) && !self.until_oom {
            ""
        } else {
            ", expect: any"
        };
        let id = self.id("n", &[("served", Unit::Count), ("evicted", Unit::Count)]);
        self.item(&format!(
            "infer: {{ id: {id}, layers: {layers}, kv_heads: 4, head_dim: {head_dim}, requests: \
             {requests}, prompt: {{ min: 1, max: 30 }}, output: {{ min: 1, max: 9 }}, stream: \
             {stream}{page}{on_oom}{expect} }}"
        ));
        true
    }

    fn with_indent(&mut self, more: usize, write: impl FnOnce(&mut Self)) {
        self.indent += more;
        write(self);
        self.indent -= more;
    }
}
