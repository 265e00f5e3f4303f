use std::{collections::BTreeMap, path::PathBuf};

use clap::{Args, Subcommand};
use harness_base::printable::printable;
use harness_gpu_settings::gpus::{GPUS, Gpu};
use harness_scenario::{ParameterSettings, Scenario};
use serde_json::json;
use unicode_width::UnicodeWidthStr;

use super::{Format, error::Failures, exit::Exit, inputs};

/// List scenarios: name, allocators, memory, and the first sentence of their description.
#[derive(Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  harness list gpus\n  harness list\n  harness list my-scenarios \
         --format json | jq -r '.[].path'"
)]
pub(super) struct List {
    #[command(subcommand)]
    what: Option<What>,
    /// Scenario files or folders. Of a folder, the `*.yaml` files are listed, without subfolders.
    #[arg(value_name = "PATH", default_value = inputs::CATALOGUE)]
    paths: Vec<PathBuf>,
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

#[derive(Subcommand)]
enum What {
    Gpus(Gpus),
}

/// List the GPUs that can be simulated: name, memory, and other accepted names. A unique beginning
/// of a name is accepted too, and the number alone of an RTX GPU, as in `4090`.
#[derive(Args)]
struct Gpus {
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

impl Gpus {
    fn run(&self) -> Result<Exit, Failures> {
        let document = |gpu: &Gpu| {
            let Gpu {
                name,
                device,
                memory,
                ..
            } = gpu;
            json!({ "name": name, "device": device, "memory": memory, "aliases": gpu.aliases() })
        };
        let rows = || {
            GPUS.iter().map(|gpu| {
                [
                    gpu.name.clone(),
                    gpu.device.clone(),
                    gpu.memory.to_string(),
                    gpu.aliases().join(", "),
                ]
            })
        };
        self.format
            .print(&GPUS.iter().map(document).collect::<Vec<_>>(), || {
                aligned(&rows().collect::<Vec<_>>())
            })?;
        Ok(Exit::Passed)
    }
}

impl List {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if let Some(What::Gpus(gpus)) = &self.what {
            return gpus.run();
        }
        let scenarios = inputs::load(&self.paths, &ParameterSettings::new())?;
        let documents: Vec<_> = scenarios.iter().map(document).collect();
        self.format.print(&documents, || table(&scenarios))?;
        Ok(Exit::Passed)
    }
}

fn document(scenario: &Scenario) -> serde_json::Value {
    json!({
        "name": scenario.name,
        "path": scenario.path,
        "about": scenario.about,
        "allocators": allocators(scenario),
        "memory": scenario.needs.memory,
        "parameters": scenario.parameters.iter().cloned().collect::<BTreeMap<_, _>>(),
        "tags": scenario.tags,
        "seed": scenario.seed,
        "steps": scenario.steps.len(),
    })
}

fn table(scenarios: &[Scenario]) -> String {
    let rows: Vec<[String; 4]> = scenarios
        .iter()
        .map(|scenario| {
            let memory = scenario.needs.memory.to_string();
            let cells = [
                scenario.name.clone(),
                allocators(scenario).join(", "),
                memory,
                first_sentence(&scenario.about),
            ];
            cells.map(|cell| printable(&cell).into_owned())
        })
        .collect();
    aligned(&rows)
}

fn aligned(rows: &[[String; 4]]) -> String {
    let columns: [usize; 3] = std::array::from_fn(|column| {
        rows.iter()
            .map(|row| row[column].width())
            .max()
            .unwrap_or(0)
    });
    let mut text = String::new();
    for [name, kinds, memory, about] in rows {
        let blanks = |cell: &str, column: usize| " ".repeat(columns[column] - cell.width());
        let (after_name, after_kinds, before_memory) =
            (blanks(name, 0), blanks(kinds, 1), blanks(memory, 2));
        text.push_str(&format!(
            "{name}{after_name}  {kinds}{after_kinds}  {before_memory}{memory}  {about}\n"
        ));
    }
    text
}

fn allocators(scenario: &Scenario) -> Vec<String> {
    scenario
        .allocators
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// The text up to the first full stop before a space, on one line.
pub(super) fn first_sentence(about: &str) -> String {
    let text = about.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.find(". ") {
        Some(end) => text[..=end].to_owned(),
        None => text,
    }
}
