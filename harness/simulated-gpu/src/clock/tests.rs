use super::*;

#[test]
fn an_event_completes_by_its_model_or_a_wait_of_the_host() {
    let mut streams = Streams::new(1);
    let (side, event) = (streams.create(0, -1, 1), streams.create_event());
    assert_eq!(streams.query(event, Events::Synchronize, 0), Ok(()), "never recorded");
    streams.record(event, side, 0, (10, Nanos::ZERO)).expect("record");
    assert_eq!(streams.query(event, Events::Instant, 10), Ok(()));
    assert_eq!(streams.query(event, Events::Lag(5), 14), Err(Code::NotReady));
    assert_eq!(streams.query(event, Events::Lag(5), 15), Ok(()));
    assert_eq!(streams.query(event, Events::Synchronize, 1_000), Err(Code::NotReady));
    streams.wait_for(0, 0, 20).expect("wait");
    assert_eq!(streams.query(event, Events::Synchronize, 20), Err(Code::NotReady), "the host waited for another stream");
    let later = streams.create_event();
    streams.record(later, side, 0, (20, Nanos::ZERO)).expect("record");
    streams.wait_for_event(later).expect("find it");
    assert_eq!(streams.query(event, Events::Synchronize, 20), Ok(()), "the host waited for a later event");
}

#[test]
fn unknown_and_destroyed_handles_are_refused() {
    let mut streams = Streams::new(1);
    let (stream, event) = (streams.create(0, 0, 0), streams.create_event());
    streams.destroy(stream).expect("find it");
    streams.destroy_event(event).expect("find it");
    assert_eq!(streams.destroy(stream), Err(Code::InvalidHandle));
    assert_eq!(streams.destroy(0), Err(Code::InvalidHandle));
    assert_eq!(streams.query(event, Events::Instant, 0), Err(Code::InvalidHandle));
    assert_eq!(streams.stream(77, 0).err(), Some(Code::InvalidHandle));
    assert_eq!(streams.stream(0, 3).err(), Some(Code::InvalidHandle), "the machine has one device");
}

#[test]
fn polling_advances_the_clock() {
    let mut streams = Streams::new(1);
    let moved = (0..2_500).filter(|_| streams.has_polled(7)).count();
    assert_eq!(moved, 2);
    assert!((0..999).all(|_| !streams.has_polled(8)));
}
