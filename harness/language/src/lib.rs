//! YAML with places: what the languages of scenarios and of suites stand on, without knowing a step or a measure of either.
//!
//! * [`yaml`]: from a file to wire types, within bounds;
//! * [`located`]: values that know their line and column;
//! * [`text`]: scalars, kept as text until they are checked;
//! * [`expression`]: sums and comparisons of named quantities;
//! * [`fields`], [`arms`]: what both languages have: what a file is about, the memory it needs, the allocators and their settings;
//! * [`error`]: problems, and errors that name file, line, column and the accepted forms.

pub mod arms;
pub mod error;
pub mod expression;
pub mod fields;
pub mod located;
pub mod text;
pub mod yaml;
