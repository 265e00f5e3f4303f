use super::captures::{Caller, Status, exchange_mode};
use super::*;

#[test]
fn an_event_completes_by_its_model_or_a_wait_of_the_host() {
    let mut streams = Streams::new(1);
    let (side, event) = (streams.create(0, -1, 1), streams.create_event());
    assert_eq!(
        streams.query(event, Events::Synchronize, 0),
        Ok(()),
        "never recorded"
    );
    streams.submitted().add(side, 0);
    streams
        .record(event, side, 0, 0, (10, Nanos::ZERO))
        .expect("record");
    assert_eq!(streams.query(event, Events::Instant, 10), Ok(()));
    assert_eq!(
        streams.query(event, Events::Lag(5), 14),
        Err(Code::NotReady)
    );
    assert_eq!(streams.query(event, Events::Lag(5), 15), Ok(()));
    assert_eq!(
        streams.query(event, Events::Synchronize, 1_000),
        Err(Code::NotReady)
    );
    streams.submitted().add(0, 0);
    streams.wait_for(0, 0).expect("wait");
    assert_eq!(
        streams.query(event, Events::Synchronize, 20),
        Err(Code::NotReady),
        "the host waited for another stream"
    );
    let later = streams.create_event();
    streams.submitted().add(side, 0);
    streams
        .record(later, side, 0, 0, (20, Nanos::ZERO))
        .expect("record");
    streams.wait_for_event(later).expect("find it");
    assert_eq!(
        streams.query(event, Events::Synchronize, 20),
        Ok(()),
        "the host waited for a later event"
    );
}

/// Whether the host knows that an event's work has ended.
fn has_ended(streams: &Streams, event: usize) -> bool {
    streams.pending_since(event) == Ok(None)
}

/// An event of a stream that has some work.
fn working(streams: &mut Streams, stream: usize) -> usize {
    streams.submitted().add(stream, 0);
    recorded(streams, stream)
}

fn recorded(streams: &mut Streams, stream: usize) -> usize {
    let event = streams.create_event();
    streams.record(event, stream, 0, 0, WORK).expect("records");
    event
}

#[test]
fn a_stream_without_new_work_is_idle_whatever_others_do() {
    let mut streams = Streams::new(2);
    let [fresh, busy] = [(); 2].map(|()| streams.create(0, 0, 1));
    let of_busy = working(&mut streams, busy);
    let of_fresh = recorded(&mut streams, fresh);
    assert_eq!(streams.is_idle(fresh, 0), Ok(true), "no work ever");
    assert!(has_ended(&streams, of_fresh));
    assert_eq!(streams.is_idle(busy, 0), Ok(false));
    streams.wait_for(busy, 0).expect("waits");
    let after = recorded(&mut streams, busy);
    streams.submitted().add(fresh, 0);
    streams.submitted().add(PER_THREAD, 0);
    streams.submitted().add(0, 1);
    assert_eq!(streams.is_idle(busy, 0), Ok(true), "others got work");
    assert!(has_ended(&streams, of_busy) && has_ended(&streams, after));
    let handles = [(fresh, 0), (PER_THREAD, 0), (0, 1), (0, 0), (PER_THREAD, 1)];
    let idle = handles.map(|(stream, current)| streams.is_idle(stream, current));
    assert_eq!(
        idle,
        [false, false, false, false, true].map(Ok),
        "the legacy stream waits for that of the thread"
    );
    streams.wait_for_device(0).expect("waits");
    let idle = handles.map(|(stream, current)| streams.is_idle(stream, current));
    assert_eq!(idle, [true, true, false, true, true].map(Ok));
}

#[test]
fn a_wait_for_a_stream_ends_the_work_that_it_waited_for() {
    let mut streams = Streams::new(1);
    let [first, second, third] = [(); 3].map(|()| streams.create(0, 0, 1));
    let of_first = working(&mut streams, first);
    streams
        .wait_in_stream(second, 0, of_first, 0)
        .expect("waits");
    assert_eq!(streams.is_idle(second, 0), Ok(false), "it waits itself");
    let of_second = recorded(&mut streams, second);
    let later = working(&mut streams, first);
    streams
        .wait_in_stream(third, 0, of_second, 0)
        .expect("waits");
    assert!(!has_ended(&streams, of_first) && !has_ended(&streams, of_second));
    streams.wait_for(third, 0).expect("waits");
    assert!(has_ended(&streams, of_first) && has_ended(&streams, of_second));
    assert!(!has_ended(&streams, later), "it came after the event");
    assert_eq!(streams.is_idle(second, 0), Ok(true));
    streams.wait_for_event(later).expect("waits");
    assert_eq!(streams.is_idle(first, 0), Ok(true));
}

#[test]
fn blocking_streams_and_the_legacy_stream_wait_for_each_other() {
    let mut streams = Streams::new(2);
    let [blocking, other] = [0, 1].map(|flags| streams.create(0, 0, flags));
    for stream in [blocking, other] {
        streams.submitted().add(stream, 0);
    }
    assert_eq!(streams.is_idle(0, 0), Ok(false), "a blocking stream works");
    assert_eq!(streams.is_idle(0, 1), Ok(true), "of another device");
    streams.wait_for(0, 0).expect("waits");
    assert_eq!(streams.is_idle(blocking, 0), Ok(true));
    assert_eq!(streams.is_idle(other, 0), Ok(false), "it is not blocking");
    streams.submitted().add(0, 0);
    let [of_blocking, of_other] = [blocking, other].map(|stream| recorded(&mut streams, stream));
    assert!(
        !has_ended(&streams, of_blocking),
        "it follows the legacy stream"
    );
    streams.wait_for_event(of_other).expect("waits");
    assert_eq!(streams.is_idle(0, 0), Ok(false));
    streams.wait_for_event(of_blocking).expect("waits");
    assert_eq!(streams.is_idle(0, 0), Ok(true));
}

#[test]
fn unknown_and_destroyed_handles_are_refused() {
    let mut streams = Streams::new(1);
    let (stream, event) = (streams.create(0, 0, 0), streams.create_event());
    streams.destroy(stream).expect("find it");
    streams.destroy_event(event).expect("find it");
    assert_eq!(streams.destroy(stream), Err(Code::InvalidHandle));
    assert_eq!(streams.destroy(0), Err(Code::InvalidHandle));
    assert_eq!(
        streams.query(event, Events::Instant, 0),
        Err(Code::InvalidHandle)
    );
    assert_eq!(streams.stream(77, 0).err(), Some(Code::InvalidHandle));
    assert_eq!(
        streams.stream(0, 3).err(),
        Some(Code::InvalidHandle),
        "the machine has one device"
    );
}

#[test]
fn polling_advances_the_clock() {
    let mut streams = Streams::new(1);
    let moved = (0..2_500).filter(|_| streams.has_polled(7)).count();
    assert_eq!(moved, 2);
    assert!((0..999).all(|_| !streams.has_polled(8)));
}

/// Streams with two that capture on request, the second of which synchronizes with the legacy
/// stream, and an event.
fn capturing() -> (Streams, [usize; 2], usize) {
    let mut streams = Streams::new(1);
    let created = [streams.create(0, 0, 1), streams.create(0, 0, 0)];
    let event = streams.create_event();
    (streams, created, event)
}

const WORK: (u64, Nanos) = (1, Nanos::ZERO);
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

fn here() -> Caller {
    Caller::current()
}

fn in_mode(mode: i32) -> Caller {
    let mut exchanged = mode;
    exchange_mode(&mut exchanged).expect("a mode");
    let caller = Caller::current();
    exchange_mode(&mut exchanged).expect("the mode before");
    caller
}

fn elsewhere() -> Caller {
    std::thread::spawn(Caller::current)
        .join()
        .expect("no panic")
}

#[test]
fn a_capturing_stream_refuses_to_be_waited_for_and_its_capture_is_lost() {
    type Wait = fn(&mut Streams, usize, usize) -> Result<(), Code>;
    let waits: [(Code, Wait); 7] = [
        (Code::CaptureUnsupported, |streams, stream, _| {
            streams.wait_for(stream, 0)
        }),
        (Code::CaptureUnsupported, |streams, stream, _| {
            streams.is_idle(stream, 0).map(drop)
        }),
        (Code::CaptureUnsupported, |streams, _, _| {
            streams.wait_for_device(0)
        }),
        (Code::CaptureUnsupported, |streams, _, _| {
            streams.allow_unsafe(here())
        }),
        (Code::CapturedEvent, |streams, _, event| {
            streams.wait_for_event(event)
        }),
        (Code::CapturedEvent, |streams, _, event| {
            streams.query(event, Events::Instant, 1)
        }),
        (Code::CapturedEvent, |streams, _, event| {
            streams.recorded_at(event).map(drop)
        }),
    ];
    for (code, wait) in waits {
        let (mut streams, [stream, _], event) = capturing();
        streams
            .begin_capture(stream, 0, GLOBAL, here())
            .expect("begins");
        streams.record(event, stream, 0, 0, WORK).expect("records");
        assert_eq!(streams.submit(stream, 0), Ok(true));
        assert_eq!(wait(&mut streams, stream, event), Err(code));
        assert!(
            matches!(
                streams.capture_status(stream, 0),
                Ok(Status::Invalidated(1))
            ),
            "{code:?}"
        );
        assert_eq!(streams.submit(stream, 0), Err(Code::CaptureInvalidated));
        assert_eq!(
            streams.end_capture(stream, 0, here()),
            Err(Code::CaptureInvalidated)
        );
        assert_eq!(streams.capture_status(stream, 0), Ok(Status::None));
        assert_eq!(
            (streams.wait_for(stream, 0), streams.allow_unsafe(here())),
            (Ok(()), Ok(())),
            "the stream works again"
        );
    }
}

#[test]
fn unsafe_calls_are_refused_by_the_modes_of_captures_and_threads() {
    let refused = Err(Code::CaptureUnsupported);
    for (mode, caller, expected) in [
        (GLOBAL, here(), refused),
        (GLOBAL, elsewhere(), refused),
        (GLOBAL, in_mode(THREAD_LOCAL), refused),
        (GLOBAL, in_mode(RELAXED), Ok(())),
        (THREAD_LOCAL, here(), refused),
        (THREAD_LOCAL, elsewhere(), Ok(())),
        (RELAXED, here(), Ok(())),
        (RELAXED, elsewhere(), Ok(())),
    ] {
        let (mut streams, [stream, _], _) = capturing();
        streams
            .begin_capture(stream, 0, mode, here())
            .expect("begins");
        assert_eq!(streams.allow_unsafe(caller), expected, "{mode} {caller:?}");
        let ended = if expected.is_ok() {
            Ok(None)
        } else {
            Err(Code::CaptureInvalidated)
        };
        assert_eq!(
            streams.end_capture(stream, 0, here()),
            ended,
            "{mode} {caller:?}"
        );
    }
    let (mut streams, [stream, _], _) = capturing();
    streams
        .begin_capture(stream, 0, GLOBAL, elsewhere())
        .expect("begins");
    assert_eq!(
        streams.allow_unsafe(in_mode(THREAD_LOCAL)),
        Ok(()),
        "another thread captures"
    );
}

#[test]
fn a_capture_ends_in_its_stream_and_thread() {
    let (mut streams, [stream, other], event) = capturing();
    assert_eq!(
        streams.end_capture(stream, 0, here()),
        Err(Code::IllegalState)
    );
    assert_eq!(
        streams.begin_capture(stream, 0, 3, here()),
        Err(Code::InvalidValue)
    );
    assert_eq!(
        streams.begin_capture(0, 0, GLOBAL, here()),
        Err(Code::CaptureUnsupported)
    );
    streams
        .begin_capture(stream, 0, GLOBAL, here())
        .expect("begins");
    assert_eq!(
        streams.begin_capture(stream, 0, GLOBAL, here()),
        Err(Code::IllegalState)
    );
    assert_eq!(
        streams.end_capture(stream, 0, elsewhere()),
        Err(Code::CaptureWrongThread)
    );
    assert_eq!(
        streams.end_capture(stream, 0, here()),
        Err(Code::CaptureInvalidated)
    );
    streams
        .begin_capture(stream, 0, RELAXED, here())
        .expect("begins");
    assert_eq!(streams.end_capture(stream, 0, elsewhere()), Ok(None));

    streams
        .begin_capture(stream, 0, GLOBAL, here())
        .expect("begins");
    streams.record(event, stream, 0, 0, WORK).expect("records");
    streams.wait_in_stream(other, 0, event, 0).expect("joins");
    assert_eq!(
        streams.end_capture(other, 0, here()),
        Err(Code::CaptureUnmatched)
    );
    streams.destroy(stream).expect("find it");
    assert_eq!(
        (
            streams.allow_unsafe(here()),
            streams.capture_status(other, 0)
        ),
        (Ok(()), Ok(Status::None)),
        "destroyed"
    );
}

#[test]
fn a_forked_stream_must_join_before_the_end() {
    for (works, joins, expected) in [
        (true, true, Ok(None)),
        (true, false, Err(Code::CaptureUnjoined)),
        (false, false, Ok(None)),
        (false, true, Ok(None)),
    ] {
        let (mut streams, [stream, fork], event) = capturing();
        streams
            .begin_capture(stream, 0, GLOBAL, here())
            .expect("begins");
        streams.submit(stream, 0).expect("captured");
        streams.record(event, stream, 0, 0, WORK).expect("records");
        streams.wait_in_stream(fork, 0, event, 0).expect("joins");
        assert!(matches!(
            streams.capture_status(fork, 0),
            Ok(Status::Active(1))
        ));
        if works {
            assert_eq!(streams.submit(fork, 0), Ok(true));
        }
        if joins {
            streams.record(event, fork, 0, 0, WORK).expect("records");
            streams.wait_in_stream(stream, 0, event, 0).expect("joins");
        }
        assert_eq!(streams.end_capture(stream, 0, here()), expected);
        assert_eq!(streams.capture_status(fork, 0), Ok(Status::None));
        assert_eq!(
            streams.wait_for_event(event),
            Err(Code::CapturedEvent),
            "last recorded in a capture"
        );
        assert_eq!(
            streams.wait_in_stream(fork, 0, event, 0),
            Err(Code::CapturedEvent)
        );
        streams.record(event, fork, 0, 0, WORK).expect("records");
        assert_eq!(streams.wait_for_event(event), Ok(()));
    }
}

#[test]
fn no_dependency_crosses_the_edge_of_a_capture() {
    let (mut streams, [stream, blocking], event) = capturing();
    let (third, outside) = (streams.create(0, 0, 1), streams.create_event());
    let begin = |streams: &mut Streams, stream| {
        streams
            .begin_capture(stream, 0, GLOBAL, here())
            .expect("begins")
    };
    begin(&mut streams, stream);
    assert_eq!(
        streams.wait_in_stream(stream, 0, outside, 0),
        Ok(()),
        "never recorded"
    );
    streams.record(outside, third, 0, 0, WORK).expect("records");
    assert_eq!(
        streams.wait_in_stream(stream, 0, outside, 1),
        Ok(()),
        "an external event"
    );
    assert_eq!(
        streams.record(outside, third, 0, 1, WORK),
        Err(Code::InvalidValue),
        "no capture"
    );
    assert_eq!(
        streams.wait_in_stream(stream, 0, outside, 0),
        Err(Code::CaptureIsolation)
    );
    assert_eq!(
        streams.end_capture(stream, 0, here()),
        Err(Code::CaptureInvalidated)
    );

    begin(&mut streams, stream);
    begin(&mut streams, third);
    streams.record(event, stream, 0, 0, WORK).expect("records");
    assert_eq!(
        streams.wait_in_stream(third, 0, event, 0),
        Err(Code::CaptureMerge)
    );
    assert_eq!(
        [stream, third].map(|stream| streams.end_capture(stream, 0, here())),
        [Err(Code::CaptureInvalidated); 2]
    );

    begin(&mut streams, stream);
    assert_eq!(
        (streams.submit(0, 0), streams.wait_for(0, 0)),
        (Ok(false), Ok(())),
        "the stream is non-blocking"
    );
    assert_eq!(streams.end_capture(stream, 0, here()), Ok(None));
    begin(&mut streams, blocking);
    assert_eq!(streams.capture_status(0, 0), Err(Code::CaptureImplicit));
    assert!(matches!(
        streams.capture_status(blocking, 0),
        Ok(Status::Active(_))
    ));
    assert_eq!(streams.submit(0, 0), Err(Code::CaptureImplicit));
    assert_eq!(
        streams.end_capture(blocking, 0, here()),
        Err(Code::CaptureInvalidated)
    );
}
