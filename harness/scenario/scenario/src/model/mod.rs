//! Models for training, and the memory operations of a forward and a backward pass.
//!
//! The file of a model lists its layers (`layers`). For a number of samples, a length and a
//! precision, they compile (`compile`) to a [`ModelProgram`], which a training executes.

mod compile;
mod layers;
mod program;

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use harness_language::error::{FileError, Problem};
use harness_language::located::{Located, Position};
use harness_language::yaml::{self, Language, ONE_DOCUMENT};
use harness_language::{fields::about, text::bounded, variant::Variant};

use self::layers::LayerWire;
pub use self::layers::{Layer, MAX_DIMENSION, MAX_LAYERS, Shape};
pub use self::program::{
    Backward, Gradient, ModelOperation, ModelProgram, ModelSegment, ModelUnit, ParameterId,
    TensorId, Uniform,
};
use crate::plan::Precision;

pub const MODEL: Language = Language {
    noun: "model",
    example: "scenarios/models/gpt2.yaml",
    shape: "a model has the keys `about`, `input` and `layers`, and may have `parameters`",
    required: &["about", "input", "layers"],
    required_by: |_| Vec::new(),
    shorter: "`block` with `times`",
    own: &["layers"],
    foreign: &["steps", "arms"],
    other: ("a scenario", "harness run"),
    advice: ONE_DOCUMENT,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub name: String,
    pub about: String,
    pub input: Shape,
    /// Most tokens per sample; 1 if samples are not sequences.
    pub length: u64,
    pub layers: Vec<Layer>,
}

/// A model: layers whose shapes determine the memory operations of a training.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "model")]
struct ModelWire {
    /// What the model is.
    about: Located<String>,
    /// One sample: `{ tokens: 1024 }`, a sequence of at most this many tokens; `{ features: 1024
    /// }`; or `{ image: [3, 224, 224] }`, channels, height and width.
    input: Located<InputWire>,
    /// Number of trained parameters, which is checked against the layers. Default: no check.
    parameters: Option<Located<u64>>,
    /// The layers, in order.
    layers: Located<Vec<Located<Variant<LayerWire>>>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum InputWire {
    /// A sequence of at most this many tokens.
    Tokens(Located<u64>),
    /// A vector of this size.
    Features(Located<u64>),
    /// Channels, height and width.
    Image(Located<Vec<Located<u64>>>),
}

impl Model {
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&yaml::read(path, &MODEL)?, path)
    }

    /// Checks a text. `path` names the model and appears in messages.
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let checked =
            yaml::parse(source, path, &MODEL).and_then(|wire: ModelWire| check(&wire, path));
        checked.map_err(|problem| FileError::text(problem, path, source))
    }

    pub fn program(&self, samples: u64, length: u64, precision: Precision) -> ModelProgram {
        compile::compile(&self.layers, self.input, samples, length, precision).program
    }

    /// Sizes of the parameters in 32-bit precision, in the order of the layers.
    pub fn parameters(&self) -> Vec<Bytes> {
        compile::compile(&self.layers, self.input, 1, 1, Precision::Fp32).parameters
    }

    pub fn constants(&self) -> Vec<Bytes> {
        compile::compile(&self.layers, self.input, 1, 1, Precision::Fp32).constants
    }

    pub fn parameter_count(&self) -> u64 {
        self.parameters()
            .iter()
            .map(|size| size.0 / 4)
            .fold(0, u64::saturating_add)
    }
}

fn check(wire: &ModelWire, path: &Path) -> Result<Model, Problem> {
    let about = about(&wire.about, MODEL.noun)?;
    let dimension = |given: &Located<u64>, what: &str| bounded(given, what, 1..=MAX_DIMENSION);
    let (input, length) = match &wire.input.value {
        InputWire::Tokens(length) => (Shape::Tokens, dimension(length, "tokens")?),
        InputWire::Features(width) => (
            Shape::Features {
                width: dimension(width, "features")?,
            },
            1,
        ),
        InputWire::Image(sides) => match sides.value.as_slice() {
            [channels, height, width] => {
                let [channels, height, width] = [
                    dimension(channels, "image")?,
                    dimension(height, "image")?,
                    dimension(width, "image")?,
                ];
                (
                    Shape::Image {
                        channels,
                        height,
                        width,
                    },
                    1,
                )
            }
            other => {
                return Err(
                    Problem::new(sides.at, format!("`image` has {} numbers", other.len()))
                        .help("write channels, height and width, as in `[3, 224, 224]`"),
                );
            }
        },
    };
    if wire.layers.value.is_empty() {
        return Err(Problem::new(wire.layers.at, "`layers` is empty")
            .help("as in `layers: [{ linear: { out: 10 } }]`"));
    }
    let mut shape = input;
    let layers = layers::check(&wire.layers.value, &mut shape, &mut 0)?;
    let name = path.file_stem().map_or_else(
        || MODEL.noun.to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    let model = Model {
        name,
        about,
        input,
        length,
        layers,
    };
    match &wire.parameters {
        Some(wanted) if wanted.value != model.parameter_count() => {
            let message = format!(
                "the layers have {} parameters, but `parameters` is {}",
                model.parameter_count(),
                wanted.value
            );
            Err(Problem::new(wanted.at, message).help("correct the layers, or remove `parameters`"))
        }
        _ => Ok(model),
    }
}

/// Loads the model that a step names. An error has the position of that name.
pub(crate) fn load_for(folder: &Path, named: &Located<String>) -> Result<Model, Problem> {
    let at: Position = named.at;
    Model::load(&folder.join(&named.value)).map_err(|error| {
        let help = error
            .advice()
            .unwrap_or("the path is relative to the folder of the scenario")
            .to_owned();
        Problem::new(at, format!("this model cannot be used: {error}")).help(help)
    })
}

#[cfg(feature = "schema")]
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ModelWire).to_value()
}

#[cfg(feature = "schema")]
pub fn reference() -> String {
    use crate::markdown::{code, table};

    let schemas = layers::schemas(&mut schemars::SchemaGenerator::default());
    let rows = schemas
        .into_iter()
        .zip(layers::LAYERS)
        .map(|((name, schema), (_, about))| {
            let bare = layers::may_be_bare(&schema);
            let value = schema.to_value();
            let fields = value["properties"].as_object().into_iter().flatten();
            let fields: Vec<String> = fields
                .map(|(field, of)| {
                    format!(
                        "`{field}`: {}",
                        of["description"].as_str().unwrap_or_default()
                    )
                })
                .collect();
            let alone = if fields.is_empty() {
                "none"
            } else {
                "none, or "
            };
            [
                code(name),
                format!("{}{}", if bare { alone } else { "" }, fields.join(" ")),
                (*about).to_owned(),
            ]
        });
    table(["layer", "fields", "meaning"], rows)
}
