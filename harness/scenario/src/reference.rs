//! The generated parts of the language reference: tables of steps, scalars, policies, metrics and invariants, between markers.

use std::fmt::Write;

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::faulty::Calls;
use harness_allocator::stats::{StatCounter, StatFamily, StatField, StatPool};
use harness_language::arms;
use serde_json::Value;

use super::metric::{DeviceMetric, ReportKey};
use super::policy::Recoverable;
use super::schema::schema;
use super::steps::StepKind;
use crate::text;
use harness_record::{CauseKind, Invariant};

/// A generated part: the text between `<!-- generated: NAME -->` and `<!-- end -->`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The keys of a scenario.
    Scenario,
    /// Forms of scalars.
    Scalars,
    /// What a fault takes, and the calls and errors that there are.
    Faults,
    /// What a claim takes.
    Claims,
    /// Every allocator.
    Allocators,
    /// What the map of an allocator takes.
    Settings,
    /// The fields of a library.
    Library,
    /// Every step with its fields.
    Steps,
    /// Every recovery policy with its fields.
    Policies,
    /// Every metric.
    Metrics,
    /// Why a request can fail.
    Causes,
    /// What steps report.
    Reports,
    /// Every always-checked invariant.
    Invariants,
}

impl Reference {
    /// Every one.
    pub const ALL: &'static [Self] = &[
        Self::Scenario,
        Self::Scalars,
        Self::Faults,
        Self::Claims,
        Self::Allocators,
        Self::Settings,
        Self::Library,
        Self::Steps,
        Self::Policies,
        Self::Causes,
        Self::Metrics,
        Self::Reports,
        Self::Invariants,
    ];

    /// Its name in the marker.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scenario => "scenario",
            Self::Scalars => "scalars",
            Self::Faults => "faults",
            Self::Claims => "claims",
            Self::Allocators => "allocators",
            Self::Settings => "settings",
            Self::Library => "library",
            Self::Steps => "steps",
            Self::Policies => "policies",
            Self::Causes => "causes",
            Self::Metrics => "metrics",
            Self::Reports => "reports",
            Self::Invariants => "invariants",
        }
    }

    /// Its text, in markdown.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::Scenario => fields(&schema(), &schema()),
            Self::Scalars => {
                let allocator = ("allocator", arms::ABOUT);
                let forms = scalar_kinds().into_iter().chain([allocator]);
                table(["form", "what it is"], forms.map(|(name, about)| [format!("*{name}*"), about.to_owned()]))
            }
            Self::Faults => faults(&schema()),
            Self::Claims => claims(&schema()),
            Self::Allocators => {
                table(["allocator", "what it is"], AllocatorKind::ALL.iter().map(|kind| [code(kind.name()), arms::about(*kind).to_owned()]))
            }
            Self::Settings => table(["field", "takes", "meaning"], arms::fields()),
            Self::Library => table(["field", "takes", "meaning"], arms::library_fields()),
            Self::Steps => steps(&schema()),
            Self::Policies => policies(&schema()),
            Self::Causes => {
                table(["cause", "what it says"], CauseKind::ALL.iter().map(|kind| [code(kind.name()), kind.about().to_owned()]))
            }
            Self::Metrics => metrics(),
            Self::Reports => reports(),
            Self::Invariants => table(
                ["invariant", "what it promises"],
                Invariant::ALL.iter().map(|invariant| [code(invariant.name()), invariant.promise().to_owned()]),
            ),
        }
    }
}

/// The document with every generated part renewed, or the name of a part whose markers are not there.
///
/// # Errors
/// The name of the part that has no markers.
pub fn update_reference(document: &str) -> Result<String, &'static str> {
    let mut document = document.to_owned();
    for part in Reference::ALL {
        let begin = format!("<!-- generated: {} -->\n", part.name());
        let start = document.find(&begin).ok_or(part.name())? + begin.len();
        let length = document[start..].find("<!-- end -->").ok_or(part.name())?;
        document.replace_range(start..start + length, &part.text());
    }
    Ok(document)
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(N));
    for row in rows {
        let cells = row.map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

/// The definition that a schema refers to, or the schema itself.
fn resolved<'s>(root: &'s Value, schema: &'s Value) -> &'s Value {
    match schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#')) {
        Some(path) => root.pointer(path).unwrap_or(schema),
        None => schema,
    }
}

fn about(schema: &Value) -> &str {
    schema.get("description").and_then(Value::as_str).unwrap_or_default()
}

/// The name of a form, for a table: `*size*`, a list of `*name*`, `fits` or `oom`.
fn form(root: &Value, schema: &Value) -> String {
    if let Some(name) = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.rsplit('/').next()) {
        let explained =
            ["policy", "step", "allocator", "fault", "claim"].contains(&name) || scalar_kinds().iter().any(|(scalar, _)| *scalar == name);
        return if explained { format!("*{name}*") } else { form(root, resolved(root, schema)) };
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(forms) = schema.get(key).and_then(Value::as_array) {
            let mut forms: Vec<String> = forms.iter().map(|one| form(root, one)).filter(|one| one != "*null*").collect();
            forms.dedup();
            return forms.join(" or ");
        }
    }
    let constants =
        |value: &Value| value.as_array().map(|all| all.iter().filter_map(Value::as_str).map(code).collect::<Vec<_>>().join(" or "));
    if let Some(constants) = schema.get("enum").and_then(constants) {
        return constants;
    }
    if let Some(constant) = schema.get("const").and_then(Value::as_str) {
        return code(constant);
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::String(one)) => vec![one.as_str()],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).filter(|one| *one != "null").collect(),
        _ => Vec::new(),
    };
    let words = types.iter().map(|one| match *one {
        "array" => format!("list of {}", schema.get("items").map_or_else(String::new, |items| form(root, items))),
        "integer" => "integer".to_owned(),
        "number" => "number".to_owned(),
        "boolean" => "`true` or `false`".to_owned(),
        "string" => "text".to_owned(),
        "null" => "*null*".to_owned(),
        _ => "a map".to_owned(),
    });
    words.collect::<Vec<_>>().join(" or ")
}

fn fields(root: &Value, schema: &Value) -> String {
    let Some(properties) = schema.get("properties").and_then(Value::as_object).filter(|all| !all.is_empty()) else { return String::new() };
    let required: Vec<&str> =
        schema.get("required").and_then(Value::as_array).map(|all| all.iter().filter_map(Value::as_str).collect()).unwrap_or_default();
    let rows = properties.iter().map(|(name, property)| {
        let need = if required.contains(&name.as_str()) { "yes" } else { "" };
        let text = if about(property).is_empty() { about(resolved(root, property)) } else { about(property) };
        [code(name), form(root, property), need.to_owned(), text.to_owned()]
    });
    table(["field", "form", "required", "meaning"], rows)
}

fn steps(root: &Value) -> String {
    let mut text = String::new();
    for kind in StepKind::ALL {
        let schema = root.pointer(&format!("/$defs/{kind}")).unwrap_or(&Value::Null);
        let _ = write!(text, "### {kind}\n\n{}\n\n```yaml\n{}\n```\n\n", about(schema), kind.example());
        if schema.get("type").is_some_and(|kind| kind == "object") {
            let _ = writeln!(text, "{}", fields(root, schema));
        } else {
            let _ = write!(text, "Takes {}.\n\n", form(root, schema));
        }
        text.push_str(&maps_within(root, "", schema));
        for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            text.push_str(&maps_within(root, name, property));
        }
        if !kind.reports().is_empty() {
            let names: Vec<String> = kind.reports().iter().map(|key| code(key.name())).collect();
            let _ = write!(text, "Reports {}.\n\n", names.join(", "));
        }
    }
    text.trim_end().to_owned() + "\n"
}

/// The documented maps that a field (or, without a name, a step) takes besides other forms.
fn maps_within(root: &Value, field: &str, schema: &Value) -> String {
    let direct = (!field.is_empty()).then(|| resolved(root, schema));
    let within = resolved(root, schema).get("anyOf").and_then(Value::as_array).into_iter().flatten().map(|one| resolved(root, one));
    let mut text = String::new();
    for map in direct.into_iter().chain(within).filter(|map| map.get("properties").is_some() && !about(map).is_empty()) {
        let head = if field.is_empty() { "As a map: ".to_owned() } else { format!("{} as a map: ", code(field)) };
        let _ = write!(text, "{head}{}\n\n{}\n", about(map), fields(root, map));
    }
    text
}

fn policies(root: &Value) -> String {
    let mut text = String::new();
    let forms = root.pointer("/$defs/policy/oneOf").and_then(Value::as_array);
    for form in forms.into_iter().flatten() {
        for (name, fields_of) in form["properties"].as_object().into_iter().flatten() {
            let steps = Recoverable::STEPS.iter().filter(|(_, parts)| Recoverable::accepted(parts).any(|kind| kind.name() == name));
            let steps = steps.map(|(step, _)| code(step)).collect::<Vec<_>>().join(" and ");
            let _ = write!(text, "### on_oom: {name}\n\n{} For {steps}.\n\n{}\n", about(form), fields(root, resolved(root, fields_of)));
        }
    }
    text.trim_end().to_owned() + "\n"
}

fn claims(root: &Value) -> String {
    fields(root, root.pointer("/$defs/claim").unwrap_or(&Value::Null))
}

fn faults(root: &Value) -> String {
    let schema = root.pointer("/$defs/fault").unwrap_or(&Value::Null);
    let calls = Calls::names().map(code).collect::<Vec<_>>().join(", ");
    format!("{}\nCalls: {calls}.\n", fields(root, schema))
}

fn metrics() -> String {
    let list = |names: Vec<&str>| names.into_iter().map(code).collect::<Vec<_>>().join(", ");
    let families = StatFamily::ALL.iter().map(|family| {
        let unit = if family.name().ends_with("_bytes") { "bytes" } else { "count" };
        [code(&format!("{}.POOL.FIELD", family.name())), unit.to_owned(), stat_about(*family).to_owned()]
    });
    let counters = StatCounter::ALL.iter().map(|counter| [code(counter.name()), "count".to_owned(), counter_about(*counter).to_owned()]);
    let device = DeviceMetric::ALL.iter().map(|metric| [code(metric.name()), metric.unit().word().to_owned(), metric.about().to_owned()]);
    let pools = list(StatPool::ALL.iter().map(|pool| pool.name()).collect());
    let all_fields = list(StatField::ALL.iter().map(|field| field.name()).collect());
    format!(
        "{}\nPOOL is one of {pools}; FIELD is one of {all_fields}: the value now, the high-water mark, the sum of increases, the sum of decreases.\n",
        table(["metric", "unit", "what it is"], families.chain(counters).chain(device))
    )
}

const fn stat_about(family: StatFamily) -> &'static str {
    match family {
        StatFamily::AllocatedBytes => "Rounded bytes handed out.",
        StatFamily::ReservedBytes => "Bytes held from the driver.",
        StatFamily::ActiveBytes => "Bytes handed out, or freed but waiting for an event.",
        StatFamily::InactiveSplitBytes => "Bytes of free pieces in partly used segments, which cannot go back to the driver.",
        StatFamily::RequestedBytes => "Bytes asked for.",
        StatFamily::Allocation => "Live allocations.",
        StatFamily::Segment => "Segments held from the driver.",
        StatFamily::Active => "Blocks handed out, or freed but waiting for an event.",
        StatFamily::InactiveSplit => "Free pieces in partly used segments.",
    }
}

const fn counter_about(counter: StatCounter) -> &'static str {
    match counter {
        StatCounter::NumAllocRetries => {
            "Driver allocations that failed and made the allocator give its cache back; a final OOM counts here too."
        }
        StatCounter::NumOoms => "Requests that failed for good.",
        StatCounter::NumSyncAllStreams => "Times the allocator waited for all streams.",
        StatCounter::NumDeviceAlloc => "Successful driver allocations.",
        StatCounter::NumDeviceFree => "Driver frees.",
    }
}

fn reports() -> String {
    let rows = ReportKey::ALL.iter().map(|key| {
        let steps: Vec<String> = StepKind::ALL.iter().filter(|kind| kind.reports().contains(key)).map(|kind| code(kind.name())).collect();
        [code(key.name()), key.unit().word().to_owned(), steps.join(", "), key.about().to_owned()]
    });
    table(["report", "unit", "steps", "what it is"], rows)
}

/// Every kind of scalar: its name and what it is.
fn scalar_kinds() -> Vec<(&'static str, &'static str)> {
    let mut kinds = harness_language::text::scalar_kinds();
    kinds.extend(text::scalar_kinds());
    kinds
}
