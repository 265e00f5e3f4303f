//! The loop over orders of the harness.

use std::ffi::{c_char, c_int};

use harness_allocator::allocator::library::wire::{Order, Reply};

use crate::connection::{connect, connection};
use crate::library::Functions;
use crate::timed;

/// Loads a library and does what the harness orders, until it orders the end or has gone. The process is to end then.
///
/// # Safety
/// Four C strings: the library's path and the names of its functions for allocation and free, then those of the others or null. Standard input is
/// the socket to the harness.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_library_host(
    path: *const c_char,
    alloc: *const c_char,
    free: *const c_char,
    record_stream: *const c_char,
    empty_cache: *const c_char,
) -> c_int {
    // SAFETY: the process is to end with the harness, whatever the library does meanwhile.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if !connect() {
        return 1;
    }
    let mut functions = None;
    while let Some(order) = next_order() {
        let done = match (order, &functions) {
            (Order::End, _) => {
                // Destructors of the library may still call, and are answered until the process has ended.
                return 0;
            }
            (Order::Load, _) => {
                // SAFETY: as the caller promises.
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
            // SAFETY: the arguments are what the library's interface has, and addresses are its own.
            (order, Some(functions)) => Reply::Done(unsafe { functions.call(order) }),
            (_, None) => Reply::Refused("it is not loaded".to_owned()),
        };
        if let Some(connection) = connection().as_mut() {
            connection.has_order = false;
            connection.say(&done);
        }
    }
    0
}

/// Waits for the harness. Calls of the library are listened to from then on.
fn next_order() -> Option<Order> {
    let mut connection = connection();
    let connection = connection.as_mut()?;
    let order = connection.next();
    connection.has_order = true;
    order
}
