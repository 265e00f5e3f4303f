//! Sorts allocated memory by purpose: [`CategoryBytes`].
//!
//! A block's category follows from the stack that allocated it and from the events that end its life. Allocations form passes: the autograd
//! engine allocates in C++ threads, so its allocations have no Python frames or begin in PyTorch; those of an optimizer have a frame of
//! `torch/optim`. Consecutive allocations of one kind are one pass. If neither stack nor lifetime decides, the category is `other`.

use std::collections::{BTreeMap, HashMap, HashSet};

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::snapshot::{Action, Block, Event, Frame, Snapshot, StackId, Value};
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::explanation::SiteBytes;
use crate::sites::{self, SiteId};
use crate::state::{At, State};
use crate::view::View;

/// The built-in categories in display order, with their descriptions.
const CATEGORIES: [(&str, &str); 9] = [
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
    (OTHER, "other"),
];
const PARAMETERS: &str = "parameters";
const GRADIENTS: &str = "gradients";
const OPTIMIZER_STATE: &str = "optimizer_state";
const ACTIVATIONS: &str = "activations";
const WORKSPACES: &str = "workspaces";
const TEMPORARIES: &str = "temporaries";
const COMMUNICATION: &str = "communication";
const KV_CACHE: &str = "kv_cache";
const OTHER: &str = "other";

/// The key under which `harness.observe` adds the addresses of a program's tensors to a snapshot.
const RECORDED: &str = "harness_tensors";

/// PyTorch's workspaces of cuBLAS, in bytes: before and since Hopper, and of cublasLt.
const CUBLAS: [u64; 3] = [8_519_680, 33_554_432, 1_048_576];

/// The bytes of allocated blocks with one purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    pub category: String,
    pub about: String,
    /// At the moment of the explanation.
    pub bytes: Bytes,
    pub blocks: u64,
    /// At the peak of allocated memory.
    pub peak_bytes: Bytes,
    /// The sites of the blocks at the moment, largest first.
    pub sites: Vec<SiteBytes>,
}

/// Assigns blocks to a category by a frame of their stack. All given parts must match the same frame.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub category: String,
    /// A part of the path.
    #[serde(default)]
    pub file: Option<String>,
    #[serde(default)]
    pub function: Option<String>,
    #[serde(default)]
    pub regex: Option<Pattern>,
}

/// Matched against `file:line function`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(Regex);

impl TryFrom<String> for Pattern {
    type Error = regex::Error;

    fn try_from(text: String) -> Result<Self, regex::Error> {
        Regex::new(&text).map(Self)
    }
}

impl Rule {
    pub const fn matches_everything(&self) -> bool {
        self.file.is_none() && self.function.is_none() && self.regex.is_none()
    }

    fn matches(&self, frame: &Frame) -> bool {
        let of_file = self.file.as_ref().is_none_or(|file| frame.file.contains(file.as_str()));
        let of_function = self.function.as_ref().is_none_or(|function| *function == frame.name);
        let text = || format!("{}:{} {}", frame.file, frame.line, frame.name);
        of_file && of_function && self.regex.as_ref().is_none_or(|Pattern(regex)| regex.is_match(&text()))
    }
}

/// What the stack of an allocation shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin<'a> {
    /// The stack alone decides.
    Known(&'a str),
    Optimizer,
    /// `recomputes`: a checkpointed forward pass runs again.
    Backward {
        recomputes: bool,
    },
    Forward,
    Program,
    /// Reduces gradients of FSDP: a buffer, or the gradients themselves.
    Reduction,
}

impl Origin<'_> {
    fn pass(self) -> u8 {
        match self {
            Self::Backward { .. } => 1,
            Self::Optimizer => 2,
            Self::Known(OPTIMIZER_STATE) => 2,
            _ => 0,
        }
    }
}

/// Consecutive allocations of one kind.
struct Pass {
    is_backward: bool,
    is_of_optimizer: bool,
    /// The number of backward passes up to this one.
    backward: usize,
    last_allocation: usize,
}

pub(crate) struct Categories<'a> {
    view: &'a View<'a>,
    of_stack: Vec<Origin<'a>>,
    passes: Vec<Pass>,
    /// The pass of the last allocation up to each event.
    pass_of: Vec<u32>,
    /// The event that frees the block, by the event that allocates it.
    ends: HashMap<usize, usize>,
    parameter_sizes: HashSet<Bytes>,
    /// By the event that allocates: how many earlier allocations of the same pass have its stack.
    repetitions: HashMap<usize, u32>,
    /// The category of the last finished block, by stack and repetition.
    finished: HashMap<(StackId, u32), &'a str>,
    recorded: HashMap<u64, &'static str>,
}

/// The categories of a moment, and of the peak. Empty if the stacks have no Python frames.
pub(crate) fn list(view: &View<'_>, rules: &[Rule]) -> Vec<CategoryBytes> {
    if !view.snapshot.stacks.all_frames().any(is_python) {
        return Vec::new();
    }
    let categories = Categories::new(view, rules);
    let now = categories.of(view.state);
    let at_peak = view.history.moment(At::Peak).map_or_else(|_| now.clone(), |peak| categories.of(&view.history.state(peak.event)));
    let given = rules.iter().map(|rule| (rule.category.as_str(), rule.category.as_str()));
    let mut seen = HashSet::new();
    let all = given.chain(CATEGORIES).filter(|(name, _)| seen.insert(*name));
    let category = |(name, about): (&str, &str)| {
        let sum =
            |of: &BTreeMap<SiteId, (Bytes, u64)>| (of.values().map(|(bytes, _)| *bytes).sum(), of.values().map(|(_, blocks)| blocks).sum());
        let ((bytes, blocks), (peak_bytes, _)) =
            (now.get(name).map_or_else(Default::default, sum), at_peak.get(name).map_or_else(Default::default, sum));
        let site =
            |(&id, &(bytes, blocks)): (&SiteId, &(Bytes, u64))| SiteBytes { site: view.sites.get(id).name.clone(), id, bytes, blocks };
        let mut sites: Vec<SiteBytes> = now.get(name).into_iter().flatten().map(site).collect();
        sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
        CategoryBytes { category: name.to_owned(), about: about.to_owned(), bytes, blocks, peak_bytes, sites }
    };
    all.map(category).filter(|category| category.bytes.max(category.peak_bytes) > Bytes::ZERO).collect()
}

impl<'a> Categories<'a> {
    fn new(view: &'a View<'a>, rules: &'a [Rule]) -> Self {
        let stacks = &view.snapshot.stacks;
        let of_stack: Vec<Origin<'a>> = stacks.all().map(|stack| origin(&stacks.frames(stack).collect::<Vec<_>>(), rules)).collect();
        let (mut passes, mut pass_of): (Vec<Pass>, Vec<u32>) = (Vec::new(), Vec::new());
        let (mut ends, mut live, mut last) = (HashMap::new(), HashMap::new(), u8::MAX);
        let (mut parameter_sizes, mut repetitions, mut in_pass) = (HashSet::new(), HashMap::new(), HashMap::new());
        for (index, event) in view.history.events().iter().enumerate() {
            match event.action {
                Action::Alloc => {
                    let origin = of_stack[event.stack.0 as usize];
                    if passes.is_empty() || origin.pass() != last {
                        let is_backward = matches!(origin, Origin::Backward { .. });
                        let backward = passes.last().map_or(0, |pass| pass.backward) + usize::from(is_backward);
                        passes.push(Pass { is_backward, is_of_optimizer: origin.pass() == 2, backward, last_allocation: index });
                        in_pass.clear();
                    }
                    last = origin.pass();
                    passes.iter_mut().next_back().into_iter().for_each(|pass| pass.last_allocation = index);
                    if origin == Origin::Known(PARAMETERS) {
                        parameter_sizes.insert(event.size);
                    }
                    let repetition = in_pass.entry(event.stack).or_insert(0);
                    repetitions.insert(index, *repetition);
                    *repetition += 1;
                    live.insert(event.address, index);
                }
                Action::FreeRequested => {
                    live.remove(&event.address).map(|start| ends.insert(start, index));
                }
                _ => {}
            }
            pass_of.push((passes.len() as u32).saturating_sub(1));
        }
        let blocks = view.snapshot.segments_of(view.device).flat_map(|segment| &segment.blocks);
        let of_parameters = blocks.filter(|block| of_stack[block.stack.0 as usize] == Origin::Known(PARAMETERS));
        parameter_sizes.extend(of_parameters.map(|block| block.requested));
        let finished = HashMap::new();
        let recorded = recorded(view.snapshot);
        let mut all = Self { view, of_stack, passes, pass_of, ends, parameter_sizes, repetitions, finished, recorded };
        let mut started: Vec<usize> = all.ends.keys().copied().collect();
        started.sort_unstable();
        for start in started {
            let event = &view.history.events()[start];
            let category = all.of_block(event.stack, event.address, event.size, Some(start));
            all.finished.insert((event.stack, all.repetitions[&start]), category);
        }
        all
    }

    /// The bytes and blocks of a state by category and site.
    fn of(&self, state: &State) -> HashMap<&'a str, BTreeMap<SiteId, (Bytes, u64)>> {
        let mut sums: HashMap<&str, BTreeMap<SiteId, (Bytes, u64)>> = HashMap::new();
        let blocks = state.segments.iter().flat_map(|segment| &segment.blocks);
        for &Block { address, size, requested, stack, .. } in blocks.filter(|block| block.state == BlockState::Allocated) {
            let start = state.origin(address).allocated;
            let stack = start.map_or(stack, |start| self.events()[start as usize].stack);
            let category = self.of_block(stack, address, requested, start.map(|start| start as usize));
            let (bytes, blocks) = sums.entry(category).or_default().entry(self.view.sites.of_block(start, stack)).or_default();
            *bytes += size;
            *blocks += 1;
        }
        sums
    }

    fn events(&self) -> &'a [Event] {
        self.view.history.events()
    }

    /// `start`: the event that allocates the block, if it was recorded.
    fn of_block(&self, stack: StackId, address: u64, size: Bytes, start: Option<usize>) -> &'a str {
        let origin = self.of_stack[stack.0 as usize];
        let end = start.and_then(|start| self.ends.get(&start).copied());
        if let Some(recorded) = self.recorded.get(&address).filter(|_| end.is_none()) {
            return recorded;
        }
        let Some(start) = start else {
            return match origin {
                Origin::Known(known) => known,
                _ => OTHER,
            };
        };
        let pass = self.pass_of[start] as usize;
        let is_last = pass + 1 == self.passes.len();
        let ends_in_pass = end.is_some_and(|end| self.pass_of[end] as usize == pass);
        // Programs repeat their steps, so an unfinished block is like the block of the same stack and repetition in an earlier step.
        let like_before = || self.finished.get(&(stack, self.repetitions[&start])).copied();
        match origin {
            Origin::Known(known) => known,
            _ if end.is_none() && self.is_workspace(start, size) => WORKSPACES,
            // The optimizer's step comes between the reduction of gradients and their end.
            Origin::Reduction => match end {
                Some(end) if !self.passes[pass..=self.pass_of[end] as usize].iter().any(|pass| pass.is_of_optimizer) => COMMUNICATION,
                Some(_) => GRADIENTS,
                None => like_before().unwrap_or(GRADIENTS),
            },
            Origin::Optimizer if ends_in_pass => TEMPORARIES,
            Origin::Optimizer if end.is_none() && is_last => like_before().unwrap_or(OTHER),
            Origin::Optimizer => OPTIMIZER_STATE,
            Origin::Backward { recomputes: true } => ACTIVATIONS,
            Origin::Backward { .. } => {
                let outlives = end.is_none_or(|end| end > self.passes[pass].last_allocation);
                match () {
                    () if outlives && self.parameter_sizes.contains(&size) => GRADIENTS,
                    () if ends_in_pass => TEMPORARIES,
                    () if is_last && self.view.oom().is_some() && !self.parameter_sizes.is_empty() => TEMPORARIES,
                    () => OTHER,
                }
            }
            Origin::Forward | Origin::Program => match end {
                Some(_) if ends_in_pass => TEMPORARIES,
                Some(end) => {
                    let until = self.pass_of[end] as usize;
                    let outlives_forward = self.passes[until].backward > self.passes[pass].backward;
                    let is_saved = if origin == Origin::Forward { outlives_forward } else { self.passes[until].is_backward };
                    if is_saved { ACTIVATIONS } else { OTHER }
                }
                // An activation is freed at the latest in the backward pass.
                None if self.survives_backward(pass) => OTHER,
                None => like_before().unwrap_or(if origin == Origin::Forward { ACTIVATIONS } else { OTHER }),
            },
        }
    }

    /// Returns whether a complete backward pass follows this pass.
    fn survives_backward(&self, pass: usize) -> bool {
        self.passes.iter().nth_back(1).is_some_and(|complete| complete.backward > self.passes[pass].backward)
    }

    /// Returns whether an unfreed block is a workspace of cuBLAS: it has its size, comes directly after the result of the same operation, and if
    /// the size is common, survives a backward pass.
    fn is_workspace(&self, start: usize, size: Bytes) -> bool {
        let event = &self.events()[start];
        if size.0 == CUBLAS[2] && !self.survives_backward(self.pass_of[start] as usize) {
            return false;
        }
        let before = self.events()[..start].iter().rev().find(|before| before.action == Action::Alloc);
        let is_after_result = before.is_some_and(|before| before.stack == event.stack);
        CUBLAS.contains(&size.0) && is_after_result && !(self.parameter_sizes.contains(&size) && event.stack == StackId::EMPTY)
    }
}

fn is_python(frame: &Frame) -> bool {
    frame.file.ends_with(".py") || sites::is_of_program(frame)
}

/// The part of a path within a package: `torch/nn/modules/linear.py`.
fn in_package(file: &str) -> &str {
    ["/site-packages/", "/dist-packages/"].iter().find_map(|folder| Some(file.rsplit_once(folder)?.1)).unwrap_or(file)
}

/// `frames`: innermost first.
fn origin<'a>(frames: &[&Frame], rules: &'a [Rule]) -> Origin<'a> {
    if let Some(rule) = rules.iter().find(|rule| frames.iter().any(|frame| rule.matches(frame))) {
        return Origin::Known(&rule.category);
    }
    let is_of_workspace = |frame: &Frame| frame.name.contains("CUDABlasWorkspace") || frame.name.contains("CUDABlasLtWorkspace");
    if frames.iter().any(|frame| is_of_workspace(frame)) {
        return Origin::Known(WORKSPACES);
    }
    let python: Vec<&Frame> = frames.iter().copied().filter(|frame| is_python(frame)).collect();
    let Some(outermost) = python.last() else { return Origin::Backward { recomputes: false } };
    let is_backward = in_package(&outermost.file).starts_with("torch/");
    let decided = python.iter().find_map(|frame| of_frame(frame));
    match decided.unwrap_or(Origin::Program) {
        Origin::Forward | Origin::Program if is_backward => Origin::Backward { recomputes: decided == Some(Origin::Forward) },
        other => other,
    }
}

/// The origin of an allocation whose innermost known frame is this one.
fn of_frame(frame: &Frame) -> Option<Origin<'static>> {
    let (file, function) = (in_package(&frame.file), frame.name.as_str());
    let is_in = |folders: &[&str]| folders.iter().any(|folder| file.starts_with(folder));
    Some(match function {
        "_apply" if file == "torch/nn/modules/module.py" => Origin::Known(PARAMETERS),
        "_call_impl" if file == "torch/nn/modules/module.py" => Origin::Forward,
        "__init__" | "reset_parameters" | "flatten_parameters" if is_in(&["torch/nn/modules/"]) => Origin::Known(PARAMETERS),
        _ if is_in(&["torch/nn/parameter.py"]) => Origin::Known(PARAMETERS),
        "_init_group" if is_in(&["torch/optim/"]) => Origin::Known(OPTIMIZER_STATE),
        _ if is_in(&["torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py"]) => return None,
        _ if is_in(&["torch/optim/"]) => Origin::Optimizer,
        _ if is_in(&["torch/autograd/__init__.py", "torch/autograd/graph.py"]) => Origin::Backward { recomputes: false },
        "_init_sharded_param" if is_in(&["torch/distributed/fsdp/"]) => Origin::Known(PARAMETERS),
        "foreach_reduce" if is_in(&["torch/distributed/fsdp/"]) => Origin::Reduction,
        // Its caller decides.
        "allocate" if is_in(&["torch/distributed/fsdp/"]) => return None,
        _ if is_in(&["torch/distributed/", "torch/nn/parallel/distributed.py", "torch/nn/parallel/comm.py", "torch/cuda/nccl.py"]) => {
            Origin::Known(COMMUNICATION)
        }
        // These packages are often used from a folder outside of `site-packages`.
        _ if frame.file.ends_with("/transformers/cache_utils.py") => Origin::Known(KV_CACHE),
        _ if ["/vllm/", "/sglang/"].iter().any(|package| frame.file.contains(package)) && function.contains("kv_cache") => {
            Origin::Known(KV_CACHE)
        }
        _ => return None,
    })
}

/// The tensors of the program by address. Empty unless `harness.observe` wrote the snapshot.
pub(crate) fn recorded(snapshot: &Snapshot) -> HashMap<u64, &'static str> {
    let mut recorded = HashMap::new();
    let Some(Value::Dict(pairs)) = snapshot.extras.value(snapshot.extra, RECORDED) else { return recorded };
    for (key, addresses) in pairs {
        let category = [PARAMETERS, GRADIENTS, OPTIMIZER_STATE].into_iter().find(|name| key.as_text() == Some(name));
        if let (Some(category), Value::List(addresses)) = (category, addresses) {
            recorded.extend(addresses.iter().filter_map(Value::as_u64).map(|address| (address, category)));
        }
    }
    recorded
}

#[cfg(test)]
mod tests;
