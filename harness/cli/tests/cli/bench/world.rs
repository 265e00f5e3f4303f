//! A folder, a machine, and the command `harness bench` in them.

use std::os::unix::{fs::PermissionsExt as _, process::CommandExt};
use std::process::{Command, Stdio};
use std::{fs, path::PathBuf};

use harness_allocator::units::Bytes;
use harness_bench::record::BenchRun;
use harness_gpu_settings::settings::Settings;
use harness_staging::{Staging, strict};
use tempfile::TempDir;

/// A folder and a machine.
pub(crate) struct World {
    pub(crate) folder: TempDir,
    pub(crate) staging: Staging,
}

pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    pub(crate) fn told(&self) -> String {
        let code = self
            .code
            .map_or_else(|| "none".to_owned(), |code| code.to_string());
        format!(
            "exit: {code}\n--- stdout ---\n{}--- stderr ---\n{}",
            self.out, self.err
        )
    }
}

pub(crate) const SMALL: &str = "about: Small.
needs: { memory: 64MiB }
arms: [caching, direct]
time:
  - latency: { sizes: [1MiB, 2MiB] }
";

impl World {
    pub(crate) fn without_gpu() -> Self {
        Self {
            folder: TempDir::new().unwrap(),
            staging: Staging::without_driver().unwrap(),
        }
    }

    /// With a GPU of this much memory.
    pub(crate) fn with_gpu(memory: Bytes) -> Self {
        Self::with_driver(&Settings { memory, ..strict() })
    }

    /// With a GPU of this description.
    pub(crate) fn with_driver(config: &Settings) -> Self {
        Self {
            staging: Staging::new(config).unwrap(),
            ..Self::without_gpu()
        }
    }

    /// The same as [`World::with`], for a program.
    pub(crate) fn with_program(self, name: &str, text: &str) -> Self {
        let world = self.with(name, text);
        fs::set_permissions(world.path(name), fs::Permissions::from_mode(0o755)).unwrap();
        world
    }

    pub(crate) fn with(self, name: &str, text: &str) -> Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        self.harness(&[&["bench"], arguments].concat())
    }

    fn harness(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command
            .arg0("harness")
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        for variable in [
            "CARGO",
            "COLUMNS",
            "GITHUB_ACTIONS",
            "HARNESS_DEVICE",
            "NO_COLOR",
        ] {
            command.env_remove(variable);
        }
        self.staging.apply(&mut command);
        command
    }

    pub(crate) fn bench(&self, arguments: &[&str]) -> Ran {
        Self::ran(self.command(arguments))
    }

    pub(crate) fn report(&self, arguments: &[&str]) -> Ran {
        Self::ran(self.harness(&[&["report"], arguments].concat()))
    }

    fn ran(mut command: Command) -> Ran {
        let output = command.output().unwrap();
        Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Changes the first saved run: its date is yesterday, and no other process disturbed it,
    /// although one may today.
    pub(crate) fn rewrite_first_run(&self, change: impl FnOnce(&mut BenchRun)) {
        let folder = fs::read_dir(self.path("reports/nightly"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        let mut run: BenchRun =
            serde_json::from_str(&fs::read_to_string(folder.join("benchmark.json")).unwrap())
                .unwrap();
        run.started = "2026-11-19T02:17:00Z".to_owned();
        run.conditions.contended.clear();
        change(&mut run);
        fs::write(
            folder.join("benchmark.json"),
            serde_json::to_string(&run).unwrap(),
        )
        .unwrap();
    }

    pub(crate) fn run(&self, folder: &str) -> BenchRun {
        serde_json::from_str(&fs::read_to_string(self.path(folder).join("benchmark.json")).unwrap())
            .unwrap()
    }
}
