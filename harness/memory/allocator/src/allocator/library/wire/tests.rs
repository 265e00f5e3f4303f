use super::*;

#[test]
fn messages_and_the_end_of_the_process_arrive() {
    let mut line = Vec::new();
    let sent = Reply::Call(LibraryCall::WaitEvent {
        stream: 3,
        event: u32::MAX,
    });
    send(&mut line, &sent).expect("there is room");
    let mut from = line.as_slice();
    assert_eq!(
        receive::<Reply>(&mut from).expect("it is a message"),
        Some(sent)
    );
    assert_eq!(receive::<Reply>(&mut from).expect("it is the end"), None);
}
