//! Why a request ran out of memory, and what would have helped.

pub mod causes;
pub mod growth;
pub mod pins;
pub mod sites;
pub mod state;
pub mod waits;
pub mod ways;

mod headline;
