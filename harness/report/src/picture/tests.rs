use super::*;
use crate::tests::examples;

#[test]
fn curves_are_stairs_and_the_points_of_a_step_share_its_width() {
    let point = |at, step, mib| CurvePoint {
        at,
        step,
        allocated: Bytes::mib(mib),
        active: Bytes::mib(mib),
        reserved: Bytes::ZERO,
        used: Bytes::ZERO,
        ooms: 0,
        retries: 0,
    };
    let curve = [
        point(0, 1, 2),
        point(1, 2, 2),
        point(2, 2, 4),
        point(3, 3, 1),
    ];
    let points = positions(&curve, |step| (f64::from(step), f64::from(step) + 1.0));
    let path = svg::stairs(
        points
            .into_iter()
            .map(|(x, point)| (x, svg::mib(point.allocated))),
        4.0,
    );
    assert_eq!(
        path,
        [
            (1.0, 2.0),
            (2.5, 2.0),
            (2.5, 4.0),
            (3.0, 4.0),
            (3.0, 1.0),
            (4.0, 1.0)
        ]
    );
}

#[test]
fn a_step_with_many_points_has_a_wider_column() {
    let (columns, right) = columns(&[&examples::storm()]);
    let widths: Vec<f64> = columns
        .values()
        .map(|(left, right)| (right - left).round())
        .collect();
    assert_eq!(widths, [1.0, 24.0, 1.0]);
    assert_eq!(columns.values().last().map(|column| column.1), Some(right));
}

/// Ten points of a step keep their positions although points between them were dropped.
#[test]
fn points_stand_where_they_were_in_their_step_and_steps_that_are_not_recorded_keep_their_room() {
    let point = |at, step| CurvePoint {
        at,
        step,
        allocated: Bytes(at),
        active: Bytes(at),
        reserved: Bytes::ZERO,
        used: Bytes::ZERO,
        ooms: 0,
        retries: 0,
    };
    let curve = [point(0, 1), point(75, 1), point(99, 1), point(100, 4)];
    let places: Vec<f64> = positions(&curve, |step| (f64::from(step), f64::from(step) + 1.0))
        .into_iter()
        .map(|(x, _)| x)
        .collect();
    assert_eq!(places, [1.0, 1.75, 1.99, 4.0]);
    let run = RunRecord {
        curve: curve.to_vec(),
        steps: Vec::new(),
        ..examples::oom_retry("caching", 0)
    };
    let (columns, right) = columns(&[&run]);
    assert_eq!(
        (columns.get(&1), columns.get(&4), right),
        (Some(&(0.0, 10.0)), Some(&(12.0, 13.0)), 13.0)
    );
}

#[test]
fn a_picture_has_one_panel_an_allocator_and_its_own_ground() {
    let (caching, direct) = (
        examples::oom_retry("caching", 0),
        examples::oom_retry("direct", 0),
    );
    let svg = draw(&[&caching, &direct]).expect("both have curves");
    assert!(svg.contains("caching: passed") && svg.contains("direct: passed"));
    assert!(
        svg.contains(&format!("height=\"{}\"", HEAD + 2 * PANEL))
            && svg.contains("fill=\"#FFFFFF\"")
    );
    assert!(svg.contains("limit 1 GiB"));
    assert_eq!(Some(svg), draw(&[&caching, &direct]));
}

#[test]
fn a_long_name_keeps_its_ends_and_stays_inside_the_picture() {
    assert_eq!(
        (shortened("abcdef", 6), shortened("abcdefg", 6)),
        ("abcdef".to_owned(), "abc…fg".to_owned())
    );
    let name = format!("caching({})", "garbage_collection_threshold:0.8,".repeat(9));
    let run = RunRecord {
        allocator: name,
        ..examples::failed("caching", 0)
    };
    let svg = draw(&[&run]).expect("it has a curve");
    let title = svg
        .lines()
        .find(|line| line.starts_with("caching(") && line.contains("FAILED"))
        .expect("the panel has a title");
    assert_eq!(title.chars().count(), TITLE, "{title}");
}

#[test]
fn marks_of_evenly_spread_ooms_are_evenly_spread() {
    let steps: Vec<u32> = (1..=5_000).collect();
    let run = examples::long_run(5_000, &steps);
    let axes = Axes::new(&[&run]).expect("it has a curve");
    let marks = rises(&run, &axes, |point| point.ooms);
    let gaps: Vec<f64> = marks.windows(2).map(|pair| pair[1].x - pair[0].x).collect();
    let (least, most) = (
        gaps.iter().copied().fold(f64::MAX, f64::min),
        gaps.iter().copied().fold(0.0, f64::max),
    );
    assert!(most < 1.2 * least, "{gaps:?}");
}

#[test]
fn a_failed_request_is_drawn_with_its_size_and_cause() {
    let run = examples::fragmented();
    let svg = draw(&[&run]).expect("it has a curve");
    assert!(
        svg.contains("\nfailed request\n") && svg.contains("\n64 MiB\n"),
        "{svg}"
    );
    let cause = "step 3, line 10, 64 MiB: enough memory is free in total, but it is fragmented: no \
         free block is large enough";
    assert!(
        svg.contains(cause) && svg.contains("\nalloc wanted\n"),
        "{svg}"
    );
    assert!(
        !draw(&[&examples::oom_retry("caching", 0)])
            .expect("it has a curve")
            .contains("failed request")
    );
}

#[test]
fn active_is_drawn_where_it_differs_from_allocated() {
    let svg = draw(&[&examples::storm()]).expect("it has a curve");
    assert!(
        svg.contains("\nactive\n") && svg.contains("freed and waiting for an event"),
        "{svg}"
    );
    let mut run = examples::storm();
    run.curve
        .iter_mut()
        .for_each(|point| point.active = point.allocated);
    assert!(
        !draw(&[&run])
            .expect("it has a curve")
            .contains("\nactive\n")
    );
}

#[test]
fn passes_of_loops_are_marked_where_they_begin() {
    let mut run = examples::long_run(40, &[]);
    for step in &mut run.steps {
        step.iteration = Some(format!("i = {}", step.number / 10));
    }
    let svg = draw(&[&run]).expect("it has a curve");
    let marks: Vec<usize> = (0..=4)
        .map(|pass| svg.matches(&format!("\ni = {pass}\n")).count())
        .collect();
    assert_eq!(marks, [1; 5], "{svg}");
}

#[test]
fn settings_that_the_name_does_not_tell_stand_in_the_title() {
    let settings = Some("max_split_size_mb:512".to_owned());
    let run = RunRecord {
        settings,
        allocator: "tuned".to_owned(),
        ..examples::oom_retry("caching", 0)
    };
    assert!(
        draw(&[&run])
            .expect("it has a curve")
            .contains("tuned (max_split_size_mb:512): passed")
    );
}

#[test]
fn names_cannot_break_the_picture() {
    let run = RunRecord {
        allocator: "a<b>&\"".to_owned(),
        ..examples::oom_retry("caching", 0)
    };
    let svg = draw(&[&run]).expect("it has a curve");
    assert!(
        svg.contains("a&lt;b&gt;&amp;") && !svg.contains("a<b"),
        "{svg}"
    );
}

#[test]
fn a_run_without_a_curve_has_no_picture() {
    assert_eq!(draw(&[&examples::skipped()]), None);
    assert_eq!(draw(&[]), None);
}

#[test]
fn a_limit_far_above_everything_is_named_but_not_drawn() {
    let mut run = examples::oom_retry("caching", 0);
    run.scenario.memory = Bytes::gib(80);
    let svg = draw(&[&run]).expect("it has a curve");
    assert!(
        svg.contains("The memory limit, 80 GiB, is far above.") && !svg.contains("\nlimit 80 GiB")
    );
}

#[test]
fn marks_stand_where_the_counters_rise_and_merge_where_they_would_overlap() {
    let mut run = examples::storm();
    run.curve
        .iter_mut()
        .for_each(|point| (point.ooms, point.retries) = (0, 0));
    let raise = |run: &mut RunRecord, from: usize, by: u64| {
        run.curve[from..]
            .iter_mut()
            .for_each(|point| point.ooms += by)
    };
    for (from, by) in [(100, 1), (102, 1), (104, 1), (400, 2)] {
        raise(&mut run, from, by);
    }
    let axes = Axes::new(&[&run]).expect("it has a curve");
    let at =
        |index: usize| positions(&run.curve, |step| axes.column(step))[index].0 * axes.pixels();
    let expected = [
        Mark {
            x: at(100),
            count: 3,
        },
        Mark {
            x: at(400),
            count: 2,
        },
    ];
    assert_eq!(rises(&run, &axes, |point| point.ooms), expected);
    assert_eq!(rises(&run, &axes, |point| point.retries), []);
    let svg = draw(&[&run]).expect("it has a curve");
    assert!(svg.contains("×3") && svg.contains("×2"), "{svg}");
}

#[test]
fn thousands_of_marks_are_merged_and_none_is_lost() {
    let steps: Vec<u32> = (1..=5_000).collect();
    let run = examples::long_run(5_000, &steps);
    let axes = Axes::new(&[&run]).expect("it has a curve");
    let marks = rises(&run, &axes, |point| point.ooms);
    assert_eq!(marks.iter().map(|mark| mark.count).sum::<u64>(), 5_000);
    assert!(
        marks
            .windows(2)
            .all(|pair| pair[0].free_from() <= pair[1].x),
        "{marks:?}"
    );
    assert!(marks.len() < 60, "{} marks", marks.len());
}

#[test]
fn a_violation_is_marked_at_the_end_of_its_step_even_where_that_is_not_recorded() {
    let run = examples::failed("caching", 0);
    let axes = Axes::new(&[&run]).expect("it has a curve");
    assert_eq!(
        [0, 1, 3, 9].map(|step| axes.end_of(step)),
        [0.0, 1.0, 3.0, 3.0]
    );
    let svg = draw(&[&run]).expect("it has a curve");
    assert!(
        svg.contains("caching: FAILED (thick vertical line: violation after step 3)"),
        "{svg}"
    );
}

#[test]
fn a_picture_says_in_words_what_it_shows() {
    let run = RunRecord {
        allocator: "a<b>".to_owned(),
        ..examples::oom_retry("caching", 0)
    };
    let svg = draw(&[&run]).expect("it has a curve");
    let words = "role=\"img\">\n<title>Memory over the steps of \
         oom_retry</title>\n<desc>a&lt;b&gt;: passed; peak 700.50 MiB allocated, \
                     702 MiB reserved and 702 MiB device used without the context overhead; limit \
                     1 GiB; allocator retries: 1, OOMs: 0.</desc>\n";
    assert!(svg.contains(words), "{svg}");
}
