//! The torch of made-up environments, asked of a real interpreter; and refusals of what an interpreter may answer.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use super::*;

/// A folder with programs, and a torch that may not be imported.
struct World(tempfile::TempDir);

impl World {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// A program.
    fn program(&self, name: &str, text: &str) -> OsString {
        let path = self.write(name, text);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.into()
    }

    /// An interpreter that answers this.
    fn python(&self, name: &str, answer: &Value) -> OsString {
        self.program(name, &format!("#!/bin/sh\necho noise; echo '{answer}'\n"))
    }

    fn torch(&self, folder: &str, version: &str) -> PathBuf {
        self.write(&format!("{folder}/torch/__init__.py"), "raise Exception('imported')");
        self.write(&format!("{folder}/torch/version.py"), version);
        self.write(&format!("{folder}/torch/lib/libtorch_cuda.so"), "");
        let metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\nRequires-Dist: numpy\nRequires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == \"Linux\"\n";
        self.write(&format!("{folder}/torch-2.11.0.dist-info/METADATA"), metadata);
        self.path(folder).join("torch")
    }
}

/// What an interpreter answers that has a torch.
fn answer(torch: &Path) -> Value {
    json!({
        "python": "/usr/bin/python3", "is_64_bit": true, "machine": "x86_64", "has_special_rights": false, "libc": "glibc 2.36", "packages": ["/usr/lib/site-packages"],
        "torch": { "folder": torch, "version": "2.11.0+cu130", "cuda": "13.0", "hip": null, "requires": [] },
    })
}

fn find(command: &[&OsStr]) -> Result<Torch, TorchError> {
    Torch::find(&command.iter().map(OsString::from).collect::<Vec<_>>(), None)
}

const VERSION: &str =
    "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n";

#[test]
fn a_real_interpreter_tells_its_torch_without_importing_it() {
    if in_path(OsStr::new("python3")).is_none() {
        eprintln!("skipped: there is no python3 here");
        return;
    }
    let world = World::new();
    let folder = world.torch("site", VERSION);
    let python = world.program("bin/python3", &format!("#!/bin/sh\nPYTHONPATH='{}' exec python3 \"$@\"\n", world.path("site").display()));
    let script = world.write("train.py", "import torch");
    let torch = find(&[&python, OsStr::new("-u"), script.as_os_str()]).unwrap();
    assert_eq!(
        (torch.folder.as_path(), torch.version.as_str(), torch.cuda, torch.cudnn),
        (folder.as_path(), "2.11.0+cu130", (13, 0), Some(91_900))
    );
    // A torch beside the script goes before it, unless the interpreter is told otherwise.
    let beside = world.torch("beside", VERSION);
    let script = world.write("beside/train.py", "import torch");
    let of = |options: &[&str]| {
        let command: Vec<&OsStr> =
            [python.as_os_str()].into_iter().chain(options.iter().map(OsStr::new)).chain([script.as_os_str()]).collect();
        find(&command).map(|torch| torch.folder)
    };
    assert_eq!(of(&[]).unwrap(), beside);
    assert_eq!(of(&["-W", "ignore", "-X", "dev"]).unwrap(), beside);
    assert_eq!(of(&["-c", "import torch"]).unwrap(), folder);
    assert!(matches!(of(&["-uI"]), Err(TorchError::NoTorch { .. })), "isolated, it does not see PYTHONPATH");
}

#[test]
fn the_interpreter_is_the_command_or_its_first_lines_or_the_first_argument_that_has_one() {
    let world = World::new();
    let torch = world.torch("site", VERSION);
    let python = world.python("bin/python3", &answer(&torch));
    let path = python.to_str().unwrap();
    let torchrun = world.program("bin/torchrun", &format!("#!{path}\n"));
    let long = world.program("bin/accelerate", &format!("#!/bin/sh\n'''exec' \"{path}\" \"$0\" \"$@\"\n' '''\n"));
    let env = world.program("bin/pytest", &format!("#!/usr/bin/env -S {path} -E\n"));
    let shell = world.program("bin/train.sh", "#!/bin/bash\npython train.py\n");
    for command in [vec![&python], vec![&torchrun], vec![&long], vec![&env], vec![&shell, &torchrun], vec![&shell, &shell, &python]] {
        let command: Vec<&OsStr> = command.into_iter().map(OsString::as_os_str).collect();
        assert_eq!(find(&command).unwrap().folder, torch, "{command:?}");
    }
    assert_eq!(Torch::find(&[shell], Some(Path::new(path))).unwrap().folder, torch);
    let other = OsString::from("/nonexistent/train");
    assert!(matches!(find(&[&other]), Err(TorchError::NoCommand { .. })));
}

#[test]
fn options_that_change_where_modules_are_found_are_kept() {
    let of = |arguments: &[&str]| {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let interpreter = Interpreter::with_arguments("python".into(), &arguments);
        interpreter.options.into_iter().map(|option| option.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(&["-I", "x.py", "-E"]), "-I");
    assert_eq!(of(&["-uSE", "-m", "x", "-s"]), "-S -E");
    assert_eq!(of(&["-Es", "-W", "-P", "-Wignore", "-X", "I", "--check-hash-based-pycs", "always", "-P", "x.py"]), "-E -s -P");
    assert_eq!(of(&["-uc", "pass", "-I"]), "");
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    let world = World::new();
    let torch = world.torch("site", VERSION);
    let processors = world.torch("processors", VERSION);
    fs::remove_file(processors.join("lib/libtorch_cuda.so")).unwrap();
    let changed = |path: &str, value: Value| {
        let mut answer = answer(&torch);
        *answer.pointer_mut(path).unwrap() = value;
        answer
    };
    let cases = [
        changed("/torch", Value::Null),
        changed("/torch/version", json!("2.5.1")),
        changed("/torch/version", Value::Null),
        changed("/torch/folder", json!(processors)),
        changed("/torch/cuda", json!("11.8")),
        {
            let mut rocm = changed("/torch/cuda", Value::Null);
            rocm["torch"]["hip"] = json!("6.4");
            rocm
        },
        changed("/is_64_bit", json!(false)),
        changed("/machine", json!("aarch64")),
        changed("/libc", Value::Null),
        changed("/has_special_rights", json!(true)),
    ];
    let refusals = cases.map(|answer| find(&[&world.python("bin/python3", &answer)]).unwrap_err().to_string());
    let shown = refusals.join("\n").replace(&*world.path("").to_string_lossy(), "…/");
    insta::assert_snapshot!(shown);
}

#[test]
fn an_interpreter_that_fails_is_quoted() {
    let world = World::new();
    let failing = world.program("bin/python3", "#!/bin/sh\necho first >&2; echo 'no such environment' >&2; exit 3\n");
    let error = find(&[&failing]).unwrap_err().to_string();
    assert!(error.ends_with("does not work: exit status: 3: no such environment"), "{error}");
    let silent = world.program("bin/python3", "#!/bin/sh\n");
    assert!(find(&[&silent]).unwrap_err().to_string().contains("it answered something else"));
}
