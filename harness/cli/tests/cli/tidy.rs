//! The structure of the code stays easy to follow: files of a crate do not import each other in a
//! circle.
//!
//! A file imports another if it names a path through the other's module, as in
//! `crate::device::faulty` or `super::faulty`. A module and the files inside it are one unit, so an
//! import from a file of its own module does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fmt::Write as _, fs};

use regex_lite::Regex;

/// A module's path inside its crate: the names after `crate`.
type Module = Vec<String>;

/// The files of a crate by module. Tests are not part of the structure.
fn modules(folder: &Path, at: &Module, into: &mut BTreeMap<Module, PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        let name = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name == "tests" {
            continue;
        }
        let inside = [at.clone(), vec![name.clone()]].concat();
        if path.is_dir() {
            modules(&path, &inside, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let is_root = matches!(name.as_str(), "lib" | "main" | "mod");
            into.insert(if is_root { at.clone() } else { inside }, path);
        }
    }
}

/// The paths that a text names, with the lists in braces expanded.
fn paths(text: &str) -> Vec<Vec<String>> {
    let start = Regex::new(r"\b(crate|self|super)::").expect("the pattern is valid");
    let mut found = Vec::new();
    for begin in start.find_iter(text) {
        // `super::super::x` is found at its first word.
        if !text[..begin.start()].ends_with("::") {
            expand(&text[begin.start()..], &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Reads one path of a `use` tree and returns the rest of the text.
fn expand<'t>(text: &'t str, before: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> &'t str {
    let depth = before.len();
    let mut rest = text.trim_start();
    loop {
        let end = rest
            .find(|letter: char| !letter.is_alphanumeric() && letter != '_')
            .unwrap_or(rest.len());
        if end > 0 {
            before.push(rest[..end].to_owned());
            rest = &rest[end..];
        } else if let Some(list) = rest.strip_prefix('{') {
            rest = list.trim_start();
            while !rest.is_empty() && !rest.starts_with('}') {
                let after = expand(rest, before, found).trim_start();
                let after = after.strip_prefix(',').map_or(after, str::trim_start);
                // Not a list of paths, but code.
                if after.len() == rest.len() {
                    break;
                }
                rest = after;
            }
            before.truncate(depth);
            return rest.strip_prefix('}').unwrap_or(rest);
        } else if let Some(all) = rest.strip_prefix('*') {
            rest = all;
        }
        match rest.strip_prefix("::") {
            Some(next) => rest = next,
            None => break,
        }
    }
    found.push(before.clone());
    before.truncate(depth);
    let rest = rest.trim_start();
    // A new name, as in `a as b`.
    match rest.strip_prefix("as ") {
        Some(name) => name
            .trim_start()
            .trim_start_matches(|letter: char| letter.is_alphanumeric() || letter == '_'),
        None => rest,
    }
}

/// The module that a path goes through: the longest start of it that is a file.
fn target(path: &[String], from: &Module, files: &BTreeMap<Module, PathBuf>) -> Option<Module> {
    let mut at = match path.first()?.as_str() {
        "crate" => Vec::new(),
        _ => from.clone(),
    };
    for name in path {
        match name.as_str() {
            "crate" | "self" => {}
            "super" => drop(at.pop()),
            _ => at.push(name.clone()),
        }
    }
    while !files.contains_key(&at) {
        at.pop()?;
    }
    Some(at)
}

fn without_comments(text: &str) -> String {
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The modules that each module imports, except those that it is inside of.
fn imports(files: &BTreeMap<Module, PathBuf>) -> BTreeMap<Module, BTreeSet<Module>> {
    let of = |(module, path): (&Module, &PathBuf)| {
        let text = without_comments(&fs::read_to_string(path).expect("the file is readable"));
        let targets = paths(&text)
            .into_iter()
            .filter_map(|path| target(&path, module, files));
        let imported = targets
            .filter(|target| !module.starts_with(target))
            .collect();
        (module.clone(), imported)
    };
    files.iter().map(of).collect()
}

/// The modules that can be reached from one.
fn reachable(from: &Module, imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = open.pop() {
        for next in &imports[&module] {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

/// The circles of a crate: groups of modules that all reach each other.
fn circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reach: BTreeMap<_, _> = imports
        .keys()
        .map(|module| (module, reachable(module, imports)))
        .collect();
    let group = |module: &Module| {
        let both = reach[module]
            .iter()
            .filter(|other| reach[*other].contains(module));
        both.cloned().collect::<BTreeSet<_>>()
    };
    imports
        .keys()
        .map(group)
        .filter(|group| !group.is_empty())
        .collect()
}

/// The sources of all crates: `ROOM/src` and `ROOM/CRATE/src`.
fn sources(root: &Path) -> Vec<PathBuf> {
    let inside = |folder: &Path| {
        let entries = fs::read_dir(folder).expect("the folder is readable");
        let paths = entries.map(|entry| entry.expect("the entry is readable").path());
        paths.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let rooms = inside(root);
    let crates = rooms
        .iter()
        .flat_map(|room| inside(room))
        .chain(rooms.iter().cloned());
    let sources = crates.map(|folder| folder.join("src"));
    let is_crate =
        |source: &PathBuf| source.join("lib.rs").exists() || source.join("main.rs").exists();
    let mut sources: Vec<PathBuf> = sources.filter(is_crate).collect();
    sources.sort();
    sources
}

/// The rooms from the ground up, as in ARCHITECTURE.md.
const ROOMS: [&str; 8] = [
    "memory", "gpu", "snapshot", "programs", "scenario", "bench", "report", "cli",
];

#[test]
fn a_room_uses_only_rooms_below_it() {
    let root = root();
    let folders = fs::read_to_string(root.join("../Cargo.toml")).expect("the manifest is readable");
    let place = Regex::new(r#"(?m)^(harness-[a-z-]+) = \{ path = "harness/([a-z-]+)"#)
        .expect("the pattern is valid");
    let named = |pattern: &Regex, text: &str| -> Vec<(String, String)> {
        let found = pattern.captures_iter(text);
        found
            .map(|found| (found[1].to_owned(), found[2].to_owned()))
            .collect()
    };
    let floor = |room: &str| ROOMS.iter().position(|known| *known == room);
    let places: BTreeMap<String, String> = named(&place, &folders).into_iter().collect();
    assert!(
        places.len() > 10,
        "only {} crates have a place",
        places.len()
    );
    let uses = Regex::new(r"(?m)^(harness-[a-z-]+)()\.workspace").expect("the pattern is valid");
    let mut wrong = Vec::new();
    for source in sources(&root) {
        let folder = source.parent().expect("a source has a crate");
        let room = folder
            .strip_prefix(&root)
            .expect("it is inside")
            .iter()
            .next()
            .expect("it has a room")
            .to_string_lossy()
            .into_owned();
        let Some(own) = floor(&room) else { continue };
        let manifest =
            fs::read_to_string(folder.join("Cargo.toml")).expect("the manifest is readable");
        let used = manifest
            .split("[dev-dependencies]")
            .next()
            .unwrap_or_default();
        for (name, _) in named(&uses, used) {
            if places
                .get(&name)
                .and_then(|room| floor(room))
                .is_some_and(|other| other > own)
            {
                wrong.push(format!("{} uses {name}", folder.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_files_of_a_crate_import_each_other_in_a_circle() {
    let root = root();
    let sources = sources(&root);
    assert!(
        sources.len() > 10,
        "only {} crates were found",
        sources.len()
    );
    let (mut text, mut arrows) = (String::new(), 0);
    for source in sources {
        let mut files = BTreeMap::new();
        modules(&source, &Vec::new(), &mut files);
        let imports = imports(&files);
        arrows += imports.values().map(BTreeSet::len).sum::<usize>();
        for circle in circles(&imports) {
            let _ = writeln!(
                text,
                "{}:",
                source.strip_prefix(&root).unwrap_or(&source).display()
            );
            for module in &circle {
                let inside = imports[module]
                    .intersection(&circle)
                    .map(|other| other.join("::"));
                let _ = writeln!(
                    text,
                    "  {} imports {}",
                    module.join("::"),
                    inside.collect::<Vec<_>>().join(", ")
                );
            }
        }
    }
    assert!(arrows > 500, "only {arrows} imports were found");
    assert!(
        text.is_empty(),
        "files import each other in a circle; move what both need into a file below them:\n{text}"
    );
}

#[test]
fn a_circle_is_found_through_lists_and_relative_paths() {
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    assert_eq!(
        paths("use crate::{a::{b, c::d}, e as f};\nuse super::g;"),
        ["crate::a::b", "crate::a::c::d", "crate::e", "super::g"].map(module)
    );
    let files = ["a", "b", "b::c"]
        .map(|path| (module(path), PathBuf::new()))
        .into();
    assert_eq!(
        target(&module("super::super::a::Thing"), &module("b::c"), &files),
        Some(module("a"))
    );
    assert_eq!(
        target(&module("self::c::Thing"), &module("b"), &files),
        Some(module("b::c"))
    );
    let imports = BTreeMap::from([
        (module("a"), BTreeSet::from([module("b")])),
        (module("b"), BTreeSet::from([module("b::c")])),
        (module("b::c"), BTreeSet::from([module("a")])),
    ]);
    let circle = ["a", "b", "b::c"].map(module).into_iter().collect();
    assert_eq!(circles(&imports), BTreeSet::from([circle]));
}

/// Split a longer function at a part that has a name.
const MOST_LINES: usize = 70;

/// Public types that share a name, with their number. A new type gets a name that says what it is.
const SHARED_NAMES: &str = include_str!("shared_names.txt");

/// The files of the product, with their paths below the root.
fn product(root: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for source in sources(root) {
        let mut files = BTreeMap::new();
        modules(&source, &Vec::new(), &mut files);
        found.extend(files.into_values().map(|path| {
            let name = path.strip_prefix(root).unwrap_or(&path).display();
            let text = fs::read_to_string(&path).expect("the file is readable");
            (name.to_string(), text)
        }));
    }
    found.sort();
    found
}

/// The names of functions with more than `most` lines. rustfmt puts the last brace below the first
/// word.
fn long_functions(text: &str, most: usize) -> Vec<String> {
    let head =
        Regex::new(r#"^( *)(?:pub(?:\([a-z]+\))? |const |unsafe |extern "[A-Za-z-]+" )*fn (\w+)"#)
            .expect("the pattern is valid");
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(parts) = head.captures(line) else {
            continue;
        };
        let last = format!("{}}}", &parts[1]);
        let is_one_line = line.ends_with(['}', ';']);
        let length = lines[start..].iter().position(|line| *line == last);
        if !is_one_line && length.is_some_and(|length| length + 1 > most) {
            found.push(parts[2].to_owned());
        }
    }
    found
}

/// Compares findings with a list. A list may only shrink.
fn only_shrinks(found: &BTreeSet<String>, listed: &str, why: &str) {
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let new: Vec<_> = found.difference(&listed).cloned().collect();
    let gone: Vec<_> = listed.difference(found).cloned().collect();
    assert!(new.is_empty(), "{why}:\n{}", new.join("\n"));
    assert!(
        gone.is_empty(),
        "remove from the list, because they are gone:\n{}",
        gone.join("\n")
    );
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("the folder of the crates exists")
}

/// The Rust files below a folder, with tests.
fn rust_files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn no_line_has_more_than_100_columns_except_for_an_address() {
    let root = root();
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    assert!(files.len() > 500, "only {} files were found", files.len());
    let mut wide = String::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("the file is readable");
        for (number, line) in (1..).zip(text.lines()) {
            if line.chars().count() > 100 && !line.contains("://") {
                let path = path.strip_prefix(&root).unwrap_or(&path).display();
                let _ = writeln!(wide, "{path}:{number}");
            }
        }
    }
    assert!(wide.is_empty(), "break these lines at 100 columns:\n{wide}");
}

#[test]
fn no_function_is_longer_than_70_lines() {
    let mut found = Vec::new();
    let files = product(&root());
    assert!(files.len() > 300, "only {} files were found", files.len());
    for (path, text) in files {
        let names = long_functions(&text, MOST_LINES);
        found.extend(names.iter().map(|name| format!("{path} {name}")));
    }
    assert!(
        found.is_empty(),
        "these functions have more than 70 lines:\n{}",
        found.join("\n")
    );
    let text = "fn short() {}\n    pub fn long(\n    ) {\n        {\n        }\n    }\n";
    assert_eq!(long_functions(text, 4), ["long"]);
    assert_eq!(long_functions(text, 5), [""; 0]);
}

#[test]
fn no_public_types_share_a_name_except_the_listed() {
    let head = Regex::new(r"(?m)^ *pub (?:struct|enum|trait|type|union) (\w+)")
        .expect("the pattern is valid");
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    for (_, text) in product(&root()) {
        for parts in head.captures_iter(&text) {
            *numbers.entry(parts[1].to_owned()).or_default() += 1;
        }
    }
    assert!(
        numbers.len() > 500,
        "only {} types were found",
        numbers.len()
    );
    let shared = numbers.into_iter().filter(|(_, number)| *number > 1);
    only_shrinks(
        &shared
            .map(|(name, number)| format!("{name} {number}"))
            .collect(),
        SHARED_NAMES,
        "several public types have one of these names",
    );
}

/// How Python, PyTorch or another library gets a function to call.
const WAYS_IN: [&str; 5] = [
    r"\b(register|register_at_fork|register_after_fork|register_callback|addaudithook)\(",
    r"\b(_lazy_call|CFUNCTYPE|Thread|Finalize|finalize|impl|setattr|settrace|setprofile)\(",
    r"_attach_out_of_memory_observer\(|\bstart_new_thread\(",
    r"\b(meta_path|path_hooks)\.\w+\(|\bsignal\.signal\(",
    // Not the attributes of our own objects, and types of C functions.
    r"^\s*[A-Za-z_][\w.]*\.\w+(, [A-Za-z_][\w.]*)* = ",
];
/// What these lines call or change is our own, or C code.
const OF_OURS: [&str; 5] = [
    r"^\s*(self|cls|original|kind|description|engine)\.\w+(, [\w.]+)* = ",
    r"^\s*(recording|report|Numbers|_effects|_saved|_guard)\.\w+(, [\w.]+)* = ",
    r"\.(argtypes|restype|_?harness_\w+)( = .*)? = |faulthandler\.register\(",
    r"^\s*register\(|def register\(|pluginmanager\.register\(",
    r"^def |^\s*(from|import) ",
];
/// Ways in of the package for Python, whose functions are guarded by themselves: `ci/pytest` fails
/// each call of the observer.
const OF_PACKAGE: [&str; 8] = [
    "start_new_thread(self.work, (device, messages, ended))",
    "self.torch._C._cuda_attach_out_of_memory_observer(self.write)",
    "torch.cuda._lazy_call(torch._harness_observer.start)",
    "spec.loader.exec_module = load_and_observe",
    "sys.meta_path.insert(0, AfterImport())",
    "torch._C._cuda_attach_out_of_memory_observer(write)",
    "os.register_at_fork(after_in_child=self.stop)",
    "ipython._showtraceback = show_others",
];

/// Lines that install a function of ours in a program without the guard.
fn unguarded(text: &str) -> Vec<&str> {
    let [ways, ours] = [&WAYS_IN[..], &OF_OURS].map(|patterns| {
        let pattern = |text: &&str| Regex::new(text).expect("the pattern is valid");
        patterns.iter().map(pattern).collect::<Vec<_>>()
    });
    let is_in = |line: &&str| ways.iter().any(|way| way.is_match(line));
    let is_ours = |line: &&str| ours.iter().any(|pattern| pattern.is_match(line));
    text.lines()
        .filter(|line| !line.contains("guard.") && is_in(line) && !is_ours(line))
        .map(str::trim)
        .collect()
}

#[test]
fn each_function_of_ours_that_a_program_calls_is_guarded() {
    let programs = root().join("programs/exec/src");
    let package = root().join("cli/python/harness");
    let folders = [programs.clone(), programs.join("engines"), package];
    let mut found = Vec::new();
    for path in folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(folder).expect("the folder is readable");
        entries.map(|entry| entry.expect("the entry is readable").path())
    }) {
        if path.extension().is_some_and(|extension| extension == "py")
            && !path.ends_with("guard.py")
        {
            let text = fs::read_to_string(&path).expect("the file is readable");
            let lines = unguarded(&text).into_iter();
            let lines = lines.filter(|line| !OF_PACKAGE.contains(line));
            found.extend(lines.map(|line| format!("{}: {line}", path.display())));
        }
    }
    assert!(
        found.is_empty(),
        "use harness/programs/exec/src/guard.py:\n{}",
        found.join("\n")
    );
}

#[test]
fn a_function_that_is_installed_without_the_guard_is_found() {
    for line in [
        "atexit.register(write)",
        "    module._lazy_call(begin)",
        "torch._C._cuda_init = initialize",
        "sys.meta_path.insert(0, finder)",
        "    setattr(kind, name, note)",
        "sys.exit = exit",
        "hook = ctypes.CFUNCTYPE(ctypes.c_bool)(note)",
    ] {
        assert_eq!(unguarded(line).len(), 1, "{line}");
    }
    for line in [
        "module._lazy_call(_guard.entry(begin))",
        "self.kind = kind",
        "library.f.argtypes = []",
    ] {
        assert!(unguarded(line).is_empty(), "{line}");
    }
}
