use super::*;

#[test]
fn a_timeline_is_a_process_with_rows_counters_and_refused_requests() {
    let span =
        |track, name: &str, start, duration, size, failure: Option<&str>| TimelineEntry::Span {
            track,
            name: name.to_owned(),
            start: Nanos(start),
            duration: Nanos(duration),
            size,
            failure: failure.map(str::to_owned),
        };
    let entries = vec![
        span(
            Track::Calls,
            "malloc",
            1_500,
            250,
            Some(Bytes::mib(20)),
            None,
        ),
        TimelineEntry::Memory {
            at: Nanos(1_750),
            allocated: Bytes::mib(4),
            active: Bytes::mib(5),
            reserved: Bytes::mib(20),
        },
        span(
            Track::Stream(StreamId(1)),
            "fill",
            2_000,
            1_000,
            Some(Bytes::mib(4)),
            None,
        ),
        span(
            Track::Calls,
            "malloc",
            3_000,
            100,
            Some(Bytes::gib(2)),
            Some("the device has 1 GiB free, but 2 GiB were requested"),
        ),
        TimelineEntry::Refused {
            at: Nanos(3_100),
            size: Bytes::gib(2),
        },
        span(Track::Steps, "alloc a", 1_000, 2_200, None, None),
    ];
    let timeline = Timeline {
        scenario: "retry".to_owned(),
        allocator: "caching".to_owned(),
        repetition: 1,
        device: "simulated".to_owned(),
        clock: Clock::Simulated,
        streams: vec![(StreamId(1), "side".to_owned())],
        entries,
        left_out: 7,
    };
    let text = render(&[timeline]);
    assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}");
    insta::assert_snapshot!(text);
}
