use super::*;

#[test]
fn times_have_three_digits_and_the_fitting_unit() {
    let told = [
        0,
        999,
        1_000,
        4_234,
        99_949,
        99_960,
        123_456,
        999_499,
        999_600,
        7_500_000_000,
        3_600_000_000_000_000,
    ]
    .map(time);
    let expected = [
        "0 ps", "999 ps", "1.00 ns", "4.23 ns", "99.9 ns", "100 ns", "123 ns", "999 ns", "1.00 µs",
        "7.50 ms", "3600 s",
    ];
    assert_eq!(told, expected);
}

#[test]
fn model_times_are_never_called_measured() {
    assert!(
        short(Quantity::ModelTime).contains("not measured")
            && !short(Quantity::HostTime).contains("not measured")
    );
}

#[test]
fn moments_ratios_and_shares_read_well() {
    assert_eq!(
        [moment("2026-11-20T02:17:33Z"), moment("yesterday")],
        ["2026-11-20 02:17 UTC", "yesterday"]
    );
    assert_eq!(
        [1.3149, 1.0041, 0.5, 0.000_147, f64::NAN].map(ratio),
        ["1.31×", "1.004×", "0.50×", "0.00015×", "–"]
    );
    assert_eq!(
        [1.3, 1.000_000_1, 0.999_999_9, 1.0].map(exact_ratio),
        ["1.30×", "above 1.000×", "below 1.000×", "1.000×"]
    );
    assert_eq!([0.05, 0.012, 0.31].map(percent), ["5 %", "1.2 %", "31 %"]);
    assert_eq!(
        [1.1238, 0.97, 0.9999].map(changed_by),
        ["+12.4 %", "-3.0 %", "0.0 %"]
    );
    assert_eq!(
        [4_200, 62_000, 3_720_000].map(took),
        ["4.2 s", "1 min 2 s", "1 h 2 min"]
    );
}
