//! YAML with places: what every language of this project stands on, without knowing a step of any.
//!
//! * [`yaml`]: from a file to wire types, within bounds;
//! * [`located`]: values that know their line and column;
//! * [`text`]: scalars, kept as text until they are checked;
//! * [`error`]: problems, and errors that name file, line, column and the accepted forms.

pub mod error;
pub mod located;
pub mod text;
pub mod yaml;
