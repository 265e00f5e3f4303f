//! `claim:` of a scenario: a statement about GPU memory, and figures that support or refute it.

use harness_language::error::{Problem, named};
use harness_language::located::{Entries, Located, Position};
use harness_language::schema::JsonSchema;
use harness_record::claim::{Claim, ClaimVerdict};
use serde::Deserialize;

use crate::{checker::Checker, metric::Expression};

/// A figure of a claim, evaluated after the last step. At least one of the two formulas exists.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    pub name: String,
    /// The formula for a PyTorch program.
    pub pytorch: Option<Expression>,
    pub harness: Option<Expression>,
}

/// A statement about GPU memory, a verdict, and figures.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "claim")]
pub(crate) struct ClaimWire {
    /// The statement, in one sentence.
    says: Located<String>,
    /// The source of the statement: a URL or a title.
    source: Option<String>,
    /// The verdict that the expectations support: `holds`, `holds_with_conditions`, `does_not_hold`
    /// or `cannot_be_tested`.
    verdict: Located<String>,
    /// The reason and the conditions. Required unless the verdict is `holds`.
    because: Option<String>,
    /// Figures by name, as in `{ reserved after del: { pytorch: program.reserved, harness: reserved
    /// } }`. They are formulas, evaluated after the last step: `pytorch` for an `exec` step,
    /// `harness` for the scenario's own steps.
    figures: Option<Entries<FigureWire>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "claim_figure")]
pub(crate) struct FigureWire {
    /// A formula of a PyTorch program's figures.
    pytorch: Option<Located<String>>,
    /// A formula of the scenario's own figures.
    harness: Option<Located<String>>,
}

impl ClaimWire {
    pub(crate) fn check(&self, checker: &Checker<'_>) -> Result<(Claim, Vec<Figure>), Problem> {
        let says = self.says.value.trim().to_owned();
        if says.is_empty() {
            return Err(Problem::new(self.says.at, "`says` is empty")
                .help("write the statement in one sentence"));
        }
        let given = &self.verdict;
        let names = ClaimVerdict::ALL.iter().map(|verdict| verdict.name());
        let find = |name: &str| {
            ClaimVerdict::ALL
                .iter()
                .copied()
                .find(|verdict| verdict.name() == name)
        };
        let verdict = named(given, ["verdict", "verdicts"], find, names)?;
        let because = self
            .because
            .as_ref()
            .map(|text| text.trim().to_owned())
            .filter(|text| !text.is_empty());
        if because.is_none() && verdict != ClaimVerdict::Holds {
            let message = format!("the verdict `{}` needs a `because`", verdict.name());
            return Err(Problem::new(given.at, message).help("write the reason, or the conditions"));
        }
        let figures = self
            .figures
            .iter()
            .flat_map(|figures| &figures.0)
            .map(|(name, figure)| {
                let formula = |text: &Option<Located<String>>| {
                    text.as_ref().map(|text| checker.formula(text)).transpose()
                };
                let figure = Figure {
                    name: name.value.clone(),
                    pytorch: formula(&figure.pytorch)?,
                    harness: formula(&figure.harness)?,
                };
                let is_empty = figure.pytorch.is_none() && figure.harness.is_none();
                if is_empty {
                    Err(empty(name.at))
                } else {
                    Ok(figure)
                }
            });
        Ok((
            Claim {
                says,
                source: self.source.clone(),
                verdict,
                because,
            },
            figures.collect::<Result<_, _>>()?,
        ))
    }
}

fn empty(at: Position) -> Problem {
    Problem::new(at, "this figure needs a formula")
        .help("as in `{ pytorch: program.reserved, harness: reserved }`; one of the two is enough")
}
