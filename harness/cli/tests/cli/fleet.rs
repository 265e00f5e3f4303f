//! `harness fleet` over folders with good, broken and hostile files.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::{ffi::OsStrExt as _, fs::symlink, net::UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use serde_json::Value;
use tempfile::TempDir;

const HAS_PARQUET: bool = cfg!(feature = "parquet");
const SNAPSHOTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../snapshot/explain/tests/snapshots"
);

/// Runs `harness fleet` in this folder.
fn fleet(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_harness"))
        .arg("fleet")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn summary(folder: &Path, arguments: &[&str]) -> Value {
    let output = fleet(folder, &[arguments, &["--format", "json"]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Two ranks of a job, another job, a truncated file, and a pickle that would run a command.
fn jobs() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let jobs = folder.path().join("jobs");
    fs::create_dir_all(jobs.join("b")).unwrap();
    let snapshot = |name: &str| fs::read(Path::new(SNAPSHOTS).join(name)).unwrap();
    fs::write(
        jobs.join("a-rank0-gpu0.pickle.gz"),
        snapshot("kept-features.pickle.gz"),
    )
    .unwrap();
    fs::write(
        jobs.join("a-rank1-gpu1.pickle.gz"),
        snapshot("kept-features.pickle.gz"),
    )
    .unwrap();
    fs::write(
        jobs.join("b/rank0.pickle.gz"),
        snapshot("trained.pickle.gz"),
    )
    .unwrap();
    let features = snapshot("features.pickle.gz");
    fs::write(jobs.join("c.pickle.gz"), &features[..features.len() / 2]).unwrap();
    fs::write(
        jobs.join("d.pickle"),
        b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.",
    )
    .unwrap();
    let path = folder.path().to_owned();
    (folder, path)
}

fn rows(folder: &Path, out: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.join(out).join("rows.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|row: &Value| row.get("file").is_some())
        .collect()
}

#[test]
#[cfg(not(feature = "parquet"))]
fn a_build_without_parquet_names_the_builds_that_write_it() {
    let (_kept, folder) = jobs();
    let message = || String::from_utf8(fleet(&folder, &["jobs"]).stderr).unwrap();
    let first = message();
    assert!(
        first.contains("fleet.parquet is not written: this harness is built without Parquet;"),
        "{first}"
    );
    assert!(
        first.contains("`ci/install`") && first.contains("`--features parquet`"),
        "{first}"
    );
    fs::write(folder.join("fleet/fleet.parquet"), "older").unwrap();
    let second = message();
    assert!(
        second.contains("fleet.parquet is from an earlier run: "),
        "{second}"
    );
}

#[test]
fn broken_and_hostile_files_cost_one_row_each() {
    let (_kept, folder) = jobs();
    let summary = summary(&folder, &["jobs"]);
    let figures = [
        "snapshots",
        "jobs",
        "out_of_memory",
        "ended",
        "unreadable",
        "replayed",
    ]
    .map(|name| summary[name].as_u64().unwrap());
    assert_eq!(figures, [5, 4, 2, 1, 2, 2]);
    assert_eq!(
        (
            &summary["causes"][0]["cause"],
            &summary["causes"][0]["jobs"],
            &summary["causes"][0]["ranks"]
        ),
        (&"inactive_split".into(), &1.into(), &2.into())
    );
    let change = &summary["changes"][0];
    assert_eq!(
        (&change["change"], &change["prevents"]),
        (
            &"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".into(),
            &2.into()
        )
    );
    assert_eq!(summary["unreadable_because"].as_array().unwrap().len(), 2);
    let absolute = folder.join("jobs/b");
    let same = fleet(
        &folder,
        &[
            "./jobs",
            "jobs",
            absolute.to_str().unwrap(),
            "jobs/d.pickle",
            "--format",
            "json",
            "--out",
            "same",
        ],
    );
    assert_eq!(
        serde_json::from_slice::<Value>(&same.stdout).unwrap()["snapshots"],
        5,
        "each file counts once"
    );
    assert!(!folder.join("ran").exists() && folder.join("fleet/fleet.html").exists());
    let columns = fs::read(folder.join("fleet/fleet.parquet")).ok();
    assert_eq!(
        columns.map(|columns| columns.starts_with(b"PAR1")),
        HAS_PARQUET.then_some(true)
    );
}

#[test]
fn only_changed_files_are_analysed_again_and_an_unfinished_line_is_repeated() {
    let (_kept, folder) = jobs();
    let first = summary(&folder, &["jobs"]);
    let path = folder.join("fleet/rows.jsonl");
    let lines = fs::read_to_string(&path).unwrap();
    assert_eq!(
        lines.lines().count(),
        6,
        "the last line proves that the five rows are all"
    );
    // As after a kill: one row is missing, and the last one is unfinished.
    let kept: Vec<&str> = lines.lines().skip(1).take(4).collect();
    let text = kept.join("\n");
    fs::write(&path, &text[..text.len() - 10]).unwrap();
    assert_eq!(summary(&folder, &["jobs"]), first);
    assert_eq!(fs::read_to_string(&path).unwrap(), lines);
    fs::write(folder.join("jobs/d.pickle"), b"no snapshot").unwrap();
    fs::remove_file(folder.join("jobs/b/rank0.pickle.gz")).unwrap();
    assert_eq!(summary(&folder, &["jobs"])["unreadable"], 2);
    assert_eq!(rows(&folder, "fleet").len(), 4, "a removed file has no row");
    // As after a full disk or a bad copy: a line that is cut within a character, and a torn one.
    let mut bytes = b"{\"file\":\"jobs/\xc3\n\xff\xfe\n{\"file\"".to_vec();
    bytes.extend(lines.lines().next().unwrap().bytes());
    fs::write(&path, bytes).unwrap();
    assert_eq!(summary(&folder, &["jobs"])["snapshots"], 4);
}

#[test]
fn the_merged_shards_have_the_result_of_one_run() {
    let (_kept, folder) = jobs();
    let whole = summary(&folder, &["jobs"]);
    let sizes = ["1/2", "2/2"].map(|shard| {
        let out = format!("out-{}", &shard[..1]);
        summary(&folder, &["jobs", "--shard", shard, "--out", &out]);
        rows(&folder, &out).len()
    });
    assert!(
        sizes.iter().sum::<usize>() == 5 && !sizes.contains(&5),
        "{sizes:?}"
    );
    let refused = |folders: &[&str], why: &str| {
        let output = fleet(
            &folder,
            &[&["merge"], folders, &["--out", "refused"]].concat(),
        );
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(2)
                && error.contains(why)
                && !folder.join("refused").exists(),
            "{error}"
        );
    };
    refused(&["out-1"], "missing: shard 2/2");
    refused(&["out-1", "out-2", "out-2"], "shard 2/2 appears twice");
    let shard = folder.join("out-2/rows.jsonl");
    let text = fs::read_to_string(&shard).unwrap();
    fs::write(&shard, text.replacen("{\"file\"", "{\"fil\"", 1)).unwrap();
    refused(&["out-1", "out-2"], "line 1 is damaged");
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    fs::write(&shard, lines[1..].concat()).unwrap();
    refused(&["out-1", "out-2"], "rows are missing, or were changed");
    fs::write(&shard, lines[..lines.len() - 1].concat()).unwrap();
    refused(&["out-1", "out-2"], "the rows are not complete");
    summary(&folder, &["jobs", "--shard", "2/2", "--out", "out-2"]);
    assert_eq!(
        fs::read_to_string(&shard).unwrap(),
        text,
        "the same command again completes the shard"
    );
    let replaced = fleet(&folder, &["merge", "out-1", "out-2", "--out", "out-1"]);
    assert!(
        String::from_utf8_lossy(&replaced.stderr).contains("would replace the rows of this shard"),
        "{replaced:?}"
    );
    assert_eq!(
        summary(&folder, &["merge", "out-1", "out-2", "--out", "merged"]),
        whole
    );
    if HAS_PARQUET {
        assert_eq!(
            fs::read(folder.join("merged/fleet.parquet")).unwrap(),
            fs::read(folder.join("fleet/fleet.parquet")).unwrap()
        );
    }
}

#[test]
fn pipes_devices_bad_names_and_bad_folders_cost_one_row_each() {
    let (_kept, folder) = jobs();
    let jobs = folder.join("jobs");
    for name in ["pipe.pickle", "b/pipe.pkl.gz"] {
        assert!(
            Command::new("mkfifo")
                .arg(jobs.join(name))
                .status()
                .unwrap()
                .success()
        );
    }
    let _socket = UnixListener::bind(jobs.join("socket.pickle")).unwrap();
    for (target, name) in [
        ("/dev/zero", "zero.pickle"),
        ("/dev/urandom", "random.pkl"),
        ("b", "folder.pickle"),
        ("none", "dangling.pkl"),
    ] {
        symlink(target, jobs.join(name)).unwrap();
    }
    fs::create_dir(jobs.join("folder-named.pickle")).unwrap();
    fs::copy(
        jobs.join("b/rank0.pickle.gz"),
        jobs.join(OsStr::from_bytes(b"\xff.pickle.gz")),
    )
    .unwrap();
    // A path that is too long cannot be read by its name.
    let long = "l".repeat(250);
    let script =
        format!("cd jobs && for i in $(seq 20); do mkdir {long} && cd -P {long} || exit 1; done");
    assert!(
        Command::new("bash")
            .args(["-c", &script])
            .current_dir(&folder)
            .status()
            .unwrap()
            .success()
    );
    let summary = summary(&folder, &["jobs"]);
    let figures = ["snapshots", "out_of_memory", "ended", "unreadable"]
        .map(|name| summary[name].as_u64().unwrap());
    assert_eq!(figures, [14, 2, 2, 10]);
    let rows = rows(&folder, "fleet");
    let problem = |name: &str| {
        rows.iter()
            .find(|row| row["file"].as_str().unwrap().ends_with(name))
            .unwrap()["problem"]
            .clone()
    };
    for (name, why) in [
        (
            "/pipe.pickle",
            "cannot be read: this is a named pipe, not a file",
        ),
        (
            "pipe.pkl.gz",
            "cannot be read: this is a named pipe, not a file",
        ),
        (
            "socket.pickle",
            "cannot be read: this is a socket, not a file",
        ),
        (
            "zero.pickle",
            "cannot be read: this is a device, not a file",
        ),
        ("random.pkl", "cannot be read: this is a device, not a file"),
        ("folder.pickle", "cannot be read: is a directory"),
        (
            "dangling.pkl",
            "cannot be read: No such file or directory (os error 2)",
        ),
        (
            &long,
            "the folder cannot be read: File name too long (os error 36)",
        ),
    ] {
        assert_eq!(problem(name), why, "{name}");
    }
    assert_eq!(problem("/\\xff.pickle.gz"), Value::Null);
}

#[test]
fn each_job_has_a_page_that_the_table_links() {
    let (_kept, folder) = jobs();
    let output = fleet(&folder, &["jobs", "--pages"]);
    assert!(
        String::from_utf8_lossy(&output.stdout).ends_with("\npage: fleet/fleet.html\n"),
        "{output:?}"
    );
    let page = fs::read_to_string(folder.join("fleet/fleet.html")).unwrap();
    let links: BTreeSet<&str> = page
        .split("href=\"")
        .skip(1)
        .map(|link| link.split('"').next().unwrap())
        .collect();
    let titles: Vec<String> = links
        .iter()
        .map(|link| fs::read_to_string(folder.join("fleet").join(link)).unwrap())
        .map(|page| {
            page.split("<title>")
                .nth(1)
                .unwrap()
                .split("</title>")
                .next()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(
        titles,
        ["2 snapshots", "jobs/b/rank0.pickle.gz"],
        "{links:?}"
    );
    let merged = fleet(&folder, &["merge", "fleet", "--out", "merged", "--pages"]);
    assert_eq!(
        fs::read_to_string(folder.join("merged/fleet.html")).unwrap(),
        page,
        "{merged:?}"
    );
}

#[test]
fn bad_input_is_one_clear_error_and_touches_nothing() {
    let (_kept, folder) = jobs();
    fs::create_dir(folder.join("empty")).unwrap();
    assert!(fleet(&folder, &["jobs"]).status.success());
    let files = || {
        ["rows.jsonl", "fleet.html", "fleet.parquet"]
            .map(|name| fs::read(folder.join("fleet").join(name)).ok())
    };
    let before = files();
    assert!(
        Command::new("mkfifo")
            .arg(folder.join("pipe.pickle"))
            .status()
            .unwrap()
            .success()
    );
    let error = |arguments: &[&str]| {
        let output = fleet(&folder, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(files(), before);
        String::from_utf8(output.stderr).unwrap()
    };
    for path in ["nope", "jobs/nope.pickle"] {
        assert!(error(&[path]).contains(&format!("{path}: there is no such file")));
        assert!(error(&["jobs", path]).contains(&format!("{path}: there is no such file")));
    }
    let two = error(&["nope", "jobs", "empty"]);
    assert!(two.contains("nope: ") && two.contains("empty: "), "{two}");
    assert!(
        error(&["pipe.pickle"])
            .contains("pipe.pickle: cannot be read: this is a named pipe, not a file")
    );
    assert!(error(&["/dev/zero"]).contains("this is a device, not a file"));
    assert!(
        error(&["fleet/fleet.html", "pipe.pickle"])
            .contains("is not a pickle but probably a web page")
    );
    assert!(
        error(&["empty"]).contains("empty: there is no snapshot in this folder or its subfolders")
    );
    assert!(
        error(&["merge", "empty", "--out", "merged"])
            .contains("empty: there are no rows in this folder")
    );
    let out = ["jobs", "--out", "s3://bucket/fleet"];
    assert!(error(&[&out[..], &["--open"]].concat()).contains("`--out` is a URL"));
    if !cfg!(feature = "cloud") {
        let shard = ["merge", "s3://bucket/fleet-1"];
        for arguments in [&["s3://bucket/jobs"][..], &out, &shard] {
            assert!(error(arguments).contains("this harness is built without cloud storage"));
        }
    }
    assert!(!folder.join("s3:").exists());
}

/// Runs `harness fleet` on a bucket of moto, a server of S3. `HARNESS_TEST_MOTO` names a Python
/// with `pip install 'moto[server,s3]'`.
#[test]
#[cfg_attr(
    not(feature = "cloud"),
    ignore = "needs `--features cloud`, and HARNESS_TEST_MOTO"
)]
fn a_bucket_has_the_result_of_a_folder_and_the_rows_of_shards() {
    use std::io::{BufRead as _, BufReader};
    let Some(python) = env::var_os("HARNESS_TEST_MOTO") else {
        eprintln!("skipped: HARNESS_TEST_MOTO names no Python with moto");
        return;
    };
    let (_kept, folder) = jobs();
    let local = summary(&folder, &["jobs"]);
    let local_rows = rows(&folder, "fleet");
    let program = "import boto3, os, sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0)
server.start()
host, port = server.get_host_and_port()
s3 = boto3.client('s3', endpoint_url=f'http://127.0.0.1:{port}', region_name='us-east-1')
s3.create_bucket(Bucket='bucket')
for folder, _, names in os.walk('jobs'):
    for name in names:
        path = os.path.join(folder, name)
        s3.upload_file(path, 'bucket', path)
print(port, flush=True)
sys.stdin.read()";
    let keys = [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ];
    let pipe = std::process::Stdio::piped;
    let mut server = Command::new(python)
        .args(["-c", program])
        .envs(keys)
        .current_dir(&folder)
        .stdin(pipe())
        .stdout(pipe())
        .spawn()
        .unwrap();
    // moto prints other lines first.
    let port = BufReader::new(server.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().parse::<u16>().ok())
        .unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command.arg("fleet").args(arguments).envs(keys);
        command
            .args(["--format", "json"])
            .current_dir(&folder)
            .env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"))
            .output()
            .unwrap()
    };
    let found = |arguments: &[&str]| {
        let output = run(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{error}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        (found, error)
    };
    let (of_bucket, _) = found(&["s3://bucket/jobs", "--out", "of-bucket"]);
    let missing = [
        run(&["s3://no-such-bucket/jobs", "--out", "none"]),
        run(&["jobs", "--out", "s3://no-such-bucket/fleet"]),
    ];
    let shards = ["s3://bucket/out-1", "s3://bucket/out-2/"];
    for (number, out) in (1..).zip(shards) {
        let shard = format!("{number}/2");
        found(&["jobs", "--shard", &shard, "--out", out]);
    }
    // The rows are kept: the one that was there when the snapshot could be read.
    let changed = folder.join("jobs/b/rank0.pickle.gz");
    let modified = changed.metadata().unwrap().modified().unwrap();
    let length = changed.metadata().unwrap().len() as usize;
    fs::write(&changed, vec![0; length]).unwrap();
    let file = fs::File::options().append(true).open(&changed).unwrap();
    file.set_modified(modified).unwrap();
    found(&["jobs", "--shard", "1/2", "--out", shards[0]]);
    found(&["jobs", "--shard", "2/2", "--out", shards[1]]);
    let merged = "s3://bucket/merged";
    let (of_store, error) = found(&["merge", shards[0], shards[1], "--out", merged]);
    assert_eq!(error, "page: s3://bucket/merged/fleet.html\n");
    assert_eq!(of_store, local);
    found(&["merge", merged, "--out", "again"]);
    assert_eq!(rows(&folder, "again"), local_rows);
    let replaced = run(&["merge", shards[0], shards[1], "--out", "s3://bucket/out-2"]);
    drop(server.stdin.take());
    server.wait().unwrap();
    assert!(
        String::from_utf8_lossy(&replaced.stderr).contains("would replace the rows of this shard"),
        "{replaced:?}"
    );
    for name in [
        "snapshots",
        "jobs",
        "out_of_memory",
        "ended",
        "unreadable",
        "causes",
        "changes",
    ] {
        assert_eq!(of_bucket[name], local[name], "{name}");
    }
    assert_eq!(
        rows(&folder, "of-bucket")[0]["file"]
            .as_str()
            .map(|file| file.starts_with("s3://bucket/jobs/")),
        Some(true)
    );
    for missing in missing {
        let error = String::from_utf8_lossy(&missing.stderr);
        assert!(
            missing.status.code() == Some(2)
                && error.contains("s3://no-such-bucket/")
                && error.contains("AWS_ACCESS_KEY_ID"),
            "{missing:?}"
        );
    }
}
