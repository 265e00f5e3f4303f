//! [`Limiter`]: decides which attempts to get memory go through, and counts them, in the same files as a simulated GPU.

use std::env;
use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{Attempt, Attempts, Outcome};
use harness_gpu_settings::counters::{Counters, Figure};
use harness_gpu_settings::latency::{self, Latency, SlowCall};
use harness_gpu_settings::limits::{LIMITS, LIMITS_RUN, Limits};
use harness_gpu_settings::settings::{Fault, FaultyCall};

use crate::accounts::{Accounts, Charge, Kind};
use crate::real::inside;

/// What CUDA's functions return for success, and for want of memory: the runtime and the driver agree.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// The one device that the program sees.
const DEVICE: usize = 0;

/// Why a real function was not called.
pub(crate) struct Refused;

/// The limits of this process, and what it did.
pub(crate) struct Limiter {
    faults: Vec<Fault>,
    latencies: Vec<Latency>,
    counters: &'static Counters,
    state: Mutex<State>,
}

struct State {
    attempts: Attempts,
    accounts: Accounts,
}

/// The limiter of this process. The first call makes it, from the environment.
pub(crate) fn limiter() -> &'static Limiter {
    static LIMITER: OnceLock<Limiter> = OnceLock::new();
    LIMITER.get_or_init(|| match env::var(LIMITS).unwrap_or_default().parse() {
        Ok(limits) => Limiter::new(limits, env::var_os(LIMITS_RUN).map(PathBuf::from)),
        Err(error) => {
            eprintln!("harness: {LIMITS}: {error}");
            std::process::abort()
        }
    })
}

impl Limiter {
    fn new(limits: Limits, folder: Option<PathBuf>) -> Self {
        let counters = Counters::of_this_process(folder.as_deref(), 1, limits.visible());
        let state = State { attempts: Attempts::of_this_process(folder.as_deref()), accounts: Accounts::new(limits.memory) };
        Self { faults: limits.faults, latencies: limits.latencies, counters, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an attempt to get device memory with a real function, which returns its answer and where the memory is. `note` is told of what was got.
    fn attempt(
        &self,
        (call, kind, size): (FaultyCall, Kind, Bytes),
        get: impl FnOnce() -> (c_int, u64),
        note: fn(&mut Accounts, u64, Charge),
    ) -> Result<c_int, Refused> {
        self.delay(call.into());
        let (held, charged) = {
            let State { attempts, accounts } = &mut *self.state();
            let held = accounts.used();
            let fails = attempts.fails(&self.faults, call, size);
            (held, if fails { Err(Outcome::Injected) } else { accounts.charge(kind, size).ok_or(Outcome::Refused) })
        };
        // The lock is not held over the real function: it may take long.
        let got = charged.map(|charge| (charge, inside(get)));
        let State { attempts, accounts } = &mut *self.state();
        let outcome = match got {
            Err(outcome) => outcome,
            Ok((charge, (SUCCESS, place))) => {
                note(accounts, place, charge);
                Outcome::Served
            }
            Ok((charge, (code, _))) => {
                accounts.discharge(charge);
                if code != OUT_OF_MEMORY {
                    // Refused for another reason, as PyTorch expects where it tries kinds of memory: no attempt.
                    attempts.take_back(&self.faults, call, size);
                    return Ok(code);
                }
                Outcome::Refused
            }
        };
        attempts.note(&Attempt { call, size, submitted: 0, outcome, device: 0, held });
        self.counters.count_allocation(DEVICE, accounts.used(), outcome == Outcome::Injected, outcome != Outcome::Served);
        got.map(|(_, (code, _))| code).map_err(|_| Refused)
    }

    /// Gets memory that has an address.
    pub(crate) fn allocate(&self, call: (FaultyCall, Kind, usize), get: impl FnOnce() -> (c_int, u64)) -> Result<c_int, Refused> {
        let (call, kind, size) = call;
        self.attempt((call, kind, Bytes(size as u64)), get, Accounts::place)
    }

    /// Notes how large memory is whose size the driver chose.
    pub(crate) fn correct(&self, address: u64, size: usize) {
        let accounts = &mut self.state().accounts;
        accounts.correct(address, Bytes(size as u64));
        self.counters.set_used(DEVICE, accounts.used());
    }

    /// Gets physical memory, which has a handle.
    pub(crate) fn create(&self, size: usize, get: impl FnOnce() -> (c_int, u64)) -> Result<c_int, Refused> {
        self.attempt((FaultyCall::Create, Kind::Pages, Bytes(size as u64)), get, Accounts::create)
    }

    /// Gets page-locked memory of the host: it can fail because that is asked for, and is not limited.
    pub(crate) fn allocate_on_host(&self, size: usize, get: impl FnOnce() -> c_int) -> Result<c_int, Refused> {
        let (call, size) = (FaultyCall::HostAlloc, Bytes(size as u64));
        self.delay(call.into());
        let injected = self.state().attempts.fails(&self.faults, call, size);
        let got = if injected { Err(Refused) } else { Ok(inside(get)) };
        let outcome = match got {
            Err(Refused) => Outcome::Injected,
            Ok(SUCCESS) => Outcome::Served,
            Ok(_) => Outcome::Refused,
        };
        self.state().attempts.note(&Attempt { call, size, submitted: 0, outcome, device: 0, held: Bytes::ZERO });
        got
    }

    /// Has a call take as much longer as is asked for.
    pub(crate) fn delay(&self, call: SlowCall) {
        latency::wait(&self.latencies, self.counters, call);
    }

    /// Gives the memory at an address back with a real function.
    pub(crate) fn free(&self, call: SlowCall, address: u64, give: impl FnOnce() -> c_int) -> c_int {
        self.delay(call);
        // Before the real function: behind it another thread may have the address.
        let taken = self.state().accounts.take(address);
        let code = inside(give);
        let accounts = &mut self.state().accounts;
        match taken {
            Some(charge) if code != SUCCESS => accounts.put_back(address, charge),
            Some(_) => self.count_free(accounts),
            None => {}
        }
        code
    }

    /// Releases a handle of physical memory with a real function.
    pub(crate) fn release(&self, handle: u64, give: impl FnOnce() -> c_int) -> c_int {
        // Before the real function, as in `free`. A handle that cannot be released is none that the driver knows.
        {
            let accounts = &mut self.state().accounts;
            if accounts.release(handle) {
                self.count_free(accounts);
            }
        }
        inside(give)
    }

    /// Notes one more handle of physical memory.
    pub(crate) fn retain(&self, handle: u64) {
        self.state().accounts.retain(handle);
    }

    /// Notes that physical memory is mapped.
    pub(crate) fn map(&self, address: u64, handle: u64) {
        self.state().accounts.map(address, handle);
    }

    /// Notes that nothing is mapped any more.
    pub(crate) fn unmap(&self, address: u64, size: usize) {
        let accounts = &mut self.state().accounts;
        for _ in 0..accounts.unmap(address, size as u64) {
            self.count_free(accounts);
        }
    }

    fn count_free(&self, accounts: &Accounts) {
        self.counters.add(DEVICE, Figure::Frees);
        self.counters.set_used(DEVICE, accounts.used());
    }

    /// Free and all memory that the program is told of, given those of the device.
    pub(crate) fn seen(&self, free: usize, total: usize) -> (usize, usize) {
        let (free, total) = self.state().accounts.seen(Bytes(free as u64), Bytes(total as u64));
        (free.0 as usize, total.0 as usize)
    }
}
