//! This program as tools for coding agents, over the Model Context Protocol. A tool runs a command
//! of this program, which ends with the call: when the client cancels it or goes away, or when this
//! server ends in any way.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use harness_exec::process::Started;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    ToolAnnotations,
};
use rmcp::service::{RequestContext, RxJsonRpcMessage, ServerInitializeError, TxJsonRpcMessage};
use rmcp::transport::{self, Transport, async_rw::AsyncRwTransport};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt as _};
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader,
    DuplexStream, Stdin, Stdout,
};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::error::{CliError, Failures};
use crate::{built, exit::Exit};

/// A command of this program as a tool.
struct Served {
    name: &'static str,
    about: &'static str,
    /// Arguments without a name, in order. The last one of `exec` is a list.
    positional: &'static [(&'static str, &'static str)],
    /// Options of the command with the same names, but `_` for `-`.
    options: &'static [(&'static str, &'static str)],
    /// Options without a value: `true` sets them.
    flags: &'static [(&'static str, &'static str)],
}

/// The most bytes of a command's standard output, and of its standard error, that an answer
/// contains: the last ones.
const MOST_OUTPUT: u64 = 4 << 20;
/// The longest line of the protocol.
const MOST_INPUT: u64 = transport::async_rw::DEFAULT_MAX_LINE_LENGTH as u64;
/// The time that commands have to end after the client went away.
const PATIENCE: Duration = Duration::from_secs(10);

const MEMORY: (&str, &str) = ("memory", "The device's memory, as in 24GiB");
const TOOLS: [Served; 4] = [
    Served {
        name: "explain",
        about: "Explains from a PyTorch memory snapshot why a program ran out of GPU memory: every \
             byte by cause, by purpose and by line of code.",
        positional: &[(
            "snapshot",
            "The path of a memory snapshot, or of a folder with one snapshot per rank",
        )],
        options: &[
            MEMORY,
            ("at", "The moment: oom, peak, end, or the index of an event"),
            ("format", "text or json"),
        ],
        flags: &[],
    },
    Served {
        name: "advise",
        about: "Replays the recorded program of a PyTorch memory snapshot, and lists the settings \
             and changes that would have prevented the error.",
        positional: &[("snapshot", "The path of a memory snapshot")],
        options: &[MEMORY, ("format", "text or json")],
        flags: &[],
    },
    Served {
        name: "compare",
        about: "Compares two PyTorch memory snapshots: what grew, by line of code and by cause.",
        positional: &[
            ("before", "The path of the earlier snapshot"),
            ("after", "The path of the later snapshot"),
        ],
        options: &[
            ("at", "The moment: peak or end"),
            ("format", "text or json"),
        ],
        flags: &[],
    },
    Served {
        name: "exec",
        about: "Runs a program, for example a PyTorch training, on a simulated GPU, and reports \
             its peak memory and its out-of-memory errors.",
        positional: &[("command", "The program and its arguments")],
        options: &[
            MEMORY,
            ("gpu", "The model of the GPU, as in h100-80"),
            ("devices", "The number of GPUs"),
            (
                "alloc_conf",
                "Settings of PyTorch's allocator, in the format of PYTORCH_ALLOC_CONF",
            ),
            (
                "values",
                "The values that the program reads from GPU memory: copies, zeros or cpu",
            ),
            (
                "fail",
                "Fails an allocation, as CALL:FIRST[:COUNT], for example any:40:2",
            ),
            (
                "every_fault",
                "Repeats the program and fails an allocation each time: all, sample:N or largest:N",
            ),
            (
                "expect",
                "With every_fault, what each run must do: recovers or ends-cleanly",
            ),
            (
                "baseline",
                "A file with the memory of an earlier run: any difference is an error",
            ),
            ("snapshot", "A file to which a memory snapshot is written"),
        ],
        flags: &[
            (
                "least_memory",
                "Searches for the least memory in which the program ends well",
            ),
            ("update", "With baseline, writes the file"),
        ],
    },
];

pub(super) fn run(allow_exec: bool) -> Result<Exit, Failures> {
    let failed = |error: &dyn std::fmt::Display| {
        CliError::internal(
            format!("the server failed: {error}"),
            "start it from a client of the protocol",
        )
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(&error))?;
    let (gone, is_gone) = watch::channel(false);
    let commands = std::thread::available_parallelism().map_or(1, usize::from);
    let tools = TOOLS
        .iter()
        .filter(|tool| allow_exec || tool.name != "exec")
        .collect();
    let server = Server {
        tools,
        commands: Arc::new(Semaphore::new(commands)),
        is_gone,
    };
    let running = Arc::clone(&server.commands);
    let served = runtime.block_on(async {
        let served = match server.serve(Lines::new(transport::stdio())).await {
            Ok(service) => service
                .waiting()
                .await
                .map(|_| ())
                .map_err(|error| failed(&error)),
            Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
            Err(error) => Err(failed(&error)),
        };
        let _ = gone.send(true);
        // Each command holds a permit. On an error or after a timeout, the commands end because
        // this process ends.
        let _ = tokio::time::timeout(
            PATIENCE,
            running.acquire_many(u32::try_from(commands).unwrap_or(u32::MAX)),
        )
        .await;
        served
    });
    // A read of standard input may wait forever.
    runtime.shutdown_background();
    served.map(|()| Exit::Passed).map_err(Failures::from)
}

impl Served {
    fn is_list(&self) -> bool {
        self.name == "exec"
    }

    fn tool(&self) -> Tool {
        let text = |about: &str| json!({ "type": "string", "description": about });
        let list = |about: &str| {
            let items = json!({ "type": "string" });
            json!({ "type": "array", "items": items, "minItems": 1, "description": about })
        };
        let positional = self.positional.iter().map(|(name, about)| {
            (
                *name,
                if self.is_list() {
                    list(about)
                } else {
                    text(about)
                },
            )
        });
        let flag = |about: &str| json!({ "type": "boolean", "description": about });
        let properties: JsonObject = positional
            .chain(
                self.options
                    .iter()
                    .map(|(name, about)| (*name, text(about))),
            )
            .chain(self.flags.iter().map(|(name, about)| (*name, flag(about))))
            .map(|(name, schema)| (name.to_owned(), schema))
            .collect();
        let required: Vec<&str> = self.positional.iter().map(|(name, _)| *name).collect();
        let mut schema = JsonObject::new();
        schema.insert("type".to_owned(), json!("object"));
        schema.insert("properties".to_owned(), properties.into());
        schema.insert("required".to_owned(), json!(required));
        schema.insert("additionalProperties".to_owned(), json!(false));
        let hints = ToolAnnotations::new().read_only(!self.is_list());
        Tool::new(self.name, self.about, schema).with_annotations(hints)
    }

    /// The arguments of the command. No value becomes an option of its own.
    fn arguments(&self, mut given: JsonObject) -> Result<Vec<String>, String> {
        let known = || {
            self.positional
                .iter()
                .chain(self.options)
                .chain(self.flags)
                .map(|(name, _)| *name)
        };
        if let Some(unknown) = given
            .keys()
            .find(|given| known().all(|known| known != given.as_str()))
        {
            return Err(format!(
                "`{unknown}` is unknown; `{}` has {}",
                self.name,
                known().collect::<Vec<_>>().join(", ")
            ));
        }
        let mut arguments = vec![self.name.to_owned(), "--color=never".to_owned()];
        let mut positional = Vec::new();
        for (name, _) in self.positional {
            match given.remove(*name) {
                Some(Value::String(text)) if !self.is_list() && text.starts_with('-') => {
                    positional.push(format!("./{text}"))
                }
                Some(Value::String(text)) if !self.is_list() => positional.push(text),
                Some(Value::Array(items)) if self.is_list() && !items.is_empty() => {
                    let texts = items
                        .iter()
                        .map(|item| item.as_str().map(str::to_owned))
                        .collect::<Option<Vec<_>>>();
                    positional
                        .extend(texts.ok_or_else(|| format!("`{name}` must be a list of texts"))?);
                }
                _ => {
                    return Err(format!(
                        "`{name}` is required: {}",
                        if self.is_list() {
                            "a list of texts"
                        } else {
                            "a text"
                        }
                    ));
                }
            }
        }
        for (name, value) in given {
            let option = name.replace('_', "-");
            match (value, self.flags.iter().any(|(flag, _)| *flag == name)) {
                (Value::Bool(is_set), true) => {
                    arguments.extend(is_set.then(|| format!("--{option}")))
                }
                (_, true) => return Err(format!("`{name}` must be true or false")),
                (Value::String(value), false) => arguments.push(format!("--{option}={value}")),
                (Value::Number(value), false) => arguments.push(format!("--{option}={value}")),
                (_, false) => return Err(format!("`{name}` must be a text")),
            }
        }
        if self.is_list() {
            arguments.push("--".to_owned());
        }
        arguments.extend(positional);
        Ok(arguments)
    }

    /// Runs the command to its end, or ends it if `is_cancelled`.
    fn call(&self, given: JsonObject, is_cancelled: impl Fn() -> bool) -> CallToolResult {
        let run = || {
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let arguments = self.arguments(given)?;
            let output = || {
                tempfile::tempfile().map_err(|error| format!("the output cannot be kept: {error}"))
            };
            let (mut out, mut err) = (output()?, output()?);
            let mut command = Command::new(program);
            // Standard input belongs to the protocol.
            command.args(arguments).stdin(Stdio::null());
            let copies = out
                .try_clone()
                .and_then(|out| Ok((out, err.try_clone()?)))
                .map_err(|error| error.to_string())?;
            command.stdout(copies.0).stderr(copies.1);
            let started = Started::start_command(&mut command)
                .map_err(|error| format!("the command cannot start: {error}"))?;
            let ended = started
                .wait_unless(is_cancelled)
                .map_err(|error| error.to_string())?;
            let texts = last(&mut out)
                .and_then(|out| Ok(out + &last(&mut err)?))
                .map_err(|error| error.to_string())?;
            Ok::<_, String>((texts, ended.is_some_and(|end| end.exit_code() == 0)))
        };
        match run() {
            Ok((text, true)) => CallToolResult::success(vec![ContentBlock::text(text)]),
            Ok((text, false)) | Err(text) => CallToolResult::error(vec![ContentBlock::text(text)]),
        }
    }
}

/// The last [`MOST_OUTPUT`] bytes of a file.
fn last(output: &mut File) -> io::Result<String> {
    let length = output.metadata()?.len();
    let cut = length.saturating_sub(MOST_OUTPUT);
    output.seek(SeekFrom::Start(cut))?;
    let mut bytes = Vec::new();
    output.read_to_end(&mut bytes)?;
    let note = if cut == 0 {
        String::new()
    } else {
        format!("({cut} bytes of output are left out)\n")
    };
    Ok(note + &String::from_utf8_lossy(&bytes))
}

/// Standard input and output. Answers lines that are not JSON, which the transport of `rmcp` drops,
/// and passes it the others. Drops what comes before the first request, because `rmcp` ends after
/// it.
struct Lines {
    has_started: bool,
    passed: AsyncRwTransport<RoleServer, DuplexStream, Stdout>,
    problems: mpsc::Receiver<String>,
}

impl Lines {
    fn new((input, output): (Stdin, Stdout)) -> Self {
        let (pass, passed) = tokio::io::duplex(64 << 10);
        let (problem, problems) = mpsc::channel(16);
        // Ends with standard input, or when nothing reads the lines.
        tokio::spawn(pass_lines(BufReader::new(input), pass, problem));
        Self {
            has_started: false,
            passed: AsyncRwTransport::new_server(passed, output),
            problems,
        }
    }
}

async fn pass_lines(
    mut input: BufReader<impl AsyncRead + Unpin>,
    mut pass: DuplexStream,
    problem: mpsc::Sender<String>,
) -> io::Result<()> {
    let mut line = Vec::new();
    let mut is_rest = false;
    loop {
        line.clear();
        (&mut input)
            .take(MOST_INPUT)
            .read_until(b'\n', &mut line)
            .await?;
        let is_whole = line.ends_with(b"\n");
        // Unlike `IgnoredAny`, `Value` refuses what `rmcp` drops: texts that are not UTF-8, numbers
        // out of range and deep nesting.
        let found = match serde_json::from_slice::<Value>(line.trim_ascii_end()) {
            _ if line.is_empty() => return Ok(()),
            // The rest of a line that is too long, or nothing.
            _ if is_rest || line.iter().all(u8::is_ascii_whitespace) => Ok(()),
            _ if !is_whole && line.len() as u64 == MOST_INPUT => {
                Err(format!("the line is longer than {MOST_INPUT} bytes"))
            }
            Err(error) => Err(format!("the line is not JSON: {error}")),
            Ok(_) => {
                pass.write_all(&line).await?;
                Ok(())
            }
        };
        is_rest = !is_whole;
        if let Err(found) = found {
            problem.send(found).await.map_err(io::Error::other)?;
        }
    }
}

impl Transport<RoleServer> for Lines {
    type Error = io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        self.passed.send(item)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            let problem = tokio::select! {
                message = self.passed.receive() => {
                    self.has_started |=
                        matches!(message, Some(RxJsonRpcMessage::<RoleServer>::Request(_)));
                    if self.has_started || message.is_none() {
                        return message;
                    }
                    continue;
                }
                Some(problem) = self.problems.recv() => problem,
            };
            self.passed
                .send(TxJsonRpcMessage::<RoleServer>::error(
                    ErrorData::parse_error(problem, None),
                    None,
                ))
                .await
                .ok()?;
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.passed.close().await
    }
}

/// The tools of one client.
struct Server {
    tools: Vec<&'static Served>,
    /// A permit per command that may run at a time.
    commands: Arc<Semaphore>,
    is_gone: watch::Receiver<bool>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.with_server_info(Implementation::new("harness", built::version()))
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(
            self.tools.iter().map(|tool| tool.tool()).collect(),
        ))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(&tool) = self.tools.iter().find(|tool| tool.name == request.name) else {
            let hint = if request.name == "exec" {
                ": start the server with --allow-exec"
            } else {
                ""
            };
            return Err(ErrorData::invalid_params(
                format!("there is no tool `{}`{hint}", request.name),
                None,
            ));
        };
        let given = request.arguments.unwrap_or_default();
        let failed =
            |error: &dyn std::fmt::Display| ErrorData::internal_error(error.to_string(), None);
        let permit = Arc::clone(&self.commands)
            .acquire_owned()
            .await
            .map_err(|error| failed(&error))?;
        let is_gone = self.is_gone.clone();
        let is_cancelled = move || context.ct.is_cancelled() || *is_gone.borrow();
        if is_cancelled() {
            return Err(failed(&"cancelled"));
        }
        // The server answers other requests meanwhile.
        let run = move || {
            let _permit = permit;
            tool.call(given, is_cancelled)
        };
        tokio::task::spawn_blocking(run)
            .await
            .map(Into::into)
            .map_err(|error| failed(&error))
    }
}
