//! `#[derive(JsonSchema)]` for builds without schemars.

use proc_macro::TokenStream;

/// Accepts what schemars accepts, and derives nothing.
#[proc_macro_derive(JsonSchema, attributes(schemars))]
pub fn nothing(_: TokenStream) -> TokenStream {
    TokenStream::new()
}
