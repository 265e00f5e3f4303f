//! What stands between a shared library that allocates and the harness, in the process that the library runs in: functions of CUDA's runtime and driver
//! under their own names, which pass what the library asks on to the harness and its device.
//!
//! Nothing is modelled here: memory, streams and events are those of the harness's device. `harness_library_host` loads the library and
//! does what the harness orders. A function without an entry here is told to the harness and answered as not supported.
//!
//! * `connection` is the socket, and which thread may talk;
//! * `host` is the loop over orders, `timed` a program that is done without orders between its operations; `library` calls the library;
//! * `runtime` and `driver` are the exported functions, those for addresses apart from memory in `mapping`;
//! * `device` is what both have of memory, streams and events, `pools` of pools;
//! * `handles` are streams, events and pools as C has them.

mod connection;
mod device;
mod driver;
mod handles;
mod host;
mod library;
mod mapping;
mod pools;
mod runtime;
mod timed;
