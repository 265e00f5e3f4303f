use super::*;

fn read(text: &str) -> AllocatorSpec {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn the_default_name_can_be_parsed_again() {
    for kind in AllocatorKind::ALL {
        assert_eq!(read(kind.name()), AllocatorSpec::from(*kind));
    }
    for name in [
        "caching(torch:2.9)",
        "caching(torch:2.12,max_split_size_mb:512)",
        "caching(max_split_size_mb:512)",
        "caching(max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4])",
    ] {
        assert_eq!(read(name).to_string(), name);
    }
    assert_eq!(
        read("caching( max_split_size_mb : 64.5 )").to_string(),
        "caching(max_split_size_mb:64)",
        "the settings as PyTorch reads them"
    );
    assert_eq!(
        read("caching(torch:2.15)").to_string(),
        "caching",
        "the default version"
    );
    assert_eq!(
        read("caching(large_segment_size_mb:20)").to_string(),
        "caching",
        "the default setting"
    );
}

#[test]
fn settings_do_not_depend_on_the_name() {
    let tuned = read("caching(expandable_segments:True,max_split_size_mb:32)").named("tuned");
    assert_eq!(
        (tuned.to_string(), tuned.has_own_name()),
        ("tuned".to_owned(), true)
    );
    assert_eq!(
        tuned.settings().as_deref(),
        Some("max_split_size_mb:32,expandable_segments:True")
    );
    assert_eq!(tuned.build().name(), "expandable");
    assert_eq!(read("caching").settings(), None);
}

#[test]
fn equal_allocators_with_equal_settings_are_equivalent_under_any_name() {
    assert!(read("expandable").is_equivalent_to(&read("caching(expandable_segments:True)")));
    assert!(read("caching()").is_equivalent_to(&read("caching").named("plain")));
    assert!(!read("caching").is_equivalent_to(&read("expandable")));
    assert!(!read("caching").is_equivalent_to(&read("direct")));
    assert!(!read("bfc").is_equivalent_to(&read("direct")));
}

#[test]
fn a_library_is_parsed_from_its_file_and_functions() {
    let library = "library(path:./my alloc.so,alloc:my_malloc,free:my_free,empty_cache:my_clear)";
    assert_eq!(read(library).to_string(), library);
    assert_eq!(
        (read(library).kind(), read(library).kind_name()),
        (None, "library")
    );
    assert!(read(library).is_equivalent_to(&read(library).named("mine")));
    assert!(!read(library).is_equivalent_to(&read("direct")));
    let refusal = |text: &str| text.parse::<AllocatorSpec>().expect_err(text).to_string();
    assert_eq!(refusal("library"), "a library needs `path`");
    assert_eq!(
        refusal("library(path:a.so,alloc:a)"),
        "a library needs `free`"
    );
    assert_eq!(
        refusal("library(path:a.so,allocate:a)"),
        "unknown key `allocate`: the keys are `path`, `alloc`, `free`, `record_stream` and \
         `empty_cache`"
    );
}

#[test]
fn an_invalid_name_is_refused_with_a_reason() {
    let refusal = |text: &str| text.parse::<AllocatorSpec>().expect_err(text).to_string();
    assert_eq!(refusal("cachign"), "there is no allocator `cachign`");
    assert_eq!(
        refusal("caching(a"),
        "write settings in parentheses, as in `caching(max_split_size_mb:512)`"
    );
    assert!(refusal("direct(max_split_size_mb:512)").starts_with("`direct` has no settings"));
    assert!(
        refusal("expandable(max_split_size_mb:512)")
            .starts_with("`expandable` is `caching` with expandable_segments:True")
    );
    assert!(
        refusal("caching(expandable_segments:true)")
            .starts_with("expandable_segments must be `True` or `False`")
    );
}
