use super::*;

fn squeezed() -> Squeezed {
    let look = |milliseconds, used| Look {
        milliseconds,
        used: Bytes::mib(used),
        free: Bytes::mib(2048 - used),
    };
    Squeezed {
        command: "python train.py".to_owned(),
        exit_code: 1,
        signal: None,
        leave: Bytes::mib(700),
        taken: Bytes::mib(1048),
        free_before: Bytes::mib(1748),
        free_at_start: Bytes::mib(700),
        peak_used: Bytes::mib(2000),
        least_free: Bytes::mib(48),
        looks: 31,
        milliseconds: 1520,
        lost: None,
        curve: vec![
            look(0, 1348),
            look(400, 1348),
            look(450, 2000),
            look(1500, 1348),
        ],
    }
}

#[test]
fn a_page_has_every_figure_and_its_picture() {
    insta::assert_snapshot!(markdown(
        &squeezed(),
        Some("run.svg"),
        "harness squeeze --leave 700MiB -- python train.py"
    ));
    let lost = Squeezed {
        lost: Some("cuMemGetInfo failed".to_owned()),
        signal: Some(9),
        ..squeezed()
    };
    let page = markdown(&lost, None, "again");
    assert!(
        page.contains("**Signal 9 ended the program.")
            && page.contains("stopped early: cuMemGetInfo failed."),
        "{page}"
    );
    assert!(!page.contains("!["), "{page}");
}

#[test]
fn a_picture_says_in_words_what_it_shows_and_needs_a_look() {
    let svg = picture(&squeezed()).expect("there is a curve");
    assert!(
        svg.contains(
            "<desc>The program ended with exit code 1. Device memory: at most 1.95 \
         GiB (2097152000) in use"
        ),
        "{svg}"
    );
    assert!(
        svg.contains("device used (driver)") && svg.contains("python train.py"),
        "{svg}"
    );
    assert_eq!(
        picture(&Squeezed {
            curve: Vec::new(),
            ..squeezed()
        }),
        None
    );
}
