//! The loop over the harness's orders.

use std::ffi::{c_char, c_int};

use harness_allocator::allocator::library::wire::{Order, Reply};

use crate::connection::{connect, connection};
use crate::library::Functions;
use crate::timed;

/// Loads a library and executes the harness's orders until the harness ends it or disconnects. The process must exit afterwards.
///
/// # Safety
/// The first three arguments are C strings: the library's path and the names of its functions for allocation and free. The others
/// are C strings or null. Standard input is the socket to the harness.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_library_host(
    path: *const c_char,
    alloc: *const c_char,
    free: *const c_char,
    record_stream: *const c_char,
    empty_cache: *const c_char,
) -> c_int {
    // SAFETY: the process must end with the harness, whatever the library is doing.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if !connect() {
        return 1;
    }
    let mut functions = None;
    while let Some(order) = next_order() {
        let done = match (order, &functions) {
            (Order::End, _) => {
                // Exit handlers of the library may still call functions; they are answered.
                return 0;
            }
            (Order::Load, _) => {
                // SAFETY: guaranteed by the caller.
                match unsafe { Functions::load(path, [alloc, free, record_stream, empty_cache]) } {
                    Ok(loaded) => {
                        functions = Some(loaded);
                        Reply::Done(0)
                    }
                    Err(why) => Reply::Refused(why),
                }
            }
            // SAFETY: as for the other orders.
            (Order::Time(program), Some(functions)) => Reply::Timed(unsafe { timed::run(functions, &program) }),
            // SAFETY: the arguments match the library's interface, and the addresses are its own.
            (order, Some(functions)) => Reply::Done(unsafe { functions.call(order) }),
            (_, None) => Reply::Refused("the library is not loaded".to_owned()),
        };
        if let Some(connection) = connection().as_mut() {
            connection.has_order = false;
            connection.say(&done);
        }
    }
    0
}

/// Receives an order. From then on, the library's calls are answered.
fn next_order() -> Option<Order> {
    let mut connection = connection();
    let connection = connection.as_mut()?;
    let order = connection.next();
    connection.has_order = true;
    order
}
