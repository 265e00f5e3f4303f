//! The loop over the harness's orders.

use std::ffi::c_int;

use harness_allocator::allocator::library::wire::{Order, Reply};

use crate::connection::{connect, connection};
use crate::{library::Functions, timed};

/// Executes the harness's orders until the harness ends it or disconnects. The process must exit
/// afterwards.
///
/// # Safety
/// Standard input is the socket to the harness. Libraries of orders have functions of the types in
/// the library interface.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_library_host() -> c_int {
    // SAFETY: the process must end with the harness, whatever the library is doing.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if !connect() {
        return 1;
    }
    let mut functions = None;
    while let Some(order) = next_order() {
        // Exit handlers of the library may still call CUDA, and the harness answers.
        if order == Order::End {
            return 0;
        }
        // SAFETY: guaranteed by the caller; the addresses of orders are the library's own.
        let done = unsafe { execute(order, &mut functions) }.unwrap_or_else(Reply::Refused);
        if let Some(connection) = connection().as_mut() {
            connection.has_order = false;
            connection.say(&done);
        }
    }
    0
}

/// # Safety
/// The library's functions have the types of the library interface, and returned the order's
/// addresses.
unsafe fn execute(order: Order, loaded: &mut Option<Functions>) -> Result<Reply, String> {
    if let Order::Load(spec) = order {
        // SAFETY: as the caller promises.
        *loaded = Some(unsafe { Functions::load(&spec) }?);
        return Ok(Reply::Done(0));
    }
    let functions = loaded.as_ref().ok_or("the library is not loaded")?;
    let mut result = 0;
    // SAFETY: as the caller promises.
    unsafe {
        match order {
            Order::Allocate { size, stream } => result = functions.allocate(size, stream),
            Order::Free {
                address,
                size,
                stream,
            } => functions.free(address, size, stream),
            Order::RecordStream { address, stream } => functions.record_stream(address, stream),
            Order::EmptyCache => functions.empty_cache(),
            Order::Time(program) => return Ok(Reply::Timed(timed::run(functions, &program))),
            Order::Load(_) | Order::End | Order::Answer { .. } => {}
        }
    }
    Ok(Reply::Done(result))
}

/// Receives an order. From then on, the library's calls are answered.
fn next_order() -> Option<Order> {
    let mut connection = connection();
    let connection = connection.as_mut()?;
    let order = connection.next();
    connection.has_order = true;
    order
}
