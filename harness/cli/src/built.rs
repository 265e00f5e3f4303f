use std::sync::LazyLock;
use std::{fs, hash::Hasher as _};

use harness_allocator::hash::Mixer;
use harness_bench::record::Build;

/// The compiler's version and the build profile.
pub(crate) const COMPILER: &str = env!("HARNESS_BUILD_COMPILER");

/// The commit. Debug builds know it only if `HARNESS_COMMIT` was set at build time.
pub(crate) fn build() -> Build {
    option_env!("HARNESS_BUILD_COMMIT").map_or_else(Build::default, built_from)
}

/// The version and the commit as `--version` shows them: `0.1.0 (1a2b3c)`.
pub(crate) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| version_of(build()));
    &VERSION
}

/// The version, and a hash of the executable if the commit does not determine the code. Results of
/// one run that several processes make have the same identity.
pub(crate) fn identity() -> String {
    match build() {
        Build {
            commit: Some(_),
            dirty: Some(false),
        } => version().to_owned(),
        Build { .. } => {
            let mut hash = Mixer::default();
            hash.write(&fs::read("/proc/self/exe").unwrap_or_default());
            format!("{}, executable {:016x}", version(), hash.finish())
        }
    }
}

fn version_of(build: Build) -> String {
    let commit = match build {
        Build {
            commit: Some(commit),
            dirty: Some(true),
        } => format!("{commit}, with uncommitted changes"),
        Build {
            commit: Some(commit),
            ..
        } => commit,
        Build { commit: None, .. } => {
            "commit unknown: a debug build, or built without git".to_owned()
        }
    };
    format!("{} ({commit})", env!("CARGO_PKG_VERSION"))
}

/// Parses `1a2b3c` or `1a2b3c-dirty`.
fn built_from(text: &str) -> Build {
    let clean = text.strip_suffix("-dirty");
    Build {
        commit: Some(clean.unwrap_or(text).to_owned()),
        dirty: Some(clean.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_shows_the_commit_and_uncommitted_changes() {
        let commit = Some("1a2b3c".to_owned());
        assert_eq!(
            built_from("1a2b3c"),
            Build {
                commit: commit.clone(),
                dirty: Some(false)
            }
        );
        assert_eq!(
            built_from("1a2b3c-dirty"),
            Build {
                commit,
                dirty: Some(true)
            }
        );
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            version_of(built_from("1a2b3c")),
            format!("{version} (1a2b3c)")
        );
        assert_eq!(
            version_of(built_from("1a2b3c-dirty")),
            format!("{version} (1a2b3c, with uncommitted changes)")
        );
        assert!(version_of(Build::default()).starts_with(&format!("{version} (commit unknown")));
    }
}
