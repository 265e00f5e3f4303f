//! Generates `harness/book/src/commands.md`, the command reference, from the definitions of the
//! commands, and `gpus.md` from the table of GPUs.

use std::{fmt::Write as _, path::Path};

use clap::{Arg, Command, CommandFactory as _};
use harness_gpu_settings::gpus::{GPUS, Gpu};

use crate::Cli;

const BEGINNING: &str = "# Command reference

This page is generated from `harness --help`. To renew it, run `UPDATE=1 cargo test -p harness --bin
harness reference`.
";

fn reference() -> String {
    let mut root = Cli::command().term_width(0).disable_help_subcommand(true);
    root.build();
    let mut page = BEGINNING.to_owned();
    for command in root
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
    {
        section(&mut page, command, "harness");
    }
    let exit_codes = root
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    write!(page, "\n## Exit codes\n\n```text\n{exit_codes}\n```\n")
        .expect("a string takes all text");
    page
}

fn section(page: &mut String, command: &Command, parent: &str) {
    let name = format!("{parent} {}", command.get_name());
    let about = command
        .get_long_about()
        .or(command.get_about())
        .map(ToString::to_string)
        .unwrap_or_default();
    let usage = command.clone().bin_name(&name).render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let level = "#".repeat(name.split(' ').count());
    write!(
        page,
        "\n{level} `{name}`\n\n{about}\n\n```text\n{usage}\n```\n"
    )
    .expect("a string takes all text");
    let shown = |argument: &&Arg| {
        !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "color")
    };
    let arguments: Vec<&Arg> = command.get_arguments().filter(shown).collect();
    if !arguments.is_empty() {
        page.push('\n');
    }
    for argument in arguments {
        page.push_str(&entry(argument));
    }
    // The exit codes are the same for all commands: they are shown once, at the end.
    let after = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let after = after.split("\n\nExit codes:").next().unwrap_or_default();
    if !after.is_empty() {
        write!(page, "\n```text\n{after}\n```\n").expect("a string takes all text");
    }
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        section(page, sub, &name);
    }
}

/// One argument as an item of a list.
fn entry(argument: &Arg) -> String {
    let help = argument
        .get_long_help()
        .or(argument.get_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    let values: Vec<String> =
        if argument.is_hide_possible_values_set() || !argument.get_action().takes_values() {
            Vec::new()
        } else {
            argument
                .get_possible_values()
                .iter()
                .map(|value| format!("`{}`", value.get_name()))
                .collect()
        };
    let values = if values.is_empty() {
        String::new()
    } else {
        format!(" Values: {}.", values.join(", "))
    };
    let defaults: Vec<String> = argument
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    let has_default =
        argument.get_action().takes_values() && defaults.iter().any(|value| !value.is_empty());
    let default = if has_default {
        format!(" Default: `{}`.", defaults.join(" "))
    } else {
        String::new()
    };
    let help = help
        .lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n  ")
        .replace("\n  \n", "\n\n");
    // `<` would begin an HTML tag outside of code.
    format!(
        "- `{argument}`: {}{values}{default}\n",
        help.replace('<', "&lt;")
    )
}

const GPU_PAGE: &str = "# GPUs

This page is generated from `harness/gpu/settings/src/gpus.tsv`. To renew it, run `UPDATE=1 cargo
test -p harness --bin harness reference`.

`harness exec --gpu NAME`, `gpu: NAME` in an `exec` step, and `--device-profile NAME` simulate these
GPUs:

```
harness exec --gpu rtx4090-24 -- python train.py
harness run my.yaml --device sim --device-profile a100-40-2g.10gb
```

The memory is what CUDA reports on Linux (`torch.cuda.mem_get_info()`). It is less than the total of
`nvidia-smi`, and other driver versions report slightly different amounts: `--memory` overrides it.
The last column is the source of the memory; *derived* figures are not measured. The table lacks
GPUs without a published figure, such as B300 and the MIG instances of a B200.

GB10 and Jetson GPUs [share the host's memory](pytorch.md#gpus-that-share-the-hosts-memory).

[Functions from all parts of PyTorch](../../../harness/cli/tests/programs/functions.py) run on each
GPU with PyTorch 2.6, 2.9, 2.11 and 2.15, except for what PyTorch itself refuses: flash attention
before capability 8.0, and with 2.6 after 9.0; FP8 matrix products before 8.9; and, from 2.11 on,
cuDNN before 7.5. If a version of PyTorch has no kernels for a GPU, it prints a warning. The
simulated run continues; on the real GPU, kernels fail.

```
harness exec --values cpu --gpu t4-16 -- python harness/cli/tests/programs/functions.py
```

## Your own GPU

`--gpu my-gpu.yaml` and `--device-profile my-gpu.yaml` take a file:

";

fn gpu_page() -> String {
    let example = include_str!("../../../../scenarios/devices/my-gpu.yaml");
    let mut page = format!("{GPU_PAGE}```yaml\n{example}```\n\n## Table\n\n");
    page.push_str(
        "| name | GPU | memory in bytes | compute capability | multiprocessors | L2 in \
         MiB | source of the memory |\n|---|---|---:|---:|---:|---:|---|\n",
    );
    for gpu in GPUS.iter() {
        let Gpu {
            name,
            device,
            memory,
            capability: (major, minor),
            multiprocessors,
            l2_cache,
            source,
            ..
        } = gpu;
        let l2 = f64::from(*l2_cache) / f64::from(1 << 20);
        writeln!(
            page,
            "| `{name}` | {device} | {} | {major}.{minor} | {multiprocessors} | {l2} | {source} |",
            memory.0
        )
        .expect("a string takes all text");
    }
    page
}

fn assert_current(file: &str, page: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../book/src")
        .join(file);
    if std::env::var_os("UPDATE").is_some_and(|update| update == "1") {
        std::fs::write(&path, page).expect("the page can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == page,
        "run `UPDATE=1 cargo test -p harness --bin harness reference`, and commit {}",
        path.display()
    );
}

#[test]
fn the_command_reference_is_current() {
    assert_current("commands.md", &reference());
}

#[test]
fn the_page_of_gpus_is_current() {
    assert_current("gpus.md", &gpu_page());
}
