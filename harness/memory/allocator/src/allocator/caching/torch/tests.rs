use super::*;

#[test]
fn a_release_is_its_version_and_others_become_the_nearest() {
    for (text, version, is_covered) in [
        ("2.9", TorchVersion::V2_9, true),
        ("2.9.1", TorchVersion::V2_9, true),
        ("2.15.0+cu130", TorchVersion::V2_15, true),
        ("2.17", TorchVersion::V2_15, false),
        ("3.0", TorchVersion::V2_15, false),
        ("2.3.1", TorchVersion::V2_4, false),
        ("1.13", TorchVersion::V2_4, false),
    ] {
        assert_eq!(text.parse(), Ok(version), "{text}");
        assert_eq!(version.covers(text), is_covered, "{text}");
    }
    for text in ["", "2", "two", "2.x", "v2.9"] {
        assert_eq!(
            text.parse::<TorchVersion>(),
            Err(TorchVersionError(text.to_owned()))
        );
    }
}
