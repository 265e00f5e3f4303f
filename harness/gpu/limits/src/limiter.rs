//! [`Limiter`]: decides which requests for memory reach the driver, and counts them in the same
//! files as a simulated GPU.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{convert::Infallible, env, ffi::c_int};

use harness_allocator::sync::lock;
use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome, Attempts};
use harness_gpu_settings::ledger::{Ledger, LedgerAccount};
use harness_gpu_settings::limits::{LIMITS, LIMITS_LEDGER, LIMITS_RUN, Limits};
use harness_gpu_settings::process::{ForkedState, keep_usable_after_fork};
use harness_gpu_settings::text::{of_variable, or_abort};
use harness_gpu_settings::{calls::Call, counters::OwnCounters, latency::Latency};

use crate::accounts::{Accounts, Charge};
use crate::fork::at_fork_of_program;
use crate::nesting::{is_nested, nested};

/// Codes for success and for out of memory, equal in the runtime and the driver.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// The only device that the program sees: its index in the counters and its number in the ledger.
const DEVICE: usize = 0;
const NUMBER: u32 = 0;

/// The limit or an injected failure refused a request, so no real function was called.
pub(crate) struct Refused;

pub(crate) struct Limiter {
    limit: Option<Bytes>,
    latencies: Vec<Latency>,
    counters: OwnCounters,
    state: Mutex<State>,
}

struct State {
    attempts: Attempts,
    accounts: Accounts,
    /// The memory of this process under a limit that it shares with others.
    shared: LedgerAccount,
}

impl State {
    /// Charges memory if the limit and the memory of others allow it.
    fn charge(&mut self, call: Call, size: Bytes) -> Result<Charge, AttemptOutcome> {
        let Self {
            accounts, shared, ..
        } = self;
        shared.change(NUMBER, |others| {
            (
                accounts
                    .charge(others, call, size)
                    .ok_or(AttemptOutcome::Refused),
                accounts.used(),
            )
        })
    }

    fn discharge(&mut self, charge: Charge) {
        self.accounts.discharge(charge);
        self.shared.released(NUMBER, self.accounts.used());
    }
}

impl ForkedState for State {
    fn lock() -> MutexGuard<'static, Self> {
        limiter().locked()
    }

    /// The child has no device memory: no context survives a fork.
    fn start_child(&mut self) {
        let limiter = limiter();
        limiter.counters.start_child();
        self.attempts.start_child();
        self.shared.start_child();
        self.accounts = Accounts::new(limiter.limit);
    }
}

/// The limiter of this process, which the first call creates from the environment.
pub(crate) fn limiter() -> &'static Limiter {
    static LIMITER: OnceLock<Limiter> = OnceLock::new();
    LIMITER.get_or_init(|| {
        // SAFETY: the function registers handlers of the program, and an audit library is never
        // unloaded.
        unsafe { keep_usable_after_fork::<State>(at_fork_of_program) };
        let path = |variable| env::var_os(variable).map(PathBuf::from);
        let limits = or_abort(
            "harness",
            LIMITS,
            of_variable(&env::var(LIMITS).unwrap_or_default()),
        );
        let ledger =
            path(LIMITS_LEDGER).map(|path| or_abort("harness", LIMITS_LEDGER, Ledger::open(&path)));
        Limiter::new(limits, path(LIMITS_RUN).as_deref(), ledger)
    })
}

impl Limiter {
    fn new(limits: Limits, folder: Option<&Path>, ledger: Option<Ledger>) -> Self {
        let counters = OwnCounters::new(folder, 1, limits.visible());
        let attempts = Attempts::new(folder, &limits.faults);
        let state = State {
            attempts,
            accounts: Accounts::new(limits.memory),
            shared: LedgerAccount::new(ledger),
        };
        Self {
            limit: limits.memory,
            latencies: limits.latencies,
            counters,
            state: Mutex::new(state),
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The state, with the files of this process open.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.locked();
        self.counters.open();
        state.attempts.open();
        state
    }

    /// Requests device memory with a real function, which returns its code and the address or
    /// handle.
    pub(crate) fn allocate(
        &self,
        call: Call,
        size: usize,
        get: impl FnOnce() -> (c_int, u64),
    ) -> Result<c_int, Refused> {
        let size = Bytes(size as u64);
        self.delay(call);
        let (held, charged) = {
            let state = &mut *self.state();
            let held = state.accounts.used();
            let fails = state.attempts.fails(call, size);
            (
                held,
                if fails {
                    Err(AttemptOutcome::Injected)
                } else {
                    state.charge(call, size)
                },
            )
        };
        // The real function may take long, so other threads can use the lock.
        let got = charged.map(|charge| (charge, nested(get)));
        let state = &mut *self.state();
        let outcome = match got {
            Err(outcome) => outcome,
            Ok((charge, (SUCCESS, place))) => {
                match call {
                    Call::Create => state.accounts.create(place, charge),
                    _ => state.accounts.place(place, charge),
                }
                AttemptOutcome::Served
            }
            Ok((charge, (code, _))) => {
                state.discharge(charge);
                if code != OUT_OF_MEMORY {
                    // Not an attempt: PyTorch tries kinds of memory and expects such errors.
                    state.attempts.take_back(call, size);
                    return Ok(code);
                }
                AttemptOutcome::Refused
            }
        };
        let submitted = state.attempts.noted();
        state.attempts.note(&Attempt {
            call,
            size,
            submitted,
            outcome,
            device: NUMBER,
            number: NUMBER,
            held,
        });
        self.counters.count_allocation(
            DEVICE,
            state.accounts.used(),
            outcome == AttemptOutcome::Injected,
            outcome != AttemptOutcome::Served,
        );
        got.map(|(_, (code, _))| code).map_err(|_| Refused)
    }

    pub(crate) fn correct(&self, address: u64, size: usize) {
        let State {
            accounts, shared, ..
        } = &mut *self.state();
        accounts.correct(address, Bytes(size as u64));
        // The allocation exists already, so it cannot fail.
        let entered: Result<(), Infallible> = shared.change(NUMBER, |_| (Ok(()), accounts.used()));
        let Ok(()) = entered;
        self.counters.set_used(DEVICE, accounts.used());
    }

    /// Requests page-locked host memory, which is not limited but can have injected failures.
    pub(crate) fn allocate_on_host(
        &self,
        size: usize,
        get: impl FnOnce() -> c_int,
    ) -> Result<c_int, Refused> {
        let (call, size) = (Call::HostAlloc, Bytes(size as u64));
        self.delay(call);
        let injected = self.state().attempts.fails(call, size);
        let got = if injected {
            Err(Refused)
        } else {
            Ok(nested(get))
        };
        let outcome = match got {
            Err(Refused) => AttemptOutcome::Injected,
            Ok(SUCCESS) => AttemptOutcome::Served,
            Ok(_) => AttemptOutcome::Refused,
        };
        if outcome != AttemptOutcome::Served {
            self.counters.count_failed_call(call, injected);
        }
        let attempts = &mut self.state().attempts;
        let submitted = attempts.noted();
        attempts.note(&Attempt {
            call,
            size,
            submitted,
            outcome,
            device: NUMBER,
            number: NUMBER,
            held: Bytes::ZERO,
        });
        got
    }

    pub(crate) fn delay(&self, call: Call) {
        self.counters.delay(&self.latencies, call);
    }

    /// Frees the memory at an address with a real function.
    pub(crate) fn free(&self, call: Call, address: u64, free: impl FnOnce() -> c_int) -> c_int {
        if is_nested() {
            return free();
        }
        self.delay(call);
        // Before the real function: afterwards another thread may get the address.
        let taken = self.state().accounts.take(address);
        let code = nested(free);
        let state = &mut *self.state();
        match taken {
            Some(charge) if code != SUCCESS => state.accounts.put_back(address, charge),
            Some(_) => self.count_free(state),
            None => {}
        }
        code
    }

    /// Releases a handle of physical memory with a real function.
    pub(crate) fn release(&self, handle: u64, release: impl FnOnce() -> c_int) -> c_int {
        // Before the real function, as in `free`. The driver releases every handle that it knows.
        {
            let state = &mut *self.state();
            if state.accounts.release(handle) {
                self.count_free(state);
            }
        }
        nested(release)
    }

    pub(crate) fn retain(&self, handle: u64) {
        self.state().accounts.retain(handle);
    }

    pub(crate) fn map(&self, address: u64, handle: u64) {
        self.state().accounts.map(address, handle);
    }

    pub(crate) fn unmap(&self, address: u64, size: usize) {
        let state = &mut *self.state();
        for _ in 0..state.accounts.unmap(address, size as u64) {
            self.count_free(state);
        }
    }

    fn count_free(&self, state: &mut State) {
        let held = state.accounts.used();
        state.shared.released(NUMBER, held);
        let noted = state.attempts.noted();
        state.attempts.note_free(noted, NUMBER, held);
        self.counters.count_frees(DEVICE, held, 1);
    }

    /// Free and total memory that the program sees, from those of the device.
    pub(crate) fn visible_memory(&self, free: usize, total: usize) -> (usize, usize) {
        let state = self.state();
        let others = state.shared.held_by_others(NUMBER);
        let (free, total) =
            state
                .accounts
                .visible_memory(others, Bytes(free as u64), Bytes(total as u64));
        (free.0 as usize, total.0 as usize)
    }
}
