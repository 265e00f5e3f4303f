use super::*;

fn latency(text: &str) -> Latency {
    text.parse().expect("parse a latency")
}

#[test]
fn latencies_are_parsed_as_they_are_shown() {
    for text in [
        "cudaMalloc:5ms",
        "cuMemUnmap:1500us",
        "any:2s",
        "all:17ns",
        "cudaHostAlloc:250us",
        "cudaFreeAsync:1ms",
    ] {
        assert_eq!(latency(text).to_string(), text);
    }
    assert_eq!(latency("cudaFree:1.5ms").to_string(), "cudaFree:1500us");
}

#[test]
fn errors_list_the_accepted_latencies() {
    let message = |text: &str| {
        text.parse::<Latency>()
            .expect_err("reject the text")
            .to_string()
    };
    let calls = "write cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, cudaFree, \
         cudaFreeAsync, cuMemUnmap, cudaGraphLaunch, any, all";
    assert_eq!(
        message("cudaMemcpy:3ms"),
        format!("`cudaMemcpy` is not a call that can be delayed: {calls}")
    );
    for text in [
        "cudaFree",
        "cudaFree:",
        "cudaFree:3",
        "cudaFree:0ms",
        "cudaFree:3ms:2",
    ] {
        assert_eq!(
            message(text),
            format!(
                "`{text}` is not CALL:DURATION with a duration above 0, as in `cudaFree:3ms` or \
                 `any:250us`"
            )
        );
    }
}

#[test]
fn the_delays_of_a_call_add_up() {
    let latencies = ["cudaMalloc:2ms", "any:1ms", "all:500us"].map(latency);
    let calls = [Call::Malloc, Call::Create, Call::Free, Call::HostAlloc];
    assert_eq!(
        calls.map(|call| Latency::sum(&latencies, call)),
        [3500, 1500, 500, 500].map(Nanos::micros)
    );
}
