use super::*;

#[test]
fn steps_own_the_comments_above_and_after_them() {
    let source = "steps:\n  # first\n  # of all\n  - alloc: { buffer: 'a # b' }  # a\n  - \
         storm:\n      id: s  # its name\n      live: 1MiB # at most\n\n  # last\n  - free: \
         a\nseed: 1 # other\n";
    let mut comments = Comments::of(source);
    let texts = |lines: &[&str]| lines.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        comments.take(4),
        (texts(&["first", "of all"]), Some("a".to_owned()))
    );
    assert_eq!(
        comments.take(5),
        (Vec::new(), Some("its name; at most".to_owned()))
    );
    assert_eq!(comments.take(10), (texts(&["last"]), None));
}
