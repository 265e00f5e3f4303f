//! The parameters of a kernel, from its mangled name (Itanium C++ ABI,
//! <https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling>).

use cpp_demangle::{DemangleOptions, Symbol};

/// A parameter of a kernel, as far as its type shows pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parameter {
    /// A number or an enumeration of at most eight bytes.
    Scalar,
    /// This many pointers: one, or a `std::array` of them.
    Pointers(usize),
    /// A class that contains pointers to operands among other fields, in its first
    /// [`OPERAND_WORDS`].
    Operands,
    /// A class with unknown fields and unknown size.
    Class,
}

/// The parameters of the function with this mangled name; `None` if the name cannot be parsed.
pub(crate) fn parameters(mangled: &[u8]) -> Option<Vec<Parameter>> {
    // The demangler repeats a pack itself, as in `DpT_`, but not a pattern, as in `Dp5ArrayIT_E`.
    let is_pattern = |part: &[u8]| part.starts_with(b"Dp") && !part.ends_with(b"T");
    if mangled.windows(3).any(is_pattern) {
        return None;
    }
    let text = Symbol::new(mangled)
        .ok()?
        .demangle(&DemangleOptions::new().no_return_type())
        .ok()?;
    Some(
        elements(last_list(&text)?)
            .into_iter()
            .map(Parameter::of_type)
            .collect(),
    )
}

/// Classes of PyTorch that contain pointers to operands: of reductions, and of operations on lists
/// of tensors.
const OPERANDS: [&str; 4] = [
    "ReduceOp<",
    "TensorListMetadata<",
    "TensorListScalarListMetadata<",
    "FusedOptimizerTensorListMetadata<",
];
/// Their pointers are among this many words: `TensorListMetadata<5>` begins with 5 × 30 addresses
/// (ATen/native/cuda/MultiTensorApply.cuh), the most.
pub(crate) const OPERAND_WORDS: usize = 150;

impl Parameter {
    fn of_type(text: &str) -> Self {
        let text = text.trim();
        let name = text.split_inclusive('<').next().unwrap_or(text);
        // The captures of a lambda contain operands.
        if text.ends_with('}')
            || OPERANDS
                .iter()
                .any(|class| name.rsplit("::").next() == Some(class))
        {
            return Self::Operands;
        }
        if text.ends_with('*') || text.ends_with('&') {
            return Self::Pointers(1);
        }
        let array = text
            .strip_prefix("std::array<")
            .and_then(|rest| rest.strip_suffix('>'))
            .and_then(|rest| rest.rsplit_once(','));
        if let Some((element, length)) = array
            && element.trim().ends_with('*')
        {
            let digits: String = length.chars().filter(char::is_ascii_digit).collect();
            return Self::Pointers(digits.parse().unwrap_or(1));
        }
        let numbers = [
            "bool",
            "char",
            "short",
            "int",
            "long",
            "float",
            "double",
            "unsigned",
            "signed",
            "__half",
            "__nv_bfloat16",
        ];
        let is_number = text
            .split(' ')
            .all(|word| numbers.contains(&word) || word == "const");
        if is_number { Self::Scalar } else { Self::Class }
    }
}

/// The text in the last pair of parentheses at the outermost level.
fn last_list(text: &str) -> Option<&str> {
    let end = text.rfind(')')?;
    let mut depth = 0_usize;
    for (at, byte) in text
        .bytes()
        .enumerate()
        .take(end + 1)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
    {
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

/// The elements of a list. Commas in nested brackets do not separate elements.
fn elements(list: &str) -> Vec<&str> {
    if list.trim().is_empty() || list == "void" {
        return Vec::new();
    }
    let mut depth = 0_i32;
    list.split(|character| {
        match character {
            '(' | '<' | '[' | '{' => depth += 1,
            ')' | '>' | ']' | '}' => depth -= 1,
            _ => {}
        }
        character == ',' && depth == 0
    })
    // An empty pack.
    .filter(|element| !element.trim().is_empty())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Parameter::{Class, Operands, Pointers, Scalar};

    #[test]
    fn parameters_are_numbers_pointers_or_classes() {
        assert_eq!(parameters(b"_Z4funcv"), Some(vec![]));
        assert_eq!(
            parameters(b"_Z4funciPfS_"),
            Some(vec![Scalar, Pointers(1), Pointers(1)])
        );
        let elementwise = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctor\
              IfEESt5arrayIPcLm3EEEEviT0_T1_";
        assert_eq!(
            parameters(elementwise),
            Some(vec![Scalar, Class, Pointers(3)])
        );
        let reduction =
            b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIf\
              NS0_11sum_functorIfffEEEEjfLi4ELi4EEEEEvT1_";
        assert_eq!(parameters(reduction), Some(vec![Operands]));
        let list = b"_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorList\
              MetadataILi2EEEEEvT_";
        assert_eq!(parameters(list), Some(vec![Operands]));
        assert_eq!(parameters(b"not_a_mangled_name"), None);
        // Packs: of two types, of none, and of a class for each type.
        assert_eq!(
            parameters(b"_Z4funcIJiPfEEvbDpT_"),
            Some(vec![Scalar, Scalar, Pointers(1)])
        );
        assert_eq!(parameters(b"_Z4funcIJEEvbDpT_"), Some(vec![Scalar]));
        assert_eq!(parameters(b"_Z4funcIJEEvbDp5ArrayIT_E"), None);
    }
}
