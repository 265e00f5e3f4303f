//! Explains out-of-memory errors and finds remedies.
//!
//! * [`causes`]: the use of memory at one moment, and why a request failed. [`state`] reconstructs the moment, [`sites`] finds
//!   call sites, [`pins`] finds blocks that keep free memory from being released, [`waits`] finds stalled frees, and [`growth`]
//!   finds leaks.
//! * [`ranks`]: compares the snapshots of all ranks; [`compare`]: compares two snapshots of one program.
//! * [`advise`]: recommends settings, using replays with a [`grid`] of them; [`least`]: finds the least sufficient memory.
//! * [`program_advice`]: recommends changes of the program, using replays.
//! * [`plain`]: converts a program to a plain trace; [`requests`]: converts traces and RMM logs to programs and snapshots.
//! * [`fidelity`]: checks whether a replay matches the recording.

pub mod advise;
pub mod attempts;
pub mod causes;
pub mod compare;
mod consistency;
pub mod fidelity;
pub mod grid;
pub mod growth;
pub mod least;
pub mod pins;
pub mod plain;
pub mod program_advice;
pub mod ranks;
pub mod requests;
pub mod sites;
pub mod state;
pub mod waits;

mod explanation;
mod headline;
mod view;
