//! `harness mcp` speaks the Model Context Protocol over pipes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

const SNAPSHOT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../snapshot/explain/tests/snapshots/kept-features.pickle.gz"
);

struct Client {
    server: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Client {
    fn new(options: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        let mut server = command
            .arg("mcp")
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (requests, answers) = (
            server.stdin.take().unwrap(),
            BufReader::new(server.stdout.take().unwrap()),
        );
        let mut client = Self {
            server,
            requests,
            answers,
        };
        let initialized = client.ask(
            "initialize",
            json!({ "protocolVersion": "2025-06-18", "capabilities": {},
                "clientInfo": { "name": "test", "version": "1" } }),
        );
        assert_eq!(initialized["result"]["serverInfo"]["name"], "harness");
        client.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }));
        client
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.requests, "{message}").unwrap();
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.send(&json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params }));
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// The text of a tool's answer, and whether it is an error.
    fn call(&mut self, tool: &str, arguments: Value) -> (String, bool) {
        let answer = self.ask(
            "tools/call",
            json!({ "name": tool, "arguments": arguments }),
        );
        let result = &answer["result"];
        let text = result["content"][0]["text"]
            .as_str()
            .or(answer["error"]["message"].as_str());
        (
            text.unwrap().to_owned(),
            result["isError"] != json!(false) && result["isError"] != Value::Null
                || answer["error"] != Value::Null,
        )
    }

    fn tools(&mut self) -> Vec<String> {
        let answer = self.ask("tools/list", json!({}));
        answer["result"]["tools"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect()
    }

    fn end(self) {
        let Self {
            mut server,
            requests,
            ..
        } = self;
        drop(requests);
        assert!(server.wait().unwrap().success());
    }
}

#[test]
#[cfg_attr(not(feature = "mcp"), ignore = "needs `--features mcp`")]
fn an_agent_gets_explanations_and_advice_of_a_snapshot() {
    let mut client = Client::new(&[]);
    assert_eq!(client.tools(), ["explain", "advise", "compare"]);
    let (text, is_error) = client.call("explain", json!({ "snapshot": SNAPSHOT }));
    assert!(
        !is_error && text.contains("620.25 MiB are reserved but pinned"),
        "{text}"
    );
    let (text, _) = client.call(
        "explain",
        json!({ "snapshot": SNAPSHOT, "format": "json", "at": "peak" }),
    );
    assert_eq!(
        serde_json::from_str::<Value>(&text).unwrap()["moment"]["at"],
        "peak"
    );
    let (text, _) = client.call("advise", json!({ "snapshot": SNAPSHOT }));
    assert!(
        text.contains("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        "{text}"
    );
    let (text, _) = client.call("compare", json!({ "before": SNAPSHOT, "after": SNAPSHOT }));
    assert!(
        text.contains("peak reserved 2.10 GiB") || text.contains("Peak reserved 2.10 GiB"),
        "{text}"
    );
    client.end();
}

#[test]
#[cfg_attr(not(feature = "mcp"), ignore = "needs `--features mcp`")]
fn no_argument_becomes_an_option_and_wrong_ones_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let written = folder.path().join("written");
    let mut client = Client::new(&[]);
    let (text, is_error) = client.call(
        "explain",
        json!({ "snapshot": format!("--out={}", written.display()) }),
    );
    assert!(is_error && text.contains("there is no such file"), "{text}");
    let (text, is_error) = client.call("explain", json!({ "snapshot": SNAPSHOT, "out": written }));
    assert!(
        is_error && text == "`out` is unknown; `explain` has snapshot, memory, at, format",
        "{text}"
    );
    let (text, is_error) = client.call("compare", json!({ "before": SNAPSHOT }));
    assert!(is_error && text == "`after` is required: a text", "{text}");
    let (text, is_error) = client.call("compare", json!({ "befor": SNAPSHOT, "after": 5 }));
    assert!(
        is_error && text == "`befor` is unknown; `compare` has before, after, at, format",
        "{text}"
    );
    assert!(!written.exists());
    client.end();
}

#[test]
#[cfg_attr(not(feature = "mcp"), ignore = "needs `--features mcp`")]
fn programs_run_only_if_the_user_allows_it() {
    let mut client = Client::new(&[]);
    let (text, is_error) = client.call("exec", json!({ "command": ["true"] }));
    assert!(
        is_error && text == "there is no tool `exec`: start the server with --allow-exec",
        "{text}"
    );
    client.end();
    let mut client = Client::new(&["--allow-exec"]);
    assert_eq!(client.tools().last().map(String::as_str), Some("exec"));
    // Fails, because the machine has no such program, but it was tried.
    let (text, is_error) = client.call(
        "exec",
        json!({ "command": ["/no/such/program"], "memory": "1GiB" }),
    );
    assert!(is_error && text.contains("/no/such/program"), "{text}");
    for (argument, value, message) in [
        ("every_fault", json!("some:1"), "'--every-fault[=<WHICH>]'"),
        ("expect", json!("much"), "'--expect <WHAT>'"),
        (
            "fail",
            json!("cudaMalloc"),
            "'--fail <CALL:FIRST[:COUNT][:MIN_SIZE]>'",
        ),
        ("devices", json!(0), "'--devices <N>'"),
        ("update", json!(true), "`--update` needs `--baseline`"),
        (
            "least_memory",
            json!("yes"),
            "`least_memory` must be true or false",
        ),
        (
            "least-memory",
            json!(true),
            "`least-memory` is unknown; `exec` has command, memory, ",
        ),
    ] {
        let (text, is_error) = client.call(
            "exec",
            json!({ "command": ["/no/such/program"], argument: value }),
        );
        assert!(is_error && text.contains(message), "{argument}: {text}");
    }
    client.end();
}

#[test]
#[cfg_attr(not(feature = "mcp"), ignore = "needs `--features mcp`")]
fn a_line_that_is_not_json_is_answered_and_the_next_one_served() {
    let mut client = Client::new(&[]);
    let of_id = |id: &[u8]| [&br#"{"jsonrpc":"2.0","method":"ping","id":"#[..], id, b"}"].concat();
    for line in [
        b"{\"jsonrpc\": \"2.0\", \"id\": 7,".to_vec(),
        b"nonsense".to_vec(),
        b"[1, 2".to_vec(),
        b"{\"a\": \0}".to_vec(),
        of_id(b"\"\xff\""),
        of_id(br#""\ud800""#),
        of_id(b"1e400"),
        of_id(&[b"[".repeat(200), b"]".repeat(200)].concat()),
    ] {
        let said = String::from_utf8_lossy(&line).into_owned();
        client
            .requests
            .write_all(&[line, b"\n".to_vec()].concat())
            .unwrap();
        let answer = client.answer();
        assert!(
            answer["error"]["code"] == -32700 && answer["id"] == Value::Null,
            "{said}: {answer}"
        );
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with("the line is not JSON: ") && message.contains("at line 1 column "),
            "{said}: {message}"
        );
    }
    writeln!(client.requests, "\n\r\n5").unwrap();
    assert_eq!(client.answer()["error"]["code"], -32600);
    client.requests.write_all(&vec![b'1'; 17 << 20]).unwrap();
    writeln!(client.requests).unwrap();
    assert_eq!(
        client.answer()["error"]["message"],
        "the line is longer than 16777216 bytes"
    );
    assert_eq!(client.tools().len(), 3);
    client.end();
}

#[test]
#[cfg_attr(not(feature = "mcp"), ignore = "needs `--features mcp`")]
fn a_client_that_goes_away_before_the_start_is_no_error() {
    let notification = "{\"jsonrpc\": \"2.0\", \"method\": \"notifications/initialized\"}\n";
    for sent in ["", "{\"jsonrpc\": \"2.0\"", "nonsense\n", notification] {
        let mut server = Command::new(env!("CARGO_BIN_EXE_harness"));
        let mut server = server
            .arg("mcp")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        server
            .stdin
            .take()
            .unwrap()
            .write_all(sent.as_bytes())
            .unwrap();
        assert!(server.wait().unwrap().success(), "{sent:?}");
    }
}

#[test]
#[cfg(not(feature = "mcp"))]
fn a_build_without_the_protocol_names_the_builds_that_have_it() {
    let output = Command::new(env!("CARGO_BIN_EXE_harness"))
        .arg("mcp")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("this harness is built without the Model Context Protocol"),
        "{error}"
    );
    assert!(
        error.contains("`ci/install`") && error.contains("`--features mcp`"),
        "{error}"
    );
}
