//! The page that lists every key, step, policy and metric of scenario files: [`reference`].

use std::fmt::Write;

use harness_allocator::stats::{StatCounter, StatFamily, StatField, StatPool};
use harness_allocator::{allocator::AllocatorKind, device::faulty::Calls};
use harness_language::{arms, text::scalar_kinds};
use harness_record::{CauseKind, Invariant};
use harness_scenario::markdown::{code, table};
use harness_scenario::{
    Account, DeviceMetric, EXAMPLE_HEAD, MAX_BUFFERS, MAX_INVARIANTS, MAX_NESTING, MAX_OPERATIONS,
    MAX_POINTS, MAX_PROCESSES, MAX_PROGRAMS, MAX_STREAMS, PolicyKind, ReportKey, STEP_KEYS,
    StepKind, schema,
};
use serde_json::Value;

pub(crate) fn reference() -> String {
    let root = schema();
    let mut page = String::from(
        "<!-- Generated. UPDATE=1 cargo test -p harness-scenario --test scenario catalogue:: \
         rewrites it. -->\n\n\
         # Scenario reference\n\n\
         This page lists every key, step, policy and metric of scenario files. The \
         [tutorial](scenarios.md) explains them with examples. \
         `scenarios/schema.json` contains the same as a JSON Schema: with the first line \
         `# yaml-language-server: $schema=schema.json` an editor completes and checks a file.\n\n\
         Unknown keys and fields are errors. In the tables, *italic* forms are defined under \
         [value forms](#value-forms) or have their own section.\n",
    );
    let definition = |name: &str| {
        fields(
            &root,
            root.pointer(&format!("/$defs/{name}"))
                .unwrap_or(&Value::Null),
        )
    };
    let causes = CauseKind::ALL
        .iter()
        .map(|kind| [code(kind.name()), kind.about().to_owned()]);
    let invariants = Invariant::ALL
        .iter()
        .map(|invariant| [code(invariant.name()), invariant.promise().to_owned()]);
    let allocators = AllocatorKind::ALL
        .iter()
        .map(|kind| [code(kind.name()), arms::about(*kind).to_owned()]);
    for (title, content) in [
        ("## File", format!("{}\n{}", fields(&root, &root), limits())),
        ("### needs", definition("needs")),
        ("### health_check", described(&root, "health_check")),
        ("## Value forms", value_forms()),
        ("## Allocators", table(["allocator", "meaning"], allocators)),
        (
            "### Settings",
            table(["key", "form", "meaning"], arms::fields()),
        ),
        (
            "### Libraries",
            format!(
                "A library is {}.\n\n{}",
                arms::LIBRARY_ABOUT,
                table(["key", "form", "meaning"], arms::library_fields())
            ),
        ),
        ("## Steps", steps(&root)),
        ("## Leak checks", described(&root, "leak_check")),
        ("## Recovery policies", policies(&root)),
        ("## Metrics", metrics()),
        ("### Figures of steps", figures()),
        ("## Causes of an OOM", table(["cause", "meaning"], causes)),
        (
            "## Always-checked invariants",
            table(["invariant", "meaning"], invariants),
        ),
        ("## Faults", faults(&root)),
        ("## Claims", described(&root, "claim")),
    ] {
        let _ = write!(page, "\n{title}\n\n{content}");
    }
    page
}

fn limits() -> String {
    format!(
        "A scenario has at most {MAX_OPERATIONS} operations, {MAX_BUFFERS} buffer names, \
         {MAX_STREAMS} streams, {MAX_PROGRAMS} programs, \
         {MAX_PROCESSES} processes, {} allocators, {MAX_POINTS} matrix points, {MAX_INVARIANTS} \
         invariants, and blocks nested {MAX_NESTING} deep. \
         A step is one operation per execution, an `expect` one per comparison, a `storm` one per \
         request or free, a `train` one per layer and \
         iteration, an `infer` one per buffer and token.\n",
        arms::MAX_ARMS
    )
}

fn value_forms() -> String {
    let kinds = scalar_kinds()
        .into_iter()
        .chain(harness_scenario::scalar_kinds())
        .chain([("allocator", arms::ABOUT)]);
    table(
        ["form", "meaning"],
        kinds.map(|(name, about)| [format!("*{name}*"), about.to_owned()]),
    )
}

fn resolved<'s>(root: &'s Value, schema: &'s Value) -> &'s Value {
    match schema["$ref"]
        .as_str()
        .and_then(|path| path.strip_prefix('#'))
    {
        Some(path) => root.pointer(path).unwrap_or(schema),
        None => schema,
    }
}

fn about(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_default()
}

/// The form of a value, for a table: `*size*`, `list of *name*`, `` `fits` or `oom` ``.
fn form(root: &Value, schema: &Value) -> String {
    if let Some(name) = schema["$ref"]
        .as_str()
        .and_then(|path| path.rsplit('/').next())
    {
        let explained = ["policy", "step", "allocator", "fault", "claim"].contains(&name)
            || scalar_kinds()
                .iter()
                .chain(&harness_scenario::scalar_kinds())
                .any(|(scalar, _)| *scalar == name);
        return if explained {
            format!("*{name}*")
        } else {
            form(root, resolved(root, schema))
        };
    }
    if let Some(forms) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        let alternatives = forms
            .iter()
            .map(|one| form(root, one))
            .collect::<Vec<_>>()
            .join(" or ");
        let mut unique: Vec<&str> = Vec::new();
        for one in alternatives.split(" or ") {
            // A bare name is one of the forms of a policy.
            let is_policy = PolicyKind::ALL.iter().any(|kind| code(kind.name()) == one);
            if one != "*null*" && !is_policy && !unique.contains(&one) {
                unique.push(one);
            }
        }
        return unique.join(" or ");
    }
    if let Some(constants) = schema["enum"].as_array() {
        return constants
            .iter()
            .filter_map(Value::as_str)
            .map(code)
            .collect::<Vec<_>>()
            .join(" or ");
    }
    if let Some(constant) = schema["const"].as_str() {
        return code(constant);
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(many) => many
            .iter()
            .filter_map(Value::as_str)
            .filter(|one| *one != "null")
            .collect(),
        _ => vec!["any"],
    };
    let words = types.iter().map(|one| match *one {
        "array" => format!("list of {}", form(root, &schema["items"])),
        "integer" | "number" => (*one).to_owned(),
        "boolean" => "`true` or `false`".to_owned(),
        "string" => "text".to_owned(),
        "any" => "any value".to_owned(),
        "null" => "*null*".to_owned(),
        _ => "a map".to_owned(),
    });
    words.collect::<Vec<_>>().join(" or ")
}

/// The fields of a map: key, form, default, meaning. A description states a default in its last
/// sentence, `Default: X.`.
fn fields(root: &Value, schema: &Value) -> String {
    let Some(properties) = schema["properties"]
        .as_object()
        .filter(|all| !all.is_empty())
    else {
        return String::new();
    };
    let is_required = |name: &str| {
        schema["required"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one == name))
    };
    let rows = properties.iter().map(|(name, property)| {
        let text = if about(property).is_empty() {
            about(resolved(root, property))
        } else {
            about(property)
        };
        let (meaning, default) = text.rsplit_once("Default: ").unwrap_or((text, ""));
        let default = if is_required(name) {
            "required"
        } else {
            default.trim_end().trim_end_matches('.')
        };
        [
            code(name),
            form(root, property),
            default.to_owned(),
            meaning.to_owned(),
        ]
    });
    table(["key", "form", "default", "meaning"], rows)
}

fn described(root: &Value, name: &str) -> String {
    let schema = root
        .pointer(&format!("/$defs/{name}"))
        .unwrap_or(&Value::Null);
    format!("{}\n\n{}", about(schema), fields(root, schema))
}

fn steps(root: &Value) -> String {
    let mut text = String::from(
        "Each item of `steps` is a map with one key, the name of the step, or a bare name if the \
         step needs no fields. The check follows the steps \
         in order, and loop bodies twice, so it finds a double free or an unknown metric before \
         the run. Next to its own key a step may have the \
         keys of this table. `steps` belongs to blocks (`for`, `repeat`, `program`, `process`, \
         `private_pool`); `until`, `id` and `leak_check` \
         belong to loops.\n\n",
    );
    let _ = write!(
        text,
        "Each example below runs in a file of `scenarios/` that begins with these \
         lines:\n\n```text\n{EXAMPLE_HEAD}```\n\n"
    );
    text.push_str(&table(
        ["key", "meaning"],
        STEP_KEYS.map(|(key, about)| [code(key), about.to_owned()]),
    ));
    for kind in StepKind::ALL {
        let schema = root
            .pointer(&format!("/$defs/{kind}"))
            .unwrap_or(&Value::Null);
        let _ = write!(
            text,
            "\n### {kind}\n\n{}\n\n```yaml\n{}\n```\n",
            about(schema),
            kind.example()
        );
        if schema.get("type").is_some_and(|kind| kind == "object") {
            let fields = fields(root, schema);
            let _ = write!(
                text,
                "{}{fields}",
                if fields.is_empty() { "" } else { "\n" }
            );
        } else {
            let _ = write!(text, "\nForm: {}.\n", form(root, schema));
        }
        text.push_str(&maps_within(root, "", schema));
        for (name, property) in schema
            .get("properties")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            text.push_str(&maps_within(root, name, property));
        }
        if !kind.reports().is_empty() {
            let names: Vec<String> = kind.reports().iter().map(|key| code(key.name())).collect();
            let _ = write!(text, "\nFigures: {}.\n", names.join(", "));
        }
    }
    text
}

/// The documented maps that a field (or, without a name, a step) accepts besides other forms.
fn maps_within(root: &Value, field: &str, schema: &Value) -> String {
    let direct = (!field.is_empty()).then(|| resolved(root, schema));
    let within = resolved(root, schema)
        .get("anyOf")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|one| resolved(root, one));
    let mut text = String::new();
    for map in direct
        .into_iter()
        .chain(within)
        .filter(|map| map.get("properties").is_some() && !about(map).is_empty())
    {
        let head = if field.is_empty() {
            "Map form.".to_owned()
        } else {
            format!("Map form of {}.", code(field))
        };
        let _ = write!(text, "\n{head} {}\n\n{}", about(map), fields(root, map));
    }
    text
}

fn policies(root: &Value) -> String {
    let mut text = String::from(
        "`on_oom` of a step takes a policy by its name, a map from the name to fields, or a list \
         of policies.\n",
    );
    let forms = root
        .pointer("/$defs/policy/oneOf")
        .and_then(Value::as_array);
    for form in forms.into_iter().flatten() {
        for (name, fields_of) in form["properties"].as_object().into_iter().flatten() {
            let policy = PolicyKind::from_name(name).into_iter();
            let steps: Vec<String> = policy.flat_map(PolicyKind::steps).map(code).collect();
            let steps = steps.join(", ");
            let fields = fields(root, resolved(root, fields_of));
            let space = if fields.is_empty() { "" } else { "\n" };
            let _ = write!(
                text,
                "\n### on_oom: {name}\n\n{}\n\nSteps: {steps}.\n{space}{fields}",
                about(form)
            );
        }
    }
    text
}

fn faults(root: &Value) -> String {
    let calls = Calls::names().map(code).collect::<Vec<_>>().join(", ");
    format!("{}\nCalls: {calls}.\n", described(root, "fault"))
}

fn metrics() -> String {
    let list = |names: Vec<&str>| names.into_iter().map(code).collect::<Vec<_>>().join(", ");
    let row = |name: &str, unit: &str, about: &str| [code(name), unit.to_owned(), about.to_owned()];
    let families = StatFamily::ALL.iter().map(|family| {
        let unit = Account::from_name(&format!("{}.all.current", family.name()))
            .map_or("", |account| account.unit().word());
        row(
            &format!("{}.POOL.FIELD", family.name()),
            unit,
            family.about(),
        )
    });
    let counters = StatCounter::ALL
        .iter()
        .map(|counter| row(counter.name(), "count", counter.about()));
    let device = DeviceMetric::ALL
        .iter()
        .map(|metric| row(metric.name(), metric.unit().word(), metric.about()));
    let pools = list(StatPool::ALL.iter().map(|pool| pool.name()).collect());
    let all_fields = list(StatField::ALL.iter().map(|field| field.name()).collect());
    format!(
        "A metric is a name in this table, the same name after `start.` or the name of a `measure` \
         (its value at that point), a figure of a step \
         after its id (`storm.failed_request`), or a metric after the name of a program, process \
         or allocator.\n\n{}\n\
         POOL is {pools}. FIELD is {all_fields}: the current value, the largest value, the sum of \
         increases, the sum of decreases. \
         Short names cover all pools: `reserved` is `reserved_bytes.all.current`, `reserved.peak` \
         is `reserved_bytes.all.peak`; \
         {} work in the same way.\n",
        table(
            ["metric", "unit", "meaning"],
            families.chain(counters).chain(device)
        ),
        list(
            Account::SHORT
                .into_iter()
                .filter(|name| *name != "reserved")
                .collect()
        )
    )
}

fn figures() -> String {
    let rows = ReportKey::ALL.iter().map(|key| {
        let steps: Vec<String> = StepKind::ALL
            .iter()
            .filter(|kind| kind.reports().contains(key))
            .map(|kind| code(kind.name()))
            .collect();
        [
            code(key.name()),
            key.unit().word().to_owned(),
            steps.join(", "),
            key.about().to_owned(),
        ]
    });
    table(["figure", "unit", "steps", "meaning"], rows)
}
