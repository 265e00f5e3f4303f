//! Explains out-of-memory errors and finds remedies.

pub mod advise;
pub mod attempts;
pub mod categories;
pub mod causes;
pub mod compare;
mod consistency;
pub mod fidelity;
pub mod fleet;
pub mod grid;
pub mod growth;
pub mod idle;
pub mod least;
pub mod pins;
pub mod plain;
pub mod program_advice;
pub mod ranks;
pub mod requests;
pub mod sites;
pub mod state;
pub mod waits;

mod byte_cause;
mod explanation;
mod headline;
mod view;
