use std::time::Duration;

use super::*;

#[test]
fn days_are_counted_as_the_calendar_has_them() {
    let of = |seconds| Date::of(UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
    // Expected values from `date -u -d @N +%F`.
    for (seconds, day) in [
        (0, "1970-01-01"),
        (951_782_399, "2000-02-28"),
        (951_782_400, "2000-02-29"),
        (951_868_800, "2000-03-01"),
        (1_795_132_800, "2026-11-20"),
        (4_102_444_799, "2099-12-31"),
    ] {
        assert_eq!(of(seconds), day);
    }
    assert_eq!(
        Date::of(UNIX_EPOCH - Duration::from_secs(1)).to_string(),
        "1970-01-01"
    );
}

#[test]
fn what_is_not_a_day_is_refused() {
    assert_eq!(
        Date::try_from("2026-11-20".to_owned()),
        Ok(Date::of(UNIX_EPOCH + Duration::from_secs(1_795_132_800)))
    );
    for text in [
        "",
        "2026-11",
        "2026-13-01",
        "2026-02-29",
        "2026-00-10",
        "26-11-20",
        "2026-11-20T00",
        "2026-1-1",
        "+026-11-20",
    ] {
        let error = Date::try_from(text.to_owned()).expect_err(text);
        assert_eq!(
            error,
            format!("`{text}` is not a day: write year, month and day, as in `2026-11-20`")
        );
    }
}
