//! Tests of the program from a user's view: output, exit code, and files.
//!
//! Each test runs the built program in its own folder, on a machine without a GPU unless it stages
//! one. A real GPU of the machine is hidden.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io::pipe, os::unix::process::CommandExt, thread};

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::Settings;
use harness_record::{Records, Rule, RunRecord, Verdict};
use harness_scenario::{DeviceKind, Scenario};
use harness_staging::{NOTHING_LEFT, Staging, strict};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder and a machine.
struct World {
    folder: TempDir,
    staging: Staging,
}

/// The result of a run of the program.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl World {
    fn without_gpu() -> Self {
        Self {
            folder: TempDir::new().unwrap(),
            staging: Staging::without_driver().unwrap(),
        }
    }

    fn with_gpu(config: &Settings) -> Self {
        Self {
            folder: TempDir::new().unwrap(),
            staging: Staging::new(config).unwrap(),
        }
    }

    /// Adds files, by name and content.
    fn holding(self, files: &[(&str, &str)]) -> Self {
        for (name, content) in files {
            fs::write(self.path(name), content).unwrap();
        }
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command
            .arg0("harness")
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
            command.env_remove(variable);
        }
        self.staging.apply(&mut command);
        command
    }

    fn harness(&self, arguments: &[&str]) -> Ran {
        Self::ran(self.command(arguments))
    }

    /// Runs a line in a shell in which `harness` is installed.
    fn shell(&self, line: &str) -> Ran {
        let program = Path::new(env!("CARGO_BIN_EXE_harness")).parent().unwrap();
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", line])
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .env("PATH", program)
            .env_remove("CARGO");
        self.staging.apply(&mut command);
        Self::ran(command)
    }

    fn ran(mut command: Command) -> Ran {
        let output = command.output().unwrap();
        Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The names of all files in the folder.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Ran {
    /// The whole result as one text.
    fn told(&self) -> String {
        let code = self
            .code
            .map_or_else(|| "a signal".to_owned(), |code| code.to_string());
        format!(
            "exit: {code}\n--- stdout ---\n{}--- stderr ---\n{}",
            self.out, self.err
        )
    }

    /// The lines from one that starts with `start` to the next empty one.
    fn paragraph(&self, start: &str) -> String {
        self.out
            .lines()
            .skip_while(|line| !line.starts_with(start))
            .take_while(|line| !line.is_empty())
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Sends the signal of Ctrl-C.
fn interrupt(child: &Child) {
    assert!(
        Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
}

/// Checks that a text contains all of these strings, ignoring line breaks.
fn assert_contains(text: &str, needles: &[&str]) {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for needle in needles {
        assert!(
            words(text).contains(&words(needle)),
            "`{needle}` is missing in:\n{text}"
        );
    }
}

/// The root of the project.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

const GOOD: &str = "about: One request is served. Nothing else happens.
needs: { memory: 64MiB }
allocators: [ caching, direct ]
steps:
  - alloc: { buffer: a, size: 10MiB }
  - free: a
";

/// Runs an invalid scenario text, which must be rejected before anything runs.
fn refused(scenario: &str) -> String {
    let world = World::without_gpu().holding(&[("wrong.yaml", scenario)]);
    let ran = world.harness(&["run", "wrong.yaml"]);
    assert_eq!(world.names(), ["wrong.yaml"], "nothing is written");
    ran.told()
}

fn with_step(step: &str) -> String {
    format!(
        "about: A mistake.\nneeds: {{ memory: 1GiB }}\nsteps:\n  - alloc: {{ buffer: a, size: 1MiB \
         }}\n  - {step}\n"
    )
}

#[test]
fn a_missing_file_is_named() {
    assert_contains(
        &World::without_gpu()
            .harness(&["run", "nothing.yaml"])
            .told(),
        &["exit: 2", "nothing.yaml"],
    );
}

#[test]
fn a_folder_without_scenarios_is_an_error() {
    assert_contains(
        &World::without_gpu().harness(&["run", "."]).told(),
        &["exit: 2", ".: ", "*.yaml"],
    );
}

#[test]
fn a_text_that_is_not_yaml_is_shown_at_its_place() {
    assert_contains(
        &refused("about: [\nneeds: {\n"),
        &["exit: 2", "wrong.yaml:1:8"],
    );
}

#[test]
fn the_error_for_an_unknown_step_lists_the_steps() {
    insta::assert_snapshot!(refused(&with_step("aloc: { buffer: b, size: 1MiB }")));
}

#[test]
fn a_list_item_without_a_step_is_shown_at_its_beginning() {
    let told = refused(&with_step("{}"));
    assert!(
        told.contains("wrong.yaml:5:5: this list item is empty"),
        "{told}"
    );
}

#[test]
fn an_unknown_metric_is_shown_with_the_nearest_one() {
    assert_contains(
        &refused(&with_step("expect: alocated_bytes.all.current == 0")),
        &["exit: 2", "wrong.yaml:5:13", "`allocated_bytes"],
    );
}

#[test]
fn a_size_with_a_decimal_unit_is_refused() {
    assert_contains(
        &refused(&with_step("alloc: { buffer: b, size: 600MB }")),
        &["exit: 2", "wrong.yaml:5:31", "600MB"],
    );
}

#[test]
fn another_version_of_the_language_is_refused_and_this_one_passes() {
    let stated = |version: u64| {
        let scenario = with_step("free: a").replacen("needs:", "version: V\nneeds:", 1);
        scenario.replacen('V', &version.to_string(), 1)
    };
    assert_contains(
        &refused(&stated(2)),
        &["exit: 2", "wrong.yaml:2:10", "version 1, not 2"],
    );
    let world = World::without_gpu().holding(&[("right.yaml", &stated(1))]);
    assert_contains(
        &world.harness(&["check", "right.yaml"]).told(),
        &["exit: 0"],
    );
}

#[test]
fn a_negative_size_is_refused() {
    assert_contains(
        &refused(&with_step("alloc: { buffer: b, size: -1 }")),
        &["exit: 2", "wrong.yaml:5:31"],
    );
}

#[test]
fn a_size_beyond_64_bits_is_refused() {
    assert_contains(
        &refused(&with_step("alloc: { buffer: b, size: 20EiB }")),
        &["exit: 2", "wrong.yaml:5:31", "20EiB"],
    );
}

#[test]
fn a_buffer_freed_twice_is_shown_with_both_places() {
    insta::assert_snapshot!(refused(&with_step("free: a\n  - free: a")));
}

#[test]
fn an_unknown_buffer_is_shown() {
    assert_contains(
        &refused(&with_step("free: weights")),
        &["exit: 2", "wrong.yaml:5:11", "`weights`"],
    );
}

#[test]
fn an_alias_bomb_is_refused_where_it_becomes_too_large() {
    // Each line is ten times the line before it: 10⁹ steps in total.
    let mut bomb =
        "about: x\nneeds: { memory: 1GiB }\nsteps:\n  - &a { empty_cache: {} }\n".to_owned();
    for (name, of) in ('b'..='j').zip('a'..='i') {
        let ten = vec![format!("*{of}"); 10].join(", ");
        bomb.push_str(&format!("  - &{name} {{ repeat: 1, steps: [{ten}] }}\n"));
    }
    assert_contains(&refused(&bomb), &["exit: 2", "wrong.yaml:4:26"]);
}

#[test]
fn sizes_on_the_command_line_are_refused_like_those_in_scenarios() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    for size in ["600MB", "-1", "20EiB", "1KiB"] {
        let told = world
            .harness(&["run", "good.yaml", &format!("--memory={size}")])
            .told();
        assert_contains(
            &told,
            &["exit: 2", "--memory <SIZE>", size.trim_end_matches("KiB")],
        );
    }
}

#[test]
fn all_scenarios_are_checked_before_any_runs() {
    let wrong = with_step("free: weights");
    let world = World::without_gpu().holding(&[
        ("good.yaml", GOOD),
        ("wrong.yaml", &wrong),
        ("worse.yaml", "about: ["),
    ]);
    let ran = world.harness(&["run", "."]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
    assert!(
        ran.err.contains("./wrong.yaml:5:11: ") && ran.err.contains("./worse.yaml:"),
        "{}",
        ran.err
    );
    assert_eq!(world.names(), ["good.yaml", "worse.yaml", "wrong.yaml"]);
}

#[test]
fn the_error_for_an_unknown_allocator_lists_the_known_ones() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    assert_contains(
        &world
            .harness(&["run", "good.yaml", "--allocator", "cacheing"])
            .told(),
        &["exit: 2", "`cacheing`", "caching", "direct"],
    );
}

#[test]
fn the_error_for_an_unlisted_allocator_lists_those_of_the_scenarios() {
    let only_caching = GOOD.replace("allocators: [ caching, direct ]\n", "");
    let world = World::without_gpu().holding(&[
        ("first.yaml", &only_caching),
        ("second.yaml", &only_caching),
    ]);
    let told = world
        .harness(&["run", "first.yaml", "second.yaml", "--allocator", "direct"])
        .told();
    assert_contains(
        &told,
        &[
            "exit: 2",
            "`direct`",
            "first.yaml lists `caching`",
            "second.yaml lists `caching`",
        ],
    );
}

/// A cached block is split, and its remainder is too small for the next request.
const CUT: &str = "about: Which setting would have saved me?
needs: { memory: 1GiB }
allocators: [ caching, { caching: { name: tuned, conf: \"max_split_size_mb:100\" } }, direct ]
steps:
  - alloc: { buffer: a, size: 600MiB }
  - free: a
  - alloc: { buffer: kept, size: 30MiB }
  - alloc: { buffer: again, size: 600MiB }
";

/// The configurations that ran, and whether they passed.
fn ended(ran: &Ran) -> Vec<(String, bool)> {
    let records: Records =
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}\n{}", ran.told()));
    records
        .runs
        .iter()
        .map(|run| (run.allocator.clone(), run.verdict == Verdict::Passed))
        .collect()
}

#[test]
fn settings_of_options_run_next_to_those_of_the_scenario() {
    let world = World::without_gpu().holding(&[
        ("cut.yaml", CUT),
        ("direct.yaml", &GOOD.replace("caching, ", "")),
    ]);
    let run = |arguments: &[&str]| {
        let always = [
            "run",
            "cut.yaml",
            "direct.yaml",
            "--device",
            "sim",
            "--no-report",
            "--format",
            "json",
        ];
        ended(&world.harness(&[&always, arguments].concat()))
    };
    let arms = |names: &[(&str, bool)]| {
        names
            .iter()
            .map(|(name, passed)| ((*name).to_owned(), *passed))
            .collect::<Vec<_>>()
    };
    let (split, expandable) = (
        "caching(max_split_size_mb:200)",
        "caching(expandable_segments:True)",
    );
    let both = [
        "--alloc-conf",
        "max_split_size_mb:200",
        "--alloc-conf",
        "expandable_segments:True",
    ];
    assert_eq!(
        run(&both),
        arms(&[
            ("caching", false),
            ("tuned", true),
            ("direct", true),
            (split, true),
            (expandable, true),
            ("direct", true)
        ]),
        "a scenario without PyTorch's allocator gets none"
    );
    assert_eq!(
        run(&[&both[..], &["--allocator", "caching"]].concat()),
        arms(&[("caching", false), (split, true), (expandable, true)])
    );
    assert_eq!(
        run(&["--allocator", &format!("{split},direct")]),
        arms(&[("direct", true), (split, true), ("direct", true)])
    );
    assert_eq!(
        run(&[
            "--allocator",
            "caching",
            "--alloc-conf",
            "max_split_size_mb:100.5"
        ]),
        arms(&[("caching", false), ("tuned", true)])
    );
    assert_eq!(
        run(&[
            "--allocator",
            "caching(max_split_size_mb:200,backend:native)"
        ]),
        arms(&[(split, true)])
    );
}

#[test]
fn the_variable_of_pytorch_is_not_read_unless_it_is_given() {
    let world = World::without_gpu().holding(&[("cut.yaml", CUT)]);
    let mut command = world.command(&[
        "run",
        "cut.yaml",
        "--device",
        "sim",
        "--no-report",
        "--allocator",
        "caching",
    ]);
    let output = command
        .env("PYTORCH_ALLOC_CONF", "max_split_size_mb:200")
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "the plain arm fails as without the variable"
    );
}

#[test]
fn the_command_of_a_failed_arm_reproduces_that_arm() {
    let listed = CUT.replace(
        "direct ]",
        "{ caching: { \
         conf: \"garbage_collection_threshold:0.6,per_process_memory_fraction:0.9\" } } ]",
    );
    let world = World::without_gpu().holding(&[("cut.yaml", &listed)]);
    let arm = "caching(garbage_collection_threshold:0.6,per_process_memory_fraction:0.9)";
    let ran = world.harness(&[
        "run",
        "cut.yaml",
        "--device",
        "sim",
        "--no-report",
        "--allocator",
        &format!("tuned,{arm}"),
    ]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    insta::assert_snapshot!(ran.paragraph("FAILED cut on"));
    let reproduce = ran
        .out
        .lines()
        .find_map(|line| line.strip_prefix("reproduce: harness "))
        .unwrap();
    let arguments: Vec<&str> = reproduce
        .split(' ')
        .map(|word| word.trim_matches('\''))
        .chain(["--no-report"])
        .collect();
    let again = world.harness(&arguments);
    assert_eq!(
        (again.code, again.paragraph("FAILED cut on")),
        (ran.code, ran.paragraph("FAILED cut on"))
    );
    assert!(!again.out.contains("tuned"), "that arm alone");
}

#[test]
fn errors_for_invalid_settings_show_their_place() {
    let world = World::without_gpu().holding(&[
        ("cut.yaml", CUT),
        ("direct.yaml", &GOOD.replace("caching, ", "")),
    ]);
    let told = [
        [
            "cut.yaml",
            "--alloc-conf",
            "max_split_size_mb:200,max_splt:1",
        ],
        ["cut.yaml", "--alloc-conf", "expandable_segments:true"],
        ["cut.yaml", "--allocator", "caching(max_split_size_mb:1)"],
        ["cut.yaml", "--allocator", "caching(max_split_size_mb:100"],
        ["cut.yaml", "--allocator", "direct(max_split_size_mb:100)"],
        ["cut.yaml", "--allocator", "tund"],
        ["direct.yaml", "--alloc-conf", "max_split_size_mb:200"],
    ]
    .map(|arguments| world.harness(&[&["run"], &arguments[..]].concat()).told());
    insta::assert_snapshot!(told.join("\n"));
}

#[test]
fn a_scenario_that_needs_more_than_the_device_has_is_skipped_with_exit_code_3() {
    let world = World::without_gpu().holding(&[("huge.yaml", &GOOD.replace("64MiB", "512TiB"))]);
    let ran = world.harness(&["run", "huge.yaml", "--allocator", "caching", "--no-report"]);
    assert_eq!(ran.code, Some(3), "{}", ran.told());
    assert_contains(&ran.out, &["skipped:", "512 TiB"]);
}

#[test]
fn skipped_scenarios_are_listed_and_do_not_fail_a_run_in_which_others_pass() {
    let world = World::without_gpu().holding(&[
        ("huge.yaml", &GOOD.replace("64MiB", "512TiB")),
        ("good.yaml", GOOD),
    ]);
    let ran = world.harness(&[
        "run",
        ".",
        "--device",
        "sim",
        "--allocator",
        "caching",
        "--no-report",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    assert!(
        ran.out.contains("skipped:") && ran.out.contains("huge"),
        "{}",
        ran.told()
    );
}

#[test]
fn skips_that_do_not_depend_on_the_size_of_the_device_end_with_exit_code_0() {
    let on_purpose = GOOD.replace("steps:", "skip: an upstream bug\nsteps:");
    let other_device = GOOD.replace("64MiB }", "64MiB, device: gpu }");
    let other_allocator = GOOD.replace("caching, ", "").replace(
        "steps:\n",
        "steps:\n  - private_pool: p\n    steps: [empty_cache]\n",
    );
    let world = World::without_gpu().holding(&[
        ("on_purpose.yaml", &on_purpose),
        ("other_device.yaml", &other_device),
        ("other_allocator.yaml", &other_allocator),
        ("huge.yaml", &GOOD.replace("64MiB", "512TiB")),
    ]);
    let run = |files: &[&str]| {
        world.harness(&[&["run", "--device", "sim", "--no-report"], files].concat())
    };
    for (file, reason) in [
        ("on_purpose.yaml", "an upstream bug"),
        ("other_device.yaml", "needs the device `gpu`"),
        (
            "other_allocator.yaml",
            "private pools, which `direct` does not support",
        ),
    ] {
        let ran = run(&[file]);
        assert_eq!(ran.code, Some(0), "{}", ran.told());
        assert_contains(&ran.out, &["skipped:", reason, "0 failed"]);
    }
    let ran = run(&["on_purpose.yaml", "other_device.yaml", "huge.yaml"]);
    assert_eq!(
        ran.code,
        Some(3),
        "the device is too small for everything that is not skipped anyway: {}",
        ran.told()
    );
}

/// The first configuration has a checked and a timed run. The second meets a failed launch, and the
/// driver refuses the next context.
#[test]
fn a_device_that_is_lost_on_the_way_takes_no_finished_run_with_it() {
    let broken =
        strict()
            .failing("cuMemAlloc_v2", 7, 719)
            .failing("cuDevicePrimaryCtxRetain", 4, 719);
    let world = World::with_gpu(&broken).holding(&[("good.yaml", GOOD)]);
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "cuda",
        "--repeat",
        "2",
        "--report",
        "kept",
    ]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    let records: Records =
        serde_json::from_str(&fs::read_to_string(world.path("kept/records.json")).unwrap())
            .unwrap();
    let runs: Vec<_> = records
        .runs
        .iter()
        .map(|run| (run.allocator.as_str(), run.repetition, &run.verdict))
        .collect();
    let [
        ("caching", 0, Verdict::Passed),
        ("direct", 0, Verdict::Failed { first, .. }),
        lost,
        skipped,
    ] = &runs[..]
    else {
        panic!("{runs:?}")
    };
    assert!(
        first
            .seen
            .starts_with("cuMemAlloc_v2 failed: CUDA_ERROR_LAUNCH_FAILED (719)"),
        "{first}"
    );
    let ("caching", 1, Verdict::Failed { first, .. }) = lost else {
        panic!("{lost:?}")
    };
    assert_eq!((first.step, &first.rule), (0, &Rule::DeviceFailure));
    assert!(
        first
            .seen
            .starts_with("cuDevicePrimaryCtxRetain failed: CUDA_ERROR_LAUNCH_FAILED (719)"),
        "{first}"
    );
    let ("direct", 1, Verdict::Skipped { reason, .. }) = skipped else {
        panic!("{skipped:?}")
    };
    assert_eq!(reason, "the device could not be opened for an earlier run");
    assert!(
        ran.out.contains("cuMemAlloc_v2 failed") && ran.out.contains("report: kept/"),
        "{}",
        ran.out
    );
    let first_of_all = World::with_gpu(&strict().failing("cuDevicePrimaryCtxRetain", 1, 719))
        .holding(&[("good.yaml", GOOD)]);
    let ran = first_of_all.harness(&["run", "good.yaml", "--device", "cuda"]);
    assert_eq!(
        (ran.code, first_of_all.names()),
        (Some(3), vec!["good.yaml".to_owned()]),
        "nothing was run: {}",
        ran.told()
    );
}

#[test]
fn continuous_integration_gets_a_summary_and_junit() {
    let world =
        World::without_gpu().holding(&[("good.yaml", GOOD), ("summary.md", "## Earlier step\n")]);
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--no-report",
        "--summary",
        "summary.md",
        "--junit",
        "junit.xml",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let summary = fs::read_to_string(world.path("summary.md")).unwrap();
    assert!(
        summary.starts_with("## Earlier step\n\n# Out-of-memory report\n")
            && !summary.contains(".svg"),
        "{summary}"
    );
    let junit = fs::read_to_string(world.path("junit.xml")).unwrap();
    assert!(
        junit.starts_with("<?xml")
            && junit.contains("<testsuite name=\"good\"")
            && junit.contains("failures=\"0\""),
        "{junit}"
    );
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--no-report",
        "--junit",
        "good.yaml/junit.xml",
    ]);
    assert_eq!(ran.code, Some(4), "{}", ran.err);
    assert!(
        ran.err.contains("good.yaml/junit.xml") && ran.err.contains("choose another file"),
        "{}",
        ran.err
    );
}

/// Runs by scenario and allocator.
fn started(ran: &Ran) -> Vec<String> {
    let records: Records =
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}\n{}", ran.told()));
    records
        .runs
        .iter()
        .map(|run| format!("{}::{}", run.scenario.name, run.allocator))
        .collect()
}

#[test]
fn runs_are_chosen_by_words() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD), ("other.yaml", GOOD)]);
    let run = |arguments: &[&str]| {
        let always = [
            "run",
            ".",
            "--device",
            "sim",
            "--no-report",
            "--format",
            "json",
        ];
        world.harness(&[&always, arguments].concat())
    };
    assert_eq!(
        started(&run(&["--filter", "caching"])),
        ["good::caching", "other::caching"]
    );
    assert_eq!(
        started(&run(&["--filter", "other caching"])),
        ["other::caching"]
    );
    assert_eq!(
        started(&run(&["--filter", "good::direct", "--filter", "other dir"])),
        ["good::direct", "other::direct"]
    );
    let none = run(&["--filter", "good elsewhere"]);
    assert_eq!(none.code, Some(2));
    assert!(
        none.err.contains("no run matches `good elsewhere`"),
        "{}",
        none.told()
    );
}

#[test]
fn fail_fast_starts_nothing_after_a_failure() {
    let world = World::without_gpu().holding(&[
        ("bad.yaml", &GOOD.replace("10MiB", "100MiB")),
        ("good.yaml", GOOD),
    ]);
    let ran = world.harness(&["run", ".", "--device", "sim", "--no-report", "--fail-fast"]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    assert!(
        ran.out.contains("Incomplete: 3 of 4 runs did not start"),
        "{}",
        ran.told()
    );
}

#[test]
fn what_failed_is_run_again_until_it_passes() {
    let bad = GOOD.replace("10MiB", "100MiB");
    let world = World::without_gpu().holding(&[
        ("a.yaml", &bad),
        ("b.yaml", &bad.replace("caching, ", "")),
        ("good.yaml", GOOD),
    ]);
    let run = |arguments: &[&str]| {
        world.harness(
            &[
                &["run", ".", "--device", "sim", "--format", "json"],
                arguments,
            ]
            .concat(),
        )
    };
    let all = [
        "a::caching",
        "a::direct",
        "b::direct",
        "good::caching",
        "good::direct",
    ];
    let first = run(&["--last-failed"]);
    assert_eq!(
        (started(&first), first.code),
        (all.map(str::to_owned).to_vec(), Some(1))
    );
    assert!(
        first
            .err
            .contains("no run failed last time, so all runs are started"),
        "{}",
        first.told()
    );
    assert_eq!(
        started(&run(&["--last-failed"])),
        ["a::caching", "a::direct", "b::direct"]
    );
    fs::write(world.path("a.yaml"), GOOD).unwrap();
    assert_eq!(
        started(&run(&["--filter", "a::caching"])),
        ["a::caching"],
        "skipped runs stay in the list"
    );
    assert_eq!(
        started(&run(&["--last-failed", "--no-report"])),
        ["a::direct", "b::direct"]
    );
    assert_eq!(
        started(&run(&["--last-failed"])),
        ["a::direct", "b::direct"],
        "without a report the list is not changed"
    );
    assert_eq!(started(&run(&["--last-failed"])), ["b::direct"]);
    fs::write(world.path("reports/runs/last-failed.json"), "{}").unwrap();
    let broken = run(&["--last-failed"]);
    assert_eq!(broken.code, Some(2), "{}", broken.told());
    assert!(
        broken.err.contains("last-failed.json") && broken.err.contains("remove this file"),
        "{}",
        broken.told()
    );
}

#[test]
fn a_pass_does_not_erase_the_failure_of_a_scenario_with_the_same_name_in_another_folder() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    fs::create_dir(world.path("other")).unwrap();
    fs::write(
        world.path("other/good.yaml"),
        GOOD.replace("10MiB", "100MiB"),
    )
    .unwrap();
    let run = |paths: &[&str], arguments: &[&str]| {
        world.harness(
            &[
                &["run"],
                paths,
                &["--device", "sim", "--format", "json"],
                arguments,
            ]
            .concat(),
        )
    };
    assert_eq!(run(&[".", "other"], &[]).code, Some(1));
    assert_eq!(run(&["good.yaml"], &[]).code, Some(0));
    let again = run(&[".", "other"], &["--last-failed"]);
    assert_eq!(
        (started(&again), again.code),
        (
            ["good::caching", "good::direct"]
                .map(str::to_owned)
                .to_vec(),
            Some(1)
        )
    );
}

#[test]
fn text_json_and_junit_explain_a_failure() {
    let world = World::without_gpu();
    let adapters = project().join("scenarios/failing/adapters.yaml");
    let adapters = adapters.to_str().unwrap();
    let files = [
        "--no-report",
        "--summary",
        "summary.md",
        "--junit",
        "junit.xml",
    ];
    let ran = world.harness(&[&["run", adapters, "--device", "sim"], files.as_slice()].concat());
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    let why = "lora1, lora2 and lora3 (lines 11-13) pin a segment";
    let [summary, junit] =
        ["summary.md", "junit.xml"].map(|name| fs::read_to_string(world.path(name)).unwrap());
    for (place, text) in [
        ("terminal", &ran.out),
        ("summary", &summary),
        ("JUnit", &junit),
    ] {
        assert!(text.contains(why), "{place}: {text}");
    }
    let json = world.harness(&[
        "run",
        adapters,
        "--device",
        "sim",
        "--no-report",
        "--format",
        "json",
    ]);
    let document: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(
        document["runs"][0]["out_of_memory"][0]["causes"],
        json!(["fragmented"])
    );
}

#[test]
fn a_gpu_that_the_user_names_must_exist() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    assert_contains(
        &world
            .harness(&["run", "good.yaml", "--device", "cuda"])
            .told(),
        &["exit: 3", "libcuda.so.1", "harness doctor"],
    );
}

#[test]
fn the_error_for_an_invalid_device_lists_the_valid_forms() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    assert_contains(
        &world
            .harness(&["run", "good.yaml", "--device", "gpu0"])
            .told(),
        &["exit: 2", "gpu0", "cuda:"],
    );
}

#[test]
fn without_a_gpu_the_simulated_device_runs_and_the_reason_is_printed() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let ran = world.harness(&["run", "good.yaml", "--no-report"]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    assert!(
        ran.err
            .starts_with("on the simulated device, because no GPU can be used: "),
        "{}",
        ran.err
    );
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    let asked_for = world.harness(&["run", "good.yaml", "--no-report", "--device", "sim"]);
    assert_eq!(
        (asked_for.code, asked_for.err.as_str(), &asked_for.out),
        (Some(0), "", &ran.out)
    );
}

#[test]
fn the_device_can_be_chosen_by_a_variable() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let output = world
        .command(&["run", "good.yaml", "--no-report"])
        .env("HARNESS_DEVICE", "cuda:3")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn an_unwritable_report_folder_is_an_error_before_the_run() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD), ("taken", "a file")]);
    for folder in ["taken", "taken/below"] {
        assert_contains(
            &world
                .harness(&["run", "good.yaml", "--device", "sim", "--report", folder])
                .told(),
            &["exit: 4", folder],
        );
    }
    assert_eq!(world.names(), ["good.yaml", "taken"]);
}

#[test]
fn reports_go_to_the_requested_folder() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let named = world.harness(&["run", "good.yaml", "--device", "sim", "--report", "here"]);
    assert_eq!(
        named.out.lines().last(),
        Some("report: here/report.md"),
        "{}",
        named.told()
    );
    let numbered = world.harness(&["run", "good.yaml", "--device", "sim"]);
    assert_eq!(
        numbered.out.lines().last(),
        Some("report: reports/runs/0001-good-sim/report.md"),
        "{}",
        numbered.told()
    );
    for folder in ["here", "reports/runs/0001-good-sim"] {
        let records = harness_report::store::read(&world.path(folder)).unwrap();
        assert_eq!(
            records
                .runs
                .iter()
                .map(|run| run.allocator.as_str())
                .collect::<Vec<_>>(),
            ["caching", "direct"]
        );
    }
    let none = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--no-report",
        "--quiet",
    ]);
    assert_eq!(
        (none.code, none.told()),
        (
            Some(0),
            "exit: 0\n--- stdout ---\n--- stderr ---\n".to_owned()
        )
    );
    assert_eq!(world.names(), ["good.yaml", "here", "reports"]);
}

#[test]
fn a_missed_expectation_is_shown_with_place_figures_and_command() {
    let world = World::without_gpu().holding(&[(
        "missed.yaml",
        &with_step("expect: reserved_bytes.all.current == 1MiB"),
    )]);
    let ran = world.harness(&[
        "run",
        "missed.yaml",
        "--no-report",
        "--seed",
        "7",
        "--memory",
        "512MiB",
        "--device",
        "sim",
    ]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    insta::assert_snapshot!(ran.paragraph("FAILED missed on"));
    let reproduce = ran
        .out
        .lines()
        .find_map(|line| line.strip_prefix("reproduce: harness "))
        .unwrap();
    let again = world.harness(
        &reproduce
            .split(' ')
            .chain(["--no-report"])
            .collect::<Vec<_>>(),
    );
    assert_eq!(
        (again.code, again.out),
        (ran.code, ran.out),
        "the command reproduces it"
    );
}

const FALLIBLE: &str = "about: Three requests.
needs: { memory: 64MiB }
allocators: [caching, direct]
steps:
  - alloc: { buffer: a, size: 20MiB }
  - free: a
  - alloc: { buffer: b, size: 50MiB }
";

#[test]
fn every_fault_fails_each_call_and_prints_the_outcomes_without_a_report() {
    let world = World::without_gpu().holding(&[("small.yaml", FALLIBLE)]);
    let ran = world.harness(&["run", "small.yaml", "--every-fault", "--device", "sim"]);
    let told = ran.told();
    // The last line has the time that the runs took.
    let (lines, took) = told.trim_end().rsplit_once('\n').unwrap_or_default();
    insta::assert_snapshot!(lines);
    assert!(took.starts_with("15 runs in "), "{took}");
    assert_eq!(world.names(), ["small.yaml"]);
    let sampled = world.harness(&[
        "run",
        "small.yaml",
        "--every-fault=sample:2",
        "--device",
        "sim",
        "--format",
        "json",
    ]);
    let document: Value = serde_json::from_str(&sampled.out).unwrap();
    assert_eq!(
        document["arms"][0]["chosen"],
        json!("2 evenly spread of 7"),
        "{}",
        sampled.told()
    );
    let reproduce = document["arms"][1]["cases"][0]["reproduce"]
        .as_str()
        .unwrap()
        .strip_prefix("harness ")
        .unwrap()
        .to_owned();
    let again = world.harness(
        &reproduce
            .split(' ')
            .chain(["--no-report"])
            .collect::<Vec<_>>(),
    );
    assert_eq!(again.code, Some(1), "{}", again.told());
    assert!(
        again
            .out
            .contains(&format!("reproduce: harness {reproduce}")),
        "{}",
        again.told()
    );
}

/// A worker is killed and restarted, and continues the count of its calls.
const WITH_WORKER: &str = "about: x
needs: { memory: 64MiB }
allocators: [caching, direct]
processes: [worker]
steps:
  - alloc: { buffer: a, size: 8MiB }
  - process: worker
    steps:
      - alloc: { buffer: b, size: 20MiB }
      - free: b
  - kill: worker
  - process: worker
    steps: [ alloc: { buffer: c, size: 30MiB, on_oom: { empty_cache: {} } } ]
";

#[test]
fn every_fault_includes_the_calls_of_further_processes() {
    let world = World::without_gpu().holding(&[("worker.yaml", WITH_WORKER)]);
    let options = ["--every-fault", "--device", "sim", "--format", "json"];
    let ran = world.harness(&[&["run", "worker.yaml"], &options[..]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let document: Value = serde_json::from_str(&ran.out).unwrap();
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    let mut lines = Vec::new();
    for (arm, case) in document["arms"].as_array().unwrap().iter().flat_map(|arm| {
        arm["cases"]
            .as_array()
            .unwrap()
            .iter()
            .map(move |case| (arm, case))
    }) {
        let end = case.get("error").unwrap_or(&case["outcome"]);
        let parts = [
            &arm["allocator"],
            &case["process"],
            &case["call"],
            &case["number"],
            &case["count"],
            &case["step"],
            end,
        ];
        lines.push(parts.map(text).join(" "));
    }
    insta::assert_snapshot!(lines.join("\n"));
    // The process was a copy of the harness; the command starts a program.
    let told = document["arms"][1]["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| case["process"] == "worker" && case["outcome"] == "named_error");
    for case in told {
        let reproduce = case["reproduce"]
            .as_str()
            .unwrap()
            .strip_prefix("harness ")
            .unwrap();
        let again = world.harness(
            &reproduce
                .split(' ')
                .chain(["--no-report"])
                .collect::<Vec<_>>(),
        );
        let error = case["error"]
            .as_str()
            .unwrap()
            .strip_prefix("in the process `worker`: ")
            .unwrap();
        assert!(
            again.code == Some(1) && again.out.contains(error),
            "{reproduce}: {}",
            again.told()
        );
    }
    let worker = |case: &&Value| {
        case["process"] == "worker" && case["number"] == 2 && case["outcome"] == "recovered"
    };
    let recovered = document["arms"][1]["cases"]
        .as_array()
        .unwrap()
        .iter()
        .find(worker)
        .expect("the policy of the worker asks again");
    let reproduce = recovered["reproduce"].as_str().unwrap();
    assert!(
        reproduce.ends_with(" --fail worker/cudaMalloc:2"),
        "{reproduce}"
    );
    let again = world.harness(
        &reproduce
            .strip_prefix("harness ")
            .unwrap()
            .split(' ')
            .chain(["--no-report", "--format", "json"])
            .collect::<Vec<_>>(),
    );
    let again: Records = serde_json::from_str(&again.out).unwrap();
    let note = "`--fail worker/cudaMalloc:2`: in the process `worker` cudaMalloc 2 (30 MiB) fails \
         with out_of_memory";
    assert!(
        again.runs[0]
            .steps
            .iter()
            .any(|step| step.notes.contains(&note.to_owned())),
        "{:#?}",
        again.runs[0].steps
    );
    let refused = [
        "run",
        "worker.yaml",
        "--device",
        "sim",
        "--allocator",
        "direct",
        "--no-report",
        "--fail",
        "worker/cudaMalloc:1",
    ];
    let refused = world.harness(&refused);
    assert!(
        refused
            .out
            .contains("injected this failure into cudaMalloc number 1 of the process `worker`"),
        "{}",
        refused.told()
    );
}

#[test]
fn errors_for_invalid_faults_list_the_valid_calls() {
    let world = World::without_gpu().holding(&[("small.yaml", FALLIBLE)]);
    let fail = |text: &str| {
        world.harness(&[
            "run",
            "small.yaml",
            "--device",
            "sim",
            "--no-report",
            "--fail",
            text,
        ])
    };
    let missed = fail("cudaMalloc:9");
    assert_eq!(missed.code, Some(1), "{}", missed.told());
    let mut told = [
        "cudaMaloc:1",
        "cudaMalloc:0",
        "cudaMalloc:1:x",
        "worker/cudaMalloc:3",
    ]
    .map(|text| fail(text).told())
    .to_vec();
    let world = World::without_gpu().holding(&[("worker.yaml", WITH_WORKER)]);
    let fail = |text: &str| {
        world.harness(&[
            "run",
            "worker.yaml",
            "--device",
            "sim",
            "--no-report",
            "--fail",
            text,
        ])
    };
    told.extend(["wrker/cudaMalloc:3", "worker/cudaMaloc:3"].map(|text| fail(text).told()));
    insta::assert_snapshot!(format!(
        "{}\n{}",
        told.join("\n"),
        missed.paragraph("FAILED small on simulated with direct")
    ));
}

#[test]
fn on_a_gpu_a_wait_that_never_returns_ends_with_the_time_of_its_step_and_a_lost_device_at_once() {
    let head = "about: x\nneeds: { memory: 64MiB }\n";
    let stuck = "timeout: 300ms\nfaults: [{ call: cudaEventRecord, never_completes: true \
         }]\nsteps:\n  - record: { event: done }\n  - synchronize: { event: done }\n";
    let lost = "faults: [{ call: cudaMalloc, error: device_lost, expect: error }]\nsteps:\n  - \
         alloc: { buffer: a, size: 8MiB }\n";
    let files = [
        ("stuck.yaml", format!("{head}{stuck}")),
        ("lost.yaml", format!("{head}{lost}")),
    ];
    let world = World::with_gpu(&strict())
        .holding(&files.each_ref().map(|(name, text)| (*name, text.as_str())));
    let began = Instant::now();
    let ran = world.harness(&[
        "run",
        "lost.yaml",
        "stuck.yaml",
        "--device",
        "cuda",
        "--repeat",
        "1",
        "--no-report",
    ]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    assert!(
        ran.out.contains("1 of 2 runs failed: 1 passed, 1 failed"),
        "{}",
        ran.told()
    );
    assert!(
        ran.out
            .contains("cudaEventSynchronize never returns: it waits for work that does not end"),
        "{}",
        ran.told()
    );
    assert!(
        began.elapsed() > Duration::from_millis(300),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn json_on_standard_output_is_the_records_and_nothing_else() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--format",
        "json",
        "--repeat",
        "2",
        "--allocator",
        "direct",
    ]);
    assert_eq!(ran.err, "report: reports/runs/0001-good-sim/report.md\n");
    let records: Records = serde_json::from_str(&ran.out).unwrap();
    let runs: Vec<_> = records
        .runs
        .iter()
        .map(|run| (run.allocator.as_str(), run.repetition, &run.verdict))
        .collect();
    assert_eq!(
        runs,
        [
            ("direct", 0, &Verdict::Passed),
            ("direct", 1, &Verdict::Passed)
        ]
    );
    assert_eq!(
        harness_report::store::read(&world.path("reports/runs/0001-good-sim")).unwrap(),
        records
    );
}

#[test]
fn memory_summaries_follow_the_text_report_one_a_run() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let arguments = [
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--no-report",
        "--repeat",
        "2",
    ];
    let plain = world.harness(&arguments);
    let ran = world.harness(&[arguments.as_slice(), &["--memory-summary"]].concat());
    assert_eq!(
        (ran.code, ran.err.as_str()),
        (Some(0), ""),
        "{}",
        ran.told()
    );
    let summaries = ran
        .out
        .strip_prefix(&plain.out)
        .expect("the text report is the same, and first");
    let heads: Vec<&str> = summaries
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('|'))
        .collect();
    assert_eq!(
        heads,
        [
            "caching, repetition 1",
            "caching, repetition 2",
            "direct, repetition 1",
            "direct, repetition 2"
        ]
        .map(|which| format!("good on simulated with {which}, at its end:"))
    );
    insta::assert_snapshot!(ran.paragraph("good on simulated with caching, repetition 1"));
    let quiet = world.harness(&[arguments.as_slice(), &["--memory-summary", "--quiet"]].concat());
    assert_eq!(quiet.told(), "exit: 0\n--- stdout ---\n--- stderr ---\n");
}

#[test]
fn memory_stats_appear_in_json_output_but_not_in_saved_records() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--device",
        "sim",
        "--format",
        "json",
        "--memory-summary",
        "--report",
        "kept",
    ]);
    let document: Value = serde_json::from_str(&ran.out).unwrap();
    let stats: Vec<&Value> = document["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| &run["memory_stats"])
        .collect();
    let figures = |key: &str| {
        stats
            .iter()
            .map(|stats| stats[key].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        figures("allocated_bytes.large_pool.peak"),
        [10 << 20, 10 << 20]
    );
    assert_eq!(
        figures("reserved_bytes.all.current"),
        [10 << 20, 0],
        "only a cache keeps what is freed"
    );
    let kept = fs::read_to_string(world.path("kept/records.json")).unwrap();
    assert!(!kept.contains("memory_stats"));
    assert_eq!(
        serde_json::from_str::<Records>(&ran.out).unwrap(),
        serde_json::from_str::<Records>(&kept).unwrap()
    );
}

#[test]
fn colour_appears_only_on_request() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let coloured = |choice| {
        world
            .harness(&[
                "run",
                "good.yaml",
                "--device",
                "sim",
                "--no-report",
                "--color",
                choice,
            ])
            .out
            .contains('\u{1b}')
    };
    assert_eq!(
        ["auto", "always", "never"].map(coloured),
        [false, true, false]
    );
}

#[test]
fn list_shows_scenarios() {
    let world = World::without_gpu().holding(&[
        ("good.yaml", GOOD),
        ("b.yaml", &with_step("free: a")),
        ("notes.txt", "none"),
    ]);
    insta::assert_snapshot!(world.harness(&["list", "."]).told());
    let listed: Value = serde_json::from_str(
        &world
            .harness(&["list", "good.yaml", "--format", "json"])
            .out,
    )
    .unwrap();
    assert_eq!(
        listed,
        json!([{
            "name": "good",
            "path": "good.yaml",
            "about": "One request is served. Nothing else happens.",
            "allocators": ["caching", "direct"],
            "memory": 64 << 20,
            "parameters": {},
            "tags": [],
            "seed": 0,
            "steps": 2,
        }])
    );
}

#[test]
fn check_reports_all_files_even_if_one_is_wrong() {
    let wrong = with_step("free: weights");
    let world = World::without_gpu().holding(&[
        ("a.yaml", "about: ["),
        ("b.yaml", GOOD),
        ("c.yaml", &wrong),
        ("d.yaml", GOOD),
    ]);
    let told = world.harness(&["check", ".", "d.yaml"]).told();
    assert_contains(
        &told,
        &[
            "exit: 2",
            "invalid  ./a.yaml",
            "valid    ./b.yaml",
            "invalid  ./c.yaml",
            "./a.yaml:1:8",
            "./c.yaml:5:11",
        ],
    );
    assert_eq!(
        world.harness(&["check", "b.yaml", "d.yaml"]).told(),
        "exit: 0\n--- stdout ---\nvalid    b.yaml\nvalid    d.yaml\n--- stderr ---\n"
    );
}

#[test]
fn the_schema_is_the_one_that_is_committed() {
    let printed: Value =
        serde_json::from_str(&World::without_gpu().harness(&["schema"]).out).unwrap();
    assert_eq!(printed["title"], "scenario");
    let path = project().join("scenarios/schema.json");
    let committed: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert!(printed == committed);
}

#[test]
fn doctor_lists_missing_libraries() {
    let world = World::without_gpu();
    let found: Value =
        serde_json::from_str(&world.harness(&["doctor", "--format", "json"]).out).unwrap();
    assert_eq!(
        (&found["devices"], &found["conclusion"]),
        (&json!([]), &json!("scenarios run on the simulated device"))
    );
    assert_contains(
        &found["missing"].to_string(),
        &["libcuda.so.1", "libnvidia-ml.so.1"],
    );
    assert_contains(
        &world.harness(&["doctor"]).told(),
        &["exit: 0", "GPUs           none", "missing"],
    );
    assert_eq!(world.harness(&["doctor", "--require-gpu"]).code, Some(3));
}

#[test]
fn doctor_describes_and_tests_every_gpu() {
    let world = World::with_gpu(&Settings {
        devices: 2,
        others: Bytes::mib(64),
        ..strict()
    });
    insta::assert_snapshot!(
        world
            .harness(&["doctor", "--require-gpu"])
            .told()
            .replace(env!("CARGO_PKG_VERSION"), "VERSION")
    );
    let found: Value = serde_json::from_str(
        &world
            .harness(&["doctor", "--format", "json", "--no-open"])
            .out,
    )
    .unwrap();
    assert_eq!(
        (
            &found["devices"][1]["device"],
            &found["devices"][1]["opens"]
        ),
        (&json!("cuda:1"), &Value::Null)
    );
    assert_eq!(
        (&found["devices"][0]["total"], &found["devices"][0]["free"]),
        (&json!(2_u64 << 30), &json!((2048_u64 - 64) << 20))
    );
    assert_eq!(found["missing"], json!([]));
}

#[test]
fn doctor_reports_a_gpu_that_cannot_be_used() {
    let world = World::with_gpu(&strict().failing("cuMemAlloc_v2", 0, 719));
    let ran = world.harness(&["doctor", "--require-gpu"]);
    assert_eq!(ran.code, Some(3), "{}", ran.told());
    assert!(
        ran.out.contains(
            "\nmissing        cuda:0 cannot be used: cuMemAlloc_v2 failed: \
             CUDA_ERROR_LAUNCH_FAILED (719)."
        ),
        "{}",
        ran.out
    );
    assert!(
        ran.out
            .ends_with("which cannot be used: choose another device, or `--device sim`\n"),
        "{}",
        ran.out
    );
}

const TRACE: &str = "# the second request meets a full device
a 1 600000000 0
f 1
a 2 700000000 0
a 3 900000000 0
";

/// A recording of [`TRACE`] in the format of the replay's statistics.
fn recording(world: &World) -> (Value, Vec<String>) {
    let ran = world.harness(&[
        "replay",
        "job.trace",
        "--memory",
        "1GiB",
        "--stats",
        "stats.jsonl",
    ]);
    assert_eq!(ran.told(), "exit: 0\n--- stdout ---\n--- stderr ---\n");
    let stats = fs::read_to_string(world.path("stats.jsonl")).unwrap();
    let mut lines = stats.lines().map(str::to_owned);
    let mut header: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    header["conf"] = json!("");
    header["trace"] = json!(TRACE.lines().skip(1).collect::<Vec<_>>());
    (header, lines.collect())
}

#[test]
fn a_replay_counts_like_pytorch() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let (header, rows) = recording(&world);
    let columns: Vec<&str> = header["columns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    let column = |name: &str| {
        let at = columns.iter().position(|column| *column == name).unwrap();
        rows[..4]
            .iter()
            .map(|row| serde_json::from_str::<Vec<u64>>(row).unwrap()[at])
            .collect::<Vec<_>>()
    };
    // 600000000 and 700000000 B in whole segments of 2 MiB.
    let (first, second) = (287 << 21, 334 << 21);
    assert_eq!(column("result"), [0, 0, 0, 1]);
    assert_eq!(
        column("reserved_bytes.all.current"),
        [first, first, second, second]
    );
    assert_eq!(column("num_alloc_retries"), [0, 0, 1, 2]);
    assert_eq!(column("num_ooms"), [0, 0, 0, 1]);
    assert_eq!(
        column("device_free"),
        [first, first, second, second].map(|taken| (1 << 30) - taken)
    );
    assert_eq!(
        world.names(),
        ["job.trace", "stats.jsonl"],
        "nothing temporary is left"
    );
    let printed = world.harness(&[
        "replay",
        "job.trace",
        "--memory",
        "1073741824",
        "--alloc-conf",
        "",
        "--stats",
        "-",
    ]);
    assert_eq!(
        printed.out,
        fs::read_to_string(world.path("stats.jsonl")).unwrap()
    );
}

#[test]
fn a_replay_prints_its_memory_summary_to_the_other_stream() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    recording(&world);
    let arguments = [
        "replay",
        "job.trace",
        "--memory",
        "1GiB",
        "--memory-summary",
    ];
    let apart = world.harness(&[arguments.as_slice(), &["--stats", "again.jsonl"]].concat());
    insta::assert_snapshot!(apart.told());
    let stats = fs::read_to_string(world.path("stats.jsonl")).unwrap();
    assert_eq!(
        fs::read_to_string(world.path("again.jsonl")).unwrap(),
        stats
    );
    let together = world.harness(&arguments);
    assert_eq!(
        (together.code, together.out, together.err),
        (Some(0), stats, apart.out)
    );
    let contradiction = world.harness(&["replay", "--verify", "stats.jsonl", "--memory-summary"]);
    assert_eq!(contradiction.code, Some(2), "{}", contradiction.told());
}

#[test]
fn a_recording_equals_its_replay_until_one_figure_is_changed() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let (header, rows) = recording(&world);
    fs::write(
        world.path("good.jsonl"),
        format!("{header}\n{}\n", rows.join("\n")),
    )
    .unwrap();
    let broken = rows
        .iter()
        .map(|row| row.replace("700448768", "700448256"))
        .collect::<Vec<_>>()
        .join("\n");
    fs::write(world.path("broken.jsonl"), format!("{header}\n{broken}\n")).unwrap();
    insta::assert_snapshot!(
        world
            .harness(&[
                "replay",
                "--verify",
                "good.jsonl",
                "broken.jsonl",
                "good.jsonl"
            ])
            .told()
    );
    assert_eq!(
        world.harness(&["replay", "--verify", "good.jsonl"]).told(),
        "exit: 0\n--- stdout ---\nequal    good.jsonl  4 operations\n1 equal, 0 differ, 0 \
         unusable; 4 operations compared\n--- stderr ---\n"
    );
}

#[test]
fn a_replay_follows_the_named_version_of_pytorch() {
    let world = World::without_gpu().holding(&[("job.trace", "a 1 1000 0\nm 1\n")]);
    let told = |options: &[&str]| {
        world.harness(&[&["replay", "job.trace", "--memory", "1GiB"], options].concat())
    };
    let old = told(&[
        "--torch",
        "2.9.1",
        "--alloc-conf",
        "large_segment_size_mb:64",
    ]);
    assert_eq!(old.code, Some(2));
    assert!(
        old.err
            .contains("PyTorch 2.9 has no setting `large_segment_size_mb`: PyTorch 2.11 added it"),
        "{}",
        old.err
    );
    let newer = told(&["--torch", "2.99"]);
    assert_eq!(newer.code, Some(0));
    assert!(
        newer
            .err
            .contains("the rules of PyTorch 2.99 are not known; those of PyTorch 2.15 apply"),
        "{}",
        newer.err
    );
    assert!(newer.out.contains(r#""torch":"2.15""#), "{}", newer.out);
}

#[test]
fn files_without_a_recording_are_named_and_the_others_compared() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let (header, rows) = recording(&world);
    fs::write(
        world.path("good.jsonl"),
        format!("{header}\n{}\n", rows.join("\n")),
    )
    .unwrap();
    fs::write(
        world.path("short.jsonl"),
        format!("{header}\n{}\n", rows[0]),
    )
    .unwrap();
    let mut unknown_settings = header;
    unknown_settings["conf"] = json!("max_split_size_mb:1");
    fs::write(
        world.path("settings.jsonl"),
        format!("{unknown_settings}\n{}\n", rows.join("\n")),
    )
    .unwrap();
    let files = [
        "job.trace",
        "short.jsonl",
        "nothing.jsonl",
        "settings.jsonl",
        "good.jsonl",
    ];
    let told = world
        .harness(&[["replay", "--verify"].as_slice(), &files].concat())
        .told();
    assert_contains(
        &told,
        &[
            "exit: 2",
            "equal    good.jsonl  4 operations",
            "1 equal, 0 differ, 4 unusable; 4 operations compared",
        ],
    );
}

#[test]
fn errors_in_a_trace_show_file_and_line_and_leave_no_file() {
    let world = World::without_gpu().holding(&[
        ("word.trace", "d\n\n# x\nallocate 7\n"),
        ("twice.trace", "a 1 512 0\n\na 1 512 0\n"),
    ]);
    for (trace, place) in [
        ("word.trace", "word.trace:4"),
        ("twice.trace", "twice.trace:3"),
        ("nothing.trace", "nothing.trace"),
    ] {
        let told = world
            .harness(&[
                "replay",
                trace,
                "--memory",
                "1GiB",
                "--stats",
                "stats.jsonl",
            ])
            .told();
        assert_contains(&told, &["exit: 2", place]);
    }
    assert_eq!(world.names(), ["twice.trace", "word.trace"]);
}

#[test]
fn an_interrupted_replay_leaves_no_file() {
    let world = World::without_gpu();
    let operations = (0..4_000_000)
        .map(|id| format!("a {id} 512 0\nf {id}\n"))
        .collect::<String>();
    fs::write(world.path("long.trace"), operations).unwrap();
    let mut child = world
        .command(&[
            "replay",
            "long.trace",
            "--memory",
            "1GiB",
            "--stats",
            "stats.jsonl",
        ])
        .spawn()
        .unwrap();
    // The temporary file shows that the replay has started.
    while world.names().len() == 1 {
        assert_eq!(
            child.try_wait().unwrap(),
            None,
            "it ended before it could be interrupted"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(world.names(), ["long.trace"]);
}

#[test]
fn settings_of_the_allocator_are_those_of_pytorch() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let told = [
        "max_split_size_mb:10",
        "garbage_collection_treshold:0.8",
        "max_split_size_mb:64,",
    ]
    .map(|conf| {
        world.harness(&[
            "replay",
            "job.trace",
            "--memory",
            "1GiB",
            "--stats",
            "stats.jsonl",
            "--alloc-conf",
            conf,
        ])
    });
    assert_eq!(
        told.each_ref().map(|ran| ran.code),
        [Some(2), Some(2), Some(0)]
    );
    assert_contains(&told[0].told(), &["max_split_size_mb", "--alloc-conf:1:"]);
    assert_contains(
        &told[1].told(),
        &[
            "garbage_collection_treshold",
            "garbage_collection_threshold",
        ],
    );
}

#[test]
fn statistics_that_cannot_be_written_are_an_error() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE), ("taken", "a file")]);
    let told = |stats: &str| {
        world
            .harness(&["replay", "job.trace", "--memory", "1GiB", "--stats", stats])
            .told()
    };
    for stats in ["no-folder/stats", "taken/stats", "/dev/full"] {
        assert_contains(&told(stats), &["exit: 4", &format!("`{stats}`"), "--stats"]);
    }
    assert_contains(&told("."), &["exit: 2", "--stats", "is a directory"]);
    assert_eq!(world.names(), ["job.trace", "taken"]);
}

#[test]
fn printed_commands_begin_with_the_command_of_the_user() {
    let adapters = project().join("scenarios/failing/adapters.yaml");
    let world = World::without_gpu();
    let mut command = world.command(&[
        "run",
        adapters.to_str().unwrap(),
        "--device",
        "sim",
        "--no-report",
    ]);
    let ran = World::ran({
        command.env("CARGO", "cargo");
        command
    });
    assert!(
        ran.out.contains("; cargo run -- explain oom.pickle"),
        "{}",
        ran.told()
    );
    assert!(!ran.out.contains("cargo explain"), "{}", ran.told());
}

#[test]
fn every_command_gives_up_on_a_hanging_driver() {
    let world = World::with_gpu(&strict().hanging("cuInit", 1)).holding(&[("good.yaml", GOOD)]);
    let commands: [&[&str]; 3] = [
        &["run", "good.yaml", "--no-report"],
        &["squeeze", "--leave-free", "1GiB", "--", "true"],
        &["calibrate", "--device", "cuda"],
    ];
    for arguments in commands {
        let mut command = world.command(arguments);
        command.env("HARNESS_DRIVER_LIMIT", "1s");
        let ran = World::ran(command);
        assert_contains(
            &ran.told(),
            &[
                "exit: 3",
                "no answer within 1.00 s",
                "the driver hangs",
                "--device sim",
            ],
        );
    }
    let mut command = world.command(&["run", "good.yaml", "--no-report"]);
    command.env("HARNESS_DRIVER_LIMIT", "soon");
    assert_contains(
        &World::ran(command).told(),
        &["exit: 2", "HARNESS_DRIVER_LIMIT"],
    );
    let simulated = world.harness(&["run", "good.yaml", "--device", "sim", "--no-report"]);
    assert_eq!(simulated.code, Some(0), "{}", simulated.told());
}

#[test]
fn every_memory_option_accepts_the_memory_of_large_gpus() {
    let snapshot = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../snapshot/explain/tests/snapshots/streams.pickle.gz");
    let snapshot = snapshot.to_str().unwrap();
    for gib in [80_u64, 141, 192] {
        let (memory, half) = (format!("{gib}GiB"), gib << 29);
        let trace = format!("a 1 {half} 0\na 2 {half} 0\na 3 {half} 0\n");
        let world = World::without_gpu().holding(&[("good.yaml", GOOD), ("job.trace", &trace)]);
        let commands: [&[&str]; 8] = [
            &["run", "good.yaml", "--device", "sim", "--no-report"],
            &["run", snapshot, "--device", "sim", "--no-report"],
            &[
                "run",
                "good.yaml",
                "--device",
                "sim",
                "--no-report",
                "--least-memory",
                "--try-settings",
            ],
            &["replay", "job.trace"],
            &["explain", "job.trace"],
            &["advise", snapshot, "--force"],
            &["import", snapshot, "--out", "imported.yaml"],
            &["shrink", "job.trace", "--out", "small.yaml"],
        ];
        for arguments in commands {
            let ran = world.harness(&[arguments, &["--memory", &memory]].concat());
            assert_eq!(
                ran.code,
                Some(0),
                "{arguments:?} in {memory}: {}",
                ran.told()
            );
        }
    }
}

#[test]
fn the_error_for_a_wrong_subcommand_suggests_the_nearest() {
    assert_contains(
        &World::without_gpu().harness(&["doctr"]).told(),
        &["exit: 2", "'doctr'", "'doctor'"],
    );
}

#[test]
fn the_help_has_the_exit_codes_and_examples() {
    let world = World::without_gpu();
    insta::assert_snapshot!(world.harness(&["--help"]).told());
    for command in [
        "run",
        "exec",
        "list",
        "check",
        "schema",
        "doctor",
        "replay",
        "bench",
        "report",
        "calibrate",
    ] {
        let help = world.harness(&[command, "--help"]).out;
        assert!(help.contains("\nExample"), "{help}");
    }
    assert!(
        world
            .harness(&["check", "-h"])
            .out
            .contains("one line per file, and the first error in each file\n")
    );
    let version = world.harness(&["--version"]).out;
    assert!(
        version.starts_with(&format!("harness {} (", env!("CARGO_PKG_VERSION"))),
        "{version}"
    );
}

/// Runs the CUDA device's code in an eighth of the catalogue, or in all of it with
/// HARNESS_TEST_ALL=1, which takes minutes of processor time.
#[test]
fn the_catalogue_passes_on_the_simulated_gpu() {
    // The simulated GPU uses host memory and really writes it. Larger scenarios run only on the
    // simulated device.
    const MOST: Bytes = Bytes::gib(2);
    let mut files: Vec<PathBuf> = fs::read_dir(project().join("scenarios"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    files.sort();
    let points = |path: &PathBuf| {
        Scenario::load_points(path, &harness_scenario::ParameterSettings::new()).unwrap()
    };
    let is_for_it = |scenario: &Scenario| {
        scenario.needs.memory <= MOST && scenario.needs.device != Some(DeviceKind::Simulated)
    };
    files.retain(|path| points(path).iter().all(is_for_it));
    let listed: usize = files
        .iter()
        .flat_map(points)
        .map(|scenario| scenario.allocators.len())
        .sum();
    assert!(listed > 80, "{listed}");
    let is_complete = std::env::var_os("HARNESS_TEST_ALL").is_some();
    // Two shards run in parallel, because this is the longest test.
    let ran: usize = thread::scope(|scope| {
        let shards = if is_complete {
            ["1/2", "2/2"]
        } else {
            ["3/16", "4/16"]
        };
        let parts = shards.map(|shard| scope.spawn(|| pass_on_the_simulated_gpu(&files, shard)));
        parts.map(|part| part.join().unwrap()).iter().sum()
    });
    assert!(
        ran == listed || !is_complete && ran > 10,
        "{ran} of {listed}"
    );
}

/// Runs a part of some scenarios on a simulated GPU. All must pass. Returns the number of runs.
fn pass_on_the_simulated_gpu(files: &[PathBuf], shard: &str) -> usize {
    let world = World::with_gpu(&Settings {
        memory: Bytes::gib(8),
        processes: true,
        ..strict()
    });
    let mut command = world.command(&[
        "run",
        "--device",
        "cuda",
        "--no-report",
        "--repeat",
        "1",
        "--shard",
        shard,
        "--format",
        "json",
    ]);
    let output = command.args(files).current_dir(project()).output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    let records: Records =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}\n{err}"));
    let has_passed = |run: &&RunRecord| {
        matches!(
            run.verdict,
            Verdict::Passed | Verdict::FailedAsExpected { .. }
        )
    };
    let not_passed: Vec<String> = records
        .runs
        .iter()
        .filter(|run| !has_passed(run))
        .map(harness_report::text::step_table)
        .collect();
    assert!(not_passed.is_empty(), "{}", not_passed.join("\n"));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(
        world
            .staging
            .left()
            .unwrap()
            .lines()
            .all(|line| line.ends_with(NOTHING_LEFT))
    );
    records.runs.len()
}

/// A part of four that contains this scenario, and one that does not.
fn parts(scenario: &str) -> (String, String) {
    let has = |index| harness_base::shard::Shard { index, count: 4 }.has(scenario);
    let find = |wanted: bool| format!("{}/4", (1..=4).find(|&index| has(index) == wanted).unwrap());
    (find(true), find(false))
}

#[test]
fn a_shard_without_runs_writes_all_requested_files() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let (_, empty) = parts("good");
    let always = ["run", "good.yaml", "--device", "sim", "--shard", &empty];
    let files = [
        "--junit",
        "junit.xml",
        "--summary",
        "summary.md",
        "--report",
        "report",
        "--format",
        "json",
    ];
    let ran = world.harness(&[&always[..], &files].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let records: Records = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(records.runs, []);
    assert_eq!(
        harness_report::store::read(&world.path("report")).unwrap(),
        records
    );
    let text = |name: &str| fs::read_to_string(world.path(name)).unwrap();
    assert_eq!(text("summary.md"), text("report/report.md"));
    assert!(
        text("junit.xml").contains("tests=\"0\"") && ran.err.contains(&empty),
        "{}",
        ran.told()
    );
    let told = world.harness(&[&always[..], &["--no-report"]].concat());
    assert_eq!(
        (told.code, told.out.as_str()),
        (Some(0), "Nothing was run.\n")
    );
}

#[test]
fn an_allocator_that_only_another_shard_has_is_no_mistake() {
    let world = World::without_gpu().holding(&[("cut.yaml", CUT)]);
    let (full, empty) = parts("cut");
    for (shard, arms) in [
        (full, vec![("tuned".to_owned(), true)]),
        (empty, Vec::new()),
    ] {
        let ran = world.harness(&[
            "run",
            "cut.yaml",
            "--device",
            "sim",
            "--no-report",
            "--format",
            "json",
            "--allocator",
            "tuned",
            "--shard",
            &shard,
        ]);
        assert_eq!(ended(&ran), arms);
    }
}

#[test]
fn errors_in_very_long_lines_show_only_the_place() {
    let long = format!(
        "about: {}{{ needs: 3 }}\nsteps: []\n",
        "x".repeat(2_000_000).replacen("xxxx", "x: x", 1)
    );
    let key = format!(
        "about: x\n{}: 1\nneeds: {{ memory: 1GiB }}\n",
        "k".repeat(2_000_000)
    );
    let item = format!(
        "about: x\nneeds: {{ memory: 1GiB }}\nsteps: [{} free: b ]\n",
        "alloc: { buffer: a, size: 1MiB }, free: a, ".repeat(40_000)
    );
    let nothing = "\0".repeat(3_000_000);
    let world = World::without_gpu().holding(&[
        ("long.yaml", &long),
        ("key.yaml", &key),
        ("item.yaml", &item),
        ("nul.yaml", &nothing),
    ]);
    let world = world.holding(&[
        ("good.yaml", GOOD),
        (
            "word.trace",
            &format!("d\n{}\n", "allocate ".repeat(300_000)),
        ),
    ]);
    let profile = format!("version: 1\nname: {}\n", "name".repeat(60_000));
    let size = GOOD.replace("64MiB", &"9".repeat(2_000_000));
    let world = world.holding(&[("profile.yaml", &profile), ("size.yaml", &size)]);
    let commands: [&[&str]; 8] = [
        &["check", "long.yaml"],
        &["check", "key.yaml"],
        &["check", "item.yaml"],
        &["check", "nul.yaml"],
        &["bench", "key.yaml"],
        &[
            "run",
            "good.yaml",
            "--device",
            "sim",
            "--device-profile",
            "profile.yaml",
        ],
        &["check", "size.yaml"],
        &["replay", "word.trace", "--memory", "1GiB"],
    ];
    let told = commands.map(|arguments| world.harness(arguments).told());
    for (told, command) in told.iter().zip(commands) {
        assert!(told.len() < 3000, "{command:?}: {} bytes", told.len());
    }
    insta::assert_snapshot!(told.join("\n"));
}

#[test]
fn a_packed_trace_is_replayed_like_the_trace_itself() {
    use std::io::Write;

    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let file = fs::File::create(world.path("packed.gz")).unwrap();
    let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::default());
    encoder.write_all(TRACE.as_bytes()).unwrap();
    encoder.finish().unwrap();
    let [plain, packed] = ["job.trace", "packed.gz"]
        .map(|trace| world.harness(&["replay", trace, "--memory", "1GiB"]));
    assert_eq!((packed.code, packed.out), (Some(0), plain.out));
    fs::write(
        world.path("cut.gz"),
        &fs::read(world.path("packed.gz")).unwrap()[..40],
    )
    .unwrap();
    assert_contains(
        &world
            .harness(&["replay", "cut.gz", "--memory", "1GiB"])
            .told(),
        &["exit: 2", "cut.gz"],
    );
}

#[test]
fn a_trace_without_allocations_is_not_timed() {
    let world = World::without_gpu().holding(&[
        ("none.trace", "# nothing\nd\nf 1\n"),
        ("one.trace", "a 1 512 0\n"),
    ]);
    assert_contains(
        &world
            .harness(&["replay", "none.trace", "--memory", "1GiB", "--bench", "3"])
            .told(),
        &["exit: 2", "none.trace"],
    );
    assert_eq!(
        world
            .harness(&["replay", "none.trace", "--memory", "1GiB"])
            .code,
        Some(0),
        "a second free can be replayed"
    );
    let one = world.harness(&["replay", "one.trace", "--memory", "1GiB", "--bench", "3"]);
    assert!(
        one.out
            .starts_with("2 operations per pass: 1 allocation, 1 free, "),
        "{}",
        one.told()
    );
}

#[test]
fn the_help_of_replay_explains_results_frees_and_settings() {
    let help = World::without_gpu().harness(&["replay", "--help"]).out;
    let plain = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in [
        "0 success 1 out of memory 2 ignored: its id or pool is not live",
        "Each pass frees the live blocks at its end",
        "in the format of PYTORCH_ALLOC_CONF or its older name PYTORCH_CUDA_ALLOC_CONF",
        "It may be compressed with gzip",
    ] {
        assert!(plain.contains(said), "{said:?} is not in\n{help}");
    }
}

#[test]
fn settings_that_are_identical_or_without_effect_are_named() {
    let also = CUT.replace("direct ]", "expandable ]");
    let world = World::without_gpu().holding(&[("cut.yaml", CUT), ("also.yaml", &also)]);
    let run = |arguments: &[&str]| {
        world.harness(
            &[
                &[
                    "run",
                    "cut.yaml",
                    "also.yaml",
                    "--device",
                    "sim",
                    "--no-report",
                    "--format",
                    "json",
                ],
                arguments,
            ]
            .concat(),
        )
    };
    let told = [
        &["--alloc-conf", "max_split_size_mb:100"][..],
        &[
            "--alloc-conf",
            "expandable_segments:True",
            "--alloc-conf",
            "expandable_segments:False",
        ],
        &["--alloc-conf", ""],
        &[
            "--alloc-conf",
            "max_split_size_mb:200",
            "--alloc-conf",
            "max_split_size_mb:200.5",
        ],
        &["--alloc-conf", "garbage_collection_threshold:0.6"],
        &["--allocator", "caching(max_non_split_rounding_mb:64)"],
    ]
    .map(|arguments| format!("{arguments:?}\n{}", run(arguments).err));
    insta::assert_snapshot!(told.join("\n"));
    assert_eq!(
        run(&["--alloc-conf", "max_split_size_mb:100", "--quiet"]).err,
        ""
    );
    let replayed = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let replayed = replayed.harness(&[
        "replay",
        "job.trace",
        "--memory",
        "1GiB",
        "--alloc-conf",
        "garbage_collection_threshold:0.6",
    ]);
    assert!(
        replayed
            .err
            .starts_with("garbage_collection_threshold has no effect without "),
        "{}",
        replayed.told()
    );
}

#[test]
fn suites_are_missing_outside_of_the_project() {
    let world = World::without_gpu();
    for arguments in [["bench"].as_slice(), &["bench", "latency"]] {
        assert_contains(
            &world.harness(arguments).told(),
            &["exit: 2", "scenarios/bench"],
        );
    }
}

#[test]
fn a_missing_reports_folder_is_an_error_and_is_not_created() {
    let world = World::without_gpu().holding(&[("taken", "a file")]);
    let commands: [&[&str]; 3] = [
        &["accept", "HEAD", "--reports", "typo"],
        &["index", "typo"],
        &["index", "taken"],
    ];
    for (arguments, folder) in commands.into_iter().zip(["typo: ", "typo: ", "taken: "]) {
        assert_contains(
            &world.harness(&[&["report"], arguments].concat()).told(),
            &["exit: 2", folder, "--reports DIR"],
        );
    }
    assert_eq!(world.names(), ["taken"]);
}

#[test]
fn invalid_values_of_a_shell_or_a_repository_are_errors_with_their_place() {
    let world = World::without_gpu();
    std::fs::create_dir_all(world.folder.path().join("repository/.git")).unwrap();
    std::fs::create_dir_all(world.folder.path().join("repository/src")).unwrap();
    let exec = |file: &str, variable: &str, options: &[&str]| {
        std::fs::write(world.folder.path().join("repository/.harness.yml"), file).unwrap();
        let mut command = world.command(&[&["exec"], options, &["--", "no-such-program"]].concat());
        let output = command
            .current_dir(world.folder.path().join("repository/src"))
            .env("HARNESS_VALUES", variable)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert_contains(
        &exec("values: cpu", "gpu", &[]),
        &["HARNESS_VALUES: `gpu`", "zeros, copies, cpu", "--values"],
    );
    assert_contains(
        &exec("values: gpu", "", &[]),
        &[
            ".harness.yml:1:9: ",
            "`gpu`",
            "zeros, copies, cpu",
            "--values",
        ],
    );
    assert_contains(
        &exec("# Comment\nvalue: cpu", "", &[]),
        &[".harness.yml:2:1: unknown field `value`", "values: cpu"],
    );
    assert_contains(&exec("", "", &[]), &[".harness.yml:1:1: ", "values: cpu"]);
    let is_unread = |text: &str| {
        text.contains("no-such-program")
            && !text.contains("HARNESS_VALUES")
            && !text.contains(".harness.yml")
    };
    assert!(is_unread(&exec("values: cpu", "", &[])));
    assert!(
        is_unread(&exec("values: gpu", "cpu", &[])),
        "the variable goes before the file"
    );
    assert!(
        is_unread(&exec("values: gpu", "gpu", &["--values", "zeros"])),
        "the option goes before both"
    );
}

#[test]
fn an_invalid_device_variable_is_an_error_and_an_empty_one_is_ignored() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let run = |value: &str, more: &[&str]| {
        let mut command = world.command(&[&["run", "good.yaml", "--no-report"], more].concat());
        let output = command.env("HARNESS_DEVICE", value).output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, err) = run("gpu0", &[]);
    assert_eq!(code, Some(2));
    assert_contains(&err, &["HARNESS_DEVICE: ", "gpu0", "--device"]);
    assert_eq!(
        run("gpu0", &["--device", "sim"]),
        (Some(0), String::new()),
        "the option goes before it"
    );
    assert_eq!(run("sim", &[]), (Some(0), String::new()));
    let (code, err) = run("", &[]);
    assert!(
        code == Some(0) && err.starts_with("on the simulated device, because"),
        "{err}"
    );
}

#[test]
fn the_error_for_a_file_of_another_kind_names_its_command() {
    let suite = "about: Times.\nneeds: { memory: 1GiB }\narms: [caching]\ntime: [latency: { sizes: \
         [2MiB] }]\n";
    let world = World::without_gpu().holding(&[("suite.yaml", suite), ("good.yaml", GOOD)]);
    let commands: [&[&str]; 3] = [
        &["check", "suite.yaml"],
        &["run", "suite.yaml"],
        &["bench", "good.yaml"],
    ];
    for (arguments, needles) in commands.into_iter().zip([
        ["suite.yaml:3:1", "harness bench"],
        ["suite.yaml:3:1", "harness bench"],
        ["good.yaml:3:1", "harness run"],
    ]) {
        assert_contains(
            &world.harness(arguments).told(),
            &[["exit: 2"].as_slice(), &needles].concat(),
        );
    }
    let slip = GOOD.replace("allocators", "arms");
    let slip = World::without_gpu()
        .holding(&[("slip.yaml", &slip)])
        .harness(&["check", "slip.yaml"]);
    assert!(
        !slip.err.contains("harness bench"),
        "a scenario with a wrong key is still one: {}",
        slip.err
    );
}

#[test]
fn errors_for_traces_recordings_and_pickles_name_their_commands() {
    let world = World::without_gpu().holding(&[
        ("job.trace", TRACE),
        ("recording.jsonl", "{\"torch\":\"2.11.0\",\"conf\":\"\"}\n"),
    ]);
    std::fs::write(world.path("snapshot.pickle"), b"\x80\x04\x95\x00").unwrap();
    for (arguments, is, help) in [
        (
            ["check", "job.trace"].as_slice(),
            "job.trace: this is an allocation trace, not a scenario",
            "harness replay job.trace --memory",
        ),
        (
            &["run", "job.trace"],
            "job.trace: a trace does not contain the device's memory",
            "give `--memory`",
        ),
        (
            &["check", "snapshot.pickle"],
            "this is a Python pickle, like PyTorch's memory snapshots",
            "harness explain snapshot.pickle",
        ),
        (
            &["check", "recording.jsonl"],
            "this is a recording of PyTorch's allocator",
            "harness replay --verify recording.jsonl",
        ),
        (
            &["replay", "recording.jsonl", "--memory", "1GiB"],
            "not an allocation trace",
            "harness replay --verify recording.jsonl",
        ),
        (
            &["replay", "snapshot.pickle", "--memory", "1GiB"],
            "this is a Python pickle",
            "harness explain snapshot.pickle",
        ),
    ] {
        let ran = world.harness(arguments);
        // Lines break between words.
        let told = ran.err.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            ran.code == Some(2) && told.contains(is) && told.contains(help),
            "{}",
            ran.told()
        );
    }
}

#[test]
fn files_for_ci_may_be_pipes_devices_or_links() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD), ("real.xml", "before")]);
    std::os::unix::fs::symlink("real.xml", world.path("link.xml")).unwrap();
    let ran = world.harness(&[
        "run",
        "good.yaml",
        "--quiet",
        "--summary",
        "/dev/null",
        "--junit",
        "/dev/stdout",
    ]);
    assert!(
        ran.code == Some(0) && ran.out.contains("<testsuites"),
        "{}",
        ran.told()
    );
    let full = world.harness(&["run", "good.yaml", "--quiet", "--summary", "/dev/full"]);
    assert_eq!(full.code, Some(4), "{}", full.told());
    world.harness(&["run", "good.yaml", "--quiet", "--junit", "link.xml"]);
    assert!(
        world.path("link.xml").is_symlink()
            && std::fs::read_to_string(world.path("real.xml"))
                .unwrap()
                .contains("<testsuites")
    );
    assert!(
        !std::path::Path::new("/dev/null")
            .metadata()
            .unwrap()
            .is_file()
    );
}

#[test]
fn the_error_for_a_missing_device_profile_lists_the_existing_ones() {
    let world = World::without_gpu().holding(&[("good.yaml", GOOD)]);
    let run = || {
        world
            .harness(&[
                "run",
                "good.yaml",
                "--device",
                "sim",
                "--device-profile",
                "scenarios/devices/typo.yaml",
            ])
            .told()
    };
    let none = run();
    fs::create_dir_all(world.path("scenarios/devices")).unwrap();
    for name in ["nvidia-a100.yaml", "README.md", "h200-node7.yaml"] {
        fs::write(world.path("scenarios/devices").join(name), "").unwrap();
    }
    assert_contains(&none, &["exit: 2", "scenarios/devices/typo.yaml"]);
    let told = run();
    assert_contains(&told, &["exit: 2", "nvidia-a100.yaml", "h200-node7.yaml"]);
    assert!(!told.contains("README"), "{told}");
}

/// The exit codes of the program if nothing reads its messages: with a closed pipe, and on a full
/// disk.
fn unread(command: impl Fn() -> Command) -> [Option<i32>; 2] {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    [Stdio::from(writer), Stdio::from(full)].map(|err| {
        command()
            .stdout(Stdio::null())
            .stderr(err)
            .status()
            .unwrap()
            .code()
    })
}

#[test]
fn unread_messages_change_neither_the_work_nor_the_exit_code() {
    let suite = "about: Times.\nneeds: { memory: 1GiB }\nbudget: 1ms\narms: [caching]\ntime: \
         [latency: { sizes: [2MiB] }]\n";
    let world = World::without_gpu().holding(&[
        ("good.yaml", GOOD),
        ("cut.yaml", CUT),
        ("suite.yaml", suite),
        ("job.trace", TRACE),
    ]);
    let commands: [(&[&str], i32); 7] = [
        (&["run", "good.yaml", "--report", "prep"], 0),
        (
            &[
                "run",
                "cut.yaml",
                "--no-report",
                "--alloc-conf",
                "max_split_size_mb:100",
            ],
            1,
        ),
        (&["run", "nothing.yaml"], 2),
        (
            &[
                "run",
                "good.yaml",
                "--format",
                "json",
                "--device",
                "sim",
                "--report",
                "json",
            ],
            0,
        ),
        (
            &[
                "bench",
                "suite.yaml",
                "--format",
                "json",
                "--report",
                "bench",
            ],
            0,
        ),
        (
            &[
                "replay",
                "job.trace",
                "--memory",
                "1GiB",
                "--memory-summary",
            ],
            0,
        ),
        (&["run", "--no-such-option"], 2),
    ];
    for (arguments, code) in commands {
        assert_eq!(
            unread(|| world.command(arguments)),
            [Some(code); 2],
            "{arguments:?}"
        );
    }
    for report in ["prep/report.md", "json/report.md", "bench/report.md"] {
        assert!(world.path(report).is_file(), "{report}");
    }
}

#[test]
fn the_times_of_a_trace_may_have_no_reader() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let mut command = world.command(&["replay", "job.trace", "--memory", "1GiB", "--bench", "1"]);
    let output = command.stdout(writer).output().unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap().as_str()
        ),
        (Some(0), "")
    );
}

#[test]
fn the_command_that_reproduces_a_run_is_quoted_for_a_shell() {
    let world = World::without_gpu();
    let folder = world.path("d one's");
    fs::create_dir_all(&folder).unwrap();
    fs::write(
        folder.join("job $x.yaml"),
        with_step("expect: reserved_bytes.all.current == 1MiB"),
    )
    .unwrap();
    let suite = "about: Times.\nneeds: { memory: 1GiB }\nbudget: 1ms\narms: [caching]\ntime: \
         [latency: { sizes: [2MiB] }]\n";
    fs::write(folder.join("a suite.yaml"), suite).unwrap();
    let always = ["--device", "sim", "--no-report"];
    let failed = world.harness(&[&["run", "d one's/job $x.yaml"], &always[..]].concat());
    let reproduce = failed
        .out
        .lines()
        .find_map(|line| line.strip_prefix("reproduce: "))
        .unwrap();
    let again = world.shell(&format!("{reproduce} --no-report"));
    assert_eq!(
        (again.code, &again.out),
        (Some(1), &failed.out),
        "{reproduce}\n{}",
        again.err
    );
    let night = world.harness(
        &[
            &["bench", "d one's/a suite.yaml", "--format", "json"],
            &always[..],
        ]
        .concat(),
    );
    let night: Value = serde_json::from_str(&night.out)
        .unwrap_or_else(|error| panic!("{error}\n{}", night.told()));
    let reproduce = night["reproduce"].as_str().unwrap();
    let again = world.shell(&format!("{reproduce} --no-report --quiet"));
    assert_eq!(again.code, Some(0), "{reproduce}\n{}", again.told());
}

#[test]
fn an_empty_trace_and_too_little_memory_are_refused_by_a_replay() {
    let world = World::without_gpu().holding(&[
        ("empty.trace", ""),
        ("comment.trace", "# nothing\n\n"),
        ("job.trace", TRACE),
    ]);
    let commands: [&[&str]; 5] = [
        &["empty.trace", "--memory", "1GiB"],
        &["comment.trace", "--memory", "1GiB", "--bench", "3"],
        &["job.trace", "--memory", "80"],
        &["job.trace", "--memory", "80", "--bench", "3"],
        &["job.trace", "--memory", "2PiB"],
    ];
    for arguments in commands {
        let about = if arguments[2] == "1GiB" {
            arguments[0]
        } else {
            "--memory"
        };
        assert_contains(
            &world.harness(&[&["replay"], arguments].concat()).told(),
            &["exit: 2", about],
        );
    }
}

/// A trace with two streams of these numbers.
fn trace_of_streams(one: u32, other: u32) -> String {
    format!(
        "a 1 3000000 {other}\na 2 1000 {one}\nr 2 {other}\na 3 30000000 0\nf 2\ns {other}\na 4 \
         1000 {one}\nd\n"
    )
}

#[test]
fn streams_may_have_any_numbers_in_a_trace() {
    let high = trace_of_streams(7, 3_000_000_000);
    let world = World::without_gpu().holding(&[
        ("low.trace", &trace_of_streams(1, 2)),
        ("high.trace", &high),
    ]);
    let replay = |trace: &str, front: &str| {
        let ran = world.harness(&["replay", trace, "--memory", "1GiB", "--front", front]);
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
        ran.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let streams = |lines: &[String]| {
        let last: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
        last["snapshot"]
            .as_array()
            .unwrap()
            .iter()
            .map(|segment| segment[0].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    for front in ["handle", "shared"] {
        let [low, high] = [replay("low.trace", front), replay("high.trace", front)];
        assert_eq!(
            low[..low.len() - 1],
            high[..high.len() - 1],
            "the figures do not depend on the numbers"
        );
        assert_eq!(
            (streams(&low), streams(&high)),
            (vec![2, 1, 0], vec![3_000_000_000, 7, 0]),
            "reported as the trace calls them"
        );
        let bench = world.harness(&[
            "replay",
            "high.trace",
            "--memory",
            "1GiB",
            "--bench",
            "1",
            "--front",
            front,
        ]);
        assert!(
            bench
                .out
                .starts_with("8 operations per pass: 4 allocations, 4 frees, 0 out of memory"),
            "{}",
            bench.told()
        );
    }
    let (header, rows) = (
        replay("high.trace", "handle"),
        high.lines().collect::<Vec<_>>(),
    );
    let mut head: Value = serde_json::from_str(&header[0]).unwrap();
    (head["conf"], head["trace"]) = (json!(""), json!(rows));
    fs::write(
        world.path("high.jsonl"),
        format!("{head}\n{}\n", header[1..].join("\n")),
    )
    .unwrap();
    assert_eq!(
        world.harness(&["replay", "--verify", "high.jsonl"]).code,
        Some(0)
    );
}

#[test]
fn replay_prints_statistics_and_times_and_verifies_recordings() {
    let world = World::without_gpu().holding(&[("job.trace", TRACE)]);
    let (header, rows) = recording(&world);
    fs::write(
        world.path("good.jsonl"),
        format!("{header}\n{}\n", rows.join("\n")),
    )
    .unwrap();
    for command in [
        "job.trace --memory 1GiB --stats -",
        "job.trace --memory 1GiB --bench 1",
        "--verify good.jsonl",
    ] {
        let ran = world.shell(&format!("harness replay {command}"));
        assert_eq!(ran.code, Some(0), "{command}\n{}", ran.err);
    }
}

#[test]
fn settings_without_effect_are_named_for_scenarios_and_options() {
    let idle = "{ caching: { name: idle, garbage_collection_threshold: 0.6 } }";
    let scenario = GOOD.replace("direct", idle);
    let world = World::without_gpu().holding(&[("idle.yaml", &scenario), ("too.yaml", &scenario)]);
    let err = |more: &[&str]| {
        world
            .harness(
                &[
                    &[
                        "run",
                        "idle.yaml",
                        "too.yaml",
                        "--device",
                        "sim",
                        "--no-report",
                    ],
                    more,
                ]
                .concat(),
            )
            .err
    };
    let told = "garbage_collection_threshold has no effect without per_process_memory_fraction, \
         unless the program sets a fraction itself\n";
    assert_eq!(err(&[]), told, "once");
    assert_eq!(
        err(&["--alloc-conf", "garbage_collection_threshold:0.7"]),
        told
    );
    assert_eq!(
        [err(&["--allocator", "caching"]), err(&["--quiet"])],
        ["", ""],
        "that configuration does not run, or the output is quiet"
    );
}

#[test]
fn snapshots_become_one_page_for_a_browser() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../snapshot/trace/tests/snapshots");
    let [one, other] = ["protocol4.pickle", "packed.pickle.gz"]
        .map(|name| folder.join(name).display().to_string());
    let world = World::without_gpu();
    let ran = world.harness(&[
        "explain",
        &one,
        &other,
        "--format",
        "html",
        "--out",
        "memory.html",
    ]);
    assert_eq!(
        (ran.code, ran.out.as_str(), ran.err.as_str()),
        (Some(0), "", "")
    );
    let page = fs::read_to_string(world.path("memory.html")).unwrap();
    let data = page
        .split_once("id=\"data\">")
        .unwrap()
        .1
        .split_once("</script>")
        .unwrap()
        .0;
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["title"], "2 snapshots");
    let json: Value =
        serde_json::from_str(&world.harness(&["explain", &one, "--format", "json"]).out).unwrap();
    assert_eq!(data["ranks"][0]["name"], json!(one));
    assert_eq!(data["ranks"][0]["device_total"], json["device_total"]);
    assert_eq!(data["ranks"][0]["headline"], json["headline"]);
    assert_eq!(
        world
            .harness(&["explain", &one, &other, "--format", "html"])
            .out,
        page,
        "standard output has the same page"
    );
}
