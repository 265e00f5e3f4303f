//! PyTorch's own allocator as a configuration: its answers, and the script itself with a fake
//! torch.

use std::process::{Command, Stdio};

use harness_allocator::units::Bytes;
use harness_bench::record::{Entry, EntryResult, Quantity};

use super::world::{SMALL, World};

/// A program in place of Python with torch. It answers each question with the given samples.
const PYTHON: &str = "#!/bin/sh
echo '{\"arm\": \"torch\", \"version\": \"2.11.0\", \"note\": \"from Python\"}'
while read -r question; do
    case $question in
        *'\"do\":\"latency\"'*) echo '{\"samples_ps\": [5000, 6000]}' ;;
        *) echo '{\"skipped\": \"not known here\"}' ;;
    esac
done
";

#[test]
fn pytorchs_own_allocator_takes_its_turn_among_the_arms() {
    let text = "about: x
needs: { memory: 64MiB }
arms: [caching]
rounds: { least: 2, most: 2 }
time:
  - latency: { sizes: [2MiB] }
  - empty_cache: { segments: [1] }
  - threads: { counts: [1] }
";
    let world = World::with_gpu(Bytes::gib(2))
        .with("suite.yaml", text)
        .with_program("python", PYTHON);
    let ran = world.bench(&[
        "suite.yaml",
        "--device",
        "cuda:0",
        "--report",
        "run",
        "--torch",
        "./python",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let run = world.run("run");
    let torch: Vec<_> = run.suites[0]
        .entries
        .iter()
        .filter(|entry| entry.arm == "torch")
        .collect();
    // Measures without a question have no entry, and unsupported measures have a reason.
    let told = torch.iter().map(|entry| match &entry.outcome {
        EntryResult::Measured(measured) => format!(
            "{}: {} ps, {:?}",
            entry.case(),
            measured.summary.median,
            entry.quantity
        ),
        EntryResult::Skipped { reason } | EntryResult::OutOfMemory { reason } => {
            format!("{}: {reason}", entry.case())
        }
        EntryResult::Failed { reason } => panic!("{}: {reason}", entry.case()),
    });
    let expected = ["hit, 2 MiB", "miss, 2 MiB", "after_empty_cache, 2 MiB"]
        .map(|case| format!("{case}: 5500 ps, HostTime"));
    assert_eq!(
        told.collect::<Vec<_>>(),
        [
            &expected[..],
            &["empty_cache, 1 segment: not known here".to_owned()]
        ]
        .concat()
    );
}

#[test]
fn entries_of_a_missing_pytorch_contain_the_reason() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--report",
        "run",
        "--torch",
        "python3",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let why = "it needs a GPU, but this run uses the simulated device";
    assert!(ran.err.contains(why), "{}", ran.err);
    let run = world.run("run");
    let torch = run.suites[0]
        .entries
        .iter()
        .filter(|entry| entry.arm == "torch");
    assert_eq!(
        torch
            .filter(|entry| entry.outcome
                == EntryResult::Skipped {
                    reason: why.to_owned()
                })
            .count(),
        6
    );
    let auto = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--report",
        "auto",
        "--torch",
        "auto",
    ]);
    assert!(
        auto.err.is_empty()
            && world.run("auto").suites[0]
                .entries
                .iter()
                .all(|entry| entry.arm != "torch"),
        "{}",
        auto.told()
    );
}

/// A Python with the torch of `fake_torch`; `None` without Python.
fn python_with_a_fake() -> Option<String> {
    let here = Command::new("python3")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    here.ok().filter(|status| status.success())?;
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/bench/fake_torch");
    Some(format!(
        "#!/bin/sh\nPYTHONDONTWRITEBYTECODE=1 PYTHONPATH='{fake}' exec python3 \"$@\"\n"
    ))
}

/// All measures of the script, with the interface of torch. The results exclude the 5 µs that the
/// fake's Python takes for a call, and include the 4 µs of its allocator.
#[test]
fn the_script_runs_all_measures_and_subtracts_pythons_overhead() {
    let Some(python) = python_with_a_fake() else {
        eprintln!("python3 is not here: nothing was tested");
        return;
    };
    let suite = "about: x
needs: { memory: 256MiB }
arms: [caching]
rounds: { least: 3, most: 3 }
budget: 60s
time:
  - latency: { sizes: [2MiB] }
  - empty_cache: { segments: [3] }
  - recovery: { sizes: [32MiB] }
  - record_stream: { streams: [0, 2, 40] }
  - pipeline: { sizes: [2MiB, 128MiB] }
  - trace: { file: trace.txt }
  - trace: { file: refused.txt }
  - trace: { file: pool.txt }
  - threads: { counts: [1] }
  - start_up
";
    let trace = "a 0 2097152 0\na 1 3000000 1\nr 0 1\ns 1\nf 0\ne\na 3 6291456 0\nd\np\n";
    let world = World::with_gpu(Bytes::gib(2))
        .with_program("python", &python)
        .with("suite.yaml", suite)
        .with("trace.txt", trace)
        .with("refused.txt", "a 0 2097152 0\na 2 9999999999 0\nf 2\nf 0\n")
        .with("pool.txt", "g+ 1\na 0 512 0\ng- 1\n");
    let ran = world.bench(&[
        "suite.yaml",
        "--device",
        "cuda:0",
        "--report",
        "run",
        "--torch",
        "./python",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let run = world.run("run");
    let told: Vec<String> = run.suites[0]
        .entries
        .iter()
        .filter(|entry| entry.arm == "torch")
        .map(told)
        .collect();
    insta::assert_snapshot!(told.join("\n"));
    let refused = run.suites[0]
        .entries
        .iter()
        .filter(|entry| entry.arm == "caching" && entry.group == "refused")
        .map(self::told);
    let expected = "refused: out of memory: 1 of the trace's 2 requests do not fit in 256 MiB, so \
         its times are not comparable";
    assert_eq!(refused.collect::<Vec<_>>(), [expected]);
}

#[test]
fn each_arm_of_pytorchs_settings_meets_pytorch_with_the_same_ones() {
    let Some(python) = python_with_a_fake() else {
        eprintln!("python3 is not here: nothing was tested");
        return;
    };
    let suite = r#"about: x
needs: { memory: 64MiB }
arms: [bfc, expandable, caching: { name: again, conf: "expandable_segments:True" },
  caching: { name: rounded, conf: "roundup_power2_divisions:8" }]
rounds: { least: 2, most: 2 }
time: [latency: { sizes: [2MiB], cases: [miss] }]
"#;
    let world = World::with_gpu(Bytes::gib(2))
        .with_program("python", &python)
        .with("suite.yaml", suite);
    let arguments = [
        "suite.yaml",
        "--device",
        "cuda:0",
        "--report",
        "run",
        "--torch",
        "./python",
    ];
    let mut command = world.command(&arguments);
    // The variable of the current user must not affect the test.
    let output = command
        .env("PYTORCH_ALLOC_CONF", "max_split_size_mb:21")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let run = world.run("run");
    let torches = run.suites[0]
        .entries
        .iter()
        .filter(|entry| entry.arm.starts_with("torch"));
    let told: Vec<String> = torches
        .map(|entry| format!("{}: {}", entry.arm, told(entry)))
        .collect();
    // The fake takes 4 µs and one nanosecond for each character of the settings.
    let expected = [
        "torch_expandable: miss, 2 MiB: 4024000 ps",
        "torch_rounded: miss, 2 MiB: 4026000 ps",
    ];
    assert_eq!(
        told,
        expected.map(|entry| format!("{entry}, HostTime, 1 at a time"))
    );
}

/// Requests as a person types them. Each line of the answer belongs to one request.
#[test]
fn the_script_says_why_it_cannot_do_something_and_goes_on() {
    let Some(python) = python_with_a_fake() else {
        eprintln!("python3 is not here: nothing was tested");
        return;
    };
    let requests = r#"{"do": "latency", "case": "miss", "size": 4294967296, "memory": 1073741824}
{"do": "latency", "case": "warm", "size": 512}
{"do": "latency"}
{"do": "dance"}
nonsense
{"do": "trace", "trace": "mine"}
{"do": "load", "trace": "mine", "events": ["a 0 512 0", "a 1 2147483648 0"], "refused": 2}
{"do": "trace", "trace": "mine"}
{"do": "load", "trace": "mine", "events": ["m 0.5"]}
{"do": "load", "trace": "mine", "events": ["x 1048576"]}
{"do": "load", "trace": "mine", "events": ["q"]}
"#;
    let world = World::without_gpu()
        .with_program("python", &python)
        .with("requests", requests);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ci/torch_reference.py");
    let mut command = Command::new(world.path("python"));
    let ran = command
        .arg(script)
        .stdin(std::fs::File::open(world.path("requests")).unwrap())
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    insta::assert_snapshot!(String::from_utf8(ran.stdout).unwrap());
}

/// The number of the request that takes 100 ms longer.
fn pipeline_with_a_hiccup_in(request: u32, python: &str) -> String {
    let question = r#"{"do": "pipeline", "size": 134217728, "turns": 20}"#;
    let world = World::without_gpu()
        .with_program("python", python)
        .with("requests", question);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ci/torch_reference.py");
    let mut command = Command::new(world.path("python"));
    command
        .arg(script)
        .stdin(std::fs::File::open(world.path("requests")).unwrap())
        .env("FAKE_TORCH_HICCUP", request.to_string());
    let ran = command.output().unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    String::from_utf8(ran.stdout)
        .unwrap()
        .lines()
        .nth(1)
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn a_slow_moment_of_the_interpreter_does_not_lose_a_size_of_the_pipeline() {
    let Some(python) = python_with_a_fake() else {
        eprintln!("python3 is not here: nothing was tested");
        return;
    };
    let undisturbed = pipeline_with_a_hiccup_in(0, &python);
    assert_eq!(undisturbed, r#"{"samples_ps": [131072000]}"#);
    // The first 20 rounds warm up.
    for request in [5, 25, 40] {
        assert_eq!(
            pipeline_with_a_hiccup_in(request, &python),
            undisturbed,
            "in request {request}"
        );
    }
}

/// With the fake's clock, all times are the same on every machine.
fn told(entry: &Entry) -> String {
    let outcome = match &entry.outcome {
        EntryResult::Measured(measured) => {
            let unit = if entry.quantity == Quantity::Memory {
                "bytes"
            } else {
                "ps"
            };
            format!(
                "{} {unit}, {:?}, {} at a time",
                measured.summary.median, entry.quantity, measured.batch
            )
        }
        EntryResult::Skipped { reason } => format!("skipped: {reason}"),
        EntryResult::OutOfMemory { reason } => format!("out of memory: {reason}"),
        EntryResult::Failed { reason } => format!("FAILED: {reason}"),
    };
    format!("{}: {outcome}", entry.case())
}
