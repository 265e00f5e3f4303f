//! The file of `--matrix`: programs, axes, `exclude` and `include`, as in a matrix of GitHub.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use harness_allocator::hash::fnv1a;
use harness_exec::matrix::MatrixCell;
use harness_gpu_settings::gpus::Gpu;
use harness_language::error::{FileError, Problem, choices};
use harness_language::fields::version;
use harness_language::located::{Entries, Located, Position, Tree};
use harness_language::yaml::{self, Language, ONE_DOCUMENT};

const MATRIX: Language = Language {
    noun: "matrix",
    example: "runs.yaml",
    shape: SHAPE,
    required: &["programs"],
    required_by: |_| Vec::new(),
    shorter: "fewer values",
    own: &[PROGRAMS],
    foreign: &["steps"],
    other: ("a scenario", "harness run"),
    advice: ONE_DOCUMENT,
};
const SHAPE: &str =
    "as in `programs: { train: 'python train.py --batch {batch}' }` and `batch: [8, 16]`";
const PROGRAMS: &str = "programs";
const PROGRAM: &str = "program";
const VERSION: &str = "version";
const EXCLUDE: &str = "exclude";
const INCLUDE: &str = "include";
pub(super) const PYTHON: &str = "python";

/// The options of `harness exec` that may differ between rows, as names of axes.
const OPTIONS: [&str; 12] = [
    "addresses",
    "alloc_conf",
    "context_overhead",
    "cuda",
    "cudnn_workspace",
    "devices",
    "events",
    "gpu",
    "memory",
    "nccl_memory",
    "shared_memory",
    "values",
];

/// The most rows of a matrix.
const MOST_ROWS: usize = 1_000_000;

/// A run of the matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) cell: MatrixCell,
    /// Options of `harness exec`, as in `--gpu=h200`.
    pub(super) options: Vec<String>,
    pub(super) command: Vec<String>,
}

type Values = BTreeMap<String, String>;

/// A program and the words of its command.
type Command<'a> = (&'a Located<String>, Located<Vec<String>>);

/// An axis with its values, or a value of all rows.
struct Axis<'a> {
    name: &'a Located<String>,
    values: Vec<Located<String>>,
    is_list: bool,
}

/// An entry of `exclude` or `include`.
struct Rule {
    at: Position,
    values: Vec<(Located<String>, Located<String>)>,
}

struct Definition<'a> {
    programs: Vec<Command<'a>>,
    at_programs: Position,
    axes: Vec<Axis<'a>>,
    exclude: Vec<Rule>,
    include: Vec<Rule>,
}

/// The text of a file. YAML's reader turns `3.10` into 3.1 and `010` into 10.
struct Written<'a> {
    lines: Vec<&'a str>,
    /// Each number with its text, or `None` if the file has several texts of it.
    numbers: HashMap<String, Option<String>>,
}

impl<'a> Written<'a> {
    fn of(text: &'a str) -> Self {
        Self {
            lines: text.lines().collect(),
            numbers: HashMap::new(),
        }
    }

    /// Replaces numbers by their text in the file. Fails if the text of an alias is ambiguous.
    fn restore(&mut self, entries: &mut [(Located<String>, Located<Tree>)]) -> Result<(), Problem> {
        let mut values = entries.iter_mut().map(|(_, value)| value);
        values.try_for_each(|value| self.restore_one(value))
    }

    fn restore_one(&mut self, value: &mut Located<Tree>) -> Result<(), Problem> {
        match &mut value.value {
            Tree::Nothing => Ok(()),
            Tree::Many(all) => all.iter_mut().try_for_each(|value| self.restore_one(value)),
            Tree::Map(entries) => self.restore(entries),
            Tree::One(number) if number.parse::<f64>().is_err() => Ok(()),
            Tree::One(number) => {
                let text = self.text_at(value.at, number);
                let text = text.or_else(|| self.numbers.get(number).cloned().flatten());
                let Some(text) = text else {
                    let message = format!("the number `{number}` may have another text elsewhere");
                    return Err(Problem::new(value.at, message).help("write it in quotes"));
                };
                self.numbers
                    .entry(number.clone())
                    .and_modify(|known| *known = known.take().filter(|known| *known == text))
                    .or_insert_with(|| Some(text.clone()));
                *number = text;
                Ok(())
            }
        }
    }

    /// The text of a number. `None` if its position has an alias or a tag.
    fn text_at(&self, at: Position, number: &str) -> Option<String> {
        let line = self.lines.get(at.line.checked_sub(1)? as usize)?;
        let from_here = line.chars().skip(at.column.checked_sub(1)? as usize);
        let text: String = from_here.take(at.length as usize).collect();
        match text.trim_end().chars().next()? {
            '"' | '\'' | '|' | '>' => Some(number.to_owned()),
            '*' | '&' | '!' | '<' => None,
            _ => Some(text.trim_end().to_owned()),
        }
    }
}

/// Reads a matrix. `check` returns why the value of an option is invalid.
pub(super) fn read(
    path: &Path,
    check: impl Fn(&str) -> Option<String>,
) -> Result<(String, Vec<Planned>), FileError> {
    let text = yaml::read(path, &MATRIX)?;
    let rows = parse(&text, path, check)?;
    Ok((text, rows))
}

pub(super) fn parse(
    text: &str,
    path: &Path,
    check: impl Fn(&str) -> Option<String>,
) -> Result<Vec<Planned>, FileError> {
    yaml::parse::<Entries<Located<Tree>>>(text, path, &MATRIX)
        .and_then(|Entries(mut entries)| {
            Written::of(text).restore(&mut entries)?;
            let definition = Definition::new(&entries)?;
            definition.check_names()?;
            definition.check_options(check)?;
            definition.planned()
        })
        .map_err(|problem| FileError::text(problem, path, text))
}

impl<'a> Definition<'a> {
    fn new(entries: &'a [(Located<String>, Located<Tree>)]) -> Result<Self, Problem> {
        let start = Position {
            line: 1,
            column: 1,
            length: 1,
        };
        let mut definition = Self {
            programs: Vec::new(),
            at_programs: start,
            axes: Vec::new(),
            exclude: Vec::new(),
            include: Vec::new(),
        };
        for (key, value) in entries {
            match key.value.as_str() {
                VERSION => version(Some(&value.with(number(value)?)))?,
                PROGRAMS => {
                    definition.at_programs = key.at;
                    definition.programs = programs(key, value)?;
                }
                EXCLUDE => definition.exclude = rules(key, value)?,
                INCLUDE => definition.include = rules(key, value)?,
                PROGRAM => {
                    return Err(Problem::new(key.at, "`program` is no axis")
                        .help("write the programs in `programs`"));
                }
                _ => definition.axes.push(axis(key, value)?),
            }
        }
        if definition.programs.is_empty() {
            let message = format!("the field `{PROGRAMS}` is missing");
            return Err(Problem::new(start, message).help(SHAPE));
        }
        Ok(definition)
    }

    /// All keys that a row may have.
    fn names(&self) -> BTreeSet<&str> {
        let mut names: BTreeSet<&str> = [PROGRAM, PYTHON].into_iter().chain(OPTIONS).collect();
        let words = self.programs.iter().flat_map(|(_, words)| &words.value);
        names.extend(
            words
                .flat_map(|word| Placeholder::all(word))
                .filter_map(|part| match part {
                    Placeholder::Value(name) => Some(name),
                    Placeholder::Text(_) => None,
                }),
        );
        names
    }

    /// Refuses a key that changes no run, and a rule about a program or an axis that is not there.
    fn check_names(&self) -> Result<(), Problem> {
        let names = self.names();
        let unused = |name: &Located<String>| {
            let message = format!(
                "`{}` is neither an option of the runs nor used by a program",
                name.value
            );
            let help = choices(&name.value, "accepted", names.iter().copied());
            Problem::new(name.at, message).help(format!(
                "{help}; or write {{{}}} into a command",
                name.value
            ))
        };
        let in_rules = self.include.iter().flat_map(|rule| &rule.values);
        let given = self.axes.iter().map(|axis| axis.name);
        if let Some(name) = given
            .chain(in_rules.map(|(name, _)| name))
            .find(|name| !names.contains(name.value.as_str()))
        {
            return Err(unused(name));
        }
        let axes: BTreeSet<&str> = self
            .axes
            .iter()
            .map(|axis| axis.name.value.as_str())
            .collect();
        for (name, value) in self.exclude.iter().flat_map(|rule| &rule.values) {
            if name.value != PROGRAM && !axes.contains(name.value.as_str()) {
                let known = axes.iter().copied().chain([PROGRAM]);
                return Err(Problem::not_among(
                    name,
                    format!("the matrix has no axis `{}`", name.value),
                    "axes",
                    known,
                ));
            }
            self.check_program(name, value)?;
        }
        for (name, value) in self.include.iter().flat_map(|rule| &rule.values) {
            self.check_program(name, value)?;
        }
        Ok(())
    }

    fn check_program(
        &self,
        name: &Located<String>,
        value: &Located<String>,
    ) -> Result<(), Problem> {
        let mut names = self.programs.iter().map(|(name, _)| name.value.as_str());
        if name.value != PROGRAM || names.any(|name| name == value.value) {
            return Ok(());
        }
        let names = self.programs.iter().map(|(name, _)| name.value.as_str());
        let message = format!("unknown program `{}`", value.value);
        Err(Problem::not_among(value, message, PROGRAMS, names))
    }

    fn check_options(&self, check: impl Fn(&str) -> Option<String>) -> Result<(), Problem> {
        let of_axes = self
            .axes
            .iter()
            .flat_map(|axis| axis.values.iter().map(move |value| (axis.name, value)));
        let of_rules = self.include.iter().flat_map(|rule| &rule.values);
        for (name, value) in of_axes.chain(of_rules.map(|(name, value)| (name, value))) {
            let why = option(&name.value, &value.value).and_then(|option| check(&option));
            if let Some(why) = why {
                let message = format!("`{}` is no value of `{}`", value.value, name.value);
                return Err(Problem::new(value.at, message).help(why));
            }
        }
        Ok(())
    }

    /// Combines the axes in the order of the file; the last one changes fastest.
    fn planned(&self) -> Result<Vec<Planned>, Problem> {
        let lists: Vec<&Axis<'_>> = self.axes.iter().filter(|axis| axis.is_list).collect();
        let lengths = lists.iter().map(|axis| axis.values.len());
        let count = lengths.fold(self.programs.len(), usize::saturating_mul);
        if count > MOST_ROWS {
            let message = format!("the matrix has {count} rows, and the limit is {MOST_ROWS}");
            return Err(Problem::new(self.at_programs, message)
                .help("use fewer values, or several matrices"));
        }
        let mut rows: Vec<Values> = self
            .programs
            .iter()
            .map(|(name, _)| Values::from([(PROGRAM.to_owned(), name.value.clone())]))
            .collect();
        for axis in &lists {
            let with = |row: &Values, value: &Located<String>| {
                let mut row = row.clone();
                row.insert(axis.name.value.clone(), value.value.clone());
                row
            };
            let combined = rows
                .iter()
                .flat_map(|row| axis.values.iter().map(move |value| with(row, value)));
            rows = combined.collect();
        }
        self.exclude(&mut rows)?;
        self.include(&mut rows)?;
        for (axis, value) in self.constants() {
            for row in &mut rows {
                row.entry(axis.value.clone())
                    .or_insert_with(|| value.value.clone());
            }
        }
        if rows.is_empty() {
            return Err(Problem::new(self.at_programs, "the matrix has no rows")
                .help("`exclude` removes all of them: remove one of its entries"));
        }
        self.commands(rows)
    }

    /// The values that all rows have unless `include` gives another one.
    fn constants(&self) -> impl Iterator<Item = (&Located<String>, &Located<String>)> {
        let constants = self.axes.iter().filter(|axis| !axis.is_list);
        constants.filter_map(|axis| Some((axis.name, axis.values.first()?)))
    }

    fn exclude(&self, rows: &mut Vec<Values>) -> Result<(), Problem> {
        // The values of all rows are not yet in the rows.
        let constants: Values = self
            .constants()
            .map(|(name, value)| (name.value.clone(), value.value.clone()))
            .collect();
        for rule in &self.exclude {
            let before = rows.len();
            rows.retain(|row| {
                !rule.values.iter().all(|(name, value)| {
                    row.get(&name.value).or_else(|| constants.get(&name.value))
                        == Some(&value.value)
                })
            });
            if rows.len() == before {
                return Err(Problem::new(rule.at, "this excludes no row")
                    .help("correct a value, or remove the entry"));
            }
        }
        Ok(())
    }

    /// Adds values to each row whose own values they do not change, or else a row.
    fn include(&self, rows: &mut Vec<Values>) -> Result<(), Problem> {
        let lists = self.axes.iter().filter(|axis| axis.is_list);
        let own: BTreeSet<&str> = lists
            .map(|axis| axis.name.value.as_str())
            .chain([PROGRAM])
            .collect();
        let original = rows.len();
        for rule in &self.include {
            let values = || {
                rule.values
                    .iter()
                    .map(|(name, value)| (name.value.clone(), value.value.clone()))
            };
            let mut is_added = false;
            for row in &mut rows[..original] {
                let fits = rule.values.iter().all(|(name, value)| {
                    !own.contains(name.value.as_str()) || row.get(&name.value) == Some(&value.value)
                });
                if fits {
                    row.extend(values());
                    is_added = true;
                }
            }
            let names_program = || rule.values.iter().any(|(name, _)| name.value == PROGRAM);
            if !is_added && !names_program() {
                return Err(
                    Problem::new(rule.at, "this fits no row, and has no program")
                        .help("correct its values to those of other rows, or add `program: NAME`"),
                );
            }
            if !is_added {
                rows.push(values().collect());
            }
        }
        Ok(())
    }

    fn commands(&self, rows: Vec<Values>) -> Result<Vec<Planned>, Problem> {
        let mut planned: Vec<Planned> = Vec::with_capacity(rows.len());
        let mut seen: HashMap<u64, usize> = HashMap::new();
        for mut values in rows {
            let program = values.remove(PROGRAM).unwrap_or_default();
            let Some((name, words)) = self.programs.iter().find(|(name, _)| name.value == program)
            else {
                let message = format!("unknown program `{program}`");
                return Err(Problem::new(self.at_programs, message));
            };
            let cell = MatrixCell {
                program: name.value.clone(),
                values,
            };
            let filled = words.value.iter().map(|word| filled(word, &cell, words.at));
            let run = Planned {
                command: filled.collect::<Result<_, _>>()?,
                options: cell
                    .values
                    .iter()
                    .filter_map(|(name, value)| option(name, value))
                    .collect(),
                cell,
            };
            let python = run.cell.values.get(PYTHON);
            let hash = fnv1a(format!("{:?} {:?} {python:?}", run.command, run.options).as_bytes());
            match seen.entry(hash) {
                Entry::Vacant(entry) => {
                    entry.insert(planned.len());
                }
                Entry::Occupied(entry) => {
                    let other = &planned[*entry.get()].cell;
                    let message = format!("`{other}` and `{}` are the same run", run.cell);
                    return Err(Problem::new(words.at, message).help(
                        "use the differing values in the command, or exclude one of the rows",
                    ));
                }
            }
            planned.push(run);
        }
        Ok(planned)
    }
}

/// The option of `harness exec` for the value of an axis.
fn option(name: &str, value: &str) -> Option<String> {
    OPTIONS
        .contains(&name)
        .then(|| format!("--{}={value}", name.replace('_', "-")))
}

fn number(value: &Located<Tree>) -> Result<u64, Problem> {
    let text = value.text().map(|text| text.value);
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| Problem::new(value.at, "expected a number").help("as in `version: 1`"))
}

fn programs<'a>(
    key: &Located<String>,
    value: &'a Located<Tree>,
) -> Result<Vec<Command<'a>>, Problem> {
    let Tree::Map(entries) = &value.value else {
        return Err(Problem::new(key.at, "`programs` is not a map").help(SHAPE));
    };
    let program = |(name, value): &'a (Located<String>, Located<Tree>)| {
        let words: Option<Vec<String>> = match &value.value {
            Tree::One(text) if text.contains(['\'', '"', '\\']) => {
                return Err(Problem::new(
                    value.at,
                    "a command with quotes is not split into words",
                )
                .help("write its words as a list, as in `[python, -c, 'print(1)']`"));
            }
            Tree::One(text) => Some(text.split_whitespace().map(str::to_owned).collect()),
            Tree::Nothing | Tree::Many(_) | Tree::Map(_) => value
                .texts()
                .map(|texts| texts.into_iter().map(|text| text.value).collect()),
        };
        match words.filter(|words| words.first().is_some_and(|word| !word.is_empty())) {
            Some(words) => Ok((name, value.with(words))),
            None => {
                let message = format!("`{}` has no command", name.value);
                Err(Problem::new(value.at, message).help(SHAPE))
            }
        }
    };
    entries.iter().map(program).collect()
}

fn axis<'a>(key: &'a Located<String>, value: &Located<Tree>) -> Result<Axis<'a>, Problem> {
    let values = value.texts().filter(|values| !values.is_empty());
    let values = values.ok_or_else(|| {
        Problem::new(value.at, format!("`{}` has no values", key.value))
            .help("write a value for all rows, or a list, as in `batch: [8, 16]`")
    })?;
    let meaning = |value: &str| match Gpu::named(value) {
        Some(gpu) if key.value == "gpu" => gpu.name.to_string(),
        _ => value.to_owned(),
    };
    let mut seen = BTreeMap::new();
    for value in &values {
        if let Some(before) = seen.insert(meaning(&value.value), value) {
            let message = match before.value == value.value {
                true => format!("the value `{}` appears twice", value.value),
                false => format!("`{}` and `{}` are one GPU", before.value, value.value),
            };
            return Err(Problem::new(value.at, message)
                .see(before.at, "first")
                .help("remove one of them"));
        }
    }
    Ok(Axis {
        name: key,
        is_list: matches!(value.value, Tree::Many(_)),
        values,
    })
}

fn rules(key: &Located<String>, value: &Located<Tree>) -> Result<Vec<Rule>, Problem> {
    let form = |at: Position| {
        let message = format!("`{}` is not a list of maps", key.value);
        Problem::new(at, message).help("as in `- { program: train, batch: 16 }`")
    };
    let Tree::Many(entries) = &value.value else {
        return Err(form(value.at));
    };
    let rule = |entry: &Located<Tree>| match &entry.value {
        Tree::Map(fields) if !fields.is_empty() => {
            let values = fields.iter().map(|(name, value)| {
                let text = value.text().ok_or_else(|| {
                    let message = format!("`{}` is not one value", name.value);
                    Problem::new(value.at, message).help("write one entry for each value")
                })?;
                Ok((name.clone(), text))
            });
            Ok(Rule {
                at: entry.at,
                values: values.collect::<Result<_, Problem>>()?,
            })
        }
        _ => Err(form(entry.at)),
    };
    entries.iter().map(rule).collect()
}

/// A part of a word of a command.
enum Placeholder<'a> {
    Text(&'a str),
    /// The name in `{name}`.
    Value(&'a str),
}

impl<'a> Placeholder<'a> {
    /// Splits a word. `{{name}}` is the text `{name}`, and other braces are text.
    fn all(word: &'a str) -> Vec<Self> {
        let mut parts = Vec::new();
        let (mut rest, mut text) = (word, 0);
        while let Some(open) = rest[text..].find('{').map(|at| text + at) {
            let name = |from: usize| {
                let close = rest[from..].find('}')?;
                let name = &rest[from..from + close];
                let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                    && name
                        .chars()
                        .all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
                is_name.then_some(name)
            };
            let after = &rest[open + 1..];
            if let Some(name) = name(open + 1) {
                parts.extend([Self::Text(&rest[..open]), Self::Value(name)]);
                (rest, text) = (&rest[open + name.len() + 2..], 0);
            } else if let Some(name) = after.starts_with('{').then(|| name(open + 2)).flatten()
                && rest[open + 2 + name.len()..].starts_with("}}")
            {
                parts.extend([
                    Self::Text(&rest[..open]),
                    Self::Text(&rest[open + 1..open + name.len() + 3]),
                ]);
                (rest, text) = (&rest[open + name.len() + 4..], 0);
            } else {
                text = open + 1;
            }
        }
        parts.push(Self::Text(rest));
        parts
    }
}

fn filled(word: &str, cell: &MatrixCell, at: Position) -> Result<String, Problem> {
    let part = |part: Placeholder<'_>| match part {
        Placeholder::Text(text) => Ok(text.to_owned()),
        Placeholder::Value(name) => cell.values.get(name).cloned().ok_or_else(|| {
            let names = cell.values.keys().map(String::as_str);
            let message = format!("the row `{cell}` has no value for {{{name}}}");
            Problem::new(at, message).help(format!(
                "{}; {{{{{name}}}}} is the text {{{name}}}",
                choices(name, "values", names)
            ))
        }),
    };
    Placeholder::all(word).into_iter().map(part).collect()
}

#[cfg(test)]
mod tests;
