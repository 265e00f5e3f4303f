//! `claim:` of a scenario: what is said of memory on GPUs, and the figures that show whether it is true.

use harness_language::error::{Problem, choices};
use harness_language::located::{Entries, Located, Position};
use harness_record::claim::{Claim, ClaimVerdict};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use crate::metric::Expression;

/// A figure of a claim, taken behind the last step: by a PyTorch program, by the scenario's own steps, or by both.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Of what.
    pub name: String,
    /// The figure of a PyTorch program.
    pub pytorch: Option<Expression>,
    /// That of the scenario's own steps.
    pub harness: Option<Expression>,
}

/// What somebody says of memory, whether it is true, and the figures that show it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "claim")]
pub(crate) struct ClaimWire {
    /// The claim, in a sentence.
    says: Located<String>,
    /// Where it is made: a URL, or a title.
    source: Option<String>,
    /// `holds`, `holds_with_conditions`, `does_not_hold` or `cannot_be_tested`: what the expectations of the scenario show.
    #[schemars(with = "String")]
    verdict: Located<String>,
    /// Why, and under which conditions: needed with every verdict but `holds`.
    because: Option<String>,
    /// Figures by name, as in `{ reserved after del: { pytorch: program.reserved, harness: reserved } }`: formulas, taken behind the last step. `pytorch` is
    /// that of an `exec` step, `harness` that of the scenario's own steps.
    #[schemars(with = "Option<std::collections::BTreeMap<String, FigureWire>>")]
    figures: Option<Entries<FigureWire>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "claim_figure")]
pub(crate) struct FigureWire {
    /// A formula of figures of a PyTorch program.
    #[schemars(with = "Option<String>")]
    pytorch: Option<Located<String>>,
    /// A formula of the scenario's own figures.
    #[schemars(with = "Option<String>")]
    harness: Option<Located<String>>,
}

impl ClaimWire {
    /// The claim, and its figures. All steps have been checked before.
    pub(crate) fn check(&self, checker: &Checker<'_>) -> Result<(Claim, Vec<Figure>), Problem> {
        let says = self.says.value.trim().to_owned();
        if says.is_empty() {
            return Err(Problem::new(self.says.position(), "the claim is empty").help("say what is claimed in a sentence"));
        }
        let verdict = ClaimVerdict::ALL.into_iter().find(|verdict| verdict.name() == self.verdict.value).ok_or_else(|| {
            Problem::new(self.verdict.position(), format!("there is no verdict `{}`", self.verdict.value)).help(choices(
                &self.verdict.value,
                "verdicts",
                ClaimVerdict::ALL.iter().map(|verdict| verdict.name()),
            ))
        })?;
        let because = self.because.as_ref().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        if because.is_none() && verdict != ClaimVerdict::Holds {
            let message = format!("a claim that `{}` needs a `because`", verdict.name());
            return Err(Problem::new(self.verdict.position(), message).help("say why, or under which conditions"));
        }
        let figures = self.figures.iter().flat_map(|figures| &figures.0).map(|(name, figure)| {
            let formula = |text: &Option<Located<String>>| text.as_ref().map(|text| checker.formula(text)).transpose();
            let figure = Figure { name: name.value.clone(), pytorch: formula(&figure.pytorch)?, harness: formula(&figure.harness)? };
            let is_empty = figure.pytorch.is_none() && figure.harness.is_none();
            if is_empty { Err(empty(name.position())) } else { Ok(figure) }
        });
        Ok((Claim { says, source: self.source.clone(), verdict, because }, figures.collect::<Result<_, _>>()?))
    }
}

fn empty(at: Position) -> Problem {
    Problem::new(at, "this figure has no formula")
        .help("as in `{ pytorch: program.reserved, harness: reserved }`; one of the two is enough")
}
