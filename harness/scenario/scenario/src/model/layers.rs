use derive_more::Display;
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use harness_language::located::{Located, Position};
use harness_language::variant::{Variant, Variants};
use harness_language::{error::Problem, text::bounded};

/// Largest dimension of a shape, and most repetitions of a block.
pub const MAX_DIMENSION: u64 = 1 << 20;
/// Most layers of a model, counting repeated blocks.
pub const MAX_LAYERS: usize = 10_000;

/// The shape of one sample between two layers: token ids, one for each position of the sequence; a
/// vector for each token; one vector; an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum Shape {
    #[display("tokens")]
    Tokens,
    #[display("a sequence of vectors of {width}")]
    Sequence { width: u64 },
    #[display("{width} features")]
    Features { width: u64 },
    #[display("an image of {channels} × {height} × {width}")]
    Image {
        channels: u64,
        height: u64,
        width: u64,
    },
}

/// A layer with everything that determines its memory, except samples and length. A block is a unit
/// of checkpointing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layer {
    Linear {
        inputs: u64,
        outputs: u64,
        bias: bool,
        tied: bool,
    },
    Conv2d {
        input: (u64, u64, u64),
        output: (u64, u64, u64),
        kernel: u64,
        bias: bool,
    },
    BatchNorm {
        channels: u64,
    },
    LayerNorm {
        width: u64,
    },
    Relu {
        in_place: bool,
    },
    Gelu,
    Tanh,
    Dropout,
    MaxPool {
        output: (u64, u64, u64),
    },
    AveragePool {
        channels: u64,
    },
    Embedding {
        vocabulary: u64,
        width: u64,
        positions: u64,
        types: u64,
    },
    SelfAttention {
        width: u64,
        heads: u64,
    },
    FirstToken {
        width: u64,
    },
    CrossEntropy,
    Residual {
        layers: Vec<Self>,
        shortcut: Vec<Self>,
        in_place: bool,
    },
    Block {
        layers: Vec<Self>,
    },
}

/// Registers the layers of the file: `Variant = "name": Wire` and its description.
macro_rules! layers {
    ($($variant:ident = $name:literal: $wire:ident $about:literal,)*) => {
        /// A layer as the file writes it.
        #[derive(Clone, Debug, Deserialize)]
        pub(super) enum LayerWire { $(#[serde(rename = $name)] $variant($wire),)* }

        /// The name of each layer and its description.
        pub(super) const LAYERS: &[(&str, &str)] = &[$(($name, $about)),*];

        #[cfg(feature = "schema")]
        pub(super) fn schemas(generator: &mut SchemaGenerator) -> Vec<(&'static str, Schema)> {
            vec![$(($name, $wire::json_schema(generator))),*]
        }
    };
}

layers! {
    Linear = "linear": LinearWire "A matrix multiplication with an optional bias. Saves its input.",
    Conv2d = "conv2d": Conv2dWire "A convolution of an image. Saves its input and uses a \
         workspace.",
    BatchNorm = "batch_norm": NoFields "Normalizes each channel over the batch. Saves its input, \
         mean and deviation.",
    LayerNorm = "layer_norm": NoFields "Normalizes each vector. Saves its input, mean and \
         deviation.",
    Relu = "relu": ReluWire "The rectified linear unit. Saves its result.",
    Gelu = "gelu": NoFields "The Gaussian error linear unit. Saves its input.",
    Tanh = "tanh": NoFields "The hyperbolic tangent. Saves its result.",
    Dropout = "dropout": NoFields "Sets random values to zero. Saves a mask of one byte per value.",
    MaxPool = "max_pool": PoolWire "The maximum of each window. Saves its input and the indices.",
    AveragePool = "average_pool": NoFields "The mean of each channel. Saves nothing.",
    Embedding = "embedding": EmbeddingWire "A vector per token, plus vectors for its position and \
         type.",
    SelfAttention = "self_attention": AttentionWire "A projection to queries, keys and values, \
         fused attention, and an output projection. Saves queries, keys, values, the result, and \
         one number per row.",
    FirstToken = "first_token": NoFields "The vector of the first token of each sequence.",
    CrossEntropy = "cross_entropy": NoFields "The loss. Saves the log-softmax in 32 bits.",
    Residual = "residual": ResidualWire "Adds the input to the result of its layers.",
    Block = "block": BlockWire "A group of layers, repeated `times` times. Checkpointing \
         recomputes whole blocks.",
}

/// Returns whether a layer with these fields can be written as a bare name.
#[cfg(feature = "schema")]
pub(super) fn may_be_bare(fields: &Schema) -> bool {
    fields.get("required").is_none()
}

/// No fields.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NoFields {}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LinearWire {
    /// Output features.
    out: Located<u64>,
    /// Adds a bias. Default: `true`.
    bias: Option<bool>,
    /// Shares the weights of the embedding. Default: `false`.
    #[serde(default)]
    tied: bool,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Conv2dWire {
    /// Output channels.
    out: Located<u64>,
    /// Side of the square filter.
    kernel: Located<u64>,
    /// Distance of two filter positions. Default: 1.
    stride: Option<Located<u64>>,
    /// Padding at each edge. Default: 0.
    padding: Option<Located<u64>>,
    /// Adds a bias. Default: `true`.
    bias: Option<bool>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReluWire {
    /// Works in place. Default: `false`.
    #[serde(default)]
    in_place: bool,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolWire {
    /// Side of the square window.
    kernel: Located<u64>,
    /// Distance of two windows. Default: 1.
    stride: Option<Located<u64>>,
    /// Padding at each edge. Default: 0.
    padding: Option<Located<u64>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EmbeddingWire {
    /// Number of tokens in the vocabulary.
    vocabulary: Located<u64>,
    /// Size of each vector.
    width: Located<u64>,
    /// Number of position vectors. Default: 0.
    positions: Option<Located<u64>>,
    /// Number of token-type vectors. Default: 0.
    types: Option<Located<u64>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct AttentionWire {
    /// Number of heads, a divisor of the width.
    heads: Located<u64>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ResidualWire {
    /// The layers whose result is added.
    layers: Vec<Located<Variant<LayerWire>>>,
    /// Layers for the input before it is added. Default: none.
    #[serde(default)]
    shortcut: Vec<Located<Variant<LayerWire>>>,
    /// Writes the sum into the result of the layers. Default: `false`.
    #[serde(default)]
    in_place: bool,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockWire {
    /// Repetitions. Default: 1.
    times: Option<Located<u64>>,
    /// The layers of the block.
    layers: Vec<Located<Variant<LayerWire>>>,
}

impl Variants for LayerWire {
    const NOUN: &'static str = "layer";
    const NOUNS: &'static str = "layers";
    const EXAMPLE: &'static str = "{ linear: { out: 10 } }";

    fn is_known(name: &str) -> bool {
        LAYERS.iter().any(|(known, _)| *known == name)
    }

    #[cfg(feature = "schema")]
    fn schema(generator: &mut SchemaGenerator) -> Schema {
        let layers = schemas(generator);
        let bare: Vec<&str> = layers
            .iter()
            .filter(|(_, fields)| may_be_bare(fields))
            .map(|(name, _)| *name)
            .collect();
        let maps = layers.into_iter().map(|(name, fields)| {
            json_schema!({ "type": "object", "properties": { name: fields }, "required": [name],
                "additionalProperties": false })
        });
        let forms: Vec<Schema> = std::iter::once(json_schema!({ "type": "string", "enum": bare }))
            .chain(maps)
            .collect();
        json_schema!({ "anyOf": forms })
    }
}

/// Checks layers in order. `shape` is the input of the first layer, and becomes the output of the
/// last one.
pub(super) fn check(
    wires: &[Located<Variant<LayerWire>>],
    shape: &mut Shape,
    count: &mut usize,
) -> Result<Vec<Layer>, Problem> {
    let mut layers = Vec::new();
    for wire in wires {
        let repetitions = match &wire.value {
            Variant::Known(_, LayerWire::Block(block)) => {
                dimension_or(block.times.as_ref(), "times", 1)?
            }
            _ => 1,
        };
        for _ in 0..repetitions {
            *count += 1;
            if *count > MAX_LAYERS {
                return Err(Problem::new(
                    wire.at,
                    format!("the model has more than {MAX_LAYERS} layers"),
                )
                .help("lower `times`, or remove layers"));
            }
            layers.push(check_one(wire, shape, count)?);
        }
    }
    Ok(layers)
}

fn check_one(
    wire: &Located<Variant<LayerWire>>,
    shape: &mut Shape,
    count: &mut usize,
) -> Result<Layer, Problem> {
    let at = wire.at;
    let names: Vec<&str> = LAYERS.iter().map(|(name, _)| *name).collect();
    let (name, layer) = wire.value.known(at, &names)?;
    Ok(match layer {
        LayerWire::Linear(linear) => linear.check(at, shape)?,
        LayerWire::Conv2d(conv) => conv.check(at, shape)?,
        LayerWire::BatchNorm(NoFields {}) => Layer::BatchNorm {
            channels: image(name, at, *shape)?.0,
        },
        LayerWire::LayerNorm(NoFields {}) => match *shape {
            Shape::Sequence { width } | Shape::Features { width } => Layer::LayerNorm { width },
            _ => return Err(unsuitable(name, "features or a sequence", at, *shape)),
        },
        LayerWire::Relu(relu) => Layer::Relu {
            in_place: relu.in_place,
        },
        LayerWire::Gelu(NoFields {}) => Layer::Gelu,
        LayerWire::Tanh(NoFields {}) => Layer::Tanh,
        LayerWire::Dropout(NoFields {}) => Layer::Dropout,
        LayerWire::MaxPool(pool) => pool.check(at, shape)?,
        LayerWire::AveragePool(NoFields {}) => {
            let (channels, ..) = image(name, at, *shape)?;
            *shape = Shape::Features { width: channels };
            Layer::AveragePool { channels }
        }
        LayerWire::Embedding(embedding) => embedding.check(at, shape)?,
        LayerWire::SelfAttention(attention) => attention.check(at, *shape)?,
        LayerWire::FirstToken(NoFields {}) => {
            let width = sequence(name, at, *shape)?;
            *shape = Shape::Features { width };
            Layer::FirstToken { width }
        }
        LayerWire::CrossEntropy(NoFields {}) => match *shape {
            Shape::Sequence { .. } | Shape::Features { .. } => {
                *shape = Shape::Features { width: 1 };
                Layer::CrossEntropy
            }
            _ => return Err(unsuitable(name, "features or a sequence", at, *shape)),
        },
        LayerWire::Residual(residual) => residual.check(at, shape, count)?,
        LayerWire::Block(block) => Layer::Block {
            layers: check(&block.layers, shape, count)?,
        },
    })
}

/// A layer does not accept the output of the layer before it.
fn unsuitable(name: &str, wanted: &str, at: Position, shape: Shape) -> Problem {
    Problem::new(at, format!("`{name}` takes {wanted}, not {shape}"))
        .help("correct the layers before it")
}

fn image(name: &str, at: Position, shape: Shape) -> Result<(u64, u64, u64), Problem> {
    match shape {
        Shape::Image {
            channels,
            height,
            width,
        } => Ok((channels, height, width)),
        Shape::Tokens | Shape::Sequence { .. } | Shape::Features { .. } => {
            Err(unsuitable(name, "an image", at, shape))
        }
    }
}

fn sequence(name: &str, at: Position, shape: Shape) -> Result<u64, Problem> {
    match shape {
        Shape::Sequence { width } => Ok(width),
        Shape::Tokens | Shape::Image { .. } | Shape::Features { .. } => {
            Err(unsuitable(name, "a sequence", at, shape))
        }
    }
}

impl LinearWire {
    fn check(&self, at: Position, shape: &mut Shape) -> Result<Layer, Problem> {
        let outputs = dimension(&self.out, "out")?;
        let (inputs, behind) = match *shape {
            Shape::Sequence { width } => (width, Shape::Sequence { width: outputs }),
            Shape::Features { width } => (width, Shape::Features { width: outputs }),
            Shape::Tokens | Shape::Image { .. } => {
                return Err(unsuitable("linear", "features or a sequence", at, *shape));
            }
        };
        *shape = behind;
        Ok(Layer::Linear {
            inputs,
            outputs,
            bias: self.bias.unwrap_or(true),
            tied: self.tied,
        })
    }
}

impl Conv2dWire {
    fn check(&self, at: Position, shape: &mut Shape) -> Result<Layer, Problem> {
        let input @ (_, height, width) = image("conv2d", at, *shape)?;
        let (kernel, [height, width]) = windows(
            [height, width],
            at,
            &self.kernel,
            self.stride.as_ref(),
            self.padding.as_ref(),
        )?;
        let channels = dimension(&self.out, "out")?;
        *shape = Shape::Image {
            channels,
            height,
            width,
        };
        Ok(Layer::Conv2d {
            input,
            output: (channels, height, width),
            kernel,
            bias: self.bias.unwrap_or(true),
        })
    }
}

impl PoolWire {
    fn check(&self, at: Position, shape: &mut Shape) -> Result<Layer, Problem> {
        let (channels, height, width) = image("max_pool", at, *shape)?;
        let (_, [height, width]) = windows(
            [height, width],
            at,
            &self.kernel,
            self.stride.as_ref(),
            self.padding.as_ref(),
        )?;
        *shape = Shape::Image {
            channels,
            height,
            width,
        };
        Ok(Layer::MaxPool {
            output: (channels, height, width),
        })
    }
}

impl EmbeddingWire {
    fn check(&self, at: Position, shape: &mut Shape) -> Result<Layer, Problem> {
        if *shape != Shape::Tokens {
            return Err(unsuitable("embedding", "tokens", at, *shape));
        }
        let width = dimension(&self.width, "width")?;
        *shape = Shape::Sequence { width };
        Ok(Layer::Embedding {
            vocabulary: dimension(&self.vocabulary, "vocabulary")?,
            width,
            positions: dimension_or(self.positions.as_ref(), "positions", 0)?,
            types: dimension_or(self.types.as_ref(), "types", 0)?,
        })
    }
}

impl AttentionWire {
    fn check(&self, at: Position, shape: Shape) -> Result<Layer, Problem> {
        let width = sequence("self_attention", at, shape)?;
        let heads = dimension(&self.heads, "heads")?;
        if width % heads != 0 {
            return Err(Problem::new(
                self.heads.at,
                format!("{heads} heads cannot share a width of {width} evenly"),
            )
            .help("`heads` must be a divisor of the width"));
        }
        Ok(Layer::SelfAttention { width, heads })
    }
}

impl ResidualWire {
    fn check(&self, at: Position, shape: &mut Shape, count: &mut usize) -> Result<Layer, Problem> {
        let (mut inner, mut beside) = (*shape, *shape);
        let layers = check(&self.layers, &mut inner, count)?;
        let shortcut = check(&self.shortcut, &mut beside, count)?;
        if inner != beside || layers.is_empty() {
            return Err(Problem::new(
                at,
                format!("the layers of this `residual` return {inner}, but the sum needs {beside}"),
            )
            .help("add a `shortcut` for the input, or correct the layers"));
        }
        *shape = inner;
        Ok(Layer::Residual {
            layers,
            shortcut,
            in_place: self.in_place,
        })
    }
}

fn dimension(given: &Located<u64>, what: &str) -> Result<u64, Problem> {
    bounded(given, what, 1..=MAX_DIMENSION)
}

fn dimension_or(given: Option<&Located<u64>>, what: &str, otherwise: u64) -> Result<u64, Problem> {
    given.map_or(Ok(otherwise), |given| {
        bounded(given, what, 0..=MAX_DIMENSION)
    })
}

fn windows(
    sides: [u64; 2],
    at: Position,
    kernel: &Located<u64>,
    stride: Option<&Located<u64>>,
    padding: Option<&Located<u64>>,
) -> Result<(u64, [u64; 2]), Problem> {
    let (kernel, padding) = (
        dimension(kernel, "kernel")?,
        dimension_or(padding, "padding", 0)?,
    );
    let stride = stride.map_or(Ok(1), |stride| dimension(stride, "stride"))?;
    let positions = |side: u64| {
        let room = (side + 2 * padding).checked_sub(kernel);
        room.map(|room| room / stride + 1).ok_or_else(|| {
            Problem::new(
                at,
                format!(
                    "a window of {kernel} does not fit into {side} points with \
                 {padding} at each edge"
                ),
            )
            .help("lower `kernel`, or raise `padding`")
        })
    };
    Ok((kernel, [positions(sides[0])?, positions(sides[1])?]))
}
