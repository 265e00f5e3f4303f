//! Fake torch installations, probed by a real interpreter, and unusable answers of interpreters.
#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::PermissionsExt as _};

use serde_json::{Value, json};

use super::*;
use crate::program::Program;

/// A folder with programs, and a torch that fails when imported.
struct TempEnvironment(tempfile::TempDir);

impl TempEnvironment {
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

    /// Writes an executable program.
    fn program(&self, name: &str, text: &str) -> OsString {
        // Another process writes the program: a concurrently forked child would inherit this
        // process's open file, and starting the program would fail with "Text file busy".
        let draft = self.write(&format!("{name}.draft"), text);
        let path = draft.with_extension("");
        assert!(
            std::process::Command::new("cp")
                .arg(&draft)
                .arg(&path)
                .status()
                .unwrap()
                .success()
        );
        fs::remove_file(&draft).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.into()
    }

    /// Writes an interpreter that prints this answer.
    fn python(&self, name: &str, answer: &Value) -> OsString {
        self.program(name, &format!("#!/bin/sh\necho noise; echo '{answer}'\n"))
    }

    fn torch(&self, folder: &str, version: &str) -> PathBuf {
        self.write(
            &format!("{folder}/torch/__init__.py"),
            "raise Exception('imported')",
        );
        self.write(&format!("{folder}/torch/version.py"), version);
        self.write(&format!("{folder}/torch/lib/libtorch_cuda.so"), "");
        let metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\nRequires-Dist: \
             numpy\nRequires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == \"Linux\"\n";
        self.write(
            &format!("{folder}/torch-2.11.0.dist-info/METADATA"),
            metadata,
        );
        self.path(folder).join("torch")
    }
}

/// The answer of an interpreter that has torch.
fn answer(torch: &Path) -> Value {
    json!({
        "python": "/usr/bin/python3", "is_64_bit": true, "machine": "x86_64",
        "has_special_rights": false, "libc": "glibc 2.36", "packages": ["/usr/lib/site-packages"],
        "torch": {
            "folder": torch, "version": "2.11.0+cu130", "cuda": "13.0", "hip": null, "requires": []
        },
    })
}

/// Returns what a command would run. A torch that cannot be used is an error.
fn program(command: &[&OsStr], python: Option<&Path>) -> Result<Program, TorchError> {
    let command: Vec<OsString> = command.iter().map(OsString::from).collect();
    let (program, unusable) = Program::find(&command, python)?;
    unusable.map_or(Ok(program), Err)
}

/// Returns the torch of a command that has one.
fn find(command: &[&OsStr]) -> Result<Torch, TorchError> {
    program(command, None).map(|program| program.torch.unwrap())
}

const VERSION: &str = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: \
     Optional[str] = '13.0'\nhip: Optional[str] = None\n";

#[test]
fn a_real_interpreter_reports_its_torch_without_importing_it() {
    if in_path(OsStr::new("python3")).is_none() {
        eprintln!("skipped: python3 is not installed");
        return;
    }
    let environment = TempEnvironment::new();
    let folder = environment.torch("site", VERSION);
    let python = environment.program(
        "bin/python3",
        &format!(
            "#!/bin/sh\nPYTHONPATH='{}' exec python3 \"$@\"\n",
            environment.path("site").display()
        ),
    );
    let script = environment.write("train.py", "import torch");
    let torch = find(&[&python, OsStr::new("-u"), script.as_os_str()]).unwrap();
    assert_eq!(
        (
            torch.folder.as_path(),
            torch.version.as_str(),
            torch.cuda,
            torch.cudnn
        ),
        (folder.as_path(), "2.11.0+cu130", Cuda::V13, Some(91_900))
    );
    // A torch next to the script takes precedence, unless an option changes that.
    let beside = environment.torch("beside", VERSION);
    let script = environment.write("beside/train.py", "import torch");
    let of = |options: &[&str]| {
        let command: Vec<&OsStr> = [python.as_os_str()]
            .into_iter()
            .chain(options.iter().map(OsStr::new))
            .chain([script.as_os_str()])
            .collect();
        find(&command).map(|torch| torch.folder)
    };
    assert_eq!(of(&[]).unwrap(), beside);
    assert_eq!(of(&["-W", "ignore", "-X", "dev"]).unwrap(), beside);
    assert_eq!(of(&["-c", "import torch"]).unwrap(), folder);
    let isolated = [&python, OsStr::new("-uI"), script.as_os_str()];
    let isolated = program(&isolated, None).unwrap();
    assert_eq!(
        isolated.torch, None,
        "an isolated interpreter ignores PYTHONPATH"
    );
}

#[test]
fn the_interpreter_comes_from_the_command_its_first_lines_or_an_argument() {
    let environment = TempEnvironment::new();
    let torch = environment.torch("site", VERSION);
    let python = environment.python("bin/python3", &answer(&torch));
    let path = python.to_str().unwrap();
    let torchrun = environment.program("bin/torchrun", &format!("#!{path}\n"));
    let long = environment.program(
        "bin/accelerate",
        &format!("#!/bin/sh\n'''exec' \"{path}\" \"$0\" \"$@\"\n' '''\n"),
    );
    let env = environment.program("bin/pytest", &format!("#!/usr/bin/env -S {path} -E\n"));
    let shell = environment.program("bin/train.sh", "#!/bin/bash\npython train.py\n");
    for command in [
        vec![&python],
        vec![&torchrun],
        vec![&long],
        vec![&env],
        vec![&shell, &torchrun],
        vec![&shell, &shell, &python],
    ] {
        let command: Vec<&OsStr> = command.into_iter().map(OsString::as_os_str).collect();
        assert_eq!(find(&command).unwrap().folder, torch, "{command:?}");
    }
    let given = program(&[&shell], Some(Path::new(path))).unwrap();
    assert_eq!(given.torch.unwrap().folder, torch);
    let other = OsString::from("/nonexistent/train");
    assert!(matches!(find(&[&other]), Err(TorchError::NoCommand { .. })));
    let script = environment.program("gpt.py", "print(1)\n");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(
        find(&[&script]),
        Err(TorchError::NotExecutable { .. })
    ));
}

#[test]
fn each_reason_why_a_program_cannot_start_has_its_own_sentence() {
    let environment = TempEnvironment::new();
    let program = |name: &str, text: &str| environment.program(name, text);
    let of = |program: &OsStr| {
        let refused = check_start(&[program.to_owned()]).unwrap_err().to_string();
        refused.replace(&environment.path("").display().to_string(), "./")
    };
    let [pipe, link] = ["pipe", "link"].map(|name| environment.path(name));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    std::os::unix::fs::symlink("gone", &link).unwrap();
    let plain = environment.write("plain.py", "print(1)");
    fs::create_dir(environment.path("folder")).unwrap();
    let moved = "#!/bin/sh\n'''exec' '/no/such/python' \"$0\" \"$@\"\n' '''\n";
    for (program, message) in [
        (
            environment.path("folder").into(),
            "cannot start `./folder`: this is a folder",
        ),
        (
            pipe.into(),
            "cannot start `./pipe`: this is a named pipe, not a file",
        ),
        (
            link.into(),
            "cannot find the program `./link`: it is a link to `gone`, which does not exist",
        ),
        (
            environment.path("gone").into(),
            "cannot find the program `./gone`: there is no such file",
        ),
        (
            plain.join("train.py").into(),
            "cannot find the program `./plain.py/train.py`: Not a directory (os error 20)",
        ),
        (
            OsString::from("no-such-program"),
            "cannot find the program `no-such-program`: nothing in PATH has that name",
        ),
        (
            OsString::from("Cargo.toml"),
            "`Cargo.toml` is a file of the current folder, but nothing in PATH has that name",
        ),
        (plain.into(), "the file `./plain.py` is not executable"),
        (
            program("old", "#!/no/such/python -u\n"),
            "the script `./old` needs `/no/such/python`, which is not an executable file",
        ),
        (
            program("moved", moved),
            "the script `./moved` needs `/no/such/python`, which is not an executable file",
        ),
        (
            program("windows", "#!/bin/sh\r\ntrue\r\n"),
            "the `#!` line of `./windows` ends with a carriage return, which the system takes for \
             a part of the interpreter's name",
        ),
    ] {
        assert_eq!(of(&program), message);
    }
    let bare = environment.path("bare.py");
    fs::rename(program("bare", "print(1)\n"), &bare).unwrap();
    assert_eq!(
        of(bare.as_os_str()),
        "the script `./bare.py` has no `#!` line, so a shell would run it, not Python"
    );
    for text in ["#!/bin/sh\n", "true\n", ""] {
        check_start(&[program("fine", text)]).unwrap();
    }
    let warning = |text| run_by_shell(&[program("script", text)]).is_some();
    assert!(warning("true\n") && !warning("#!/bin/sh\n") && !warning("\x7fELF\0"));
}

#[test]
fn cudnn_beside_torch_is_found_if_it_plans_without_a_device() {
    let environment = TempEnvironment::new();
    let python = environment.python("bin/python3", &answer(&environment.torch("site", VERSION)));
    let of = |version: Option<u32>| {
        let mut program = program(&[&python], None).unwrap();
        program.torch.as_mut().unwrap().cudnn = version;
        program.cudnn_library(Cuda::V13)
    };
    assert_eq!(of(Some(91_900)), None);
    let library = environment.write("site/nvidia/cudnn/lib/libcudnn_graph.so.9", "");
    assert_eq!(of(Some(91_900)), library.to_str().map(str::to_owned));
    assert_eq!((of(Some(90_701)), of(None)), (None, None));
}

#[test]
fn options_that_change_the_module_path_are_kept() {
    let of = |arguments: &[&str]| {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let interpreter = Interpreter::with_arguments("python".into(), &arguments);
        interpreter
            .options
            .into_iter()
            .map(|option| option.into_string().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(of(&["-I", "x.py", "-E"]), "-I");
    assert_eq!(of(&["-uSE", "-m", "x", "-s"]), "-S -E");
    assert_eq!(
        of(&[
            "-Es",
            "-W",
            "-P",
            "-Wignore",
            "-X",
            "I",
            "--check-hash-based-pycs",
            "always",
            "-P",
            "x.py"
        ]),
        "-E -s -P"
    );
    assert_eq!(of(&["-uc", "pass", "-I"]), "");
}

#[test]
fn unusable_interpreters_are_refused_with_the_reason() {
    let environment = TempEnvironment::new();
    let torch = environment.torch("site", VERSION);
    let processors = environment.torch("processors", VERSION);
    fs::remove_file(processors.join("lib/libtorch_cuda.so")).unwrap();
    let changed = |path: &str, value: Value| {
        let mut answer = answer(&torch);
        *answer.pointer_mut(path).unwrap() = value;
        answer
    };
    let cases = [
        changed("/torch/version", json!("2.3.1")),
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
    let refusals = cases.map(|answer| {
        find(&[&environment.python("bin/python3", &answer)])
            .unwrap_err()
            .to_string()
    });
    let shown = refusals
        .join("\n")
        .replace(&*environment.path("").to_string_lossy(), "…/");
    insta::assert_snapshot!(shown);
}

#[test]
fn the_error_quotes_a_failing_interpreter() {
    let environment = TempEnvironment::new();
    let failing = environment.program(
        "bin/python3",
        "#!/bin/sh\necho first >&2; echo 'no such environment' >&2; exit 3\n",
    );
    let error = find(&[&failing]).unwrap_err().to_string();
    assert!(
        error.ends_with("does not work: exit status: 3: no such environment"),
        "{error}"
    );
    let silent = environment.program("bin/python3", "#!/bin/sh\n");
    assert!(
        find(&[&silent])
            .unwrap_err()
            .to_string()
            .contains("unexpected output")
    );
}

#[test]
fn each_version_takes_its_settings_from_the_first_variable_that_it_reads() {
    let (cuda, hip, all) = (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    );
    type Pair<'a> = (&'a str, &'a str);
    let rows: [(&str, &[Pair<'_>], Option<Pair<'_>>, usize); 9] = [
        ("2.8.0", &[(cuda, "a"), (all, "b")], Some((cuda, "a")), 1),
        ("2.9.1+cu128", &[(hip, "a"), (all, "b")], None, 2),
        ("2.10.0", &[(hip, "a"), (all, "b")], Some((hip, "a")), 1),
        (
            "2.11.0+cu130",
            &[(cuda, ""), (all, "b")],
            Some((cuda, "")),
            1,
        ),
        ("2.11.0", &[(all, "b")], Some((all, "b")), 0),
        (
            "2.15.0",
            &[(cuda, "a"), (hip, "b"), (all, "c")],
            Some((cuda, "a")),
            2,
        ),
        ("2.15.0", &[(cuda, "a"), (all, "a")], Some((cuda, "a")), 0),
        ("2.15.0", &[], None, 0),
        ("unknown", &[(all, "a")], Some((all, "a")), 0),
    ];
    for (version, set, expected, ignored) in rows {
        let variable = |name: &str| {
            set.iter()
                .find(|(of, _)| *of == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let found = settings_of_allocator(version, variable);
        assert_eq!(
            found.as_ref().map(|(name, value)| (*name, value.as_str())),
            expected,
            "{version} {set:?}"
        );
        assert_eq!(
            settings_without_effect(version, variable).len(),
            ignored,
            "{version} {set:?}"
        );
    }
    let warning = settings_without_effect("2.11.0", |name| {
        (name != hip).then(|| name.len().to_string())
    });
    assert_eq!(
        warning,
        [
            "warning: PYTORCH_ALLOC_CONF=`18` has no effect: PyTorch 2.11 reads \
             PYTORCH_CUDA_ALLOC_CONF first, which is `23`"
        ]
    );
}

#[test]
fn an_interpreter_in_the_second_line_is_a_path_unless_a_shell_computes_it() {
    let of = |second: &str| {
        let start = format!("#!/bin/sh\n'''exec' {second} \"$0\" \"$@\"\n' '''\n");
        second_line(&start).and_then(quoted_path).map(str::to_owned)
    };
    let path = Some("/a b/bin/python".to_owned());
    assert_eq!(of("'/a b/bin/python'"), path);
    assert_eq!(of("\"/a b/bin/python\""), path);
    assert_eq!(of("/ab/bin/python"), Some("/ab/bin/python".to_owned()));
    let beside = "\"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python'";
    for computed in [beside, "$HOME/bin/python", "'/a'/python"] {
        assert_eq!(of(computed), None, "{computed}");
    }
}
