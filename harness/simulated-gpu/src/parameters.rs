//! How many parameters a kernel has, from its mangled name (Itanium C++ ABI, <https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling>).

use cpp_demangle::{DemangleOptions, Symbol};

/// The number of parameters of the function with that mangled name. `None` where the name cannot be read.
pub(crate) fn of_function(mangled: &[u8]) -> Option<usize> {
    let text = Symbol::new(mangled).ok()?.demangle(&DemangleOptions::new().no_return_type()).ok()?;
    Some(count(last_list(&text)?))
}

/// What stands between the last pair of parentheses of the outermost level.
fn last_list(text: &str) -> Option<&str> {
    let end = text.rfind(')')?;
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate().take(end + 1).collect::<Vec<_>>().into_iter().rev() {
        match byte {
            b')' => depth += 1,
            b'(' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[at + 1..end]);
        }
    }
    None
}

/// The number of elements of a list whose commas may stand in nested brackets.
fn count(list: &str) -> usize {
    if list.trim().is_empty() || list == "void" {
        return 0;
    }
    let mut depth = 0_i32;
    let commas = list.bytes().filter(|byte| {
        match byte {
            b'(' | b'<' | b'[' | b'{' => depth += 1,
            b')' | b'>' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        *byte == b',' && depth == 0
    });
    commas.count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_whatever_their_types() {
        assert_eq!(of_function(b"_Z4funcv"), Some(0));
        assert_eq!(of_function(b"_Z4funciPfS_"), Some(3));
        let elementwise = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_";
        assert_eq!(of_function(elementwise), Some(3));
        assert_eq!(of_function(b"no name of a function"), None);
    }
}
