//! `JsonSchema`, the trait and its derive macro. Only tests derive schemas, with the feature
//! `schema`: the program prints the committed ones, which these tests compare with the types. In
//! other builds all types have the trait, and the macro derives nothing.

#[cfg(feature = "schema")]
pub use schemars::JsonSchema;

#[cfg(not(feature = "schema"))]
pub use harness_no_schema::JsonSchema;

#[cfg(not(feature = "schema"))]
pub trait JsonSchema {}

#[cfg(not(feature = "schema"))]
impl<T: ?Sized> JsonSchema for T {}
