use std::path::{Path, PathBuf};

use derive_more::Display;
use harness_base::shell;
use harness_gpu_settings::gpus::{GPUS, Gpu};
use harness_gpu_settings::settings::{Fault, MOST_DEVICES};
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::cases::{Cases, DeviceKind};
use crate::{checker::Checker, metric::ReportKey};
use harness_language::error::{Problem, did_you_mean, quoted};
use harness_language::located::{Entries, Located, Position, Tree};
use harness_language::text::NameText;

const GPU: &str = "h100-80";

#[derive(Clone, Debug, PartialEq, Display)]
#[display("{}", shell::command(command))]
pub struct Exec {
    /// The program and its arguments. Never empty.
    pub command: Vec<String>,
    /// The working directory: the folder of the scenario.
    pub folder: PathBuf,
    pub env: Vec<(String, String)>,
    pub gpu: Option<&'static Gpu>,
    /// Settings of PyTorch's allocator that replace those of the scenario's allocator.
    pub alloc_conf: Option<String>,
    pub fail: Vec<Fault>,
    /// The number of GPUs.
    pub ranks: u32,
    /// Python modules that the program imports. Without one of them it cannot run.
    pub modules: Vec<String>,
    /// Skips this step, instead of the scenario, if the program cannot run.
    pub optional: bool,
    expect: Cases<ProgramEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum ProgramEnd {
    #[display("to end with exit code {_0}")]
    Code(u8),
    /// By an uncaught out-of-memory error.
    #[display("to end with an out-of-memory error")]
    Oom,
    #[display("to end in any way")]
    Any,
}

impl Exec {
    pub fn simulated_gpu(&self) -> &'static Gpu {
        self.gpu.or_else(|| Gpu::named(GPU)).unwrap_or(&GPUS[0])
    }

    pub fn expected(&self, arm: &str, device: DeviceKind) -> ProgramEnd {
        self.expect
            .of(arm, device)
            .copied()
            .unwrap_or(ProgramEnd::Any)
    }
}

/// Runs an unmodified PyTorch program on the device of the run, as `harness exec` does: on a
/// simulated GPU, or with `--device cuda:0` on that GPU with a memory limit. The working directory
/// is the folder of the scenario. The program has the settings of the scenario's allocator.
///
/// The program shares the scenario's memory with the scenario's own buffers and with programs under
/// `meanwhile`, which accepts `exec` only. Expressions can use the step's figures and the counters
/// of `torch.cuda.memory_stats()`, as in `training.allocated.peak`, summed over the program's
/// processes. This works on a GPU too. If nothing of the program uses CUDA, the scenario is
/// skipped unless the step is `optional`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "exec")]
pub(crate) struct ExecWire {
    /// A name for the step's figures.
    id: Option<NameText>,
    /// The program and its arguments. `python` is the Python in the variable HARNESS_PYTHON, or the
    /// one in PATH if the variable is not set.
    #[schemars(with = "Vec<Tree>", length(min = 1))]
    command: Located<Tree>,
    /// Environment variables of the program, as in `{ BATCH: 64 }`.
    env: Option<Entries<Located<Tree>>>,
    /// The GPU that the program sees, with the memory of the scenario. On a real GPU of another
    /// name the program cannot run. Default: `h100-80`.
    gpu: Option<Located<String>>,
    /// Settings of PyTorch's allocator in the form of PYTORCH_ALLOC_CONF. Default: those of the
    /// scenario's allocator.
    alloc_conf: Option<Located<String>>,
    /// Allocations that fail, each as CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`. The
    /// step fails if the program does not make the call.
    fail: Option<Vec<Located<String>>>,
    /// Runs the program as this many processes, each with a simulated GPU. `torchrun` starts a
    /// command such as `[python, train.py]`; other commands, such as `[python, -m,
    /// torch.distributed.run, …]`, start their processes themselves. The exit code 124 means that
    /// ranks wait forever.
    ranks: Option<Located<u32>>,
    /// Python modules that the program needs besides torch, as in `[deepspeed]`. Without one of
    /// them the program cannot run.
    #[serde(default)]
    modules: Vec<String>,
    /// Skips this step and its expectations, instead of the scenario, if the program cannot run.
    /// Default: `false`.
    #[serde(default)]
    optional: bool,
    /// How the program ends: an exit code, `oom` for an uncaught out-of-memory error, or `any`; or
    /// a map from allocators to one of these. Default: 0.
    expect: Option<ProgramEndWire>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
struct ProgramEndWire(#[schemars(schema_with = "program_ends")] Located<Tree>);

#[cfg(feature = "schema")]
fn program_ends(_: &mut SchemaGenerator) -> Schema {
    let code = json_schema!({ "type": "integer", "minimum": 0, "maximum": 255 });
    crate::ending::by_case(
        &serde_json::json!({ "anyOf": [code, { "enum": ["oom", "any"] }] }),
        &[],
    )
}

impl StepFields<Exec> for ExecWire {
    const NOT_IN_PROCESSES: Option<&'static str> =
        Some("move it out of the process: the main process starts programs");

    const EXAMPLE: &'static str = "\
- exec: { id: training, command: [python, programs/halve_batch.py], env: { BATCH: 1024 } }
- expect: [training.peak_reserved <= 4GiB, training.num_ooms == 1]
- exec: { command: [python, programs/halve_batch.py], fail: [\"any:3:2\"], expect: any }
- exec: { command: [python, claims/one_rank.py], ranks: 2, expect: any }";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::ExitCode,
        ReportKey::Processes,
        ReportKey::PeakReserved,
        ReportKey::MallocCalls,
        ReportKey::MallocFailures,
        ReportKey::InjectedFailures,
        ReportKey::FreeCalls,
        ReportKey::Ooms,
    ];

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.id.as_ref();

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Exec, Problem> {
        let is_list = matches!(self.command.value, Tree::Many(_));
        let command = self
            .command
            .texts()
            .filter(|words| is_list && !words.is_empty())
            .ok_or_else(|| {
                Problem::new(
                    self.command.at,
                    "expected a list with the program and its arguments",
                )
                .help("as in `command: [python, train.py]`")
            })?;
        let folder = checker.declared.folder;
        let folder = if folder == Path::new("") {
            Path::new(".")
        } else {
            folder
        };
        let gpu = self.gpu.as_ref().map(gpu);
        let mut command: Vec<String> = command.into_iter().map(|word| word.value).collect();
        if let Some(ranks) = &self.ranks {
            if !(1..=MOST_DEVICES).contains(&ranks.value) {
                return Err(Problem::new(
                    ranks.at,
                    format!("expected a number of ranks from 1 to {MOST_DEVICES}"),
                )
                .help("as in `ranks: 2`"));
            }
            let of_launcher = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                &ranks.value.to_string(),
            ]
            .map(str::to_owned);
            if command[0] == "python" && command.get(1).is_some_and(|word| word != "-m") {
                command.splice(1..1, of_launcher);
            }
        }
        Ok(Exec {
            command,
            ranks: self.ranks.as_ref().map_or(1, |ranks| ranks.value),
            folder: folder.to_owned(),
            env: self
                .env
                .iter()
                .flat_map(|env| &env.0)
                .map(variable)
                .collect::<Result<_, _>>()?,
            gpu: gpu.transpose()?,
            alloc_conf: self.alloc_conf.as_ref().map(|conf| conf.value.clone()),
            fail: self
                .fail
                .iter()
                .flatten()
                .map(fault)
                .collect::<Result<_, _>>()?,
            modules: self.modules.clone(),
            optional: self.optional,
            expect: match &self.expect {
                None => Cases::Always(ProgramEnd::Code(0)),
                Some(ProgramEndWire(given)) => {
                    Cases::check(given, checker, |_| false, &mut |tree, _| end(tree))?
                }
            },
        })
    }
}

fn variable((name, value): &(Located<String>, Located<Tree>)) -> Result<(String, String), Problem> {
    let wrong =
        |at: Position, message: &str| Problem::new(at, message).help("as in `env: { BATCH: 64 }`");
    if name.value.is_empty() || name.value.contains(['=', '\0']) {
        return Err(wrong(name.at, "this is not a valid name of a variable"));
    }
    let text = value
        .text()
        .filter(|text| !text.value.contains('\0'))
        .ok_or_else(|| wrong(value.at, "expected one value"))?;
    Ok((name.value.clone(), text.value))
}

fn gpu(given: &Located<String>) -> Result<&'static Gpu, Problem> {
    let unknown = || {
        Problem::new(given.at, format!("unknown GPU `{}`", given.value))
            .help(similar_gpus(&given.value))
    };
    Gpu::named(&given.value).ok_or_else(unknown)
}

/// Advice for the name of an unknown GPU: GPUs whose name contains it, otherwise similar names.
pub fn similar_gpus(name: &str) -> String {
    let plain = |text: &str| text.to_lowercase().replace([' ', '-'], "");
    let wanted = plain(name);
    let is_similar = |gpu: &&Gpu| {
        !wanted.is_empty()
            && (plain(&gpu.name).contains(&wanted) || plain(&gpu.device).contains(&wanted))
    };
    let similar: Vec<&str> = GPUS
        .iter()
        .filter(is_similar)
        .map(|gpu| &*gpu.name)
        .take(6)
        .collect();
    let hint = match &*similar {
        [] => did_you_mean(name, GPUS.iter().map(|gpu| &*gpu.name)),
        similar => format!("did you mean {}? ", quoted(similar, ", ")),
    };
    format!("{hint}`harness list gpus` lists all {}", GPUS.len())
}

fn fault(text: &Located<String>) -> Result<Fault, Problem> {
    text.value.parse().map_err(|error| {
        Problem::new(text.at, format!("{error}")).help("as in `fail: [\"cudaMalloc:40:2\"]`")
    })
}

fn end(tree: &Located<Tree>) -> Result<ProgramEnd, Problem> {
    let problem = || {
        Problem::new(tree.at, "expected how the program ends").help(
            "write an exit code from 0 to 255, `oom`, `any`, or a map from allocators to one of \
             them, as in `{ caching: oom, others: 0 }`",
        )
    };
    let text = tree.text().ok_or_else(problem)?;
    match text.value.as_str() {
        "oom" => Ok(ProgramEnd::Oom),
        "any" => Ok(ProgramEnd::Any),
        code => code.parse().map(ProgramEnd::Code).map_err(|_| problem()),
    }
}
