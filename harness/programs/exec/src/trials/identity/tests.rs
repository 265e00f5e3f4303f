//! Commands with files of a temporary folder, and invented variables.
#![allow(clippy::unwrap_used)]

use std::fs;

use super::*;

fn words(text: &str) -> Vec<OsString> {
    text.split('|').map(OsString::from).collect()
}

#[test]
fn the_code_and_the_configurations_that_a_command_names_have_hashes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["train.py", "plain", "run.sh", "model.yaml", "log.json"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at("tool"), "#!/here/bin/python\ncode").unwrap();
    let named = |command: &str| -> Vec<String> {
        files_of(&words(&command.replace("./", &at(""))))
            .into_keys()
            .map(|name| name.replace(&at(""), "./"))
            .collect()
    };
    for (command, files) in [
        ("python3|./train.py|--out|./log.json", &["./train.py"][..]),
        ("python3|-u|./plain|./log.json", &["./plain"]),
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
    let hash = || files_of(&words(&format!("python3|{}", at("tool"))));
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
