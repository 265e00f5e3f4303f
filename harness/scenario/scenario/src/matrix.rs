use std::collections::BTreeMap;

use harness_language::located::{Located, Tree};
use harness_language::{error::Problem, text::NameText};

use crate::checker::{Parameters, constant, has_no_meaning};

pub const MAX_POINTS: usize = 256;

/// Values that the user sets, by parameter: `--set batch=96`.
pub type ParameterSettings = BTreeMap<String, String>;

#[derive(Clone, Debug, Default)]
pub(crate) struct Point {
    pub(crate) values: Parameters,
    pub(crate) texts: Vec<(String, String)>,
}

/// All points in the order of the file. The last parameter changes fastest. A parameter in
/// `settings` has only that value.
pub(crate) fn points(
    given: Option<&Located<Tree>>,
    settings: &ParameterSettings,
    source: &str,
) -> Result<Vec<Point>, Problem> {
    let Some(given) = given else {
        return Ok(vec![Point::default()]);
    };
    let entries = match &given.value {
        Tree::Map(entries) if !entries.is_empty() => entries,
        _ => return Err(Problem::new(given.at, "`matrix` is empty").help(FORMS)),
    };
    let mut points = vec![Point::default()];
    for (key, list) in entries {
        let name = parameter(key)?;
        let texts = match settings.get(name) {
            Some(text) => vec![Located {
                value: text.clone(),
                ..key.clone()
            }],
            None => list
                .texts()
                .filter(|texts| !texts.is_empty())
                .ok_or_else(|| {
                    Problem::new(list.at, format!("`{name}` has no values")).help(FORMS)
                })?,
        };
        if points.len() * texts.len() > MAX_POINTS {
            let message = format!("the matrix has more than {MAX_POINTS} points");
            return Err(Problem::new(key.at, message)
                .help("use fewer values, or set some with `--set NAME=VALUE`"));
        }
        let mut next = Vec::new();
        for point in &points {
            for text in &texts {
                let value =
                    constant(text, &Parameters::new(), source).map_err(|problem| match settings
                        .contains_key(name)
                    {
                        true => problem.see(key.at, format!("set to `{}`", text.value)),
                        false => problem,
                    })?;
                let mut point = point.clone();
                point.values.insert(name.to_owned(), value);
                point.texts.push((name.to_owned(), text.value.clone()));
                next.push(point);
            }
        }
        points = next;
    }
    Ok(points)
}

const FORMS: &str = "as in `matrix: { batch: [64, 128], memory: [1GiB, 2GiB] }`";

fn parameter(key: &Located<String>) -> Result<&str, Problem> {
    has_no_meaning(&NameText(key.clone()), "choose another name")?;
    Ok(&key.value)
}
