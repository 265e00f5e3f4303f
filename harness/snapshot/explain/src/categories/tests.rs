use std::path::Path;

use harness_trace::snapshot::{Action, ExtraId};

use super::*;
use crate::causes::{Options, explain_by};

fn snapshot(name: &str) -> Snapshot {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.pickle.gz"));
    Snapshot::read(&path).expect("the file is a snapshot")
}

/// The third step of a training of a convolutional network with SGD and momentum, after the
/// optimizer's step. Contains the addresses of its tensors.
fn trained() -> Snapshot {
    snapshot("snapshots/trained")
}

fn categories(snapshot: &Snapshot, at: At, rules: &[CategoryRule]) -> Vec<(String, u64, u64)> {
    let explanation =
        explain_by(snapshot, 0, Options { memory: None, at }, rules).expect("the moment exists");
    let allocated = explanation
        .categories
        .iter()
        .map(|of| of.bytes)
        .sum::<Bytes>();
    assert_eq!(
        allocated, explanation.accounts.allocated,
        "every allocated byte has one category"
    );
    explanation
        .categories
        .into_iter()
        .map(|of| (of.category, of.bytes.0, of.blocks))
        .collect()
}

fn without_tensors() -> Snapshot {
    let mut snapshot = trained();
    assert_eq!(
        recorded(&snapshot).len(),
        60,
        "parameters, buffers, gradients and momentum"
    );
    snapshot.extra = ExtraId::NONE;
    snapshot
}

#[test]
fn categories_from_stacks_and_lifetimes_are_those_of_the_programs_tensors() {
    let derived = categories(&without_tensors(), At::End, &[]);
    assert_eq!(derived, categories(&trained(), At::End, &[]));
    let expected = [
        ("parameters", 461_824, 28),
        ("gradients", 455_680, 16),
        ("optimizer_state", 455_680, 16),
        // The result of the last forward pass.
        ("activations", 8 << 20, 1),
        ("temporaries", 0, 0),
        ("program", 393_728, 2),
    ];
    assert_eq!(
        derived,
        expected.map(|(category, bytes, blocks)| (category.to_owned(), bytes, blocks))
    );
}

#[test]
fn the_peak_lies_in_the_backward_pass_and_consists_mostly_of_activations() {
    let at_peak = categories(&without_tensors(), At::Peak, &[]);
    let found = |name: &str| {
        at_peak
            .iter()
            .find(|(category, ..)| category == name)
            .map(|&(_, bytes, blocks)| (bytes, blocks))
    };
    assert_eq!(
        (found("activations"), found("gradients")),
        (Some((67_112_960, 16)), None)
    );
}

#[test]
fn the_programs_own_tensors_come_before_the_rules() {
    let mut snapshot = trained();
    let gradients: HashSet<u64> = recorded(&snapshot)
        .into_iter()
        .filter(|(_, category)| *category == GRADIENTS)
        .map(|(address, _)| address)
        .collect();
    let addresses = gradients
        .iter()
        .map(|&address| Value::Int(i128::from(address)))
        .collect();
    let tensors = Value::Dict(vec![(
        Value::Text(OPTIMIZER_STATE.to_owned()),
        Value::List(addresses),
    )]);
    snapshot.extra = snapshot.extras.intern(vec![(RECORDED.to_owned(), tensors)]);
    assert!(
        !categories(&snapshot, At::End, &[])
            .iter()
            .any(|(category, ..)| category == GRADIENTS)
    );
}

#[test]
fn sizes_show_parameters_and_states_from_before_the_recording() {
    // The second and third step of a perceptron with AdamW, before the optimizer's step. Contains
    // frames of C++ and the addresses of its tensors.
    let mut snapshot = snapshot("categories/recorded-late");
    let known = categories(&snapshot, At::End, &[]);
    assert_eq!(
        recorded(&snapshot).len(),
        16,
        "parameters, gradients and two states each"
    );
    snapshot.extra = ExtraId::NONE;
    assert_eq!(categories(&snapshot, At::End, &[]), known);
    let about = explain_by(&snapshot, 0, Options::default(), &[])
        .expect("it has an end")
        .categories
        .into_iter()
        .map(|of| of.about);
    let expected = [
        "parameters and buffers, probably",
        "gradients, probably",
        "optimizer state, probably",
        "tensors of the program",
        "older, probably model state",
    ];
    let about: Vec<String> = about
        .filter(|about| !about.starts_with("temporaries"))
        .collect();
    assert_eq!(about, expected);
}

#[test]
fn blocks_of_the_step_before_the_recording_are_like_those_that_replace_them() {
    // The second forward pass of a perceptron, without a backward pass. Its result replaces that
    // of the first pass, which ended before the recording.
    let mut snapshot = snapshot("categories/forward-twice");
    let bytes = |snapshot: &Snapshot, name: &str| {
        let all = categories(snapshot, At::Peak, &[]);
        let found = all.into_iter().find(|(category, ..)| category == name);
        found.map_or(0, |(_, bytes, _)| bytes)
    };
    let of_two_passes = bytes(&snapshot, ACTIVATIONS);
    assert_eq!(bytes(&snapshot, BEFORE), 0);
    // Without the last block, the sizes differ.
    let is_last = |event: &&harness_trace::snapshot::Event| event.action == Action::Alloc;
    let events = &mut snapshot.traces[0];
    let last = events
        .iter()
        .rev()
        .find(is_last)
        .expect("it allocates")
        .address;
    events.retain(|event| event.address != last);
    let of_one_pass = bytes(&snapshot, ACTIVATIONS);
    assert!(of_one_pass > 0 && of_one_pass * 2 >= of_two_passes * 9 / 10);
    assert!(bytes(&snapshot, BEFORE) >= of_one_pass * 9 / 10);
}

#[test]
fn a_stream_has_one_workspace_and_other_tensors_of_its_size_are_none() {
    // Eight tensors of 32 MiB: four of one line, an input, and three results of a layer. The
    // layer's first product adds workspaces of 32 and 1 MiB.
    let found = categories(&snapshot("categories/workspace-sizes"), At::End, &[]);
    let of = |name: &str| {
        found
            .iter()
            .find(|(category, ..)| category == name)
            .map(|&(_, bytes, blocks)| (bytes >> 20, blocks))
    };
    assert_eq!(
        (of("workspaces"), of("activations"), of("program")),
        (Some((32, 1)), Some((97, 4)), Some((160, 5)))
    );
}

#[test]
fn a_rule_of_the_user_takes_the_blocks_whose_stacks_it_matches() {
    let rule = |file: Option<&str>, function: Option<&str>, regex: Option<&str>| CategoryRule {
        category: "ours".to_owned(),
        file: file.map(str::to_owned),
        function: function.map(str::to_owned),
        regex: regex.map(|regex| {
            regex
                .to_owned()
                .try_into()
                .expect("the expression is valid")
        }),
    };
    let ours = |rule| {
        categories(&without_tensors(), At::Peak, &[rule])
            .into_iter()
            .find(|(category, ..)| category == "ours")
    };
    let of_batch_norm = ours(rule(Some("modules/batchnorm.py"), Some("forward"), None));
    assert!(of_batch_norm.is_some());
    assert_eq!(
        of_batch_norm,
        ours(rule(None, None, Some(r"batchnorm\.py:\d+ forward$")))
    );
    assert_eq!(
        ours(rule(Some("batchnorm.py"), Some("backward"), None)),
        None
    );
}

#[test]
fn without_python_frames_no_purpose_is_known() {
    let mut snapshot = without_tensors();
    snapshot.stacks = harness_trace::snapshot::Stacks::default();
    snapshot
        .traces
        .iter_mut()
        .flatten()
        .for_each(|event| event.stack = StackId::EMPTY);
    snapshot
        .segments
        .iter_mut()
        .flat_map(|segment| &mut segment.blocks)
        .for_each(|block| block.stack = StackId::EMPTY);
    snapshot
        .segments
        .iter_mut()
        .for_each(|segment| segment.stack = StackId::EMPTY);
    assert_eq!(
        explain_by(&snapshot, 0, Options::default(), &[])
            .expect("it has an end")
            .categories,
        []
    );
}

#[test]
fn shards_of_fsdp_are_parameters_and_caches_are_found_in_any_folder() {
    let origin_of = |frames: &[(&str, &str)]| {
        let frame = |&(file, name): &(&str, &str)| Frame {
            file: file.to_owned(),
            line: 1,
            name: name.to_owned(),
            extra: ExtraId::NONE,
        };
        let frames: Vec<Frame> = frames.iter().map(frame).collect();
        format!(
            "{:?}",
            origin::origin(
                &frames.iter().collect::<Vec<_>>(),
                &origin::Program::default(),
                &[]
            )
        )
    };
    let fsdp = |function| {
        (
            "/venv/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp.py",
            function,
        )
    };
    let train = ("/home/me/train.py", "main");
    assert_eq!(
        origin_of(&[fsdp("_init_sharded_param"), train]),
        format!("{:?}", Origin::Known(PARAMETERS))
    );
    assert_eq!(
        origin_of(&[fsdp("allocate"), fsdp("foreach_reduce"), train]),
        "Reduction"
    );
    assert_eq!(
        origin_of(&[fsdp("allocate"), fsdp("foreach_all_gather"), train]),
        format!("{:?}", Origin::Known(COMMUNICATION))
    );
    let cache = (
        "/home/me/transformers/src/transformers/cache_utils.py",
        "update",
    );
    assert_eq!(
        origin_of(&[cache, train]),
        format!("{:?}", Origin::Known(KV_CACHE))
    );
    // Windows, and frames of C++.
    let apply = (
        r"C:\venv\lib\site-packages\torch\nn\modules\module.py",
        "_apply",
    );
    assert_eq!(
        origin_of(&[apply, (r"C:\me\train.py", "main")]),
        format!("{:?}", Origin::Known(PARAMETERS))
    );
    let engine = (
        "??",
        "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
    );
    let accumulates = (
        "??",
        "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)",
    );
    assert_eq!(
        origin_of(&[accumulates, engine]),
        format!("{:?}", Origin::Known(GRADIENTS))
    );
    assert_eq!(
        origin_of(&[("??", "at::_ops::mm::call()"), engine]),
        format!("{:?}", Origin::Backward { recomputes: false })
    );
    assert_eq!(
        origin_of(&[("??", "at::_ops::mm::call()")]),
        format!("{:?}", Origin::Program)
    );
    let workspace = ("??", "at::cuda::getCurrentCUDABlasHandle()");
    assert_eq!(
        origin_of(&[workspace, engine]),
        format!("{:?}", Origin::Known(WORKSPACES))
    );
    let step = ("/home/me/optimizer.py", "step");
    assert_eq!(
        origin_of(&[step, train]),
        format!(
            "{:?}",
            Origin::Optimizer {
                is_temporary: false
            }
        )
    );
}
