use std::fmt::Display;

/// Formats a count with its noun: `1 run`, `2 runs`, `0 retries`.
///
/// ```
/// use harness_base::words::count;
///
/// assert_eq!(count(1_u64, "out of memory error"), "1 out of memory error");
/// assert_eq!(count(2_usize, "retry"), "2 retries");
/// ```
pub fn count<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    if number == N::from(1) {
        format!("1 {noun}")
    } else {
        format!("{number} {}", plural(noun))
    }
}

pub fn joined<T: Display>(all: impl IntoIterator<Item = T>, separator: &str) -> String {
    all.into_iter()
        .map(|one| one.to_string())
        .collect::<Vec<_>>()
        .join(separator)
}

fn plural(noun: &str) -> String {
    match noun.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'i', 'o', 'u']) => format!("{stem}ies"),
        _ if noun.ends_with(['s', 'x', 'z']) || noun.ends_with("ch") || noun.ends_with("sh") => {
            format!("{noun}es")
        }
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular_and_any_other_number_plural() {
        let all = [
            "run",
            "retry",
            "entry",
            "delay",
            "process",
            "batch",
            "failed request",
        ]
        .map(|noun| [1_u64, 0, 2].map(|number| count(number, noun)));
        insta::assert_snapshot!(all.map(|forms| forms.join(", ")).join("\n"));
    }
}
