//! The scalars of the language as the file writes them: text with a place, a JSON Schema and a documented form.
//!
//! They are parsed in the check and not while YAML is read, so that every mistake is answered with its place and the accepted forms.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::located::Located;
use crate::invariant::Invariant;

/// Declares a scalar: its Rust name, its name in the schema, its schema and what it is.
macro_rules! scalars {
    ($($(#[doc = $doc:literal])+ $type:ident = $name:literal, $schema:tt;)*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
            #[serde(transparent)]
            pub(crate) struct $type(pub(crate) Located<String>);

            impl $type {
                pub(crate) fn text(&self) -> &str {
                    &self.0.value
                }
            }

            impl std::ops::Deref for $type {
                type Target = Located<String>;
                fn deref(&self) -> &Self::Target {
                    &self.0
                }
            }

            impl JsonSchema for $type {
                fn schema_name() -> Cow<'static, str> {
                    $name.into()
                }
                fn json_schema(_: &mut SchemaGenerator) -> Schema {
                    let mut schema = json_schema!($schema);
                    schema.insert("description".to_owned(), concat!($($doc),+).trim().into());
                    schema
                }
            }
        )*

        /// Every kind of scalar: its name and what it is.
        pub(crate) fn scalar_kinds() -> Vec<(&'static str, &'static str)> {
            vec![$(($name, concat!($($doc),+).trim())),*]
        }
    };
}

scalars! {
    /// A letter or `_`, then letters, digits and `_`, at most 64 in all, for example `weights`.
    NameText = "name", { "type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$" };
    /// An amount of memory: a number and one of B, KiB, MiB, GiB, TiB, PiB or EiB, for example `400MiB` or `1.5GiB`; a bare integer is bytes. Decimal units such as MB are errors.
    SizeText = "size", { "anyOf": [{ "type": "integer", "minimum": 0 }, { "type": "string", "pattern": "^[0-9][0-9_.]* ?([KMGTPE]i)?B$|^[0-9][0-9_]*$" }] };
    /// A size, or a sum of sizes and of metrics that are known at that point, for example `storm.failed_request` or `device.free - 2MiB`.
    AmountText = "amount", { "type": ["string", "integer"] };
    /// A span of time: a number and one of ns, us, ms, s or min, at most one hour, for example `5ms`.
    DurationText = "duration", { "type": "string", "pattern": "^[0-9][0-9.]* ?(ns|us|µs|ms|s)$" };
    /// A comparison of two sums, for example `reserved_bytes.all.current == 400MiB`.
    ExpressionText = "expression", { "type": "string", "pattern": "==|!=|<|<=|>|>=" };
    /// The name of an always-checked invariant, for example `retry_makes_progress`.
    InvariantText = "invariant", { "enum": Invariant::ALL.iter().map(|invariant| invariant.name()).collect::<Vec<_>>() };
}
