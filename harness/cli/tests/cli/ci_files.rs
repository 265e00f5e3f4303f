//! The files that start shards in schedulers: they must be valid for the scheduler and call
//! this program correctly.

use std::path::{Path, PathBuf};
use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};

use serde_json::Value;

fn ci() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci")
}

/// A job of Kubernetes.
fn job(name: &str) -> Value {
    let text = fs::read_to_string(ci().join("kubernetes").join(name)).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

/// People type these commands, or a machine runs them at night.
#[test]
fn budgets_in_scripts_workflows_and_pages_are_ones_that_the_command_takes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![
        root.join("README.md"),
        root.join("scenarios/bench/README.md"),
    ];
    for folder in ["ci", "ci/kubernetes", "ci/slurm", ".github/workflows"] {
        let entries = fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.is_file()));
    }
    let mut budgets = Vec::new();
    for text in files.iter().map(|path| fs::read_to_string(path).unwrap()) {
        let text = text.replace(['`', '"', '\''], " ");
        let mut words = text.split_ascii_whitespace();
        while words.by_ref().any(|word| word == "--budget") {
            budgets.extend(
                words
                    .clone()
                    .next()
                    .filter(|word| word.starts_with(|first: char| first.is_ascii_digit()))
                    .map(str::to_owned),
            );
        }
    }
    assert!(budgets.len() >= 3, "{budgets:?}");
    for budget in budgets {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        let output = command
            .args(["bench", "--list", "--budget", &budget])
            .current_dir(&root)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "--budget {budget}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn each_pod_of_a_kubernetes_job_is_one_shard() {
    for name in ["bench.yaml", "fleet.yaml"] {
        let job = job(name);
        let spec = &job["spec"];
        assert_eq!(spec["completionMode"], "Indexed", "{name}");
        assert_eq!(spec["completions"], spec["parallelism"], "{name}");
        let pod = &spec["template"]["spec"];
        // Each of the two fields requires the other:
        // https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index
        assert!(spec["backoffLimitPerIndex"].is_u64() && pod["restartPolicy"] == "Never");
        let container = &pod["containers"][0];
        let all = |list: &Value| list.as_array().unwrap().clone();
        let shards = all(&container["env"])
            .into_iter()
            .find(|env| env["name"] == "SHARDS")
            .unwrap();
        assert_eq!(shards["value"], spec["completions"].to_string(), "{name}");
        let volumes = all(&pod["volumes"]);
        assert!(
            all(&container["volumeMounts"])
                .iter()
                .all(|mount| volumes.iter().any(|volume| volume["name"] == mount["name"])),
            "{name}"
        );
    }
}

/// An unpacked bundle whose program records its arguments.
fn bundle() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("harness-gpu-bundle");
    fs::create_dir(&bundle).unwrap();
    for script in ["shard", "slurm/bench.sbatch", "slurm/fleet.sbatch"] {
        let from = ci().join(script);
        fs::copy(&from, bundle.join(from.file_name().unwrap())).unwrap();
    }
    let program = bundle.join("harness");
    fs::write(&program, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// The recorded arguments.
fn called(folder: &Path, script: &str, settings: &[(&str, &str)]) -> String {
    let output = Command::new("bash")
        .arg(folder.join("harness-gpu-bundle").join(script))
        .current_dir(folder)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .replace(&*folder.canonicalize().unwrap().to_string_lossy(), "…")
}

#[test]
fn a_kubernetes_pod_runs_the_shard_of_its_index() {
    let folder = bundle();
    let asked = called(
        folder.path(),
        "shard",
        &[
            ("SHARDS", "4"),
            ("JOB_COMPLETION_INDEX", "0"),
            ("BUDGET", "300s"),
        ],
    );
    assert_eq!(
        asked,
        "bench --device cuda --shard 1/4 --report …/shards/1-of-4 --budget 300s"
    );
}

#[test]
fn a_slurm_task_runs_the_shard_of_its_place_in_the_array() {
    let folder = bundle();
    let here = folder.path().to_string_lossy();
    let task = |id, least| {
        let settings = [
            ("SLURM_SUBMIT_DIR", &*here),
            ("SLURM_ARRAY_TASK_COUNT", "4"),
            ("SLURM_ARRAY_TASK_ID", id),
            ("SLURM_ARRAY_TASK_MIN", least),
        ];
        called(folder.path(), "bench.sbatch", &settings)
    };
    assert_eq!(
        task("4", "1"),
        "bench --device cuda --shard 4/4 --report …/shards/4-of-4"
    );
    assert_eq!(
        task("0", "0"),
        "bench --device cuda --shard 1/4 --report …/shards/1-of-4"
    );
}

/// Both schedulers divide the snapshots equally, so their shards can be merged.
#[test]
fn a_pod_and_a_task_analyse_the_shard_of_their_index() {
    let folder = bundle();
    let here = folder.path().to_string_lossy();
    let task = called(
        folder.path(),
        "fleet.sbatch",
        &[
            ("SLURM_SUBMIT_DIR", &*here),
            ("SLURM_ARRAY_TASK_COUNT", "4"),
            ("SLURM_ARRAY_TASK_ID", "5"),
            ("SLURM_ARRAY_TASK_MIN", "3"),
            ("SNAPSHOTS", "snapshots"),
            ("HARNESS", "harness-gpu-bundle/harness"),
        ],
    );
    assert_eq!(task, "fleet snapshots --shard 3/4 --out fleet-3");
    let job = job("fleet.yaml");
    let container = &job["spec"]["template"]["spec"]["containers"][0];
    let script = folder.path().join("harness-gpu-bundle/pod");
    fs::write(&script, container["args"][0].as_str().unwrap()).unwrap();
    let path = format!(
        "{here}/harness-gpu-bundle:{}",
        std::env::var("PATH").unwrap()
    );
    let pod = called(
        folder.path(),
        "pod",
        &[
            ("JOB_COMPLETION_INDEX", "2"),
            ("SHARDS", "4"),
            ("PATH", &path),
        ],
    );
    assert_eq!(pod, task);
}

/// Runs `ci/programs` on one program that prints a figure, and returns its row and whether it
/// succeeded.
fn compared(published: &str, command: &str) -> (String, bool) {
    let folder = tempfile::tempdir().unwrap();
    let (list, program) = (
        folder.path().join("list.tsv"),
        folder.path().join("harness"),
    );
    fs::write(
        &list,
        format!("# program\nmine\tGPU\t2.8.0\t-\t{command}\t{published}\n"),
    )
    .unwrap();
    fs::write(
        &program,
        "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n",
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut programs = Command::new(ci().join("programs"));
    programs
        .arg(folder.path())
        .arg("/bin/sh")
        .env("LIST", list)
        .env("HARNESS", program);
    let output = programs.output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    (
        table
            .lines()
            .last()
            .unwrap()
            .split(" | ")
            .take(6)
            .collect::<Vec<_>>()
            .join(" | "),
        output.status.success(),
    )
}

#[test]
fn a_published_figure_that_differs_or_is_missing_fails() {
    let is = |row: &str, equal| (format!("| mine | {row}"), equal);
    let bytes = "echo figure peak 3318637056; echo figure peak 3318637056";
    assert_eq!(
        compared("peak=3.091", bytes),
        is("peak 3.091 | GPU | 2.8.0 | yes | peak 3318637056", true)
    );
    assert_eq!(
        compared("peak=3318637056", bytes),
        is(
            "peak 3318637056 | GPU | 2.8.0 | yes | peak 3318637056",
            true
        )
    );
    assert_eq!(
        compared("peak=3.092", bytes),
        is("peak 3.092 | GPU | 2.8.0 | no | peak 3318637056", false)
    );
    assert_eq!(
        compared("peak=3318637057", bytes),
        is(
            "peak 3318637057 | GPU | 2.8.0 | no | peak 3318637056",
            false
        )
    );
    assert_eq!(
        compared("end=0.000", bytes),
        is("end 0.000 | GPU | 2.8.0 | no | end missing", false)
    );
    let ranks = "echo figure peak 3318637056; echo figure peak 3318637568";
    assert_eq!(
        compared("peak=3.091", ranks),
        is(
            "peak 3.091 | GPU | 2.8.0 | no | peak 3318637056 or 3318637568",
            false
        ),
        "ranks differ"
    );
    assert!(!compared("peak=3.091", "echo figure peak 3318637056; exit 3").1);
}

/// The page's figures are those that `ci/figures` printed.
#[test]
fn the_page_of_real_figures_has_each_published_figure_and_equals_signs_hold() {
    let list = fs::read_to_string(ci().join("figures.tsv")).unwrap();
    let page = fs::read_to_string(ci().join("../harness/book/src/real-figures.md")).unwrap();
    let mut figures = 0;
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let [program, gpu, torch, options, command, published] = fields[..] else {
            panic!("a row has six fields: {line}")
        };
        let begin = format!(
            "| {program} | {gpu} | {torch} | {} | ",
            published.replace(' ', ", ").replace(['=', '~'], " ")
        );
        let end = format!(" | `harness exec {options} -- {command}` |");
        let row = page
            .lines()
            .find_map(|line| line.strip_prefix(&begin)?.strip_suffix(&end));
        let here = row.unwrap_or_else(|| panic!("the page lacks {begin}…{end}"));
        let here: Vec<&str> = here.split(", ").collect();
        assert_eq!(here.len(), published.split(' ').count(), "{line}");
        for (published, here) in published.split(' ').zip(here) {
            let bytes: f64 = here.split(' ').nth(1).unwrap().parse().unwrap();
            let (name, value) = published.split_once(['=', '~']).unwrap();
            let rounded = if value.contains('.') {
                format!("{:.3}", bytes / f64::from(1 << 30))
            } else {
                bytes.to_string()
            };
            assert_eq!(
                (here.split(' ').next(), rounded == value),
                (Some(name), published.contains('=')),
                "{line}"
            );
            figures += 1;
        }
    }
    assert_eq!((list.lines().count(), figures), (123, 284));
}

#[test]
fn slurm_reads_every_setting_of_the_array_files() {
    // sbatch reads `#SBATCH` lines up to the first command:
    // https://slurm.schedmd.com/sbatch.html#SECTION_DESCRIPTION
    for name in ["bench.sbatch", "fleet.sbatch"] {
        let text = fs::read_to_string(ci().join("slurm").join(name)).unwrap();
        let first_command = text
            .lines()
            .position(|line| !line.is_empty() && !line.starts_with('#'))
            .unwrap();
        let settings: Vec<_> = text
            .lines()
            .enumerate()
            .filter(|(_, line)| line.starts_with("#SBATCH"))
            .collect();
        assert!(
            settings
                .iter()
                .all(|&(number, line)| number < first_command && line.starts_with("#SBATCH --")),
            "{name}"
        );
        assert!(
            settings
                .iter()
                .any(|(_, line)| line.starts_with("#SBATCH --array=")),
            "{name}"
        );
        assert!(text.starts_with("#!"), "{name}");
    }
}
