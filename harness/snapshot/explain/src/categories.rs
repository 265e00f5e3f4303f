//! Sorts allocated memory by purpose: [`CategoryBytes`].
//!
//! Evidence counts in this order: the tensors that `harness.observe` recorded, the stack that
//! allocated the block, the events that end its life, and its size. Allocations form passes: the
//! autograd engine allocates in C++ threads, so its allocations have frames of the engine, no
//! Python frames, or begin in PyTorch; those of an optimizer have a frame of `torch/optim`.
//! Consecutive allocations of one kind are one pass. A gradient has the size of its parameter, so
//! sizes show the parameters and the state of the optimizer from before the recording. If nothing
//! decides, the category is `other`.

mod lives;
mod origin;

use std::collections::{BTreeMap, HashMap, HashSet};

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::snapshot::{Block, Frame, FrameId, Snapshot, StackId, Value};
use lives::{Birth, Life, Lives, Pass};
use origin::{Origin, PassKind};
use regex_lite::Regex;
use serde::{Deserialize, Serialize};

use crate::byte_cause::SiteBytes;
use crate::sites::SiteId;
use crate::state::{At, State};
use crate::view::View;

/// The built-in categories in display order, with their descriptions.
const CATEGORIES: [(&str, &str); 12] = [
    (PARAMETERS, "parameters and buffers"),
    (GRADIENTS, "gradients"),
    (OPTIMIZER_STATE, "optimizer state"),
    // Allocated by modules, and kept for the backward pass or still in use.
    (ACTIVATIONS, "activations"),
    (WORKSPACES, "workspaces"),
    // Freed in the pass that allocates them.
    (TEMPORARIES, "temporaries"),
    (COMMUNICATION, "communication buffers"),
    (KV_CACHE, "KV cache"),
    // Kept for longer than a pass by code outside of modules.
    (PROGRAM, "tensors of the program"),
    (KEPT, "older, probably model state"),
    (BEFORE, "older than the recording"),
    (OTHER, "other"),
];

/// The built-in categories in display order.
pub const ALL: [&str; CATEGORIES.len()] = {
    let mut all = [""; CATEGORIES.len()];
    let mut at = 0;
    while at < all.len() {
        all[at] = CATEGORIES[at].0;
        at += 1;
    }
    all
};

/// Returns the description of a category. Those of a user have their names.
pub fn about(category: &str) -> &str {
    let built_in = CATEGORIES.iter().find(|(name, _)| *name == category);
    built_in.map_or(category, |(_, about)| about)
}

const PARAMETERS: &str = "parameters";
const GRADIENTS: &str = "gradients";
const OPTIMIZER_STATE: &str = "optimizer_state";
const ACTIVATIONS: &str = "activations";
const WORKSPACES: &str = "workspaces";
const TEMPORARIES: &str = "temporaries";
const COMMUNICATION: &str = "communication";
const KV_CACHE: &str = "kv_cache";
const PROGRAM: &str = "program";
/// Never freed in the recording.
const KEPT: &str = "kept_from_before";
const BEFORE: &str = "from_before";
const OTHER: &str = "other";

/// The key under which `harness.observe` adds the addresses of a program's tensors to a snapshot.
const RECORDED: &str = "harness_tensors";

/// PyTorch's workspaces of cuBLAS, in bytes: before and since Hopper, and of cublasLt.
const CUBLAS: [u64; 3] = [8_519_680, 33_554_432, 1_048_576];

/// Blocks of this many different sizes do not equal others by chance.
const MANY_SIZES: usize = 8;

/// The states that optimizers keep per parameter. More blocks of its size can also be averages or
/// other models.
const MOST_STATES: usize = 2;

/// The bytes of allocated blocks with one purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    pub category: String,
    /// Says "probably" where no stack and no end shows the purpose, only a size or a file's name.
    pub about: String,
    /// At the moment of the explanation.
    pub bytes: Bytes,
    pub blocks: u64,
    /// At the peak of allocated memory.
    pub peak_bytes: Bytes,
    /// The part of [`Self::bytes`] and of [`Self::peak_bytes`] that is inferred.
    pub inferred_bytes: Bytes,
    pub inferred_peak_bytes: Bytes,
    /// The sites of the blocks at the moment, largest first.
    pub sites: Vec<SiteBytes>,
}

/// Assigns blocks to a category by a frame of their stack. All given parts must match the same
/// frame.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CategoryRule {
    pub category: String,
    /// A part of the path.
    pub file: Option<String>,
    pub function: Option<String>,
    pub regex: Option<Pattern>,
}

/// Matched against `file:line function`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(Regex);

impl TryFrom<String> for Pattern {
    type Error = regex_lite::Error;

    fn try_from(text: String) -> Result<Self, regex_lite::Error> {
        Regex::new(&text).map(Self)
    }
}

impl CategoryRule {
    pub const fn matches_everything(&self) -> bool {
        self.file.is_none() && self.function.is_none() && self.regex.is_none()
    }

    fn matches(&self, frame: &Frame) -> bool {
        let of_file = self
            .file
            .as_ref()
            .is_none_or(|file| frame.file.contains(file.as_str()));
        let of_function = self
            .function
            .as_ref()
            .is_none_or(|function| *function == frame.name);
        let text = || format!("{}:{} {}", frame.file, frame.line, frame.name);
        of_file
            && of_function
            && self
                .regex
                .as_ref()
                .is_none_or(|Pattern(regex)| regex.is_match(&text()))
    }
}

/// A category, and whether only a size or the name of a file suggests it.
#[derive(Clone, Copy)]
struct Purpose<'a> {
    category: &'a str,
    is_inferred: bool,
}

const fn surely(category: &str) -> Purpose<'_> {
    Purpose {
        category,
        is_inferred: false,
    }
}

const fn probably(category: &str) -> Purpose<'_> {
    Purpose {
        category,
        is_inferred: true,
    }
}

pub(crate) struct Categories<'a> {
    view: &'a View<'a>,
    of_stack: Vec<Origin<'a>>,
    passes: Vec<Pass>,
    /// The pass of the last allocation up to each event.
    pass_of: Vec<u32>,
    /// Ordered by birth.
    lives: Vec<Life<'a>>,
    /// False if the recording has stacks of blocks, but not of events: then lives show nothing.
    has_stacks: bool,
    ends: HashMap<Birth, usize>,
    /// Blocks from before the recording have sizes rounded to 512, as in old versions of PyTorch.
    are_rounded: bool,
    /// The sizes of blocks that are parameters, or that the program keeps as such.
    parameter_sizes: HashSet<u64>,
    /// Also of other tensors that the program keeps from before its first backward pass.
    kept_sizes: HashSet<u64>,
    /// The blocks whose size shows their purpose.
    by_size: HashMap<Birth, &'static str>,
    /// The most events between the allocation and the end of a block in the same pass, by pass and
    /// stack.
    longest: HashMap<(u32, StackId), usize>,
    /// By the event that allocates: how many earlier allocations of the same pass have its stack.
    repetitions: HashMap<usize, u32>,
    /// The purpose of the last finished block, by stack and repetition.
    finished: HashMap<(StackId, u32), Purpose<'a>>,
    recorded: HashMap<u64, &'static str>,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: Bytes,
    blocks: u64,
    inferred: Bytes,
}

impl Sum {
    fn and(self, other: &Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            blocks: self.blocks + other.blocks,
            inferred: self.inferred + other.inferred,
        }
    }
}

/// The categories of a moment, and of the peak. Empty if the stacks have no frames of Python or
/// C++.
pub(crate) fn list(view: &View<'_>, rules: &[CategoryRule]) -> Vec<CategoryBytes> {
    if !view
        .snapshot
        .stacks
        .all_frames()
        .any(|frame| origin::is_python(frame) || origin::is_cpp(frame))
    {
        return Vec::new();
    }
    let categories = Categories::new(view, rules);
    let now = categories.of(view.state);
    let at_peak = view.history.moment(At::Peak).map_or_else(
        |_| now.clone(),
        |peak| categories.of(&view.history.state(peak.event)),
    );
    let given = rules
        .iter()
        .map(|rule| (rule.category.as_str(), rule.category.as_str()));
    let mut seen = HashSet::new();
    let all = given
        .chain(CATEGORIES)
        .filter(|(name, _)| seen.insert(*name));
    let category = |(name, about): (&str, &str)| {
        let sum = |of: &HashMap<&str, BTreeMap<SiteId, Sum>>| {
            let sites = of.get(name).into_iter().flat_map(BTreeMap::values);
            sites.fold(Sum::default(), Sum::and)
        };
        let (now_sum, peak) = (sum(&now), sum(&at_peak));
        let about = match now_sum.inferred + peak.inferred {
            Bytes::ZERO => about.to_owned(),
            all if all == now_sum.bytes + peak.bytes => format!("{about}, probably"),
            _ => format!("{about}, in part probably"),
        };
        let site = |(&id, &Sum { bytes, blocks, .. }): (&SiteId, &Sum)| SiteBytes {
            site: view.sites.get(id).name.clone(),
            id,
            bytes,
            blocks,
        };
        let mut sites: Vec<SiteBytes> = now.get(name).into_iter().flatten().map(site).collect();
        sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
        CategoryBytes {
            category: name.to_owned(),
            about,
            bytes: now_sum.bytes,
            blocks: now_sum.blocks,
            peak_bytes: peak.bytes,
            inferred_bytes: now_sum.inferred,
            inferred_peak_bytes: peak.inferred,
            sites,
        }
    };
    all.map(category)
        .filter(|category| category.bytes.max(category.peak_bytes) > Bytes::ZERO)
        .collect()
}

impl<'a> Categories<'a> {
    fn new(view: &'a View<'a>, rules: &'a [CategoryRule]) -> Self {
        let stacks = &view.snapshot.stacks;
        let program = origin::Program::new(view.snapshot);
        let of_stack: Vec<Origin<'a>> = stacks
            .all()
            .map(|stack| origin::origin(&stacks.frames(stack).collect::<Vec<_>>(), &program, rules))
            .collect();
        let Lives {
            passes,
            pass_of,
            lives,
            longest,
            repetitions,
            ..
        } = Lives::of(view, &of_stack);
        let ends = lives
            .iter()
            .filter_map(|life| Some((life.birth, life.end?)))
            .collect();
        let has_stacks = lives
            .iter()
            .any(|life| !life.is_from_before() && life.stack != StackId::EMPTY);
        let are_rounded = lives
            .iter()
            .filter(|life| life.is_from_before())
            .all(|life| life.size.0.is_multiple_of(512));
        let recorded = recorded(view.snapshot);
        let mut all = Self {
            view,
            of_stack,
            passes,
            pass_of,
            lives,
            has_stacks,
            ends,
            are_rounded,
            parameter_sizes: HashSet::new(),
            kept_sizes: HashSet::new(),
            by_size: HashMap::new(),
            longest,
            repetitions,
            finished: HashMap::new(),
            recorded,
        };
        if all.has_stacks {
            all.find_sizes();
            all.by_size = all.workspaces();
            let by_size = all.parameters_and_states();
            let parameters = all
                .lives
                .iter()
                .filter(|life| by_size.get(&life.birth) == Some(&PARAMETERS));
            let sizes: Vec<u64> = parameters.map(|life| all.comparable(life.size)).collect();
            all.parameter_sizes.extend(sizes);
            all.by_size.extend(by_size);
            all.finish();
            let earlier = all.earlier_step();
            all.by_size.extend(earlier);
        }
        all
    }

    /// Collects the sizes that gradients can have.
    fn find_sizes(&mut self) {
        for life in &self.lives {
            let is_kept = life.end.is_none_or(|end| self.survives(life, end));
            let is_parameter = match life.origin {
                Origin::Known(PARAMETERS | GRADIENTS) => true,
                Origin::Constructor { .. } => is_kept,
                Origin::Backward { .. } => {
                    life.is_from_before() && life.stack == StackId::EMPTY && life.end.is_none()
                }
                _ => false,
            };
            if is_parameter {
                self.parameter_sizes.insert(self.comparable(life.size));
            }
            if is_parameter || (life.origin == Origin::Program && is_kept) {
                self.kept_sizes.insert(self.comparable(life.size));
            }
        }
    }

    const fn comparable(&self, Bytes(size): Bytes) -> u64 {
        if self.are_rounded {
            size.next_multiple_of(512)
        } else {
            size
        }
    }

    /// Returns whether the block was allocated before the first backward pass and is freed after
    /// it.
    fn survives(&self, life: &Life<'_>, end: usize) -> bool {
        let born = match life.birth {
            Birth::Before(_) => 0,
            Birth::Event(start) => self.passes[self.pass_of[start] as usize].backward,
        };
        let until = &self.passes[self.pass_of[end] as usize];
        born == 0 && until.backward > 0 && until.kind != PassKind::Backward
    }

    /// Finds unfreed workspaces of cuBLAS in recordings without C++ frames. PyTorch allocates one
    /// per thread and stream, directly after the result of the first matrix product, and one for
    /// cublasLt.
    fn workspaces(&self) -> HashMap<Birth, &'static str> {
        let has_size = |life: &&Life<'_>| CUBLAS.contains(&life.size.0) && life.end.is_none();
        let stacks = &self.view.snapshot.stacks;
        let is_product = |stack: StackId| origin::is_product(stacks.frames(stack));
        let has_cpp = |stack: StackId| stacks.frames(stack).any(origin::is_cpp);
        let (before, recorded) = self
            .lives
            .split_at(self.lives.partition_point(|life| life.is_from_before()));
        let mut found = HashMap::new();
        let from_before: Vec<&Life<'_>> = before.iter().filter(has_size).collect();
        for life in &from_before {
            let has_same_stack = |other: &&&Life<'_>| other.stack == life.stack;
            let is_only = from_before.iter().filter(has_same_stack).count() == 1;
            if life.origin == Origin::Forward && is_only && is_product(life.stack) == Some(true) {
                found.insert(life.birth, WORKSPACES);
            }
        }
        // The products began before the recording.
        if !from_before.is_empty() {
            return found;
        }
        let of_size = |stack: StackId, size: Bytes| {
            recorded
                .iter()
                .filter(|life| life.stack == stack && life.size == size)
                .count()
        };
        let (mut seen, mut owners) = (HashSet::new(), HashSet::new());
        for run in recorded.chunk_by(|a, b| a.stack == b.stack) {
            let stack = run[0].stack;
            let is_backward = matches!(run[0].origin, Origin::Backward { .. });
            let candidates = run
                .iter()
                .skip(1)
                .filter(has_size)
                .filter(|life| match life.origin {
                    Origin::Backward { .. } => self.is_no_gradient(life),
                    Origin::Forward | Origin::Program => true,
                    _ => false,
                });
            // Ordinary tensors of a line have one size, or several.
            let is_unlike = |life: &Life<'_>| {
                let mut results = run.iter().filter(|other| other.birth != life.birth);
                of_size(stack, life.size) == 1 && results.all(|result| result.size == run[0].size)
            };
            let is_product = match is_product(stack) {
                _ if is_backward => Some(true),
                _ if !seen.insert(stack) || has_cpp(stack) => Some(false),
                is_product => is_product,
            };
            let is_lasting = |life: &&Life<'_>| match life.size.0 == CUBLAS[2] {
                true => self.survives_backward(self.pass(life)),
                false => {
                    !is_backward
                        || self
                            .pass(life)
                            .is_some_and(|pass| pass + 1 < self.passes.len())
                }
            };
            for life in candidates
                .filter(|life| is_product.unwrap_or_else(|| is_unlike(life)))
                .filter(is_lasting)
            {
                if owners.insert((is_backward, life.stream, life.size.0 == CUBLAS[2])) {
                    found.insert(life.birth, WORKSPACES);
                }
            }
        }
        found
    }

    /// Returns whether a block of a backward pass has another size than all parameters, or more
    /// blocks than parameters have its size.
    fn is_no_gradient(&self, life: &Life<'_>) -> bool {
        let size = self.comparable(life.size);
        let is_like = |other: &&Life<'_>| {
            self.comparable(other.size) == size
                && other.origin == life.origin
                && self.pass(other) == self.pass(life)
        };
        let parameters = self
            .lives
            .iter()
            .filter(|other| {
                other.origin == Origin::Known(PARAMETERS) && self.comparable(other.size) == size
            })
            .count();
        let alike = || {
            self.lives
                .iter()
                .filter(is_like)
                .filter(|other| self.outlives_pass(other.birth, other.end))
                .count()
        };
        !self.parameter_sizes.contains(&size) || (parameters > 0 && alike() > parameters)
    }

    /// Finds parameters and states of the optimizer whose size shows it, if no stack does. As many
    /// blocks of a size are parameters as gradients of this size are alive together; further ones
    /// from before the recording are states.
    fn parameters_and_states(&self) -> HashMap<Birth, &'static str> {
        let is_gradient = |life: &Life<'_>| match life.origin {
            Origin::Known(GRADIENTS) => true,
            Origin::Backward { recomputes: false } => {
                !life.is_from_before() && self.is_gradient(life.birth, life.size, life.end)
            }
            _ => false,
        };
        // The last temporaries of a pass can also end after its last allocation.
        let mut gradients = self.most_alive(|life| {
            is_gradient(life) && self.parameter_sizes.contains(&self.comparable(life.size))
        });
        gradients.extend(self.most_alive(|life| is_gradient(life) && self.reaches_next_pass(life)));
        let known = self.most_alive(|life| life.origin == Origin::Known(PARAMETERS));
        let known = |size: u64| known.get(&size).copied().unwrap_or_default();
        let mut missing: HashMap<u64, usize> = gradients
            .iter()
            .map(|(&size, &count)| (size, count.saturating_sub(known(size))))
            .filter(|(_, count)| *count > 0)
            .collect();
        let mut found = HashMap::new();
        let is_constructed = |life: &&Life<'_>| matches!(life.origin, Origin::Constructor { .. });
        let is_unknown = |life: &&Life<'_>| {
            life.is_from_before() && life.stack == StackId::EMPTY && life.end.is_none()
        };
        // Inputs can have gradients too, but each step has its own.
        let is_of_program = |life: &&Life<'_>| {
            let is_early = self
                .pass(life)
                .is_some_and(|pass| self.passes[pass].backward == 0);
            life.origin == Origin::Program && is_early && life.end.is_none()
        };
        let is_kept = |life: &&Life<'_>| life.end.is_none_or(|end| self.survives(life, end));
        let all = || self.lives.iter();
        let candidates = all()
            .filter(is_constructed)
            .chain(all().filter(is_unknown))
            .chain(all().filter(is_of_program))
            .filter(is_kept);
        let mut constructors = HashSet::new();
        for life in candidates.filter(|life| !self.by_size.contains_key(&life.birth)) {
            if let Some(count) = missing
                .get_mut(&self.comparable(life.size))
                .filter(|count| **count > 0)
            {
                *count -= 1;
                found.insert(life.birth, PARAMETERS);
                constructors.extend(origin::constructor_call(
                    &self.view.snapshot.stacks,
                    life.stack,
                ));
            }
        }
        let has_gradients = !gradients.is_empty();
        let of_modules = all().filter(|life| self.is_of_module(life, &constructors, has_gradients));
        for life in of_modules.filter(|life| self.reaches_forward(life)) {
            found.insert(life.birth, PARAMETERS);
        }
        let others = all()
            .filter(is_unknown)
            .filter(|life| !found.contains_key(&life.birth));
        let states = self.states(others, &gradients);
        found.extend(states);
        found
    }

    /// Returns whether the constructor of a module made the block. Constructors also make buffers
    /// and parameters without gradients. Without gradients, no size shows which ones.
    fn is_of_module(
        &self,
        life: &Life<'_>,
        constructors: &HashSet<&[FrameId]>,
        has_gradients: bool,
    ) -> bool {
        match life.origin {
            Origin::Constructor { .. } if has_gradients => {
                origin::constructor_call(&self.view.snapshot.stacks, life.stack)
                    .is_some_and(|call| constructors.contains(&call))
            }
            Origin::Constructor { is_of_module } => is_of_module,
            _ => false,
        }
    }

    /// Returns the blocks of unknown origin that are states of an optimizer: at most
    /// [`MOST_STATES`] per gradient of their size.
    fn states<'b>(
        &self,
        unknown: impl Iterator<Item = &'b Life<'a>>,
        gradients: &BTreeMap<u64, usize>,
    ) -> Vec<(Birth, &'static str)>
    where
        'a: 'b,
    {
        let mut by_size: BTreeMap<u64, Vec<Birth>> = BTreeMap::new();
        for life in unknown {
            let size = self.comparable(life.size);
            by_size.entry(size).or_default().push(life.birth);
        }
        let mut found = Vec::new();
        for (size, blocks) in by_size {
            if let Some(&count) = gradients.get(&size) {
                let states = (blocks.len() / count).min(MOST_STATES) * count;
                let blocks = blocks.into_iter().take(states);
                found.extend(blocks.map(|birth| (birth, OPTIMIZER_STATE)));
            }
        }
        found
    }

    /// Finds the purpose of blocks of the step before the recording, as of the graph of an earlier
    /// forward pass that the recorded one replaces: all blocks that the recording frees without
    /// having allocated them have the sizes of all blocks that it allocates without freeing them.
    fn earlier_step(&self) -> HashMap<Birth, &'static str> {
        let blocks = |is_meant: &dyn Fn(&Life<'_>) -> bool| {
            let mut by_size: BTreeMap<u64, Vec<&Life<'_>>> = BTreeMap::new();
            for life in self.lives.iter().filter(|life| is_meant(life)) {
                let size = self.comparable(life.size);
                by_size.entry(size).or_default().push(life);
            }
            by_size
        };
        let old = blocks(&|life| life.is_from_before() && life.end.is_some());
        let new = blocks(&|life| !life.is_from_before() && life.end.is_none());
        let counts = |by_size: &BTreeMap<u64, Vec<&Life<'_>>>| {
            let of_size = by_size.iter();
            of_size
                .map(|(&size, blocks)| (size, blocks.len()))
                .collect::<Vec<_>>()
        };
        if old.len() < MANY_SIZES || counts(&old) != counts(&new) {
            return HashMap::new();
        }
        let purpose = |life: &Life<'_>| self.of_block(life.birth, life.stack, life.size).category;
        let mut found = HashMap::new();
        for (old, new) in old.values().zip(new.values()) {
            let of_new: HashSet<&str> = new.iter().map(|life| purpose(life)).collect();
            let category = CATEGORIES.iter().find(|(name, _)| of_new.contains(name));
            let (Some((category, _)), 1) = (category, of_new.len()) else {
                continue;
            };
            let unknown = old.iter().filter(|life| purpose(life) == BEFORE);
            found.extend(unknown.map(|life| (life.birth, *category)));
        }
        found
    }

    fn reaches_next_pass(&self, life: &Life<'_>) -> bool {
        let until = life
            .end
            .map_or(self.passes.len(), |end| self.pass_of[end] as usize);
        self.pass(life).is_none_or(|pass| until > pass)
    }

    /// Returns whether a module runs while the block is alive.
    fn reaches_forward(&self, life: &Life<'_>) -> bool {
        let after = self
            .lives
            .partition_point(|other| other.birth <= life.birth);
        let next = self.lives[after..]
            .iter()
            .find(|other| other.origin == Origin::Forward);
        next.is_some_and(|next| life.end.is_none_or(|end| next.birth < Birth::Event(end)))
    }

    /// The most blocks of each size that are alive together.
    fn most_alive(&self, is_meant: impl Fn(&Life<'_>) -> bool) -> BTreeMap<u64, usize> {
        let mut changes: BTreeMap<u64, Vec<(usize, i64)>> = BTreeMap::new();
        for life in self.lives.iter().filter(|life| is_meant(life)) {
            let changes = changes.entry(self.comparable(life.size)).or_default();
            let born = if let Birth::Event(start) = life.birth {
                start + 1
            } else {
                0
            };
            changes.push((born, 1));
            changes.extend(life.end.map(|end| (end + 1, -1)));
        }
        let most = |mut changes: Vec<(usize, i64)>| {
            changes.sort_unstable();
            let alive = changes.iter().scan(0, |alive, (_, change)| {
                *alive += change;
                Some(*alive)
            });
            usize::try_from(alive.max().unwrap_or_default()).unwrap_or_default()
        };
        changes
            .into_iter()
            .map(|(size, changes)| (size, most(changes)))
            .collect()
    }

    fn finish(&mut self) {
        let mut finished = HashMap::new();
        for &Life {
            birth,
            stack,
            size,
            end,
            ..
        } in &self.lives
        {
            if let (Birth::Event(start), Some(_)) = (birth, end) {
                finished.insert(
                    (stack, self.repetitions[&start]),
                    self.of_block(birth, stack, size),
                );
            }
        }
        self.finished = finished;
    }

    /// The bytes and blocks of a state by category and site.
    fn of(&self, state: &State) -> HashMap<&'a str, BTreeMap<SiteId, Sum>> {
        let mut sums: HashMap<&str, BTreeMap<SiteId, Sum>> = HashMap::new();
        let blocks = state.segments.iter().flat_map(|segment| &segment.blocks);
        for &Block {
            address,
            size,
            requested,
            stack,
            ..
        } in blocks.filter(|block| block.state == BlockState::Allocated)
        {
            let start = state.origin(address).allocated;
            let stack = start
                .map(|start| self.view.history.events()[start as usize].stack)
                .filter(|_| self.has_stacks)
                .unwrap_or(stack);
            let birth = start.map_or(Birth::Before(address), |start| Birth::Event(start as usize));
            let Purpose {
                category,
                is_inferred,
            } = self.of_block(birth, stack, requested);
            let sum = sums
                .entry(category)
                .or_default()
                .entry(self.view.sites.of_block(start, stack))
                .or_default();
            sum.bytes += size;
            sum.blocks += 1;
            sum.inferred += if is_inferred { size } else { Bytes::ZERO };
        }
        sums
    }

    fn of_block(&self, birth: Birth, stack: StackId, size: Bytes) -> Purpose<'a> {
        let origin = self.of_stack[stack.0 as usize];
        let end = self.ends.get(&birth).copied();
        let address = match birth {
            Birth::Before(address) => address,
            Birth::Event(start) => self.view.history.events()[start].address,
        };
        if let Some(recorded) = self.recorded.get(&address).filter(|_| end.is_none()) {
            return surely(recorded);
        }
        // A recording of the program's tensors is complete.
        let is_known =
            |by_size: &&&str| end.is_none() && !self.recorded.is_empty() && **by_size != WORKSPACES;
        if let Some(by_size) = self
            .by_size
            .get(&birth)
            .filter(|by_size| !is_known(by_size))
        {
            return probably(by_size);
        }
        let pass = self.pass_of_birth(birth);
        let is_last = pass.is_some_and(|pass| pass + 1 == self.passes.len());
        let ends_in_pass = pass.is_some() && end.map(|end| self.pass_of[end] as usize) == pass;
        let like_before = || self.like_before(birth, stack);
        let until = end.and_then(|end| self.passes.get(self.pass_of[end] as usize));
        match origin {
            Origin::Known(known) => surely(known),
            _ if stack == StackId::EMPTY && (pass.is_none() || !self.has_stacks) => {
                self.without_stack(birth, size, until)
            }
            Origin::Reduction => match (pass, end) {
                (Some(pass), Some(end)) => surely(self.of_reduction(pass, end)),
                _ => like_before().unwrap_or(surely(GRADIENTS)),
            },
            Origin::Optimizer { .. } if ends_in_pass => surely(TEMPORARIES),
            Origin::Optimizer { is_temporary } if end.is_none() && is_last => like_before()
                .unwrap_or_else(|| match () {
                    () if is_temporary || self.is_young(birth, stack) => probably(TEMPORARIES),
                    () if self.parameter_sizes.contains(&self.comparable(size)) => {
                        probably(OPTIMIZER_STATE)
                    }
                    () => surely(OTHER),
                }),
            Origin::Optimizer { .. } => surely(OPTIMIZER_STATE),
            Origin::Backward { recomputes: true } => surely(ACTIVATIONS),
            Origin::Backward { .. } => match () {
                () if self.is_gradient(birth, size, end) => probably(GRADIENTS),
                () if ends_in_pass => surely(TEMPORARIES),
                () if is_last && self.view.oom().is_some() && !self.parameter_sizes.is_empty() => {
                    probably(TEMPORARIES)
                }
                () => surely(OTHER),
            },
            Origin::Forward | Origin::Program | Origin::Constructor { .. } => match until {
                _ if ends_in_pass => surely(TEMPORARIES),
                Some(until) => surely(self.of_forward(origin, pass, until)),
                // An activation is freed at the latest in the backward pass.
                None if self.survives_backward(pass) => surely(PROGRAM),
                None => like_before().unwrap_or(match origin {
                    Origin::Forward => surely(ACTIVATIONS),
                    _ => surely(PROGRAM),
                }),
            },
        }
    }

    /// Returns the purpose of a block that the forward pass or the program allocates and a later
    /// pass frees.
    fn of_forward(&self, origin: Origin<'_>, pass: Option<usize>, until: &Pass) -> &'static str {
        let is_saved = if origin == Origin::Forward {
            until.backward > pass.map_or(0, |pass| self.passes[pass].backward)
        } else {
            until.kind == PassKind::Backward
        };
        if is_saved { ACTIVATIONS } else { PROGRAM }
    }

    /// Returns the purpose of a block that a reduction allocates. The optimizer's step comes
    /// between the reduction of gradients and their end.
    fn of_reduction(&self, pass: usize, end: usize) -> &'static str {
        let mut passes = self.passes[pass..=self.pass_of[end] as usize].iter();
        if passes.any(|pass| pass.kind == PassKind::Optimizer) {
            GRADIENTS
        } else {
            COMMUNICATION
        }
    }

    /// Returns the purpose of the block of the same stack and repetition in an earlier step.
    /// Programs repeat their steps, so an unfinished block is like it.
    fn like_before(&self, birth: Birth, stack: StackId) -> Option<Purpose<'a>> {
        match birth {
            Birth::Event(start) => self
                .finished
                .get(&(stack, *self.repetitions.get(&start)?))
                .copied(),
            Birth::Before(_) => None,
        }
    }

    /// Returns whether an earlier block of the same line lived for longer in this pass and was a
    /// temporary.
    fn is_young(&self, birth: Birth, stack: StackId) -> bool {
        let Birth::Event(start) = birth else {
            return false;
        };
        let longest = self.longest.get(&(self.pass_of[start], stack));
        longest.is_some_and(|&longest| self.pass_of.len() - start <= longest)
    }

    /// The purpose of a block without a stack from before the recording. `until`: the pass that
    /// frees it.
    fn without_stack(&self, birth: Birth, size: Bytes, until: Option<&Pass>) -> Purpose<'static> {
        let has_gradient = self.kept_sizes.contains(&self.comparable(size));
        match until.map(|until| until.kind) {
            _ if !self.has_stacks && matches!(birth, Birth::Event(_)) => surely(OTHER),
            Some(PassKind::Backward) => probably(ACTIVATIONS),
            Some(PassKind::Optimizer) if has_gradient => probably(OPTIMIZER_STATE),
            Some(_) => surely(BEFORE),
            None if self.passes.is_empty() => surely(BEFORE),
            None => surely(KEPT),
        }
    }

    fn is_gradient(&self, birth: Birth, size: Bytes, end: Option<usize>) -> bool {
        let is_complete = self
            .pass_of_birth(birth)
            .is_some_and(|pass| pass + 1 < self.passes.len());
        let sizes = if is_complete {
            &self.kept_sizes
        } else {
            &self.parameter_sizes
        };
        self.outlives_pass(birth, end) && sizes.contains(&self.comparable(size))
    }

    fn outlives_pass(&self, birth: Birth, end: Option<usize>) -> bool {
        let Some(pass) = self.pass_of_birth(birth) else {
            return true;
        };
        end.is_none_or(|end| end > self.passes[pass].last_allocation)
    }

    fn pass(&self, life: &Life<'_>) -> Option<usize> {
        self.pass_of_birth(life.birth)
    }

    /// `None` before the recording.
    fn pass_of_birth(&self, birth: Birth) -> Option<usize> {
        match birth {
            Birth::Before(_) => None,
            Birth::Event(start) => Some(self.pass_of[start] as usize),
        }
    }

    /// Returns whether a complete backward pass follows this pass.
    fn survives_backward(&self, pass: Option<usize>) -> bool {
        let born = pass.map_or(0, |pass| self.passes[pass].backward);
        self.passes
            .iter()
            .nth_back(1)
            .is_some_and(|complete| complete.backward > born)
    }
}

/// The tensors of the program by address. Empty unless `harness.observe` wrote the snapshot.
pub(crate) fn recorded(snapshot: &Snapshot) -> HashMap<u64, &'static str> {
    let mut recorded = HashMap::new();
    let Some(Value::Dict(pairs)) = snapshot.extras.value(snapshot.extra, RECORDED) else {
        return recorded;
    };
    for (key, addresses) in pairs {
        let category = [PARAMETERS, GRADIENTS, OPTIMIZER_STATE]
            .into_iter()
            .find(|name| key.as_text() == Some(name));
        if let (Some(category), Value::List(addresses)) = (category, addresses) {
            recorded.extend(
                addresses
                    .iter()
                    .filter_map(Value::as_u64)
                    .map(|address| (address, category)),
            );
        }
    }
    recorded
}

#[cfg(test)]
mod tests;
