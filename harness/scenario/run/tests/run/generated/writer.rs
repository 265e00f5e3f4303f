//! Writes a scenario from numbers, step by step. Tracks live buffers, names, and the streams that
//! may still use a buffer, as the checks would. A step that is not allowed at its position is
//! omitted. So every subset of the numbers is a scenario too, and failures can be shrunk.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

use harness_allocator::allocator::AllocatorKind;
use harness_scenario::StepKind;
use proptest::prelude::*;

pub(super) const STREAMS: [&str; 3] = ["default", "side", "copy"];
/// Expectations that hold for every allocator, in every program, at any time.
const CERTAIN: &[&str] = &[
    "allocated <= reserved",
    "requested <= active",
    "active <= reserved",
    "reserved <= reserved.peak",
    "min(allocated, reserved) == allocated",
    "reserved - allocated >= 0",
    "device.free <= device.total",
    "reserved <= 1.1 * device.total",
    "device.used >= start.device.used",
    "time.now >= start.time.now",
    "device.malloc_failures <= device.malloc_calls",
    "growth(num_device_alloc) >= 0",
    "growth(time.now) >= 0ns",
    "segment.all.current <= segment.all.peak",
    "num_ooms - start.num_ooms >= 0",
];

/// A scenario and its expectations that always hold.
#[derive(Clone)]
pub(super) struct Generated {
    pub(super) text: String,
    pub(super) certain: BTreeSet<String>,
}

impl fmt::Debug for Generated {
    /// The text in a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n{}", self.text)
    }
}

/// The numbers of a step; smaller ones make a simpler step.
#[derive(Clone, Debug)]
pub(super) struct Gene {
    pub(super) kind: StepKind,
    picks: [u16; 12],
    /// The inner steps, if the step has any.
    pub(super) inside: Vec<Gene>,
    /// The `meanwhile` steps, if the item may have any.
    pub(super) meanwhile: Vec<Gene>,
}

/// The relative frequency of a step.
const fn weight(kind: StepKind) -> u32 {
    match kind {
        StepKind::Alloc => 14,
        StepKind::Free | StepKind::Fill => 7,
        StepKind::Verify
        | StepKind::ReadAsync
        | StepKind::RecordStream
        | StepKind::Expect
        | StepKind::For
        | StepKind::Repeat => 3,
        StepKind::Busy
        | StepKind::Storm
        | StepKind::Program
        | StepKind::PrivatePool
        | StepKind::EmptyCache => 2,
        StepKind::Record
        | StepKind::Wait
        | StepKind::Synchronize
        | StepKind::ExternalMemory
        | StepKind::Train
        | StepKind::Infer => 2,
        StepKind::Measure | StepKind::Compare => 2,
        StepKind::ResetPeakStats
        | StepKind::SetMemoryFraction
        | StepKind::ReleasePool
        | StepKind::Pins
        | StepKind::Eventually
        | StepKind::Replay => 1,
        // These would start programs or processes; the catalogue's scenarios test them.
        StepKind::Exec | StepKind::Process | StepKind::Kill => 0,
    }
}

fn gene(
    inside: impl Strategy<Value = Vec<Gene>>,
    meanwhile: impl Strategy<Value = Vec<Gene>>,
) -> impl Strategy<Value = Gene> {
    let kinds: Vec<StepKind> = StepKind::ALL
        .iter()
        .flat_map(|&kind| (0..weight(kind)).map(move |_| kind))
        .collect();
    (
        prop::sample::select(kinds),
        prop::array::uniform12(any::<u16>()),
        inside,
        meanwhile,
    )
        .prop_map(|(kind, picks, inside, meanwhile)| Gene {
            kind,
            picks,
            inside,
            meanwhile,
        })
}

/// The steps of a scenario.
pub(super) fn genes() -> impl Strategy<Value = Vec<Gene>> {
    let leaf = gene(Just(Vec::new()), Just(Vec::new()));
    let nested = leaf.prop_recursive(3, 24, 6, |inner| {
        let few = prop::collection::vec(inner.clone(), 0..3);
        gene(
            prop::collection::vec(inner, 0..6),
            prop_oneof![4 => Just(Vec::new()), 1 => few],
        )
    });
    prop::collection::vec(nested, 1..20)
}

/// The numbers for the keys before the steps.
pub(super) fn head() -> impl Strategy<Value = (Vec<u16>, Vec<[u16; 12]>)> {
    (
        prop::collection::vec(any::<u16>(), 16),
        prop::collection::vec(prop::array::uniform12(any::<u16>()), 0..4),
    )
}

/// Numbers to consume in order; 0 when none are left.
pub(super) struct Picks<'p>(std::slice::Iter<'p, u16>);

impl<'p> Picks<'p> {
    pub(super) fn new(picks: &'p [u16]) -> Self {
        Self(picks.iter())
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (usize::from(self.0.next().copied().unwrap_or(0)) * end) >> 16
    }

    /// A probability in these units; 0 means never.
    pub(super) fn percent(&mut self, percent: usize) -> bool {
        self.below(100) >= 100 - percent
    }

    pub(super) fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Live,
    MaybeLive,
    Dead,
}

/// A buffer without a number.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) state: State,
    pub(super) filled: bool,
    pub(super) stream: usize,
    /// Streams whose work on it may still be running.
    pub(super) users: BTreeSet<usize>,
    /// The number of loops around its request.
    pub(super) loops: usize,
    /// True if all requests for it have `leak: true`.
    pub(super) leaks: bool,
}

/// Numbered buffers: used on their own stream, and on other streams only between two device
/// synchronizations.
#[derive(Clone, Debug)]
pub(super) struct Numbered {
    pub(super) name: String,
    pub(super) stream: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Storm {
    pub(super) is_live: bool,
    pub(super) loops: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Bytes,
    Count,
}

/// The text so far and the state at its end.
#[derive(Default)]
pub(super) struct Writer {
    text: String,
    pub(super) indent: usize,
    certain: BTreeSet<String>,
    names: usize,
    /// The smallest memory for the scenario, in KiB.
    pub(super) memory: u64,
    pub(super) arms: Vec<String>,
    pub(super) programs: Vec<String>,
    pub(super) program: Option<String>,
    pub(super) buffers: BTreeMap<String, Buffer>,
    pub(super) numbered: Vec<Numbered>,
    pub(super) storms: BTreeMap<String, Storm>,
    pub(super) events: Vec<String>,
    pub(super) measures: Vec<String>,
    /// Reported metrics of bytes and counts.
    pub(super) reports: Vec<(String, Unit)>,
    pub(super) unfinished: Vec<(String, Unit)>,
    pub(super) pools: Vec<String>,
    /// True if there may be private pools, which most allocators do not support.
    pub(super) has_pools: bool,
    /// Parameters and the variables of enclosing loops.
    pub(super) variables: Vec<(String, Unit)>,
    /// The number of enclosing loops, and whether one of them runs until OOM.
    pub(super) loops: usize,
    pub(super) until_oom: bool,
    /// Buffers and storms already named, and those that must not be named.
    named: BTreeSet<String>,
    forbidden: BTreeSet<String>,
    /// Returns whether some stream may still use a buffer at the end.
    pub(super) is_unsettled: bool,
}

impl Writer {
    /// A list item.
    pub(super) fn item(&mut self, text: &str) {
        let _ = writeln!(self.text, "{:indent$}- {text}", "", indent = self.indent);
    }

    /// Another key of the last item.
    pub(super) fn beside(&mut self, text: &str) {
        let _ = writeln!(self.text, "{:indent$}  {text}", "", indent = self.indent);
    }

    /// The items of the last key; never empty.
    pub(super) fn items(&mut self, more: usize, genes: &[Gene]) {
        let before = self.text.len();
        self.indent += more;
        self.steps(genes);
        if self.text.len() == before {
            self.item("reset_peak_stats");
        }
        self.indent -= more;
    }

    pub(super) fn steps(&mut self, genes: &[Gene]) {
        for gene in genes {
            self.step(gene, &mut Picks::new(&gene.picks));
        }
    }

    pub(super) fn new_name(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names)
    }

    pub(super) fn certainly(&mut self, text: impl Into<String>) -> String {
        let text = text.into();
        self.certain.insert(text.clone());
        text
    }

    /// An expectation that always holds.
    pub(super) fn certain(&mut self, picks: &mut Picks<'_>) -> String {
        let variable = self.variables.last().cloned();
        let measure = self
            .measures
            .first()
            .filter(|_| self.programs.is_empty() && self.loops == 0)
            .cloned();
        match (picks.below(8), variable, measure, self.program.clone()) {
            (5, Some((name, Unit::Bytes)), ..) => {
                self.certainly(format!("allocated + {name} >= {name}"))
            }
            (5, Some((name, Unit::Count)), ..) => {
                self.certainly(format!("num_ooms + {name} >= {name}"))
            }
            (6, .., Some(program)) => self.certainly(format!("{program}.reserved == reserved")),
            (7, _, Some(measure), _) => format!("{measure}.num_ooms <= num_ooms"),
            _ => {
                let text = picks.of(CERTAIN);
                self.certainly(text)
            }
        }
    }

    /// Notes that a buffer or storm is named here.
    pub(super) fn name(&mut self, name: &str) {
        self.named.insert(name.to_owned());
    }

    pub(super) fn may_name(&self, name: &str) -> bool {
        !self.forbidden.contains(name)
    }

    /// One of the buffers without a number that satisfy a condition.
    pub(super) fn buffer(
        &mut self,
        picks: &mut Picks<'_>,
        wanted: impl Fn(&Buffer) -> bool,
    ) -> Option<String> {
        let there: Vec<String> = self
            .buffers
            .iter()
            .filter(|(name, buffer)| self.may_name(name) && wanted(buffer))
            .map(|(name, _)| name.clone())
            .collect();
        let name = there.get(picks.below(there.len()))?.clone();
        self.name(&name);
        Some(name)
    }

    pub(super) fn storm(
        &mut self,
        picks: &mut Picks<'_>,
        wanted: impl Fn(&Storm) -> bool,
    ) -> Option<String> {
        let there: Vec<String> = self
            .storms
            .iter()
            .filter(|(name, storm)| self.may_name(name) && storm.is_live && wanted(storm))
            .map(|(name, _)| name.clone())
            .collect();
        let name = there.get(picks.below(there.len()))?.clone();
        self.name(&name);
        Some(name)
    }

    pub(super) fn numbered(&mut self, picks: &mut Picks<'_>) -> Option<Numbered> {
        let there: Vec<Numbered> = self
            .numbered
            .iter()
            .filter(|numbered| self.may_name(&numbered.name))
            .cloned()
            .collect();
        let numbered = there.get(picks.below(there.len()))?.clone();
        self.name(&numbered.name);
        Some(numbered)
    }

    /// Makes a stream wait for the other streams' work on a buffer.
    pub(super) fn order(&mut self, picks: &mut Picks<'_>, name: &str, onto: usize) {
        let users = std::mem::replace(
            &mut self.buffers.get_mut(name).expect("it is known").users,
            BTreeSet::from([onto]),
        );
        for user in users.into_iter().filter(|&user| user != onto) {
            match picks.below(3) {
                0 => {
                    // No other step records this event.
                    let event = self.new_name("e");
                    self.item(&format!(
                        "record: {{ event: {event}, stream: {} }}",
                        STREAMS[user]
                    ));
                    self.item(&format!(
                        "wait: {{ event: {event}, stream: {} }}",
                        STREAMS[onto]
                    ));
                }
                1 => self.item(&format!("synchronize: {{ stream: {} }}", STREAMS[user])),
                _ => self.item("synchronize: device"),
            }
        }
    }

    /// Makes a buffer safe to free: its stream waits for the others, or the allocator knows about
    /// them.
    pub(super) fn settle(&mut self, picks: &mut Picks<'_>, name: &str) {
        let Buffer {
            state,
            stream,
            users,
            ..
        } = self.buffers[name].clone();
        if state == State::Live && picks.percent(50) {
            for user in users.into_iter().filter(|&user| user != stream) {
                self.item(&format!(
                    "record_stream: {{ buffer: {name}, stream: {} }}",
                    STREAMS[user]
                ));
            }
        } else {
            self.order(picks, name, stream);
        }
    }

    /// From here on, any stream may use any buffer, because the executed steps before this place
    /// are unknown.
    pub(super) fn blur(&mut self) {
        for buffer in self.buffers.values_mut() {
            buffer.users = (0..STREAMS.len()).collect();
        }
        self.is_unsettled = true;
    }

    /// Frees the buffers that an iteration must not leave to the next one.
    pub(super) fn end_iteration(&mut self, picks: &mut Picks<'_>) {
        let loops = self.loops;
        let own: Vec<String> = self
            .buffers
            .iter()
            .filter(|(_, buffer)| {
                buffer.state != State::Dead && buffer.loops == loops && !buffer.leaks
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in own {
            self.free(picks, &name);
        }
        let storms = self
            .storms
            .iter_mut()
            .filter(|(_, storm)| storm.is_live && storm.loops == loops);
        let storms: Vec<String> = storms
            .map(|(name, storm)| (std::mem::take(&mut storm.is_live), name.clone()).1)
            .collect();
        for name in storms {
            self.name(&name);
            self.item(&format!("free: {name}"));
        }
    }

    pub(super) fn free(&mut self, picks: &mut Picks<'_>, name: &str) {
        self.name(name);
        self.settle(picks, name);
        self.item(&format!("free: {name}"));
        self.buffers.get_mut(name).expect("it is known").state = State::Dead;
    }

    /// The steps that run during the last item; they must not name its buffers.
    pub(super) fn meanwhile(&mut self, genes: &[Gene], named_before: BTreeSet<String>) {
        if !genes.is_empty() {
            let outer = (self.until_oom, self.forbidden.clone());
            self.until_oom = false;
            self.forbidden.extend(std::mem::take(&mut self.named));
            self.beside("meanwhile:");
            self.blur();
            self.items(4, genes);
            self.blur();
            self.named.extend(std::mem::take(&mut self.forbidden));
            (self.until_oom, self.forbidden) = outer;
        }
        self.named.extend(named_before);
    }

    pub(super) fn take_named(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.named)
    }
}

/// An allocator with its settings; `number` makes it distinct.
fn arm(picks: &mut Picks<'_>, number: usize, arms: &mut Vec<String>) -> Option<String> {
    let kind = AllocatorKind::ALL[picks.below(AllocatorKind::ALL.len())].name();
    if picks.percent(60) {
        return (!arms.contains(&kind.to_owned())).then(|| {
            arms.push(kind.to_owned());
            kind.to_owned()
        });
    }
    let name = format!("tuned{number}");
    arms.push(name.clone());
    if !["caching", "expandable"].contains(&kind) || picks.percent(10) {
        return Some(format!("{kind}: {{ name: {name} }}"));
    }
    let large = [20, 12, 11, 14, 32, 100][picks.below(6)];
    let mut settings = vec![format!("large_segment_size_mb:{large}")];
    let mut add = |name: &str, value: Option<String>| {
        settings.extend(value.map(|value| format!("{name}:{value}")))
    };
    add(
        "max_split_size_mb",
        picks
            .percent(50)
            .then(|| (large + picks.below(40)).to_string()),
    );
    add(
        "max_non_split_rounding_mb",
        picks
            .percent(30)
            .then(|| (large + picks.below(40)).to_string()),
    );
    add(
        "expandable_segments",
        picks.percent(40).then(|| "True".to_owned()),
    );
    add(
        "garbage_collection_threshold",
        picks
            .percent(40)
            .then(|| format!("0.{:02}", 1 + picks.below(99))),
    );
    add(
        "per_process_memory_fraction",
        picks
            .percent(30)
            .then(|| format!("0.{:02}", 1 + picks.below(99))),
    );
    let divisions = ["1", "4", "16", "[1:4,8:2,>:8]", "[4:1,>:4]"];
    add(
        "roundup_power2_divisions",
        picks.percent(40).then(|| picks.of(&divisions).to_owned()),
    );
    Some(format!(
        "caching: {{ name: {name}, conf: \"{}\" }}",
        settings.join(",")
    ))
}

/// Writes the scenario of these numbers.
pub(super) fn write((picks, arms): &(Vec<u16>, Vec<[u16; 12]>), genes: &[Gene]) -> Generated {
    let mut writer = Writer::default();
    let picks = &mut Picks::new(picks);
    writer.write_head(picks, arms);
    writer.indent = 2;
    writer.text.push_str("steps:\n");
    writer.items(0, genes);
    let is_unsettled = |buffer: &Buffer| {
        buffer.state != State::Dead && buffer.users != BTreeSet::from([buffer.stream])
    };
    if writer.is_unsettled || writer.buffers.values().any(is_unsettled) {
        writer.item("synchronize: device");
    }
    if writer.text.contains("on_oom") && picks.percent(60) {
        writer
            .text
            .push_str("expect_violation: retry_makes_progress\n");
    }
    Generated {
        text: writer.text,
        certain: writer.certain,
    }
}

impl Writer {
    fn write_head(&mut self, picks: &mut Picks<'_>, arms: &[[u16; 12]]) {
        let (memory, kib) = [
            ("1GiB", 1 << 20),
            ("64MiB", 64 << 10),
            ("200MiB", 200 << 10),
            ("2MiB", 2 << 10),
            ("3MiB", 3 << 10),
            ("19MiB", 19 << 10),
            ("21MiB + 1B", 21 << 10),
            ("79GiB", 79 << 20),
        ][picks.below(8)];
        self.memory = kib;
        let head = &mut self.text;
        head.push_str("about: Made from the grammar.\n");
        let needs = picks.of(&[
            "",
            "",
            "",
            ", device: simulated",
            ", features: [memory_pools, virtual_memory]",
            ", devices: 1",
        ]);
        if picks.percent(15) {
            let _ = writeln!(
                head,
                "matrix: {{ size: [1MiB, 700KiB], n: [{}], memory: [{memory}] }}",
                1 + picks.below(3)
            );
            let _ = writeln!(head, "needs: {{ memory: memory{needs} }}");
            self.variables = vec![
                ("size".to_owned(), Unit::Bytes),
                ("n".to_owned(), Unit::Count),
            ];
        } else {
            let _ = writeln!(head, "needs: {{ memory: {memory}{needs} }}");
        }
        let written: Vec<String> = arms
            .iter()
            .enumerate()
            .filter_map(|(number, picks)| arm(&mut Picks::new(picks), number, &mut self.arms))
            .collect();
        match written.as_slice() {
            [] => self.arms.push("caching".to_owned()),
            [one] if picks.percent(30) => {
                let is_map = one.contains(':');
                let _ = writeln!(
                    head,
                    "{}",
                    if is_map {
                        format!("allocator: {{ {one} }}")
                    } else {
                        format!("allocator: {one}")
                    }
                );
            }
            several => {
                head.push_str("allocators:\n");
                several
                    .iter()
                    .for_each(|arm| head.push_str(&format!("  - {arm}\n")));
            }
        }
        let _ = writeln!(head, "streams: [{}]", STREAMS[1..].join(", "));
        self.programs = ["server", "other"][..picks.below(3)]
            .iter()
            .map(|&name| name.to_owned())
            .collect();
        if !self.programs.is_empty() {
            let _ = writeln!(self.text, "programs: [{}]", self.programs.join(", "));
        }
        self.write_rest_of_head(picks);
    }

    fn write_rest_of_head(&mut self, picks: &mut Picks<'_>) {
        if picks.percent(30) {
            let _ = writeln!(self.text, "seed: {}", picks.below(1000));
        }
        if picks.percent(10) {
            self.text.push_str("tags: [made]\ntimeout: 4min\n");
        }
        if picks.percent(3) {
            let _ = writeln!(
                self.text,
                "expected_to_fail: {{ {}: nobody knows }}",
                self.arms[0]
            );
        }
        if picks.percent(10) {
            let _ = writeln!(
                self.text,
                "health_check: {{ every: {} }}",
                1 + picks.below(20)
            );
        }
        self.has_pools = picks.percent(25);
        if picks.percent(30) {
            // Growth belongs to a position in the steps.
            let lasting: Vec<&str> = CERTAIN
                .iter()
                .copied()
                .filter(|text| !text.starts_with("growth"))
                .collect();
            let text = [picks.of(&lasting), picks.of(&lasting)].map(|text| self.certainly(text));
            let _ = writeln!(self.text, "invariants: [\"{}\", \"{}\"]", text[0], text[1]);
        }
    }
}
