//! [`CudnnWorkspace`]: the temporary memory that cuDNN requests for a convolution.
//!
//! Real sizes depend on the algorithm that cuDNN chooses. [`Convolution::estimate`] is a rule that
//! gives all measured sizes (`workspaces/measured.tsv`); for other convolutions it is an estimate
//! with bounds. cuBLAS needs no memory besides PyTorch's own workspace.
//!
//! | convolution | workspace | measured |
//! |---|---|---|
//! | 1×1, NCHW | none | forward, 32-bit |
//! | larger filter, NCHW | copies of input, filter and output, 512 bytes | forward, 32-bit on |
//! | | | 12.0; bfloat16 on 8.6 and 12.0 |
//! | the same in 32-bit floats below capability 9.0 | without the output | forward on 8.6 |
//! | larger filter, channels-last, 32-bit | copies of input and output | on a consumer GPU: about |
//! | | | 512 bytes per pixel of 64 channels |
//! | other channels-last convolutions | none | no |
//! | gradient of the filter, except 1×1 | four times the filter in addition | no |

use std::{fmt, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::text::SettingsError;

/// The model of cuDNN's workspaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CudnnWorkspace {
    None,
    /// The size of operands that are not channels-last, plus four times the filter for filter
    /// gradients.
    Operands,
    /// [`Convolution::estimate`].
    Estimate,
    /// cuDNN's own `libcudnn_graph.so.9` at this path; [`CudnnWorkspace::Estimate`] if it cannot be
    /// used.
    Library(String),
    /// The rows of a file; [`CudnnWorkspace::Estimate`] for convolutions that it lacks.
    Measured {
        file: String,
        rows: Vec<MeasuredWorkspace>,
    },
}

/// The element type of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Element {
    Double,
    Float,
    Half,
    Bfloat16,
    Byte,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    Forward,
    DataGradient,
    FilterGradient,
}

/// A convolution. In the directions of gradients, `input` and `output` are still those of the
/// forward pass, as gradients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convolution {
    pub direction: Direction,
    pub input: Vec<i64>,
    pub filter: Vec<i64>,
    pub output: Vec<i64>,
    pub element: Element,
    pub channels_last: bool,
    /// Stride, padding and dilation.
    pub geometry: [Vec<i64>; 3],
}

/// The workspace of a convolution in bytes, and its bounds. Bounds of a measured workspace are
/// equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub bytes: i64,
    pub least: i64,
    pub most: i64,
}

/// A measured workspace. An absent output or capability matches any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredWorkspace {
    direction: Direction,
    input: Vec<i64>,
    filter: Vec<i64>,
    output: Option<Vec<i64>>,
    element: Element,
    channels_last: bool,
    capability: Option<(u32, u32)>,
    bytes: i64,
}

/// Sizes of tensors are rounded up to multiples of this, and cuDNN requests as much in addition to
/// copies.
const ALIGNMENT: i64 = 512;

/// The header of a table of convolutions: [`Convolution::row`].
pub const HEADER: &str = "operator\tinput_shapes\toutput_shape\tstride\tpadding\tdilation\tdtypes\t\
     layout\tcapability\tbytes\n";

/// Copies of tensors are aligned.
pub const fn round_up(bytes: i64) -> i64 {
    (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
}

impl Element {
    #[must_use]
    pub const fn size(self) -> i64 {
        match self {
            Self::Double => 8,
            Self::Float => 4,
            Self::Half | Self::Bfloat16 => 2,
            Self::Byte => 1,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Double => "torch.float64",
            Self::Float => "torch.float32",
            Self::Half => "torch.float16",
            Self::Bfloat16 => "torch.bfloat16",
            Self::Byte => "torch.int8",
        }
    }

    fn named(text: &str) -> Option<Self> {
        Some(match text.trim_start_matches("torch.") {
            "float64" => Self::Double,
            "float32" => Self::Float,
            "float16" => Self::Half,
            "bfloat16" => Self::Bfloat16,
            "int8" | "uint8" => Self::Byte,
            _ => return None,
        })
    }
}

impl Workspace {
    const NONE: Self = Self::exact(0);

    const fn exact(bytes: i64) -> Self {
        Self {
            bytes,
            least: bytes,
            most: bytes,
        }
    }
}

impl CudnnWorkspace {
    pub fn of(&self, convolution: &Convolution, capability: (u32, u32)) -> Workspace {
        match self {
            Self::None => Workspace::NONE,
            Self::Operands => Workspace::exact(convolution.operands()),
            Self::Estimate | Self::Library(_) => convolution.estimate(capability),
            Self::Measured { rows, .. } => {
                let row = rows.iter().find(|row| row.is_of(convolution, capability));
                row.map_or_else(
                    || convolution.estimate(capability),
                    |row| Workspace::exact(row.bytes),
                )
            }
        }
    }
}

impl Convolution {
    fn bytes(&self, sizes: &[i64]) -> i64 {
        sizes.iter().product::<i64>() * self.element.size()
    }

    /// The bytes of aligned copies of input, filter and output.
    fn copies(&self) -> [i64; 3] {
        [&self.input, &self.filter, &self.output].map(|sizes| round_up(self.bytes(sizes)))
    }

    /// Returns a row of a table of workspaces, with the line's end.
    pub fn row(&self, (major, minor): (u32, u32), bytes: i64) -> String {
        let Self {
            direction,
            input,
            filter,
            output,
            element,
            channels_last,
            geometry: [stride, padding, dilation],
        } = self;
        let operator = match direction {
            Direction::Forward => "forward",
            Direction::DataGradient => "data_gradient",
            Direction::FilterGradient => "filter_gradient",
        };
        let (element, layout) = (
            element.name(),
            if *channels_last {
                "channels_last"
            } else {
                "nchw"
            },
        );
        format!(
            "{operator}\t[{input:?}, \
             {filter:?}]\t{output:?}\t{stride:?}\t{padding:?}\t{dilation:?}\t{element}\t{layout}\t\
             {major}.{minor}\t{bytes}\n"
        )
    }

    /// Four times the filter for the gradient of the filter.
    fn of_gradient(&self) -> i64 {
        if self.direction == Direction::FilterGradient {
            4 * self.bytes(&self.filter)
        } else {
            0
        }
    }

    fn operands(&self) -> i64 {
        let copies = if self.channels_last {
            0
        } else {
            self.copies().iter().sum()
        };
        copies + self.of_gradient()
    }

    /// Returns the workspace by the rule of this module.
    pub fn estimate(&self, capability: (u32, u32)) -> Workspace {
        let [input, filter, output] = self.copies();
        let all = input + filter + output + ALIGNMENT + self.of_gradient();
        let is_pointwise = self.filter.iter().skip(2).all(|size| *size == 1);
        let is_float = self.element == Element::Float;
        let is_forward = self.direction == Direction::Forward;
        // The copy of the result: of the output, or of the gradient of the input.
        let result = if self.direction == Direction::DataGradient {
            input
        } else {
            output
        };
        let (bytes, is_measured) = match (self.channels_last, is_pointwise) {
            (false, true) => (0, is_float),
            (true, true) => (0, false),
            (true, false) => (
                if is_float { input + output } else { 0 } + self.of_gradient(),
                false,
            ),
            (false, false)
                if is_float
                    && capability < (9, 0)
                    && self.direction != Direction::FilterGradient =>
            {
                (all - result, capability == (8, 6))
            }
            (false, false) => {
                let measured = match self.element {
                    Element::Float => capability == (12, 0),
                    Element::Bfloat16 => capability == (8, 6) || capability == (12, 0),
                    _ => false,
                };
                (all, measured)
            }
        };
        if is_measured && is_forward {
            Workspace::exact(bytes)
        } else {
            Workspace {
                bytes,
                least: 0,
                most: all,
            }
        }
    }
}

impl MeasuredWorkspace {
    fn is_of(&self, convolution: &Convolution, capability: (u32, u32)) -> bool {
        let Convolution {
            direction,
            input,
            filter,
            output,
            element,
            channels_last,
            geometry: _,
        } = convolution;
        (self.direction, self.element, self.channels_last) == (*direction, *element, *channels_last)
            && (&self.input, &self.filter) == (input, filter)
            && self
                .output
                .as_ref()
                .is_none_or(|measured| measured == output)
            && self
                .capability
                .is_none_or(|measured| measured == capability)
    }
}

/// The columns of a table of measured workspaces. Others are ignored.
const COLUMNS: [&str; 4] = ["operator", "input_shapes", "dtypes", "bytes"];

/// Parses a table of measured workspaces; errors begin with the line and the column.
fn rows(text: &str) -> Result<Vec<MeasuredWorkspace>, String> {
    let mut lines = (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
    let (first, header) = lines.next().ok_or_else(|| {
        format!(
            "1:1: the table is empty: its first line names the columns {}",
            COLUMNS.join(", ")
        )
    })?;
    let names: Vec<&str> = header.split('\t').collect();
    if let Some(missing) = COLUMNS.iter().find(|column| !names.contains(*column)) {
        return Err(format!(
            "{first}:1: the table has no column `{missing}`: its first line names {}, separated by \
             tabs",
            COLUMNS.join(", ")
        ));
    }
    let lines = lines.map(|(number, text)| Line {
        number,
        text,
        names: &names,
    });
    lines
        .filter_map(|line| line.workspace().transpose())
        .collect()
}

/// A line of a table of measured workspaces.
struct Line<'a> {
    number: usize,
    text: &'a str,
    names: &'a [&'a str],
}

impl Line<'_> {
    fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|column| *column == name)
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.text.split('\t').nth(self.position(name)?)
    }

    /// A field that may be empty.
    fn optional(&self, name: &str) -> Option<&str> {
        self.field(name).filter(|field| !field.is_empty())
    }

    fn wrong(&self, name: &str, expected: &str) -> String {
        let before = self.text.split('\t').take(self.position(name).unwrap_or(0));
        let at = before.map(|field| field.len() + 1).sum::<usize>() + 1;
        format!(
            "{}:{at}: `{}` is not {expected} (column {name})",
            self.number,
            self.field(name).unwrap_or_default()
        )
    }

    /// Returns `None` for a matrix product, which needs no memory besides PyTorch's own workspace.
    fn workspace(&self) -> Result<Option<MeasuredWorkspace>, String> {
        let bytes = self.field("bytes").and_then(|bytes| bytes.parse().ok());
        let bytes: i64 = bytes
            .filter(|bytes| *bytes >= 0)
            .ok_or_else(|| self.wrong("bytes", "a number of bytes"))?;
        let direction = match self.field("operator") {
            Some("aten::convolution" | "forward") => Direction::Forward,
            Some("data_gradient") => Direction::DataGradient,
            Some("filter_gradient") => Direction::FilterGradient,
            Some("aten::mm") if bytes == 0 => return Ok(None),
            _ => {
                return Err(self.wrong(
                    "operator",
                    "forward, data_gradient, filter_gradient, aten::convolution, or aten::mm with \
                     0 bytes",
                ));
            }
        };
        let shapes = self
            .field("input_shapes")
            .and_then(|shapes| serde_json::from_str::<[Vec<i64>; 2]>(shapes).ok());
        let [input, filter] = shapes.ok_or_else(|| {
            self.wrong(
                "input_shapes",
                "the shapes of input and filter, as in [[2, 64, 128, 128], [64, 64, 3, 3]]",
            )
        })?;
        let output = self.optional("output_shape").map(|shape| {
            serde_json::from_str(shape)
                .map_err(|_| self.wrong("output_shape", "a shape, as in [2, 64, 128, 128]"))
        });
        let output = output.transpose()?;
        let dtypes = self.field("dtypes").unwrap_or_default();
        let element = Element::named(
            dtypes
                .trim_matches(['[', ']', '\'', '"'])
                .split(['\'', '"', ','])
                .next()
                .unwrap_or_default(),
        );
        let element =
            element.ok_or_else(|| self.wrong("dtypes", "a type of torch, as in torch.float32"))?;
        let channels_last = match self.field("layout") {
            None | Some("" | "nchw") => false,
            Some("channels_last") => true,
            _ => return Err(self.wrong("layout", "nchw or channels_last")),
        };
        let capability = self.optional("capability").map(|text| {
            text.split_once('.')
                .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
                .ok_or_else(|| self.wrong("capability", "a compute capability, as in 8.6"))
        });
        Ok(Some(MeasuredWorkspace {
            direction,
            input,
            filter,
            output,
            element,
            channels_last,
            capability: capability.transpose()?,
            bytes,
        }))
    }
}

impl CudnnWorkspace {
    /// Parses the name of a model, or of a file of measured workspaces, which `read` reads.
    pub fn parse(
        text: &str,
        read: impl FnOnce(&Path) -> io::Result<String>,
    ) -> Result<Self, SettingsError> {
        let file = match text {
            "none" => return Ok(Self::None),
            "operands" => return Ok(Self::Operands),
            "estimate" => return Ok(Self::Estimate),
            library if library.contains(".so") => {
                let path = Path::new(library).canonicalize();
                let path = path.map_err(|error| {
                    SettingsError(format!(
                        "{library}: {error}: name cuDNN's libcudnn_graph.so.9"
                    ))
                })?;
                return Ok(Self::Library(path.to_string_lossy().into_owned()));
            }
            file => file,
        };
        if !file.contains('/') && Path::new(file).extension().is_none() {
            return Err(SettingsError(format!(
                "`{file}` is not a model of cuDNN's workspaces: write none, estimate, operands, a \
                 file such as measured.tsv, or a path of libcudnn_graph.so.9"
            )));
        }
        let text = read(Path::new(file)).map_err(|error| {
            SettingsError(format!(
                "{file}: {error}: name a table of measured workspaces"
            ))
        })?;
        let rows = rows(&text).map_err(|error| SettingsError(format!("{file}:{error}")))?;
        Ok(Self::Measured {
            file: file.to_owned(),
            rows,
        })
    }
}

impl fmt::Display for CudnnWorkspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Operands => "operands",
            Self::Estimate => "estimate",
            Self::Library(file) | Self::Measured { file, .. } => file,
        })
    }
}

#[cfg(test)]
mod tests;
