//! The harness: scenarios that drive memory allocators into exhaustion, the loop that runs and checks them, and reports of what happened.

pub mod invariant;
pub mod record;
pub mod replay;
