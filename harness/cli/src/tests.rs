//! Tests of the whole command line.

mod reference;
mod unused;
