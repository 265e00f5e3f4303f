//! What the stack of an allocation shows about its purpose: [`Origin`].

use std::borrow::Cow;
use std::collections::HashSet;

use harness_trace::snapshot::{Frame, FrameId, Snapshot, StackId, Stacks};

use super::{
    COMMUNICATION, CategoryRule, GRADIENTS, KV_CACHE, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES,
    WORKSPACES,
};
use crate::sites;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin<'a> {
    /// The stack alone decides.
    Known(&'a str),
    Optimizer {
        /// PyTorch's function keeps nothing that it allocates.
        is_temporary: bool,
    },
    Backward {
        /// A checkpointed forward pass runs again.
        recomputes: bool,
    },
    Forward,
    Program,
    /// The innermost function of the program is a constructor.
    Constructor {
        /// It constructs a part of a larger object, and its file has a module.
        is_of_module: bool,
    },
    /// Reduces gradients of FSDP: a buffer, or the gradients themselves.
    Reduction,
}

impl Origin<'_> {
    /// The kind of pass that the allocation belongs to. `None` if any pass can contain it.
    pub(super) fn pass(self) -> Option<PassKind> {
        match self {
            Self::Optimizer { .. } | Self::Known(OPTIMIZER_STATE) => Some(PassKind::Optimizer),
            Self::Known(_) | Self::Reduction => None,
            Self::Backward { .. } => Some(PassKind::Backward),
            Self::Forward | Self::Program | Self::Constructor { .. } => Some(PassKind::Forward),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassKind {
    /// Includes the program's own code between the passes.
    Forward,
    Backward,
    Optimizer,
}

/// What all stacks of a recording show together.
#[derive(Default)]
pub(super) struct Program<'a> {
    /// The files of the program with a function that PyTorch calls as a module.
    modules: HashSet<&'a str>,
    /// The outermost functions of stacks with a module, or with the start of a backward pass.
    roots: HashSet<(&'a str, &'a str)>,
    /// Python starts the program. Otherwise a program in another language calls functions of
    /// Python.
    is_of_python: bool,
}

impl<'a> Program<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let mut program = Self::default();
        for stack in snapshot.stacks.all() {
            let frames: Vec<&Frame> = snapshot
                .stacks
                .frames(stack)
                .filter(|frame| is_python(frame))
                .collect();
            let calls = frames
                .windows(2)
                .filter(|pair| pair[1].name == "_call_impl" && sites::is_of_program(pair[0]));
            program
                .modules
                .extend(calls.map(|pair| pair[0].file.as_str()));
            let outermost = snapshot.stacks.frames(stack).next_back();
            program.is_of_python |= outermost.is_some_and(starts);
            if frames.iter().any(|frame| {
                frame.name == "_call_impl"
                    || in_package(&frame.file) == "torch/autograd/__init__.py"
            }) {
                program
                    .roots
                    .extend(outermost.map(|frame| (frame.file.as_str(), frame.name.as_str())));
            }
        }
        program
    }
}

/// Returns whether Python starts threads and programs with this function.
fn starts(frame: &Frame) -> bool {
    ["<module>", "_run_module_as_main", "_bootstrap"].contains(&frame.name.as_str())
}

pub(super) fn is_python(frame: &Frame) -> bool {
    frame.file.ends_with(".py") || sites::is_of_program(frame)
}

pub(super) fn is_cpp(frame: &Frame) -> bool {
    frame.name.contains("::")
}

/// The part of a path within a package: `torch/nn/modules/linear.py`.
fn in_package(file: &str) -> Cow<'_, str> {
    let file = if file.contains('\\') {
        Cow::Owned(file.replace('\\', "/"))
    } else {
        Cow::Borrowed(file)
    };
    match ["/site-packages/", "/dist-packages/"]
        .iter()
        .find_map(|folder| file.rfind(folder).map(|at| at + folder.len()))
    {
        None => file,
        Some(at) => match file {
            Cow::Borrowed(file) => Cow::Borrowed(&file[at..]),
            Cow::Owned(file) => Cow::Owned(file[at..].to_owned()),
        },
    }
}

/// Threads of the autograd engine have no frames of Python.
fn without_python(calls: impl Fn(&[&str]) -> bool, is_of_engine: bool) -> Origin<'static> {
    match () {
        () if calls(&["c10d::"]) => Origin::Known(COMMUNICATION),
        () if calls(&["torch::autograd::AccumulateGrad::"]) => Origin::Known(GRADIENTS),
        () if is_of_engine => Origin::Backward { recomputes: false },
        () if calls(&["::_foreach_", "::_fused_"]) => Origin::Optimizer {
            is_temporary: false,
        },
        () => Origin::Program,
    }
}

/// `frames`: innermost first.
pub(super) fn origin<'a>(
    frames: &[&Frame],
    program: &Program<'_>,
    rules: &'a [CategoryRule],
) -> Origin<'a> {
    if let Some(rule) = rules
        .iter()
        .find(|rule| frames.iter().any(|frame| rule.matches(frame)))
    {
        return Origin::Known(&rule.category);
    }
    let calls = |names: &[&str]| {
        frames
            .iter()
            .any(|frame| names.iter().any(|name| frame.name.contains(name)))
    };
    // The last one belongs to cuDNN.
    if calls(&[
        "getCurrentCUDABlasHandle",
        "CUDABlasWorkspace",
        "CUDABlasLtWorkspace",
        "::Workspace::Workspace(",
    ]) {
        return Origin::Known(WORKSPACES);
    }
    let is_of_engine = calls(&["torch::autograd::Engine::"]);
    let python: Vec<&Frame> = frames
        .iter()
        .copied()
        .filter(|frame| is_python(frame))
        .collect();
    let Some(outermost) = python.last() else {
        return without_python(
            calls,
            is_of_engine || !frames.iter().any(|frame| is_cpp(frame)),
        );
    };
    // The engine also calls hooks of the program, in threads of its own.
    let is_root = |frame: &&Frame| {
        starts(frame)
            || program
                .roots
                .contains(&(frame.file.as_str(), frame.name.as_str()))
    };
    let is_hook = program.is_of_python
        && !frames.last().is_some_and(is_root)
        && !frames.iter().any(|frame| is_cpp(frame));
    let is_backward = is_of_engine || is_hook || in_package(&outermost.file).starts_with("torch/");
    let decided = python.iter().find_map(|frame| of_frame(frame));
    match decided {
        None | Some(Origin::Forward | Origin::Program) if is_backward => Origin::Backward {
            recomputes: decided == Some(Origin::Forward),
        },
        Some(decided) => decided,
        // Compiled code of a function outside of modules.
        None if python
            .iter()
            .any(|frame| in_package(&frame.file).starts_with("torch/_functorch/")) =>
        {
            Origin::Forward
        }
        None => constructor(&python, program).unwrap_or(Origin::Program),
    }
}

fn constructor<'a>(python: &[&Frame], program: &Program<'_>) -> Option<Origin<'a>> {
    // Python before 3.12 has own frames for list comprehensions.
    let mut functions = python
        .iter()
        .filter(|frame| sites::is_of_program(frame) && !frame.name.starts_with('<'));
    let innermost = functions.next().filter(|frame| frame.name == "__init__")?;
    let is_part = functions.any(|frame| frame.name == "__init__");
    Some(Origin::Constructor {
        is_of_module: is_part && program.modules.contains(innermost.file.as_str()),
    })
}

/// The frames that call the innermost constructor of the program: equal for all allocations of one
/// constructor.
pub(super) fn constructor_call(stacks: &Stacks, stack: StackId) -> Option<&[FrameId]> {
    let ids = stacks.ids(stack);
    let innermost = ids.iter().position(|&id| {
        stacks.frame(id).name == "__init__" && sites::is_of_program(stacks.frame(id))
    })?;
    Some(&ids[innermost + 1..])
}

/// The origin of an allocation whose innermost known frame is this one.
fn of_frame(frame: &Frame) -> Option<Origin<'static>> {
    let (file, function) = (in_package(&frame.file), frame.name.as_str());
    let is_in = |folders: &[&str]| folders.iter().any(|folder| file.starts_with(folder));
    let name = file
        .rsplit('/')
        .next()
        .and_then(|name| name.strip_suffix(".py"))
        .unwrap_or_default();
    Some(match function {
        "_apply" if file == "torch/nn/modules/module.py" => Origin::Known(PARAMETERS),
        "_call_impl" if file == "torch/nn/modules/module.py" => Origin::Forward,
        "__init__" | "reset_parameters" | "flatten_parameters" if is_in(&["torch/nn/modules/"]) => {
            Origin::Known(PARAMETERS)
        }
        _ if is_in(&["torch/nn/parameter.py"]) => Origin::Known(PARAMETERS),
        "_init_group" if is_in(&["torch/optim/"]) => Origin::Known(OPTIMIZER_STATE),
        _ if is_in(&["torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py"]) => return None,
        // SGD allocates its state in such a function.
        _ if is_in(&["torch/optim/"]) => {
            let is_kernel = ["_single_tensor_", "_multi_tensor_", "_fused_"]
                .iter()
                .any(|kind| function.starts_with(kind));
            Origin::Optimizer {
                is_temporary: is_kernel && file != "torch/optim/sgd.py",
            }
        }
        // The gradient of the loss.
        "_make_grads" if file == "torch/autograd/__init__.py" => Origin::Known(TEMPORARIES),
        _ if is_in(&["torch/autograd/__init__.py", "torch/autograd/graph.py"]) => {
            Origin::Backward { recomputes: false }
        }
        "_init_sharded_param" if is_in(&["torch/distributed/fsdp/"]) => Origin::Known(PARAMETERS),
        "foreach_reduce" if is_in(&["torch/distributed/fsdp/"]) => Origin::Reduction,
        // Its caller decides.
        "allocate" if is_in(&["torch/distributed/fsdp/"]) => return None,
        _ if is_in(&[
            "torch/distributed/",
            "torch/nn/parallel/distributed.py",
            "torch/nn/parallel/comm.py",
            "torch/cuda/nccl.py",
        ]) =>
        {
            Origin::Known(COMMUNICATION)
        }
        _ if is_in(&["torch/"]) => return None,
        // Packages are often used from a folder outside of `site-packages`, and programs have
        // caches of their own.
        _ if function.contains("kv_cache")
            || name.starts_with("cache_utils")
            || ["kv_cache", "kvcache"].contains(&name) =>
        {
            Origin::Known(KV_CACHE)
        }
        _ if function == "from_pretrained"
            || ["init_weight", "load_weight", "create_weight"]
                .iter()
                .any(|start| function.starts_with(start)) =>
        {
            Origin::Known(PARAMETERS)
        }
        _ if ["optim", "optimizer", "optimizers"].contains(&name) => Origin::Optimizer {
            is_temporary: false,
        },
        // A module without its call, or a function of autograd.
        "forward" if sites::is_of_program(frame) => Origin::Forward,
        _ => return None,
    })
}

/// Whether the line that allocates can be a matrix product: `Some(true)` for PyTorch's functions
/// that are one, `None` for a line of the program.
pub(super) fn is_product<'f>(frames: impl Iterator<Item = &'f Frame>) -> Option<bool> {
    const FUNCTIONS: [&str; 9] = [
        "linear",
        "bilinear",
        "multi_head_attention_forward",
        "_in_projection_packed",
        "_in_projection",
        "scaled_dot_product_attention",
        "einsum",
        "tensordot",
        "chain_matmul",
    ];
    let mut python = frames
        .filter(|frame| is_python(frame))
        .map(|frame| (in_package(&frame.file), frame.name.as_str()));
    // `with torch.device(…)` adds a frame to each call.
    let (file, function) = python.find(|(_, function)| *function != "__torch_function__")?;
    match &*file {
        "torch/nn/functional.py" | "torch/functional.py" => Some(FUNCTIONS.contains(&function)),
        "torch/nn/modules/linear.py"
        | "torch/nn/modules/activation.py"
        | "torch/nn/modules/transformer.py" => Some(function == "forward"),
        file if file.starts_with("torch/") => Some(false),
        _ => None,
    }
}
