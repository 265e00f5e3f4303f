//! Why a request ran out of memory, and what would have helped.
