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
        let all = |list: &Value| list.as_array().cloned().unwrap_or_default();
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
    let settings = [
        ("SLURM_SUBMIT_DIR", &*here),
        // A part of the array that is started again.
        ("SLURM_ARRAY_TASK_COUNT", "1"),
        ("SLURM_ARRAY_TASK_ID", "3"),
        ("SLURM_ARRAY_TASK_MIN", "3"),
        ("SHARDS", "4"),
        ("SNAPSHOTS", "snapshots"),
        ("HARNESS", "harness-gpu-bundle/harness"),
    ];
    let task = called(folder.path(), "fleet.sbatch", &settings);
    assert_eq!(task, "fleet snapshots --shard 3/4 --out fleet-3");
    let store = [("SNAPSHOTS", "s3://a/b"), ("OUT", "s3://a/fleet")];
    let settings = [&settings[..], &store].concat();
    let task = called(folder.path(), "fleet.sbatch", &settings);
    assert_eq!(task, "fleet s3://a/b --shard 3/4 --out s3://a/fleet-3");
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
            store[0],
            store[1],
        ],
    );
    assert_eq!(pod, task);
}

/// A list, a page and a program that stand for those of `ci/figures`: the program only runs what
/// follows `--`.
struct Figures(tempfile::TempDir);

impl Figures {
    fn new(rows: &[&str]) -> Self {
        let figures = Self(tempfile::tempdir().unwrap());
        figures.list(rows);
        figures.write(
            "figures_causes.tsv",
            "# cause\tpattern\na known cause\tknown\n",
        );
        figures.write(
            "page.md",
            "# Title\n\n<!-- begin: ci/figures writes this -->\n<!-- end -->\n\nText\n",
        );
        figures.executable(
            "harness",
            "while [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"",
        );
        figures.executable("python", "echo 2.8.0+cu128");
        figures
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.path().join(name), text).unwrap();
    }

    fn executable(&self, name: &str, script: &str) {
        self.write(name, &format!("#!/bin/sh\n{script}\n"));
        let path = self.0.path().join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn list(&self, rows: &[&str]) {
        let head = "# program\tsource\tGPU\ttorch\toptions\tcommand\tpublished";
        self.write(
            "list.tsv",
            &format!("{head}\n{}\n", rows.join("\n").replace(" | ", "\t")),
        );
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).unwrap()
    }

    /// The figure, the published and our value, and the cause, of each row of the results.
    fn results(&self) -> Vec<String> {
        let table = self.read("page.tsv");
        let rows = table.lines().skip(1);
        rows.map(|row| row.split('\t').skip(5).collect::<Vec<_>>().join(" "))
            .collect()
    }

    /// What the script prints, and whether its exit code is 0.
    fn run(&self, arguments: &[&str]) -> (String, bool) {
        let path = |name| self.0.path().join(name);
        let mut script = Command::new("python3");
        script.arg(ci().join("figures"));
        script.arg("--list").arg(path("list.tsv"));
        script.arg("--page").arg(path("page.md")).args(arguments);
        script
            .arg(path("python"))
            .env("HARNESS", path("harness"))
            .env("LIMIT", "60");
        let output = script.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (String::from_utf8(text).unwrap(), output.status.success())
    }
}

#[test]
fn a_published_figure_is_compared_in_its_unit_to_its_last_digit() {
    let row =
        |command, published| format!("mine | ours | GPU | 2.8.0 | - | {command} | {published}");
    let bytes = "echo figure peak 3318637056; echo figure peak 3318637056";
    let ranks = "echo figure peak 3318637056; echo figure peak 3318637568";
    for (command, published, result, succeeds) in [
        (bytes, "peak=3.091GiB", "peak 3.091GiB 3318637056 ", true),
        (
            bytes,
            "peak=3318637056",
            "peak 3318637056 3318637056 ",
            true,
        ),
        (
            bytes,
            "peak=3.092GiB",
            "peak 3.092GiB 3318637056 not known",
            false,
        ),
        (
            bytes,
            "peak=3318637057",
            "peak 3318637057 3318637056 not known",
            false,
        ),
        (
            bytes,
            "end=0.000GiB",
            "end 0.000GiB - the program does not print it",
            false,
        ),
        (
            ranks,
            "peak=3.091GiB",
            "peak 3.091GiB 3318637056 or 3318637568 not known",
            false,
        ),
        (
            "echo figure a/known=1 2MiB",
            "a/known=1=3MiB",
            "a/known=1 3MiB 2MiB a known cause",
            true,
        ),
        (
            "echo figure peak 2.0MiB; exit 3",
            "peak=2.0MiB",
            "peak 2.0MiB 2.0MiB ",
            false,
        ),
        (
            "echo ValueError: no; exit 1",
            "peak=1MiB",
            "peak 1MiB - ValueError: no",
            false,
        ),
    ] {
        let figures = Figures::new(&[&row(command, published)]);
        let (text, success) = figures.run(&[]);
        assert_eq!(
            (figures.results(), success),
            (vec![result.to_owned()], succeeds),
            "{text}"
        );
    }
}

#[test]
fn what_cannot_run_says_why_and_the_other_figures_run() {
    let figures = Figures::new(&[
        "first | someone/missing@abc | GPU | 2.8.0 | - | echo figure peak 1 | peak=1",
        "second | ours | GPU | 2.4.1 | - | echo figure peak 1 | peak=1",
        "third | ours | GPU | 2.8.0 | - | echo figure peak 1 | peak=1 other=2furlongs",
    ]);
    let folder = figures.0.path().to_str().unwrap();
    let (text, _) = figures.run(&["--repositories", folder]);
    assert!(
        text.contains(&format!(
            "not run: 1 figures: no repository: git clone https://github.com/someone/missing \
             {folder}/someone/missing\nnot run: 1 figures: no PYTHON with torch 2.4.1\n"
        )),
        "{text}"
    );
    let unit = "known are bytes without a unit, KiB, MiB, GiB, kB, MB, GB";
    let expected = [
        "peak 1 1 ".to_owned(),
        format!("other 2furlongs - unknown unit of 2furlongs; {unit}"),
    ];
    assert_eq!(figures.results(), expected);

    figures.list(&["mine | ours | GPU | 2.8.0 | - | true"]);
    let (text, success) = figures.run(&[]);
    assert!(!success);
    assert!(
        text.contains("list.tsv:2: 6 cells instead of 7, separated by tabs"),
        "{text}"
    );
}

#[test]
fn only_new_and_changed_rows_run_and_the_page_has_their_counts() {
    let row = |name, command| format!("{name} | ours | GPU | 2.8.0 | - | {command} | {name}=1MiB");
    let [first, second] = [
        row(
            "peak_allocated",
            "echo ran >> log; echo figure peak_allocated 1MiB",
        ),
        row("peak_reserved", "echo figure peak_reserved 2MiB"),
    ];
    let figures = Figures::new(&[&first, &second]);
    let folder = figures.0.path().to_str().unwrap();
    let log = format!("{folder}/log");
    figures.list(&[&first.replace("log", &log), &second]);
    assert!(figures.run(&["--shard", "1/2"]).1);
    assert_eq!(figures.results(), ["peak_allocated 1MiB 1MiB "]);
    assert!(!figures.run(&[]).1);
    assert_eq!(figures.read("log"), "ran\n", "it has a result");
    let page = figures.read("page.md");
    assert!(
        page.starts_with("# Title\n\n") && page.ends_with("\n\nText\n"),
        "{page}"
    );
    assert!(
        page.contains("\n| ours | GPU | 2 | 2 | 1 of 1 | 0 of 1 |  |\n"),
        "{page}"
    );
    assert!(page.contains("\n| not known | ours | 1 |\n"), "{page}");
    assert!(
        figures
            .read("page.svg")
            .contains("2 peaks of real GPUs: 1 differences are zero")
    );

    figures.list(&[
        &first.replace("log", &log).replace("=1MiB", "=3MiB"),
        &second,
    ]);
    figures.run(&[]);
    let results = figures.results();
    assert_eq!(results[0], "peak_allocated 3MiB 1MiB not known");
    assert_eq!(figures.read("log"), "ran\n", "the program did not change");
    figures.run(&["--again"]);
    assert_eq!(figures.read("log"), "ran\nran\n");
}

/// The committed page is the one that `ci/figures` writes from the committed results.
#[test]
fn the_page_of_real_figures_has_the_counts_of_its_results_and_each_result_its_row() {
    let book = ci().join("../harness/book/src");
    let figures = Figures::new(&[]);
    for name in ["figures.tsv", "figures_causes.tsv"] {
        figures.write(name, &fs::read_to_string(ci().join(name)).unwrap());
    }
    for name in ["real-figures.md", "real-figures.tsv", "real-figures.svg"] {
        figures.write(name, &fs::read_to_string(book.join(name)).unwrap());
    }
    let folder = figures.0.path();
    let mut script = Command::new("python3");
    script.arg(ci().join("figures"));
    script.arg("--list").arg(folder.join("figures.tsv"));
    script.arg("--page").arg(folder.join("real-figures.md"));
    assert!(script.status().unwrap().success());
    for name in ["real-figures.md", "real-figures.tsv", "real-figures.svg"] {
        let committed = fs::read_to_string(book.join(name)).unwrap();
        assert!(figures.read(name) == committed, "{name}: run `ci/figures`");
    }
    assert!(figures.read("real-figures.tsv").len() < 300_000);
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
