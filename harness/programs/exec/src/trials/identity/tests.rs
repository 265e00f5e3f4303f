//! Commands with files of a temporary folder, and invented variables.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::time::{Duration, SystemTime};

use super::*;

/// The folder of a run that begins in an hour, so all files were written before.
fn run_folder() -> tempfile::TempDir {
    let run = tempfile::tempdir().unwrap();
    fs::create_dir(run.path().join("python")).unwrap();
    fs::write(hook_script(run.path()), "").unwrap();
    set_began(run.path(), SystemTime::now() + Duration::from_secs(3600));
    run
}

fn set_began(run: &Path, began: SystemTime) {
    let hook = fs::File::options().append(true).open(hook_script(run));
    hook.unwrap().set_modified(began).unwrap();
}

fn words(text: &str) -> Vec<OsString> {
    text.split('|').map(OsString::from).collect()
}

#[test]
fn the_files_that_a_command_names_have_hashes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["train.py", "plain", "run.sh", "model.yaml", "log.json"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at("tool"), "#!/here/bin/python\ncode").unwrap();
    fs::write(at("a b.json"), "spaced").unwrap();
    let run = run_folder();
    let named = |command: &str| -> Vec<String> {
        inputs(&words(&command.replace("./", &at(""))), run.path())
            .unwrap()
            .into_keys()
            .map(|name| name.replace(&at(""), "./"))
            .collect()
    };
    for (command, files) in [
        (
            "python3|./train.py|--in|./log.json",
            &["./log.json", "./train.py"][..],
        ),
        ("python3|-u|./plain|./a b.json", &["./a b.json", "./plain"]),
        (
            "/usr/bin/env|python3|./train.py|--conf=./model.yaml",
            &["./model.yaml", "./train.py"],
        ),
        (
            "/bin/sh|-c|cd / && exec ./run.sh; ./tool",
            &["./run.sh", "./tool"],
        ),
        ("python3|-c|pass", &[]),
        ("python3|./missing.py", &[]),
    ] {
        let files: Vec<String> = files
            .iter()
            .map(|file| format!("the file {file}"))
            .collect();
        assert_eq!(named(command), files, "{command}");
    }
    let hash = || inputs(&words(&format!("python3|{}", at("tool"))), run.path()).unwrap();
    let before = hash();
    fs::write(at("tool"), "#!/there/bin/python\ncode").unwrap();
    assert_eq!(hash(), before);
    fs::write(at("tool"), "#!/there/bin/python\nother code").unwrap();
    assert_ne!(hash(), before);
    let long = |python: &str, code: &str| {
        let text = format!("#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n{code}");
        fs::write(at("tool"), text).unwrap();
        hash()
    };
    let before = long("/a b/bin/python", "code");
    assert_eq!(long("/c/bin/python", "code"), before);
    assert_ne!(long("/c/bin/python", "other code"), before);
}

#[test]
fn before_a_run_only_code_and_configurations_are_known_to_be_no_output() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["train.py", "model.yaml", "log.json", "notes"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at("tool"), "#!/bin/sh\n").unwrap();
    let command = "python3|./train.py|./model.yaml|--log=./log.json|./notes|./tool";
    let names = code(&words(&command.replace("./", &at("")))).into_keys();
    let expected = ["model.yaml", "tool", "train.py"].map(|name| format!("{FILE}{}", at(name)));
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

#[test]
fn a_file_that_changed_after_the_run_began_is_output() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("train.py"), "code").unwrap();
    fs::write(at("log.json"), "{}").unwrap();
    let command = words(&format!("python3|{}|{}", at("train.py"), at("log.json")));
    let run = run_folder();
    assert_eq!(inputs(&command, run.path()).unwrap().len(), 2);
    // A program can set the time of a modification.
    let log = fs::File::options().append(true).open(at("log.json"));
    log.unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let changed = fs::metadata(at("log.json")).unwrap();
    let changed =
        SystemTime::UNIX_EPOCH + Duration::new(changed.ctime() as u64, changed.ctime_nsec() as u32);
    set_began(run.path(), changed);
    let after: Vec<String> = inputs(&command, run.path()).unwrap().into_keys().collect();
    assert!(
        !after.contains(&format!("the file {}", at("log.json"))),
        "{after:?}"
    );
}

#[test]
fn modules_that_processes_listed_have_one_hash_for_each_content() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_folder();
    let file = |name: &str| folder.path().join(name);
    for (name, text) in [
        ("a/main.py", "a"),
        ("b/main.py", "b"),
        ("model.py", "model"),
    ] {
        fs::create_dir_all(file(name).parent().unwrap()).unwrap();
        fs::write(file(name), text).unwrap();
    }
    let list = |pid: u32, modules: &[(&str, &str)]| {
        let texts = modules.iter().flat_map(|(name, path)| {
            [
                name.as_bytes(),
                b"\0",
                file(path).as_os_str().as_bytes(),
                b"\0",
            ]
            .concat()
        });
        fs::write(
            run.path().join(format!("modules-{pid}")),
            texts.collect::<Vec<_>>(),
        )
        .unwrap();
    };
    list(7, &[("main.py", "a/main.py"), ("model", "model.py")]);
    list(8, &[("main.py", "b/main.py"), ("lost", "missing.py")]);
    let hash = |text: &str| format!("{:016x}", fnv1a(text.as_bytes()));
    let mut mains = [hash("a"), hash("b")];
    mains.sort();
    assert_eq!(
        inputs(&words("python3"), run.path()).unwrap(),
        Run::from([
            (
                "the module main.py".to_owned(),
                format!("hash {}", mains.join(" and "))
            ),
            (
                "the module model".to_owned(),
                format!("hash {}", hash("model"))
            ),
        ])
    );
}

#[test]
fn the_hash_of_a_long_file_is_that_of_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let mut content = vec![7; PART as usize + 1];
    fs::write(&path, &content).unwrap();
    assert_eq!(hash_of(&path), format!("{:016x}", fnv1a(&content)));
    content[PART as usize] = 8;
    let before = hash_of(&path);
    fs::write(&path, &content).unwrap();
    assert_ne!(hash_of(&path), before);
}

#[test]
fn variables_that_libraries_of_cuda_read_are_part_of_a_run() {
    let of = |torch: &str, has_alloc_conf: bool, names: &[&str]| -> Vec<String> {
        let all = names
            .iter()
            .map(|name| (OsString::from(name), OsString::from(format!("of {name}"))));
        let run = variables(torch, has_alloc_conf, all);
        run.into_iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect()
    };
    let read = [
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "HARNESS_BFC_CONF",
    ];
    let run = of("2.11.0", false, &read);
    assert_eq!(run.len(), read.len());
    for name in read {
        assert!(run.contains(&format!("the variable {name}: of {name}")));
    }
    let elsewhere = [
        "HOME",
        "RANK",
        "CUDA_HOME",
        "TORCH_HOME",
        "PYTORCH_KERNEL_CACHE_PATH",
        "HARNESS_CACHE",
        "HARNESS_PYTHON",
        "TF_VAR_password",
    ];
    assert_eq!(of("2.11.0", false, &elsewhere), Vec::<String>::new());
    // PyTorch takes the first of these. An option replaces all of them.
    let settings = ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];
    let effective = |name: &str| vec![format!("the settings of PyTorch's allocator: of {name}")];
    assert_eq!(
        of("2.11.0", false, &settings),
        effective("PYTORCH_HIP_ALLOC_CONF")
    );
    assert_eq!(
        of("2.9.0", false, &["PYTORCH_CUDA_ALLOC_CONF", settings[0]]),
        effective("PYTORCH_CUDA_ALLOC_CONF")
    );
    assert_eq!(of("2.9.0", false, &settings), Vec::<String>::new());
    assert_eq!(of("2.11.0", true, &settings), Vec::<String>::new());
}
