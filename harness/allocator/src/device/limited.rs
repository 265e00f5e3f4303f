//! Lands with its own change.
