//! Functions of CUDA for a default stream per thread, with `_ptsz` or `_ptds` at the end of their
//! names. A program that is compiled for it calls them. Each is the function without the ending,
//! in which null is `cudaStreamPerThread`. The stub libraries define them.

use std::cell::Cell;
use std::ffi::CString;

use crate::entry_points::exported;

/// The functions and where they have a stream: the position among the integer arguments, from 0,
/// or `c` for the launch configuration in the first one.
const TABLE: &str = include_str!("per_thread.tsv");
/// `cudaStreamPerThread`. For entry points the flag has the same number.
const PER_THREAD: u64 = 2;
/// `cudaLaunchConfig_t` and `CUlaunchConfig` in words, and the place of the stream in them.
const CONFIGURATION: usize = 7;
const STREAM: usize = 4;

thread_local! {
    /// The configuration of a launch, with another stream.
    static CHANGED: Cell<[u64; CONFIGURATION]> = const { Cell::new([0; CONFIGURATION]) };
}

/// The function without the ending, and where it has a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerThread {
    function: usize,
    stream: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Argument(usize),
    Configuration,
    /// The function has no stream.
    None,
}

/// A name without the ending.
pub(crate) fn base(name: &str) -> &str {
    let endings = ["_ptsz", "_ptds"];
    let mut bases = endings.iter().filter_map(|end| name.strip_suffix(end));
    bases.next().unwrap_or(name)
}

fn place(base: &str) -> Place {
    let mut rows = TABLE.lines().filter(|line| !line.starts_with('#'));
    let place = rows.find_map(|row| row.strip_prefix(base)?.strip_prefix('\t'));
    match place {
        None => Place::None,
        Some(position) => position
            .parse()
            .map_or(Place::Configuration, Place::Argument),
    }
}

impl PerThread {
    /// `None` for a name without the ending, and if no model has the function.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let base = Some(base(name)).filter(|base| *base != name)?;
        let function = exported(&CString::new(base).ok()?).expose_provenance();
        (function != 0).then(|| Self {
            function,
            stream: place(base),
        })
    }

    /// Changes the stream in the arguments of a call. Returns the function to call.
    ///
    /// # Safety
    /// They are the six registers of integer arguments, and the arguments on the stack, of a call
    /// of the function.
    pub(crate) unsafe fn prepare(&self, registers: *mut u64, stack: *mut u64) -> usize {
        // SAFETY: the function has these arguments. A configuration has this size.
        unsafe {
            match self.stream {
                Place::None => {}
                Place::Argument(position) => {
                    let argument = if position < 6 {
                        registers.add(position)
                    } else {
                        stack.add(position - 6)
                    };
                    if argument.read() == 0 {
                        argument.write(PER_THREAD);
                    }
                }
                Place::Configuration => {
                    let given = std::ptr::with_exposed_provenance::<[u64; CONFIGURATION]>(
                        registers.read() as usize,
                    );
                    if !given.is_null() && (*given)[STREAM] == 0 {
                        let mut changed = given.read();
                        changed[STREAM] = PER_THREAD;
                        let place = CHANGED.with(|place| {
                            place.set(changed);
                            place.as_ptr().expose_provenance()
                        });
                        registers.write(place as u64);
                    }
                }
            }
        }
        self.function
    }
}

#[cfg(test)]
mod tests {
    use harness_gpu_settings::functions;

    use super::*;

    #[test]
    fn each_row_is_a_function_that_has_another_for_a_stream_per_thread() {
        let rows: Vec<&str> = TABLE
            .lines()
            .filter(|line| !line.starts_with('#'))
            .collect();
        assert!(rows.is_sorted() && rows.len() > 70, "{}", rows.len());
        for row in rows {
            let (name, position) = row.split_once('\t').expect(row);
            assert!(
                position == "c" || position.parse::<usize>().is_ok(),
                "{row}"
            );
            let other = format!("{name}_ptsz");
            assert!(functions::names().any(|known| known == other), "{other}");
        }
    }

    #[test]
    fn null_becomes_the_stream_of_the_thread_in_registers_on_the_stack_and_in_configurations() {
        let call = |name: &str, mut registers: [u64; 6], mut stack: [u64; 3]| {
            let function = PerThread {
                function: 7,
                stream: place(name),
            };
            // SAFETY: the arguments are valid.
            let target = unsafe { function.prepare(registers.as_mut_ptr(), stack.as_mut_ptr()) };
            assert_eq!(target, 7);
            (registers, stack)
        };
        let (some, none) = ([9; 6], [0; 6]);
        assert_eq!(call("cudaMemcpy", none, [0; 3]), (none, [0; 3]));
        assert_eq!(call("cudaStreamQuery", none, [0; 3]).0, [2, 0, 0, 0, 0, 0]);
        assert_eq!(call("cudaStreamQuery", some, [0; 3]), (some, [0; 3]));
        assert_eq!(call("cuLaunchKernel", none, [0; 3]), (none, [0, 0, 2]));
        assert_eq!(call("cudaLaunchKernel", none, [5; 3]), (none, [5; 3]));
        let mut configuration = [8, 8, 8, 8, 0, 8, 8];
        let at = |words: &[u64; 7]| words.as_ptr().expose_provenance() as u64;
        let given = at(&configuration);
        let passed = call("cuLaunchKernelEx", [given; 6], [0; 3]).0[0];
        // SAFETY: it is the changed configuration of this thread.
        let words =
            unsafe { std::ptr::with_exposed_provenance::<[u64; 7]>(passed as usize).read() };
        assert_eq!((words, configuration[STREAM]), ([8, 8, 8, 8, 2, 8, 8], 0));
        configuration[STREAM] = 3;
        let given = at(&configuration);
        assert_eq!(call("cuLaunchKernelEx", [given; 6], [0; 3]).0[0], given);
    }
}
