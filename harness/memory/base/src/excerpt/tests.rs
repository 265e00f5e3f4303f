#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn shown(excerpt: &Excerpt) -> Vec<&str> {
    excerpt
        .labels
        .iter()
        .map(|label| &excerpt.text[label.offset()..label.offset() + label.len()])
        .collect()
}

fn heading(excerpt: &Excerpt) -> (usize, usize) {
    let contents = excerpt.read_span(excerpt.labels[0].inner(), 0, 0).unwrap();
    (contents.line() + 1, contents.column() + 1)
}

#[test]
fn a_text_of_short_lines_is_shown_as_it_is() {
    let text = "about: x\nsteps: []\n";
    let excerpt = Excerpt::new("a.yaml", text, &[(9..14, "here".to_owned())]);
    assert_eq!(
        (excerpt.text.as_str(), shown(&excerpt), heading(&excerpt)),
        (text, vec!["steps"], (2, 1))
    );
}

#[test]
fn of_a_long_line_what_stands_around_the_places_is_shown_with_its_own_columns() {
    let text = format!(
        "first\n{}wrong{}other{}\nlast\n",
        "µ".repeat(1_000_000),
        "-".repeat(500),
        "+".repeat(1_000_000)
    );
    let at = text.find("wrong").unwrap();
    let excerpt = Excerpt::new(
        "a.yaml",
        &text,
        &[
            (at..at + 5, "here".to_owned()),
            (at + 505..at + 510, "see".to_owned()),
        ],
    );
    assert_eq!(
        (shown(&excerpt), heading(&excerpt)),
        (vec!["wrong", "other"], (2, 1_000_001))
    );
    let (micro, dash, plus) = ("µ".repeat(60), "-".repeat(60), "+".repeat(60));
    assert_eq!(
        excerpt.text,
        format!("first\n…{micro}wrong{dash}…{dash}other{plus}…\nlast\n")
    );
}

#[test]
fn a_place_as_long_as_its_line_is_cut_too() {
    let text = "\0".repeat(3_000_000);
    let excerpt = Excerpt::new("a.yaml", &text, &[(0..text.len(), "here".to_owned())]);
    assert!(
        excerpt.text.chars().count() < 300 && excerpt.text.starts_with('\u{fffd}'),
        "{}",
        excerpt.text
    );
    assert_eq!(heading(&excerpt), (1, 1));
}

#[test]
fn of_a_long_message_the_beginning_and_the_end_are_told() {
    for whole in ["allocate 7".to_owned(), "µ".repeat(320)] {
        assert_eq!(shortened(&whole), whole);
    }
    assert_eq!(
        shortened(&format!("a{}z", "µ".repeat(319))),
        format!("a{}…{}z", "µ".repeat(159), "µ".repeat(159))
    );
}

proptest! {
    #[test]
    fn every_place_of_every_text_is_found_again(
        text in "([a-zµ\n\t]|[-]{250}){0,40}",
        from in any::<prop::sample::Index>(),
        length in 0_usize..20,
    ) {
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let from = from.index(ends.len());
        let line_end = text[ends[from]..].find('\n').map_or(text.len(), |end| ends[from] + end);
        let range = ends[from]..ends[(from + length).min(ends.len() - 1)].min(line_end);
        let excerpt = Excerpt::new("a", &text, &[(range.clone(), "here".to_owned())]);
        let before = &text[..range.start];
        prop_assert_eq!(shown(&excerpt), vec![&text[range]]);
        prop_assert_eq!(excerpt.text.matches('\n').count(), text.matches('\n').count());
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        prop_assert_eq!(heading(&excerpt), (line, column));
    }
}
