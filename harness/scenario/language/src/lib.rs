//! YAML files whose values know their line and column: the parts that the scenario language and the
//! suite language share.
//!
//! * [`yaml`]: reads a bounded file into wire types;
//! * [`located`]: values with line and column;
//! * [`schema`]: JSON Schema;
//! * [`text`]: scalars, kept as text until they are checked;
//! * [`variant`]: values that are a name, or a map from a name to fields;
//! * [`expression`]: sums and comparisons of named quantities;
//! * [`fields`], [`arms`]: `about`, `needs` and `allocators`, which both languages have;
//! * [`error`]: problems, and errors that name file, line, column and the accepted forms.

pub mod arms;
pub mod error;
pub mod expression;
pub mod fields;
pub mod located;
pub mod schema;
pub mod text;
pub mod variant;
pub mod yaml;
