//! [`ConfigFile`]: a file with placeholders that the command names. Each run reads its own copy.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use harness_base::files;
use harness_exec::guardian::GuardedFile;
use harness_exec::trials::largest::{Parameter, filled_in};

use super::CliError;

pub(super) struct ConfigFile<'a> {
    path: &'a Path,
    /// Arguments may name the file in another way.
    canonical: PathBuf,
    text: String,
}

impl<'a> ConfigFile<'a> {
    /// Reads a file that contains a placeholder and that an argument of the command names.
    pub(super) fn read(
        path: &'a Path,
        command: &[OsString],
        parameters: &[Parameter],
    ) -> Result<Self, CliError> {
        let shown = path.display();
        let unusable = |error| {
            let message = format!("cannot read `--config {shown}`: {error}");
            CliError::input(message, "name a text file, such as `--config config.yaml`")
        };
        let text = files::read_to_string(path).map_err(unusable)?;
        let canonical = path.canonicalize().map_err(unusable)?;
        let file = Self {
            path,
            canonical,
            text,
        };
        if !parameters.iter().any(|parameter| file.uses(parameter)) {
            let names: Vec<String> = parameters.iter().map(Parameter::placeholder).collect();
            let names = names.join("` and `");
            return Err(CliError::input(
                format!("`--config {shown}` does not contain `{names}`"),
                "write the placeholder where the value belongs, as in `batch_size: {batch}` for \
                 `--largest batch=1..512`",
            ));
        }
        if !command
            .iter()
            .any(|argument| file.option(argument).is_some())
        {
            return Err(CliError::input(
                format!("no argument of the command is `{shown}` or ends with `={shown}`"),
                format!(
                    "name the file in the command, as in `-- python train.py --config {shown}`"
                ),
            ));
        }
        Ok(file)
    }

    pub(super) fn uses(&self, parameter: &Parameter) -> bool {
        parameter.is_in(&self.text)
    }

    /// Returns the part of an argument before the path of this file, as in `--config=config.yaml`.
    /// `None` if the argument does not name the file.
    fn option<'b>(&self, argument: &'b OsStr) -> Option<&'b str> {
        let is_here = |path: &OsStr| {
            Path::new(path)
                .canonicalize()
                .is_ok_and(|path| path == self.canonical)
        };
        if is_here(argument) {
            return Some("");
        }
        let text = argument.to_str()?;
        let (option, path) = text.split_at(text.find('=')? + 1);
        is_here(OsStr::new(path)).then_some(option)
    }

    /// Writes a copy with these values next to the file, where relative paths in it have the same
    /// meaning, and names it in the command. The copy is removed when it is dropped.
    pub(super) fn copy(
        &self,
        command: &mut [OsString],
        values: &BTreeMap<String, u64>,
    ) -> Result<GuardedFile, CliError> {
        let [stem, ending] = [self.path.file_stem(), self.path.extension()]
            .map(|part| part.unwrap_or_default().to_string_lossy());
        let folder = match self.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let unwritable = |error| {
            let message = format!(
                "cannot write a copy of `{}` next to it: {error}",
                self.path.display()
            );
            CliError::input(message, "put the file into a folder that you can write to")
        };
        // Some loaders import the file as a module, whose name has no dots.
        let suffix = match &*ending {
            "" => String::new(),
            ending => format!(".{ending}"),
        };
        let copy = GuardedFile::create(folder, &format!("{stem}_"), &suffix).map_err(unwritable)?;
        std::fs::write(copy.path(), filled_in(&self.text, values)).map_err(unwritable)?;
        for argument in command {
            if let Some(option) = self.option(argument) {
                let mut named = OsString::from(option);
                named.push(copy.path());
                *argument = named;
            }
        }
        Ok(copy)
    }
}
