//! Tests of the language of scenarios, one module for each subject.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod blocks;
mod catalogue;
mod errors;
mod language;
mod models;
mod reference;
