//! [`Limiter`]: decides which attempts to get memory go through, and counts them, in the same files as a simulated GPU.

use std::convert::Infallible;
use std::env;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{Attempt, Attempts, Outcome};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};
use harness_gpu_settings::counters::{Counters, Figure};
use harness_gpu_settings::latency::Latency;
use harness_gpu_settings::ledger::{Account, Ledger};
use harness_gpu_settings::limits::{LIMITS, LIMITS_LEDGER, LIMITS_RUN, Limits};
use harness_gpu_settings::settings::Fault;

use crate::accounts::{Accounts, Charge, Kind};
use crate::real::inside;

/// What CUDA's functions return for success, and for want of memory: the runtime and the driver agree.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// The one device that the program sees: its place in the counters, and its number in the ledger.
const DEVICE: usize = 0;
const NUMBER: u32 = 0;

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
    /// What this process holds of a limit that it shares with others.
    shared: Account,
    /// The process that the account is of.
    owner: u32,
}

impl State {
    /// Charges memory, where what others hold leaves it.
    fn charge(&mut self, kind: Kind, size: Bytes) -> Result<Charge, Outcome> {
        let Self { accounts, shared, .. } = self;
        shared.change(NUMBER, |others| (accounts.charge(others, kind, size).ok_or(Outcome::Refused), accounts.used()))
    }

    /// Takes back what was charged for memory that was not got.
    fn discharge(&mut self, charge: Charge) {
        self.accounts.discharge(charge);
        self.shared.gave_back(NUMBER, self.accounts.used());
    }
}

/// The limiter of this process. The first call makes it, from the environment.
pub(crate) fn limiter() -> &'static Limiter {
    static LIMITER: OnceLock<Limiter> = OnceLock::new();
    LIMITER.get_or_init(|| {
        let path = |variable| env::var_os(variable).map(PathBuf::from);
        let limits = or_abort(LIMITS, env::var(LIMITS).unwrap_or_default().parse());
        let ledger = path(LIMITS_LEDGER).map(|path| or_abort(LIMITS_LEDGER, Ledger::open(&path)));
        Limiter::new(limits, path(LIMITS_RUN).as_deref(), ledger)
    })
}

/// What a variable says. A program whose limits are not known is not run.
fn or_abort<T>(variable: &str, read: Result<T, impl std::fmt::Display>) -> T {
    read.unwrap_or_else(|error| {
        eprintln!("harness: {variable}: {error}");
        process::abort()
    })
}

impl Limiter {
    fn new(limits: Limits, folder: Option<&Path>, ledger: Option<Ledger>) -> Self {
        let counters = Counters::of_this_process(folder, 1, limits.visible());
        let (attempts, accounts) = (Attempts::of_this_process(folder), Accounts::new(limits.memory));
        let state = State { attempts, accounts, shared: Account::new(ledger), owner: process::id() };
        Self { faults: limits.faults, latencies: limits.latencies, counters, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // What is entered in the ledger is its parent's in a forked child, which has nothing of its own: no context outlives a fork.
        if state.owner != process::id() {
            state.owner = process::id();
            state.shared.forked();
        }
        state
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
            let state = &mut *self.state();
            let held = state.accounts.used();
            let fails = state.attempts.fails(&self.faults, call, size);
            (held, if fails { Err(Outcome::Injected) } else { state.charge(kind, size) })
        };
        // The lock is not held over the real function: it may take long.
        let got = charged.map(|charge| (charge, inside(get)));
        let state = &mut *self.state();
        let outcome = match got {
            Err(outcome) => outcome,
            Ok((charge, (SUCCESS, place))) => {
                note(&mut state.accounts, place, charge);
                Outcome::Served
            }
            Ok((charge, (code, _))) => {
                state.discharge(charge);
                if code != OUT_OF_MEMORY {
                    // Refused for another reason, as PyTorch expects where it tries kinds of memory: no attempt.
                    state.attempts.take_back(&self.faults, call, size);
                    return Ok(code);
                }
                Outcome::Refused
            }
        };
        let submitted = state.attempts.noted();
        state.attempts.note(&Attempt { call, size, submitted, outcome, device: NUMBER, held });
        self.counters.count_allocation(DEVICE, state.accounts.used(), outcome == Outcome::Injected, outcome != Outcome::Served);
        got.map(|(_, (code, _))| code).map_err(|_| Refused)
    }

    /// Gets memory that has an address.
    pub(crate) fn allocate(&self, call: (FaultyCall, Kind, usize), get: impl FnOnce() -> (c_int, u64)) -> Result<c_int, Refused> {
        let (call, kind, size) = call;
        self.attempt((call, kind, Bytes(size as u64)), get, Accounts::place)
    }

    /// Notes how large memory is whose size the driver chose.
    pub(crate) fn correct(&self, address: u64, size: usize) {
        let State { accounts, shared, .. } = &mut *self.state();
        accounts.correct(address, Bytes(size as u64));
        // The driver has handed it out already, so nobody is asked.
        let entered: Result<(), Infallible> = shared.change(NUMBER, |_| (Ok(()), accounts.used()));
        let Ok(()) = entered;
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
        let attempts = &mut self.state().attempts;
        let submitted = attempts.noted();
        attempts.note(&Attempt { call, size, submitted, outcome, device: NUMBER, held: Bytes::ZERO });
        got
    }

    /// Has a call take as much longer as is asked for.
    pub(crate) fn delay(&self, call: SlowCall) {
        self.counters.wait(&self.latencies, call);
    }

    /// Gives the memory at an address back with a real function.
    pub(crate) fn free(&self, call: SlowCall, address: u64, give: impl FnOnce() -> c_int) -> c_int {
        self.delay(call);
        // Before the real function: behind it another thread may have the address.
        let taken = self.state().accounts.take(address);
        let code = inside(give);
        let state = &mut *self.state();
        match taken {
            Some(charge) if code != SUCCESS => state.accounts.put_back(address, charge),
            Some(_) => self.count_free(state),
            None => {}
        }
        code
    }

    /// Releases a handle of physical memory with a real function.
    pub(crate) fn release(&self, handle: u64, give: impl FnOnce() -> c_int) -> c_int {
        // Before the real function, as in `free`. A handle that cannot be released is none that the driver knows.
        {
            let state = &mut *self.state();
            if state.accounts.release(handle) {
                self.count_free(state);
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
        let state = &mut *self.state();
        for _ in 0..state.accounts.unmap(address, size as u64) {
            self.count_free(state);
        }
    }

    /// Memory was given back to the driver.
    fn count_free(&self, state: &mut State) {
        let held = state.accounts.used();
        state.shared.gave_back(NUMBER, held);
        let noted = state.attempts.noted();
        state.attempts.note_free(noted, NUMBER, held);
        self.counters.add(DEVICE, Figure::Frees);
        self.counters.set_used(DEVICE, held);
    }

    /// Free and all memory that the program is told of, given those of the device.
    pub(crate) fn seen(&self, free: usize, total: usize) -> (usize, usize) {
        let state = self.state();
        let others = state.shared.held_by_others(NUMBER);
        let (free, total) = state.accounts.seen(others, Bytes(free as u64), Bytes(total as u64));
        (free.0 as usize, total.0 as usize)
    }
}
