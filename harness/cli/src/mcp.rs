//! `harness mcp`: this program as tools for coding agents, over the Model Context Protocol. A tool runs a command of this program.

use std::process::{Command, Stdio};

use clap::Args;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, JsonObject, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt as _, transport};
use serde_json::{Value, json};

use super::error::{CliError, Failures};
use super::{built, exit::Exit};

const EXAMPLES: &str = "Examples:
  claude mcp add harness -- harness mcp
  { \"mcpServers\": { \"harness\": { \"command\": \"harness\", \"args\": [\"mcp\", \"--allow-exec\"] } } }";

/// Serve explain, advise, compare and exec as tools for coding agents: a server of the Model Context Protocol on standard input and output.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Mcp {
    /// Also offer the tool `exec`, which runs programs on the simulated GPU. Without it, all tools only read files.
    #[arg(long)]
    allow_exec: bool,
}

/// A command of this program as a tool.
struct Served {
    name: &'static str,
    about: &'static str,
    /// Arguments without a name, in order. The last one of `exec` is a list.
    positional: &'static [(&'static str, &'static str)],
    /// Options of the command with the same names.
    options: &'static [(&'static str, &'static str)],
}

const MEMORY: (&str, &str) = ("memory", "The device's memory, as in 24GiB");
const TOOLS: [Served; 4] = [
    Served {
        name: "explain",
        about: "Explains from a PyTorch memory snapshot why a program ran out of GPU memory: every byte by cause, by purpose and by line of code.",
        positional: &[("snapshot", "The path of a memory snapshot, or of a folder with one snapshot per rank")],
        options: &[MEMORY, ("at", "The moment: oom, peak, end, or the index of an event"), ("format", "text or json")],
    },
    Served {
        name: "advise",
        about: "Replays the recorded program of a PyTorch memory snapshot, and lists the settings and changes that would have prevented the error.",
        positional: &[("snapshot", "The path of a memory snapshot")],
        options: &[MEMORY, ("format", "text or json")],
    },
    Served {
        name: "compare",
        about: "Compares two PyTorch memory snapshots: what grew, by line of code and by cause.",
        positional: &[("before", "The path of the earlier snapshot"), ("after", "The path of the later snapshot")],
        options: &[("at", "The moment: peak or end"), ("format", "text or json")],
    },
    Served {
        name: "exec",
        about: "Runs a program, for example a PyTorch training, on a simulated GPU, and reports its peak memory and its out-of-memory errors.",
        positional: &[("command", "The program and its arguments")],
        options: &[MEMORY, ("gpu", "The model of the GPU, as in h100-80"), ("snapshot", "A file to which a memory snapshot is written")],
    },
];

impl Mcp {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let failed = |error: &dyn std::fmt::Display| {
            CliError::internal(format!("the server failed: {error}"), "start it from a client of the protocol")
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| failed(&error))?;
        let served = runtime.block_on(async {
            let service = self.serve(transport::stdio()).await.map_err(|error| failed(&error))?;
            service.waiting().await.map_err(|error| failed(&error))
        });
        // A read of standard input may wait forever.
        runtime.shutdown_background();
        served.map(|_| Exit::Passed).map_err(Failures::from)
    }

    fn tools(&self) -> impl Iterator<Item = &'static Served> + use<> {
        let is_allowed = self.allow_exec;
        TOOLS.iter().filter(move |tool| is_allowed || tool.name != "exec")
    }
}

impl Served {
    fn is_list(&self) -> bool {
        self.name == "exec"
    }

    fn tool(&self) -> Tool {
        let text = |about: &str| json!({ "type": "string", "description": about });
        let list = |about: &str| json!({ "type": "array", "items": { "type": "string" }, "minItems": 1, "description": about });
        let positional = self.positional.iter().map(|(name, about)| (*name, if self.is_list() { list(about) } else { text(about) }));
        let properties: JsonObject = positional
            .chain(self.options.iter().map(|(name, about)| (*name, text(about))))
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
        let mut arguments = vec![self.name.to_owned(), "--color=never".to_owned()];
        let mut positional = Vec::new();
        for (name, _) in self.positional {
            match given.remove(*name) {
                Some(Value::String(text)) if !self.is_list() && text.starts_with('-') => positional.push(format!("./{text}")),
                Some(Value::String(text)) if !self.is_list() => positional.push(text),
                Some(Value::Array(items)) if self.is_list() && !items.is_empty() => {
                    let texts = items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
                    positional.extend(texts.ok_or_else(|| format!("`{name}` must be a list of texts"))?);
                }
                _ => return Err(format!("`{name}` is required: {}", if self.is_list() { "a list of texts" } else { "a text" })),
            }
        }
        for (name, value) in given {
            let is_known = self.options.iter().any(|(known, _)| *known == name);
            let known = || self.positional.iter().chain(self.options).map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            match value {
                Value::String(value) if is_known => arguments.push(format!("--{name}={value}")),
                _ if is_known => return Err(format!("`{name}` must be a text")),
                _ => return Err(format!("`{name}` is unknown; `{}` has {}", self.name, known())),
            }
        }
        if self.is_list() {
            arguments.push("--".to_owned());
        }
        arguments.extend(positional);
        Ok(arguments)
    }

    fn call(&self, given: JsonObject) -> CallToolResult {
        let run = || {
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let arguments = self.arguments(given)?;
            // Standard input belongs to the protocol.
            let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            Ok::<_, String>((text, output.status.success()))
        };
        match run() {
            Ok((text, true)) => CallToolResult::success(vec![ContentBlock::text(text)]),
            Ok((text, false)) | Err(text) => CallToolResult::error(vec![ContentBlock::text(text)]),
        }
    }
}

impl ServerHandler for Mcp {
    fn get_info(&self) -> ServerConfig {
        let info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.with_server_info(Implementation::new("harness", built::version()))
    }

    async fn list_tools(&self, _: Option<PaginatedRequestParams>, _: RequestContext<RoleServer>) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools().map(Served::tool).collect()))
    }

    async fn call_tool(&self, request: CallToolRequestParams, _: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = self.tools().find(|tool| tool.name == request.name) else {
            let hint = if request.name == "exec" { ": start the server with --allow-exec" } else { "" };
            return Err(ErrorData::invalid_params(format!("there is no tool `{}`{hint}", request.name), None));
        };
        let given = request.arguments.unwrap_or_default();
        // The server answers other requests meanwhile.
        let called = tokio::task::spawn_blocking(move || tool.call(given)).await;
        called.map(Into::into).map_err(|error| ErrorData::internal_error(error.to_string(), None))
    }
}
