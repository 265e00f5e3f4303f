//! Error messages for wrong scenarios: each has file, line, column and the accepted forms.

use std::{fmt::Write, path::Path};

use harness_scenario::{FileError, MAX_FILE, MAX_NODES, Scenario, Step};
use miette::{GraphicalReportHandler, GraphicalTheme};

/// The text that the command line prints, without colours.
fn shown(error: &FileError) -> String {
    let mut text = String::new();
    let handler = GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor())
        .with_width(140)
        .with_links(false);
    handler.render_report(&mut text, error).unwrap();
    text.lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}

fn error(source: &str) -> FileError {
    Scenario::parse(source, Path::new("bad.yaml"))
        .map(|_| panic!("this was accepted:\n{source}"))
        .unwrap_err()
}

/// A scenario with these steps.
fn with_steps(steps: &str) -> String {
    let steps: String = steps.lines().map(|line| format!("  {line}\n")).collect();
    format!("about: x\nneeds: {{ memory: 1GiB }}\nstreams: [side]\nsteps:\n{steps}")
}

/// The messages for these texts.
fn all(cases: &[(&str, String)]) -> String {
    let mut text = String::new();
    for (name, source) in cases {
        let _ = write!(text, "──── {name}\n{}\n\n", shown(&error(source)));
    }
    text
}

fn steps(cases: &[(&'static str, &str)]) -> String {
    all(&cases
        .iter()
        .map(|(name, steps)| (*name, with_steps(steps)))
        .collect::<Vec<_>>())
}

const HEAD: &str = "about: x\nneeds: { memory: 1GiB }\n";

#[test]
fn errors_in_processes() {
    let declared = |processes: &str, steps: &str| {
        let steps: String = steps.lines().map(|line| format!("  {line}\n")).collect();
        format!(
            "about: x\nneeds: {{ memory: 1GiB }}\nallocators: [caching, direct]\nprocesses: \
             {processes}\nsteps:\n{steps}"
        )
    };
    let of = |steps: &str| declared("[worker, other]", steps);
    let inside = |step: &str| of(&format!("- process: worker\n  steps:\n    - {step}"));
    let text = all(&[
        (
            "the name of an allocator",
            declared("[direct]", "- reset_peak_stats"),
        ),
        ("a name twice", declared("[a, a]", "- reset_peak_stats")),
        (
            "no name",
            declared("[{ memory: 1GiB }]", "- reset_peak_stats"),
        ),
        (
            "an unknown field",
            declared("[{ name: a, limit: 1GiB }]", "- reset_peak_stats"),
        ),
        (
            "too little memory",
            declared("[{ name: a, memory: 1MiB }]", "- reset_peak_stats"),
        ),
        (
            "a list for a process",
            declared("[[a]]", "- reset_peak_stats"),
        ),
        (
            "a process that is not declared",
            of("- process: server\n  steps: [reset_peak_stats]"),
        ),
        ("no steps", of("- process: worker")),
        (
            "a process in a process",
            inside("process: other\n      steps: [reset_peak_stats]"),
        ),
        ("a kill in a process", inside("kill: worker")),
        (
            "a program of PyTorch in a process",
            inside("exec: { command: [train] }"),
        ),
        (
            "external memory in a process",
            inside("external_memory: 1MiB"),
        ),
        ("eventually in a process", inside("eventually: active == 0")),
        (
            "meanwhile in a process",
            inside("repeat: 2\n      steps: [reset_peak_stats]\n      meanwhile: [empty_cache]"),
        ),
        (
            "a loop in a process that reports",
            inside("repeat: 2\n      id: again\n      steps: [reset_peak_stats]"),
        ),
        (
            "another allocator in a process",
            inside("expect: direct.reserved >= caching.reserved"),
        ),
        (
            "another process in a process",
            inside("expect: other.reserved == 0"),
        ),
        (
            "a buffer of the main process",
            of("- alloc: { buffer: a, size: 1MiB }\n- process: worker\n  steps: [free: a]"),
        ),
        (
            "a buffer of a process",
            of("- process: worker\n  steps: [ alloc: { buffer: a, size: 1MiB } ]\n- free: a"),
        ),
        (
            "a buffer of a killed process",
            of(concat!(
                "- process: worker\n  steps: [ alloc: { buffer: a, size: 1MiB } ]\n",
                "- kill: worker\n- process: worker\n  steps: [free: a]"
            )),
        ),
        (
            "a figure before the start",
            of("- expect: worker.reserved == 0"),
        ),
        (
            "a figure of the device",
            of("- process: worker\n  steps: [reset_peak_stats]\n- expect: worker.device.used == 0"),
        ),
        (
            "an unknown metric",
            of("- process: worker\n  steps: [reset_peak_stats]\n- expect: worker.memory == 0"),
        ),
        ("a kill before the start", of("- kill: worker")),
        (
            "a kill twice",
            of("- process: worker\n  steps: [reset_peak_stats]\n- kill: worker\n- kill: worker"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_ranks() {
    let with = |ranks: &str, expect: &str| {
        format!(
            "- train: {{ id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 4, \
             iterations: 1, ranks: {ranks} }}\n- expect: {expect}"
        )
    };
    let of = |ranks: &str| with_steps(&with(ranks, "t.iterations == 1"));
    let figure = |expect: &str| with_steps(&with("2", expect));
    let waits = "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 4, \
         iterations: 1, ranks: 2, on_oom: [empty_cache, { wait: { first: 1ms } }] }";
    let text = all(&[
        ("one rank", of("1")),
        ("no rank", of("{ count: 0 }")),
        ("too many", of("17")),
        ("a list", of("[a, b]")),
        ("no count", of("{ sync_batch: true }")),
        ("an unknown field", of("{ count: 2, limits: 3 }")),
        ("too much memory", of("{ count: 4, memory: 300MiB }")),
        (
            "a limit for a rank that does not exist",
            of("{ count: 2, memory_override: { 2: 1MiB } }"),
        ),
        (
            "a limit without a rank",
            of("{ count: 2, memory_override: 1MiB }"),
        ),
        (
            "a limit above the memory of a rank",
            of("{ count: 2, memory: 64MiB, memory_override: { 1: 65MiB } }"),
        ),
        (
            "a limit that is not a size",
            of("{ count: 2, memory_override: { 1: [1MiB] } }"),
        ),
        ("another way to reduce", of("{ count: 2, reduce: fsdp }")),
        (
            "buckets without DDP",
            of("{ count: 2, reduce: hooks, bucket: 1MiB }"),
        ),
        ("a bucket of 0 bytes", of("{ count: 2, bucket: 0B }")),
        ("the policy wait", with_steps(waits)),
        ("an unknown rank", figure("t.rank2.final_batch == 4")),
        (
            "an unknown metric of a rank",
            figure("t.rank1.final_batches == 4"),
        ),
        (
            "a rank of a training without",
            with_steps(
                "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 4, \
                 iterations: 1 }\n- expect: t.rank0.ooms == 0",
            ),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_exec() {
    let text = steps(&[
        ("no command", "- exec: { gpu: a100-40 }"),
        (
            "a command in one text",
            "- exec: { command: python train.py }",
        ),
        ("an unknown GPU", "- exec: { command: [train], gpu: a100 }"),
        (
            "no failure",
            "- exec: { command: [train], fail: [\"cudaFree:1\"] }",
        ),
        (
            "too many ranks",
            "- exec: { command: [python, train.py], ranks: 121 }",
        ),
        ("no end", "- exec: { command: [train], expect: fits }"),
        (
            "a wrong exit code",
            "- exec: { command: [train], expect: 256 }",
        ),
        (
            "a variable without a name",
            "- exec: { command: [train], env: { \"A=B\": 1 } }",
        ),
        (
            "another step under meanwhile",
            "- exec: { command: [train] }\n  meanwhile: [ empty_cache ]",
        ),
        (
            "a figure that it does not report",
            "- exec: { id: a, command: [train] }\n- expect: a.iterations == 1",
        ),
        (
            "a figure before it is known",
            "- exec: { id: a, command: [train] }\n  meanwhile:\n    - exec: { command: [train], \
             id: b }\n- expect: c.num_ooms == 0",
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_leak_checks_and_health_checks() {
    let loop_of = |times: u64, check: &str| {
        with_steps(&format!(
            "- repeat: {times}\n  leak_check: {check}\n  steps: [reset_peak_stats]"
        ))
    };
    let train = "parameters: 1MiB, activations_per_sample: 1MiB, batch: 1";
    let text = all(&[
        ("too few iterations", loop_of(3, "{}")),
        (
            "too few after a long warm-up",
            loop_of(20, "{ warmup: 20 }"),
        ),
        (
            "too few for a training",
            with_steps(&format!(
                "- train: {{ id: a, {train}, iterations: 2, leak_check: {{}} }}"
            )),
        ),
        ("no warm-up", loop_of(20, "{ warmup: 0 }")),
        ("an unknown field", loop_of(20, "{ at_most: 1MiB }")),
        ("decimal units", loop_of(20, "{ total: 1MB }")),
        (
            "at a step without iterations",
            with_steps("- reset_peak_stats:\n  leak_check: {}"),
        ),
        (
            "a loop in a process",
            format!(
                "{HEAD}processes: [a]\nsteps:\n  - process: a\n    steps:\n      - repeat: \
                 9\n        leak_check: {{}}\n        steps: [reset_peak_stats]\n"
            ),
        ),
        (
            "a comparison with an unknown measure",
            with_steps("- measure: warm\n- compare: { since: worm }"),
        ),
        (
            "a comparison with a later measure",
            with_steps("- compare: { since: warm }\n- measure: warm"),
        ),
        (
            "a health check after 0 steps",
            format!("{HEAD}health_check: {{ every: 0 }}\nsteps: [empty_cache]\n"),
        ),
        (
            "a health check without a map",
            format!("{HEAD}health_check: 100\nsteps: [empty_cache]\n"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_policies_of_infer() {
    let infer = |policy: &str| {
        let of = "layers: 1, kv_heads: 1, head_dim: 64, requests: 2, prompt: { min: 1, max: 2 }, \
             output: { min: 1, max: 2 }";
        format!("- infer: {{ id: a, {of}, on_oom: {policy} }}")
    };
    let text = steps(&[
        ("half a batch", &infer("halve_batch")),
        ("a wait with fields", &infer("{ wait: { first: 1ms } }")),
        ("a policy after a wait", &infer("[ wait, evict ]")),
        (
            "evicting an unknown buffer",
            &infer("{ evict: { buffers: [cache] } }"),
        ),
        (
            "evicting requests of an alloc",
            "- alloc: { buffer: a, size: 1MiB, on_oom: evict }",
        ),
        (
            "the old field",
            &infer("evict").replace("on_oom", "on_exhaustion"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_faults() {
    let fault = |fault: &str| {
        format!("{HEAD}streams: [side]\nfaults:\n  - {fault}\nsteps: [empty_cache]\n")
    };
    let cases = [
        ("unknown call", "{ call: cudaMaloc }"),
        ("unknown field", "{ call: cudaMalloc, after: 3 }"),
        ("no call", "{ skip: 3 }"),
        ("no effect at all", "{ call: cudaMalloc, count: 0 }"),
        ("unknown error", "{ call: cudaMalloc, error: oom }"),
        (
            "out of memory of a call that frees",
            "{ call: cudaFree, error: out_of_memory }",
        ),
        ("sticky out of memory", "{ call: cudaMalloc, sticky: true }"),
        (
            "sticky delay",
            "{ call: cudaMalloc, latency: 5ms, sticky: true }",
        ),
        (
            "two effects",
            "{ call: cudaMalloc, error: ecc, latency: 5ms }",
        ),
        ("a delay without a unit", "{ call: cudaMalloc, latency: 5 }"),
        (
            "a wrong amount of a call without one",
            "{ call: cudaMalloc, off_by: -1MiB }",
        ),
        (
            "a wrong amount in decimal units",
            "{ call: cudaMemGetInfo, off_by: -1MB }",
        ),
        ("a wrong amount of 0", "{ call: cudaMemGetInfo, off_by: 0 }"),
        (
            "an event of a call without one",
            "{ call: cudaFree, never_completes: true }",
        ),
        (
            "a chance above one",
            "{ call: cudaMalloc, probability: 25 }",
        ),
        (
            "a size of a call without one",
            "{ call: cudaFree, min_size: 1MiB }",
        ),
        ("an unknown stream", "{ call: cudaMalloc, stream: sid }"),
        (
            "a stream of a call without one",
            "{ call: cudaFree, stream: side }",
        ),
        ("an unknown pool", "{ call: cudaMalloc, pool: medium }"),
        (
            "a run that ends with something else",
            "{ call: cudaFree, expect: oom }",
        ),
        (
            "a run that ends out of memory",
            "{ call: cudaMalloc, expect: error }",
        ),
        (
            "a run that ends slowly",
            "{ call: cudaFree, latency: 1ms, expect: error }",
        ),
    ];
    let mut cases: Vec<(&str, String)> = cases
        .into_iter()
        .map(|(name, text)| (name, fault(text)))
        .collect();
    let of_process = |name: &str| {
        format!(
            "{HEAD}processes: [worker]\nfaults:\n  - {{ process: {name}, call: cudaMalloc \
             }}\nsteps:\n  - process: worker\n    steps: [empty_cache]\n"
        )
    };
    cases.push(("an unknown process", of_process("wrker")));
    cases.push((
        "no faults",
        format!("{HEAD}faults: []\nsteps: [empty_cache]\n"),
    ));
    insta::assert_snapshot!(all(&cases));
}

#[test]
fn errors_for_files_that_are_not_scenarios() {
    let text = all(&[
        ("empty file", String::new()),
        ("only comments", "# nothing\n\n".to_owned()),
        ("not YAML", format!("{HEAD}steps: [a, b\n")),
        ("tabs", format!("{HEAD}steps:\n\t- empty_cache\n")),
        (
            "several documents",
            format!("{HEAD}steps: [empty_cache]\n---\nabout: y\n"),
        ),
        ("a list", "- about: x\n".to_owned()),
        ("a text", "hello\n".to_owned()),
        (
            "missing field",
            "about: x\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "unknown field",
            format!("{HEAD}alocator: caching\nsteps: [empty_cache]\n"),
        ),
        (
            "the same key twice",
            format!("{HEAD}about: y\nsteps: [empty_cache]\n"),
        ),
        ("no steps", format!("{HEAD}steps: []\n")),
        ("steps is nothing", format!("{HEAD}steps:\n")),
        (
            "steps is a map",
            format!("{HEAD}steps: {{ alloc: {{ buffer: a, size: 1 }} }}\n"),
        ),
        (
            "about says nothing",
            "about: ' '\nneeds: { memory: 1GiB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "about is nothing",
            "about:\nneeds: { memory: 1GiB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        ("unknown anchor", format!("{HEAD}steps: [*x]\n")),
        ("include", format!("{HEAD}steps: !include steps.yaml\n")),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_values() {
    let text = all(&[
        (
            "decimal unit",
            "about: x\nneeds: { memory: 600MB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "negative",
            "about: x\nneeds: { memory: -1 }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "too large",
            "about: x\nneeds: { memory: 20EiB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "too small",
            "about: x\nneeds: { memory: 1MiB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "absurd memory",
            "about: x\nneeds: { memory: 2PiB }\nsteps: [empty_cache]\n".to_owned(),
        ),
        (
            "unknown allocator",
            format!("{HEAD}allocators: [cachign]\nsteps: [empty_cache]\n"),
        ),
        (
            "allocator twice",
            format!("{HEAD}allocators: [caching, caching]\nsteps: [empty_cache]\n"),
        ),
        (
            "no allocator",
            format!("{HEAD}allocators: []\nsteps: [empty_cache]\n"),
        ),
        (
            "unknown invariant",
            format!("{HEAD}expect_violation: retry_make_progress\nsteps: [empty_cache]\n"),
        ),
        (
            "default stream",
            format!("{HEAD}streams: [default]\nsteps: [empty_cache]\n"),
        ),
        (
            "stream twice",
            format!("{HEAD}streams: [a, a]\nsteps: [empty_cache]\n"),
        ),
        (
            "bad stream name",
            format!("{HEAD}streams: [a-b]\nsteps: [empty_cache]\n"),
        ),
        ("seed", format!("{HEAD}seed: -3\nsteps: [empty_cache]\n")),
        (
            "invariant about a step",
            format!("{HEAD}invariants: [ x.time < 1s ]\nsteps: [{{ empty_cache: {{ id: x }} }}]\n"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_allocator_settings() {
    let with = |arms: &str| format!("{HEAD}{arms}\nsteps: [empty_cache]\n");
    let conf = |conf: &str| with(&format!("allocator: {{ caching: {{ conf: {conf} }} }}"));
    let fields = |fields: &str| {
        with(&format!(
            "allocators: [ direct, {{ caching: {{ {fields} }} }} ]"
        ))
    };
    let text = all(&[
        (
            "unknown key",
            conf("\"max_split_size_mb:512,garbage_colection_threshold:0.8\""),
        ),
        ("out of range", conf("max_split_size_mb:19")),
        (
            "out of range after spaces",
            conf("' max_split_size_mb : 64 , garbage_collection_threshold : 1.5'"),
        ),
        ("boolean in lower case", conf("expandable_segments:true")),
        ("empty item", conf("'max_split_size_mb:64,,backend:native'")),
        (
            "list with a gap",
            conf("\"roundup_power2_divisions:[64:8,,128:4]\""),
        ),
        (
            "list that does not end",
            conf("\"roundup_power2_divisions:[64:8\""),
        ),
        (
            "over several lines",
            with(
                "allocators:\n  - caching:\n      conf: >-\n        max_split_size_mb:64,\n        \
                 max_split:64",
            ),
        ),
        ("nothing", conf("")),
        ("a list", conf("[max_split_size_mb:64]")),
        (
            "field out of range",
            fields("max_split_size_mb: 64, large_segment_size_mb: 100"),
        ),
        ("unknown field", fields("max_split_size: 64")),
        ("field without a blank", fields("max_split_size_mb:64")),
        ("field without a value", fields("max_split_size_mb: ")),
        (
            "field with two values",
            fields("max_split_size_mb: \"64,backend:native\""),
        ),
        ("field with a list", fields("max_split_size_mb: [64]")),
        (
            "field with a wrong interval",
            fields("roundup_power2_divisions: [64:8, 63:4]"),
        ),
        (
            "field with wrong divisions",
            fields("roundup_power2_divisions: [64: 8, \">\": 3]"),
        ),
        (
            "field with two intervals in one",
            fields("roundup_power2_divisions: ['64:8,128:4']"),
        ),
        (
            "string and fields",
            fields("conf: \"max_split_size_mb:64\", expandable_segments: true"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_allocators() {
    let with = |arms: &str| format!("{HEAD}{arms}\nsteps: [empty_cache]\n");
    let text = all(&[
        (
            "settings of an allocator without settings",
            with("allocators: [{ direct: { conf: \"max_split_size_mb:64\" } }]"),
        ),
        (
            "settings of the shorthand",
            with("allocator: { expandable: { max_split_size_mb: 64 } }"),
        ),
        (
            "unknown allocator with settings",
            with("allocator: { cachign: { max_split_size_mb: 64 } }"),
        ),
        (
            "settings without a map",
            with("allocator: { caching: \"max_split_size_mb:64\" }"),
        ),
        (
            "two allocators in one map",
            with("allocators: [{ caching: {}, direct: {} }]"),
        ),
        ("an empty map", with("allocators: [{}]")),
        ("a list instead of one", with("allocator: [caching]")),
        ("one instead of a list", with("allocators: caching")),
        ("both", with("allocator: caching\nallocators: [direct]")),
        (
            "the default twice",
            with("allocators: [caching, { caching: { conf: \"large_segment_size_mb:20\" } }]"),
        ),
        (
            "the shorthand twice",
            with("allocators: [expandable, { caching: { expandable_segments: true } }]"),
        ),
        (
            "one name twice",
            with(
                "allocators: [{ caching: { name: a, max_split_size_mb: 64 } }, { direct: { name: a \
                 } }]",
            ),
        ),
        (
            "name of an allocator",
            with("allocator: { caching: { name: direct, max_split_size_mb: 64 } }"),
        ),
        ("no name", with("allocator: { caching: { name: tuned-1 } }")),
        (
            "nothing as a name",
            with("allocator: { caching: { name: } }"),
        ),
        (
            "expectation of an unknown allocator",
            with("allocator: { caching: { name: tuned } }")
                .replace("empty_cache", "expect: { tund: num_ooms == 0 }"),
        ),
        (
            "wrong end of an allocator",
            with("").replace(
                "empty_cache",
                "alloc: { buffer: a, size: 1, expect: { caching: fit } }",
            ),
        ),
        (
            "end without an allocator",
            with("").replace("empty_cache", "alloc: { buffer: a, size: 1, expect: {} }"),
        ),
        (
            "use of a buffer that may be freed",
            with("")
                .replace(
                    "empty_cache",
                    "alloc: { buffer: a, size: 1, expect: { caching: oom } }, fill: { buffer: a }",
                )
                .replace("steps: [alloc", "steps: [{ alloc")
                .replace("}, fill", "} }, { fill")
                .replace("a }]", "a } }]"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_steps() {
    let text = steps(&[
        ("unknown step", "- aloc: { buffer: a, size: 1MiB }"),
        ("unknown bare step", "- empty_cash"),
        ("bare step that needs fields", "- alloc"),
        ("unknown field", "- alloc: { bufer: a, size: 1MiB }"),
        ("missing field", "- alloc: { buffer: a }"),
        ("no field at all", "- alloc: { }"),
        (
            "no field in an inner map",
            "- storm: { id: s, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: {} }",
        ),
        ("a scalar where fields belong", "- alloc: a"),
        ("a number as step", "- 5"),
        (
            "two steps in one item",
            "- alloc: { buffer: a, size: 1MiB }\n  free: a",
        ),
        (
            "fields next to the step",
            "- alloc:\n  buffer: a\n  size: 1MiB",
        ),
        ("wrong type", "- alloc: { buffer: [a], size: 1MiB }"),
        ("decimal unit", "- alloc: { buffer: a, size: 600MB }"),
        ("negative size", "- alloc: { buffer: a, size: -1 }"),
        ("size too large", "- alloc: { buffer: a, size: 20EiB }"),
        (
            "wrong expectation of alloc",
            "- alloc: { buffer: a, size: 1MiB, expect: fit }",
        ),
        (
            "unknown policy",
            "- alloc: { buffer: a, size: 1MiB, on_oom: { retry: {} } }",
        ),
        (
            "two policies",
            "- alloc: { buffer: a, size: 1MiB, on_oom: { empty_cache: {}, synchronize: {} } }",
        ),
        (
            "policy of another step",
            "- alloc: { buffer: a, size: 1MiB, on_oom: { halve_batch: { floor: 1 } } }",
        ),
        (
            "free while training",
            "- alloc: { buffer: a, size: 1 }\n- train: { id: t, parameters: 1MiB, \
             activations_per_sample: 1MiB, batch: 8, iterations: 1, on_oom: { free: { buffers: [a] \
             } } }",
        ),
        (
            "floor above batch",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, on_oom: { halve_batch: { floor: 16 } } }",
        ),
        (
            "bare name of no policy",
            "- alloc: { buffer: a, size: 1MiB, on_oom: retry }",
        ),
        (
            "bare name of a policy with fields",
            "- alloc: { buffer: a, size: 1MiB, on_oom: evict }",
        ),
        (
            "no policies",
            "- alloc: { buffer: a, size: 1MiB, on_oom: [] }",
        ),
        (
            "policy of another step in a list",
            "- alloc: { buffer: a, size: 1MiB, on_oom: [ empty_cache, shrink_batch ] }",
        ),
        (
            "policy after give_up",
            "- alloc: { buffer: a, size: 1MiB, on_oom: [ give_up, empty_cache ] }",
        ),
        (
            "field of another policy",
            "- alloc: { buffer: a, size: 1MiB, on_oom: { wait: { floor: 1 } } }",
        ),
        (
            "parts of one sample",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 1, \
             iterations: 1, on_oom: split_and_accumulate }",
        ),
        (
            "one layer to checkpoint",
            "- train: { id: t, parameters: 1MiB, layers: 1, activations_per_sample: 1MiB, batch: \
             8, iterations: 1, on_oom: checkpoint_more }",
        ),
        (
            "half of half precision",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, precision: mixed, on_oom: half_precision }",
        ),
        (
            "spilling a request",
            "- alloc: { buffer: a, size: 1MiB, on_oom: spill_to_host }",
        ),
        (
            "spilling state that does not exist",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, optimizer: sgd, on_oom: { spill_to_host: { what: optimizer_state } } }",
        ),
        (
            "spilling to nowhere",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, on_oom: { spill_to_host: { memory: disk } } }",
        ),
        (
            "folder of pinned memory",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, on_oom: { spill_to_host: { folder: /tmp } } }",
        ),
        (
            "folder that is not there",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, \
             iterations: 1, on_oom: { spill_to_host: { memory: mapped_file, folder: \
             /no/such/folder } } }",
        ),
        (
            "no retries",
            "- alloc: { buffer: a, size: 1MiB, on_oom: { empty_cache: { retries: 0 } } }",
        ),
        (
            "batch of 0",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1MiB, batch: 0, \
             iterations: 1 }",
        ),
        (
            "batch beyond 64 bits",
            "- train: { id: t, parameters: 1MiB, activations_per_sample: 1125899906842624B, batch: \
             16384, iterations: 1 }",
        ),
        (
            "parameters beyond 64 bits",
            "- train: { id: t, parameters: 9223372036854775808B, activations_per_sample: 1MiB, \
             batch: 8, iterations: 1 }",
        ),
        ("duration without unit", "- busy: { duration: 5 }"),
        ("duration of 0", "- busy: { duration: 0ms }"),
        ("fraction above one", "- set_memory_fraction: 1.5"),
        ("fraction in words", "- set_memory_fraction: half"),
        ("synchronize what", "- synchronize: host"),
        (
            "repeat 0 times",
            "- { repeat: 0, steps: [reset_peak_stats] }",
        ),
        ("repeat without steps", "- { repeat: 2, steps: [] }"),
        (
            "repeat too often",
            "- { repeat: 1000000, steps: [{ repeat: 1000000, steps: [reset_peak_stats] }] }",
        ),
        (
            "time limit of a loop",
            "- repeat: 2\n  steps: [reset_peak_stats]\n  timeout: 5s",
        ),
        (
            "time limit without unit",
            "- reset_peak_stats: {}\n  timeout: 5",
        ),
        ("time limit without a step", "- timeout: 5s"),
        (
            "storms that do too much together",
            "- repeat: 1000000\n  steps:\n    - storm: { id: s, operations: 10000000, sizes: \
             [1MiB], live: 2MiB, lifetime: { min: 1, max: 2 } }\n    - free: s",
        ),
        (
            "training of too many layers and iterations",
            "- train: { id: t, parameters: 1MiB, layers: 10000, activations_per_sample: 1KiB, \
             batch: 1, iterations: 1001 }",
        ),
        (
            "storm of 0 operations",
            "- storm: { id: s, operations: 0, sizes: [1MiB], live: 2MiB, lifetime: { min: 1, max: \
             2 } }",
        ),
        (
            "storm without sizes",
            "- storm: { id: s, operations: 5, sizes: [], live: 2MiB, lifetime: { min: 1, max: 2 } \
             }",
        ),
        (
            "storm sizes the wrong way",
            "- storm: { id: s, operations: 5, sizes: { min: 2MiB, max: 1MiB }, live: 2MiB, \
             lifetime: { min: 1, max: 2 } }",
        ),
        (
            "storm of a range and a trace",
            "- storm: { id: s, operations: 5, sizes: { trace: t.txt, min: 1MiB, max: 2MiB }, live: \
             2MiB, lifetime: { min: 1, max: 2 } }",
        ),
        (
            "storm of a trace that is not there",
            "- storm: { id: s, operations: 5, sizes: { trace: no_such_trace.txt }, live: 2MiB, \
             lifetime: { min: 1, max: 2 } }",
        ),
        (
            "unknown storm order",
            "- storm: { id: s, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { min: 1, max: \
             2, order: stack } }",
        ),
        (
            "infer lengths the wrong way",
            "- infer: { id: s, layers: 1, kv_heads: 1, head_dim: 1, requests: 1, prompt: { min: 9, \
             max: 8 }, output: { min: 1, max: 8 } }",
        ),
        (
            "infer of 0 requests",
            "- infer: { id: s, layers: 1, kv_heads: 1, head_dim: 1, requests: 1, prompt: { min: 1, \
             max: 8 }, output: { min: 0, max: 8 } }",
        ),
        (
            "storm in one thread",
            "- storm: { id: s, threads: 1, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { \
             min: 1, max: 2 } }",
        ),
        (
            "storm in threads until it is fragmented",
            "- storm: { id: s, threads: 4, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { \
             min: 1, max: 2 }, until: fragmented }",
        ),
        (
            "storm with threads and meanwhile",
            "- storm: { id: s, threads: 4, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { \
             min: 1, max: 2 } }\n  meanwhile: [ reset_peak_stats ]",
        ),
        (
            "blocks of a storm in threads",
            "- storm: { id: s, threads: 4, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { \
             min: 1, max: 2 } }\n- free: s",
        ),
        (
            "time of a storm in threads",
            "- storm: { id: s, threads: 4, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { \
             min: 1, max: 2 } }\n- expect: s.time < 1s",
        ),
        (
            "operations of too many threads",
            "- storm: { id: s, threads: 64, operations: 10000000, sizes: [1MiB], live: 2MiB, \
             lifetime: { min: 1, max: 2 } }",
        ),
        (
            "storm without room for a block",
            "- storm: { id: s, operations: 5, sizes: [4MiB], live: 2MiB, lifetime: { min: 1, max: \
             2 } }",
        ),
        (
            "storm lifetime with min above max",
            "- storm: { id: s, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { min: 3, max: \
             2 } }",
        ),
        (
            "storm size range with a wrong field",
            "- storm: { id: s, operations: 5, sizes: { min: 1MiB, maximum: 2MiB }, live: 2MiB, \
             lifetime: { min: 1, max: 2 } }",
        ),
        ("free nothing", "- free: []"),
        (
            "free with a wrong field",
            "- free: { pining: s, for: 1MiB }",
        ),
        ("expect nothing", "- expect: []"),
        (
            "expect of an allocator not listed",
            "- expect: { direct: num_ooms == 0 }",
        ),
        (
            "expect of an allocator that does not exist",
            "- expect: { chaching: num_ooms == 0 }",
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_the_order_of_steps() {
    let text = steps(&[
        (
            "free twice",
            "- alloc: { buffer: a, size: 1MiB }\n- free: a\n- free: a",
        ),
        (
            "free twice in a list",
            "- alloc: { buffer: a, size: 1MiB }\n- free: [a, a]",
        ),
        (
            "free an unknown buffer",
            "- alloc: { buffer: weights, size: 1MiB }\n- free: weight",
        ),
        (
            "alloc a live buffer",
            "- alloc: { buffer: a, size: 1MiB }\n- alloc: { buffer: a, size: 1MiB }",
        ),
        (
            "free a refused buffer",
            "- alloc: { buffer: a, size: 2GiB, expect: oom }\n- free: a",
        ),
        (
            "use after free",
            "- alloc: { buffer: a, size: 1MiB }\n- free: a\n- record_stream: { buffer: a, stream: \
             side }",
        ),
        (
            "alloc a buffer that a policy may have freed",
            "- alloc: { buffer: a, size: 1MiB }\n- alloc: { buffer: b, size: 1MiB, on_oom: { free: \
             { buffers: [a] } } }\n- alloc: { buffer: a, size: 1MiB }",
        ),
        (
            "fill a buffer that a policy may have freed",
            "- alloc: { buffer: a, size: 1MiB }\n- alloc: { buffer: b, size: 1MiB, on_oom: { free: \
             { buffers: [a] } } }\n- fill: { buffer: a }",
        ),
        (
            "verify before fill",
            "- alloc: { buffer: a, size: 1MiB }\n- verify: { buffer: a }",
        ),
        ("unknown stream", "- busy: { stream: sid, duration: 1ms }"),
        (
            "wait for an unknown event",
            "- record: { event: done }\n- wait: { event: don }",
        ),
        (
            "synchronize with an unknown event",
            "- synchronize: { event: done }",
        ),
        (
            "policy that frees twice",
            "- alloc: { buffer: a, size: 1MiB }\n- alloc: { buffer: b, size: 1MiB, on_oom: { free: \
             { buffers: [a, a] } } }",
        ),
        (
            "second iteration allocates again",
            "- { repeat: 2, steps: [{ alloc: { buffer: a, size: 1MiB } }] }",
        ),
        (
            "second iteration frees again",
            "- alloc: { buffer: a, size: 1MiB }\n- repeat: 2\n  steps:\n    - free: a",
        ),
        (
            "second iteration storms over live blocks",
            "- { repeat: 2, steps: [{ storm: { id: s, operations: 5, sizes: [1MiB], live: \
             2MiB, lifetime: { min: 1, max: 2 } } }] }",
        ),
        (
            "id twice",
            "- empty_cache: { id: x }\n- empty_cache: { id: x }",
        ),
        ("id and measure", "- measure: x\n- empty_cache: { id: x }"),
        ("reserved name", "- measure: device"),
        (
            "pins of a step without blocks",
            "- empty_cache: { id: x }\n- pins: { storm: x }",
        ),
        (
            "pins of a freed storm",
            "- storm: { id: s, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { min: 1, max: \
             2 } }\n- free: s\n- pins: { storm: s }",
        ),
        (
            "buffer named as a storm",
            "- storm: { id: s, operations: 5, sizes: [1MiB], live: 2MiB, lifetime: { min: 1, max: \
             2 } }\n- alloc: { buffer: s, size: 1MiB }",
        ),
        (
            "metric of a later step",
            "- expect: x.freed_bytes == 0\n- empty_cache: { id: x }",
        ),
        (
            "metric of the step itself",
            "- alloc: { buffer: a, size: x.freed_bytes, id: x }",
        ),
        (
            "metric that the step does not report",
            "- empty_cache: { id: x }\n- expect: x.freed_byte == 0",
        ),
        (
            "metric that a measure does not have",
            "- measure: m\n- expect: m.reserved_bytes.all.curent == 0",
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_expressions() {
    let text = steps(&[
        ("unknown metric", "- expect: reserved_byte.all.current == 0"),
        (
            "unknown metric on the right",
            "- expect: [ num_ooms == 0, num_ooms == num_oom ]",
        ),
        ("no comparison", "- expect: num_ooms"),
        ("one equals sign", "- expect: num_ooms = 0"),
        ("two comparisons", "- expect: 0 < num_ooms < 5"),
        ("nothing on the right", "- expect: num_ooms =="),
        ("stray sign", "- expect: num_ooms == * 3"),
        ("decimal unit", "- expect: reserved_bytes.all.peak <= 600MB"),
        ("number with two points", "- expect: num_ooms == 1.5.2"),
        (
            "bytes and count",
            "- expect: reserved_bytes.all.peak == num_ooms",
        ),
        (
            "time and bytes",
            "- expect: time.now - start.time.now < 5MiB",
        ),
        (
            "units within a sum",
            "- expect: reserved_bytes.all.peak + 5ms > 0",
        ),
        ("no metric", "- expect: 1MiB == 1MiB"),
        ("same on both sides", "- expect: num_ooms == num_ooms"),
        ("empty", "- expect: ''"),
        ("quoted", "- expect: \"num_ooms == num_oom\""),
        (
            "folded over lines",
            "- expect: >-\n    num_ooms ==\n    num_oom",
        ),
        (
            "size from a count",
            "- alloc: { buffer: a, size: num_ooms }",
        ),
        (
            "size from nothing",
            "- alloc: { buffer: a, size: strom.failed_request }",
        ),
        ("negative sum", "- alloc: { buffer: a, size: 1MiB - 2MiB }"),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_formulas() {
    let text = steps(&[
        ("plain number and bytes", "- expect: reserved == 400"),
        (
            "plain number and time",
            "- expect: time.now - start.time.now < 5",
        ),
        ("bytes and share", "- expect: reserved - allocated < 20%"),
        ("division by zero", "- expect: reserved / 0 == 1MiB"),
        (
            "parenthesis that does not close",
            "- expect: (reserved - allocated / reserved < 20%",
        ),
        (
            "parenthesis that does not open",
            "- expect: reserved) == 1MiB",
        ),
        ("minimum of one", "- expect: min(reserved) == 1MiB"),
        (
            "minimum of different units",
            "- expect: min(reserved, 5) == 1MiB",
        ),
        ("unknown function", "- expect: mean(reserved) == 1MiB"),
        (
            "growth of an unknown metric",
            "- expect: growth(reservd) == 0",
        ),
        (
            "growth as a size",
            "- alloc: { buffer: a, size: growth(reserved) }",
        ),
        ("tolerance of an order", "- expect: reserved <= 1GiB +- 5%"),
        (
            "tolerance in another unit",
            "- expect: reserved == 1GiB +- 5ms",
        ),
        ("tolerance without a value", "- expect: reserved == 1GiB +-"),
        (
            "size of plain numbers",
            "- alloc: { buffer: a, size: 4 * 1024 }",
        ),
        (
            "size from a quotient of sizes",
            "- alloc: { buffer: a, size: 4MiB / 2MiB }",
        ),
        (
            "unknown parameter",
            "- { repeat: batch, steps: [reset_peak_stats] }",
        ),
        (
            "count from a metric",
            "- { repeat: num_ooms, steps: [reset_peak_stats] }",
        ),
        (
            "count that is not whole",
            "- { repeat: 7 / 2, steps: [reset_peak_stats] }",
        ),
        (
            "allocators and the current run",
            "- expect: caching.reserved <= reserved",
        ),
        (
            "eventually with allocators",
            "- eventually: caching.reserved <= caching.allocated",
        ),
        (
            "metric of an unknown allocator",
            "- expect: direct.reserved <= 1MiB",
        ),
        (
            "cause without oom",
            "- alloc: { buffer: a, size: 2GiB, expect: fragmented }",
        ),
        (
            "unknown cause",
            "- alloc: { buffer: a, size: 2GiB, expect: { oom: fragmentd } }",
        ),
        (
            "no cause",
            "- alloc: { buffer: a, size: 2GiB, expect: { oom: [] } }",
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_loops_and_blocks() {
    let text = steps(&[
        ("no steps", "- for: { i: 1..8 }"),
        ("empty steps", "- repeat: 3\n  steps: []"),
        ("no number", "- repeat:\n  steps: [reset_peak_stats]"),
        (
            "steps inside the number",
            "- repeat: { times: 2, steps: [reset_peak_stats] }",
        ),
        (
            "unknown until",
            "- repeat: until full\n  steps: [reset_peak_stats]",
        ),
        (
            "unknown until next to repeat",
            "- repeat: 3\n  until: full\n  steps: [reset_peak_stats]",
        ),
        (
            "two variables",
            "- for: { i: 1..8, j: 1..8 }\n  steps: [reset_peak_stats]",
        ),
        ("no variable", "- for: {}\n  steps: [reset_peak_stats]"),
        ("no range", "- for: { i: 8 }\n  steps: [reset_peak_stats]"),
        (
            "empty range",
            "- for: { i: 8..1 }\n  steps: [reset_peak_stats]",
        ),
        (
            "range by 0",
            "- for: { i: 1..8 by 0 }\n  steps: [reset_peak_stats]",
        ),
        (
            "range too long",
            "- for: { i: 1..10000000 }\n  steps: [reset_peak_stats]",
        ),
        (
            "range of sizes without a step",
            "- for: { size: 1MiB..8MiB }\n  steps: [reset_peak_stats]",
        ),
        (
            "range of different units",
            "- for: { i: 1..8MiB }\n  steps: [reset_peak_stats]",
        ),
        (
            "list of different units",
            "- for: { i: [1, 8MiB] }\n  steps: [reset_peak_stats]",
        ),
        (
            "empty list",
            "- for: { i: [] }\n  steps: [reset_peak_stats]",
        ),
        (
            "variable named as a metric",
            "- for: { reserved: 1..8 }\n  steps: [reset_peak_stats]",
        ),
        (
            "variable named as a step",
            "- empty_cache: { id: i }\n- for: { i: 1..8 }\n  steps: [reset_peak_stats]",
        ),
        (
            "variable named twice",
            "- for: { i: 1..8 }\n  steps:\n    - for: { i: 1..8 }\n      steps: [reset_peak_stats]",
        ),
        (
            "variable outside",
            "- for: { i: 1..8 }\n  steps: [reset_peak_stats]\n- alloc: { buffer: a, size: 1MiB * i \
             }",
        ),
        (
            "number that does not end",
            "- alloc: { buffer: 'kv[1', size: 1MiB }",
        ),
        ("empty number", "- alloc: { buffer: 'kv[]', size: 1MiB }"),
        (
            "number in bytes",
            "- alloc: { buffer: 'kv[1MiB]', size: 1MiB }",
        ),
        (
            "number of an unknown variable",
            "- alloc: { buffer: 'kv[j]', size: 1MiB }",
        ),
        (
            "numbered and not",
            "- alloc: { buffer: 'kv[1]', size: 1MiB }\n- alloc: { buffer: kv, size: 1MiB }",
        ),
        (
            "not numbered and numbered",
            "- alloc: { buffer: kv, size: 1MiB }\n- alloc: { buffer: 'kv[1]', size: 1MiB }",
        ),
        (
            "fill of all numbered ones",
            "- alloc: { buffer: 'kv[1]', size: 1MiB }\n- fill: kv",
        ),
        (
            "live from the previous iteration",
            "- repeat: 2\n  steps: [ alloc: { buffer: a, size: 1MiB, expect: any } ]",
        ),
        ("until next to another step", "- empty_cache:\n  until: oom"),
        (
            "steps next to another step",
            "- alloc: { buffer: a, size: 1MiB }\n  steps: [reset_peak_stats]",
        ),
        (
            "meanwhile of one operation",
            "- alloc: { buffer: a, size: 1MiB }\n  meanwhile: [reset_peak_stats]",
        ),
        (
            "meanwhile with the same buffer",
            "- repeat: 2\n  steps: [ alloc: { buffer: a, size: 1MiB }, free: a ]\n  meanwhile: [ \
             alloc: { buffer: a, size: 1MiB } ]",
        ),
        (
            "figure of a running step",
            "- storm: { id: churn, operations: 9, sizes: 1MiB, live: 4MiB, lifetime: { min: 1, \
             max: 3 } }\n  meanwhile: [ expect: churn.ooms == 0 ]",
        ),
        (
            "unknown program",
            "- program: server\n  steps: [reset_peak_stats]",
        ),
        ("unknown pool", "- release_pool: graph"),
        ("nested too deep", &deep_loops()),
    ]);
    insta::assert_snapshot!(text);
}

/// Nine nested loops.
fn deep_loops() -> String {
    let mut text = String::new();
    for depth in 0..9 {
        let indent = " ".repeat(4 * depth);
        let _ = write!(text, "{indent}- repeat: 1\n{indent}  steps:\n");
    }
    text + &" ".repeat(36) + "- reset_peak_stats"
}

#[test]
fn errors_in_keys_of_the_file() {
    let with = |head: &str, steps: &str| format!("about: x\n{head}\nsteps: [{steps}]\n");
    let needs = "needs: { memory: 1GiB }";
    let text = all(&[
        (
            "empty matrix",
            with(&format!("{needs}\nmatrix: {{}}"), "reset_peak_stats"),
        ),
        (
            "parameter without values",
            with(
                &format!("{needs}\nmatrix: {{ batch: [] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "invalid value",
            with(
                &format!("{needs}\nmatrix: {{ batch: [8, large] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "parameter named as a metric",
            with(
                &format!("{needs}\nmatrix: {{ device: [8] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "parameter named as an allocator",
            with(
                &format!("{needs}\nmatrix: {{ caching: [8] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "too many points",
            with(
                &format!(
                    "{needs}\nmatrix: {{ a: [{0}], b: [{0}] }}",
                    vec!["1"; 17].join(", ")
                ),
                "reset_peak_stats",
            ),
        ),
        (
            "several points instead of one",
            with(
                &format!("{needs}\nmatrix: {{ batch: [8, 16] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "memory that is a number",
            with(
                "needs: { memory: 2 * batch }\nmatrix: { batch: [8] }",
                "reset_peak_stats",
            ),
        ),
        (
            "unknown kind of device",
            with("needs: { memory: 1GiB, device: cpu }", "reset_peak_stats"),
        ),
        (
            "no device",
            with("needs: { memory: 1GiB, devices: 0 }", "reset_peak_stats"),
        ),
        (
            "unknown feature",
            with(
                "needs: { memory: 1GiB, features: [vmm] }",
                "reset_peak_stats",
            ),
        ),
        (
            "invalid tag",
            with(&format!("{needs}\ntags: [a b]"), "reset_peak_stats"),
        ),
        (
            "skip without a reason",
            with(&format!("{needs}\nskip: ''"), "reset_peak_stats"),
        ),
        (
            "skip of an unknown allocator",
            with(
                &format!("{needs}\nskip: {{ direct: slow }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "failure without a reason",
            with(
                &format!("{needs}\nexpected_to_fail: {{ gpu: [] }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "empty claim",
            with(
                &format!("{needs}\nclaim: {{ says: '', verdict: holds }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "unknown verdict",
            with(
                &format!("{needs}\nclaim: {{ says: It does., verdict: true }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "claim that does not hold and no reason",
            with(
                &format!("{needs}\nclaim: {{ says: It does., verdict: does_not_hold }}"),
                "reset_peak_stats",
            ),
        ),
        (
            "figure without a formula",
            with(
                &format!(
                    "{needs}\nclaim: {{ says: It does., verdict: holds, figures: {{ peak: {{}} }} \
                     }}"
                ),
                "reset_peak_stats",
            ),
        ),
        (
            "figure that is a time",
            with(
                &format!(
                    "{needs}\nclaim: {{ says: It does., verdict: holds, figures: {{ t: {{ harness: \
                     time.now }} }} }}"
                ),
                "reset_peak_stats",
            ),
        ),
        (
            "figure that never changes",
            with(
                &format!(
                    "{needs}\nclaim: {{ says: It does., verdict: holds, figures: {{ t: {{ harness: \
                     1MiB }} }} }}"
                ),
                "reset_peak_stats",
            ),
        ),
        (
            "program named as an allocator",
            with(&format!("{needs}\nprograms: [direct]"), "reset_peak_stats"),
        ),
        (
            "program named twice",
            with(&format!("{needs}\nprograms: [a, a]"), "reset_peak_stats"),
        ),
        (
            "counter that a program does not have",
            with(
                &format!("{needs}\nprograms: [server]"),
                "expect: server.device.used == 0",
            ),
        ),
        (
            "missing allocator",
            with(
                &format!("{needs}\nallocators: [caching, direct]"),
                "expect: { caching: num_ooms == 0 }",
            ),
        ),
        (
            "others without other allocators",
            with(needs, "expect: { caching: num_ooms == 0, others: any }"),
        ),
        (
            "missing kind of device",
            with(needs, "expect: { gpu: num_ooms == 0 }"),
        ),
        (
            "allocators next to kinds of device",
            with(needs, "expect: { gpu: any, caching: any }"),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn errors_for_unreadable_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let huge = folder.path().join("huge.yaml");
    std::fs::File::create(&huge)
        .unwrap()
        .set_len(MAX_FILE + 1)
        .unwrap();
    let paths = [
        folder.path().join("missing.yaml"),
        folder.path().to_owned(),
        file("latin1.yaml", b"about: x\nneeds: { memory: \xb5 }\n"),
        file("empty.yaml", b""),
        huge,
    ];
    let text: Vec<String> = paths
        .iter()
        .map(|path| shown(&Scenario::load(path).unwrap_err()))
        .collect();
    let text = text
        .join("\n\n")
        .replace(&folder.path().display().to_string(), "<folder>");
    insta::assert_snapshot!(text);
}

#[test]
fn the_plain_text_begins_with_file_line_and_column() {
    let text = error(&with_steps(
        "- alloc: { buffer: a, size: 1MiB }\n- free: a\n- free: a",
    ))
    .to_string();
    assert_eq!(
        text,
        "bad.yaml:7:11: buffer `a` is already freed, at line 6"
    );
}

#[test]
fn an_alias_bomb_is_rejected_quickly() {
    let mut bomb = "about: x\nneeds: { memory: 1GiB }\nstreams: &a0 [s]\n".to_owned();
    for level in 1..12 {
        let _ = writeln!(
            bomb,
            "k{level}: &a{level} [{}]",
            vec![format!("*a{}", level - 1); 10].join(", ")
        );
    }
    let as_steps = format!(
        "{HEAD}steps:\n  - &a0 {{ repeat: 1, steps: [reset_peak_stats] }}\n{}",
        {
            let mut text = String::new();
            for level in 1..8 {
                let _ = writeln!(
                    text,
                    "  - &a{level} {{ repeat: 1, steps: [{}] }}",
                    vec![format!("*a{}", level - 1); 20].join(", ")
                );
            }
            text
        }
    );
    for source in [bomb, as_steps] {
        let text = error(&source).to_string();
        assert!(text.starts_with("bad.yaml:"), "{text}");
    }
}

#[test]
fn a_scenario_with_too_many_values_is_rejected() {
    let many = "- alloc: { buffer: a, size: 1MiB }\n- free: a\n".repeat(10_000);
    let scenario = Scenario::parse(&with_steps(&many), Path::new("long.yaml")).unwrap();
    assert_eq!(scenario.steps.len(), 20_000);
    assert!(
        scenario
            .steps
            .iter()
            .zip(5..)
            .all(|(Step { position, .. }, expected)| position.line == expected)
    );
    let too_many = format!(
        "{HEAD}streams: [{}]\nsteps: [empty_cache]\n",
        "s, ".repeat(MAX_NODES + 1)
    );
    let refused = error(&too_many).to_string();
    assert!(refused.contains("the file is too large"), "{refused}");
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,40}", step in "[a-z_]{1,9}") {
        let _ = Scenario::parse(&text, Path::new("any.yaml"));
        let _ = Scenario::parse(&with_steps(&format!("- expect: '{}'", text.replace('\'', "''"))),
            Path::new("any.yaml"));
        let _ = Scenario::parse(&with_steps(&format!("- {step}: {text}")), Path::new("any.yaml"));
    }
}

#[test]
fn errors_for_scenarios_beyond_a_limit() {
    let names =
        |count: usize, name: &dyn Fn(usize) -> String| (0..count).map(name).collect::<Vec<_>>();
    let arms = names(20_000, &|arm| format!("direct: {{ name: a{arm} }}")).join(" }, { ");
    let streams = names(20_000, &|stream| format!("s{stream}")).join(", ");
    let buffers = names(100_000, &|buffer| {
        format!("  - alloc: {{ buffer: b{buffer}, size: 512B }}\n")
    })
    .concat();
    let invariants = names(101, &|bytes| {
        format!("reserved_bytes.all.peak <= {bytes}MiB")
    })
    .join(", ");
    let expectations = ["num_ooms == 0"; 11].join(", ");
    let text = all(&[
        (
            "allocators",
            format!("{HEAD}allocators: [{{ {arms} }}]\nsteps: [empty_cache]\n"),
        ),
        (
            "streams",
            format!("{HEAD}streams: [{streams}]\nsteps: [empty_cache]\n"),
        ),
        ("buffers", format!("{HEAD}steps:\n{buffers}")),
        (
            "invariants",
            format!("{HEAD}invariants: [{invariants}]\nsteps: [empty_cache]\n"),
        ),
        (
            "expectations",
            format!("{HEAD}steps: [{{ repeat: 1000000, steps: [expect: [{expectations}]] }}]\n"),
        ),
        (
            "a long name",
            format!("{HEAD}steps: [\"{}\"]\n", "alloc".repeat(1_000_000)),
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn control_characters_are_escaped() {
    let shown = steps(&[
        ("a title", "- \"\\e]0;title\\a\""),
        ("a direction", "- free: \"a\\u202eb\""),
    ]);
    assert!(!shown.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{shown}");
    insta::assert_snapshot!(shown);
}
