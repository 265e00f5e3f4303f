//! Opens the page of an explanation in a real browser: it shows the snapshot's numbers, and its
//! controls work.
//!
//! Without a browser the tests are shown as ignored; `HARNESS_BROWSER` names one that is not on the
//! path. Tests over recorded snapshots are ignored without the recordings.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_explain::causes::{Explanation, Options, explain};
use harness_report::explain::html::{PageData, RankData, page};
use harness_staging::trials::{self, Skip};
use harness_trace::snapshot::{
    Action, Annotation, Block, Event, ExtraId, Frame, MempoolId, Segment, Snapshot,
};
use libtest_mimic::Arguments;
use serde_json::{Value, json};

/// Size limit of the page of `kv-cat`, the recording with the most events.
const LARGEST_PAGE: usize = 6 << 20;
const SNAPSHOTS: [&str; 6] = [
    "gt-features.default",
    "gt-gpt-grow.default",
    "kv-cat",
    "streams-fsdp",
    "streams-fsdp-expandable",
    "resnet152-b96-oom",
];

fn main() -> ExitCode {
    let no_browser = browser()
        .is_none()
        .then(|| Skip::new("there is no browser", "install chromium"));
    let has_recordings = recordings("snapshots").is_dir() && recordings("real-snapshots").is_dir();
    let no_recordings = (!has_recordings).then(|| {
        let why = format!("{} does not exist", recordings("snapshots").display());
        Skip::new(why, "put the recorded snapshots there")
    });
    let trial = |name: &str, skip: &Option<Skip>, test: fn()| {
        trials::trial(name, skip.clone(), move || {
            test();
            Ok(())
        })
    };
    let trials = vec![
        trial(
            "a browser shows the numbers and can be used",
            &no_browser,
            a_browser_shows_the_numbers_and_can_be_used,
        ),
        trial(
            "a browser draws fifty thousand allocations fluently",
            &no_browser,
            fifty_thousand_allocations_are_drawn_fluently,
        ),
        trial(
            "a snapshot without events shows its segments",
            &no_browser,
            a_snapshot_without_events_shows_its_segments,
        ),
        trial(
            "several ranks have a table and a choice",
            &no_browser,
            several_ranks_have_a_table_and_a_choice,
        ),
        trial(
            "recorded snapshots show their numbers",
            &no_browser.clone().or(no_recordings.clone()),
            recorded_snapshots_are_shown_with_their_numbers,
        ),
        trial(
            "the data of recorded snapshots match their explanations",
            &no_recordings,
            the_data_of_recorded_snapshots_match_their_explanations,
        ),
    ];
    trials::run(&Arguments::from_args(), trials)
}

fn explained(snapshot: &Snapshot) -> Explanation {
    let device = snapshot.devices().first().copied().unwrap_or_default();
    explain(snapshot, device, Options::default()).unwrap()
}

fn page_of(name: &str, snapshot: &Snapshot, explanation: &Explanation) -> String {
    page(&PageData::new(
        name,
        Vec::new(),
        vec![RankData::new(name, snapshot, explanation)],
    ))
}

/// The path of an installed browser.
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("HARNESS_BROWSER") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = [
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
        "chrome",
    ];
    std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|file| file.is_file())
}

/// Opens the page in a browser with a script of the test, and returns the script's result.
fn seen_in_browser(name: &str, page: &str, script: &str, options: &[&str]) -> Value {
    let browser = browser().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("page")
        .join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("page.html"), page).unwrap();
    let driven = page
        .replacen(
            "<style>",
            concat!(
                "<script>",
                include_str!("page/watch.js"),
                "</script><style>"
            ),
            1,
        )
        .replacen("</body>", &format!("<script>{script}</script></body>"), 1);
    let file = folder.join("driven.html");
    fs::write(&file, driven).unwrap();
    let output = Command::new(&browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1280,900",
            "--dump-dom",
        ])
        .args(options)
        .arg(format!(
            "--user-data-dir={}",
            folder.join("profile").display()
        ))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", browser.display()));
    let dom = String::from_utf8_lossy(&output.stdout);
    let Some((_, rest)) = dom.split_once("<pre id=\"seen\">") else {
        panic!(
            "{name}: the page did not run to its end: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    };
    let text = rest
        .split_once("</pre>")
        .unwrap()
        .0
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&");
    serde_json::from_str(&text).unwrap()
}

/// Operates the page in a browser. The browser's virtual clock skips idle time, up to the budget in
/// milliseconds.
fn used(name: &str, page: &str) -> Value {
    seen_in_browser(
        name,
        page,
        include_str!("page/drive.js"),
        &["--virtual-time-budget=20000"],
    )
}

/// Opens the page and compares its figures with the explanation.
fn shows_the_numbers_of(name: &str, snapshot: &Snapshot, explanation: &Explanation) -> Value {
    let seen = used(name, &page_of(name, snapshot, explanation));
    let accounts = explanation.accounts;
    let waiting = accounts.active.saturating_sub(accounts.allocated);
    let events = snapshot
        .traces
        .get(explanation.device as usize)
        .map_or(0, Vec::len);
    let moment = explanation.moment.event.map_or(0, |event| event + 1);
    assert_eq!(seen["problems"], json!([]), "{name}");
    assert_eq!(seen["headline"], explanation.headline, "{name}");
    let causes: Vec<Value> = explanation
        .causes
        .iter()
        .map(|cause| json!([cause.cause.name(), cause.bytes]))
        .collect();
    assert_eq!(seen["causes"], json!(causes), "{name}");
    assert_eq!(
        seen["device_total"],
        json!(explanation.device_total),
        "{name}"
    );
    assert_eq!(
        (&seen["events"], &seen["moment"]),
        (&json!(events), &json!(moment)),
        "{name}"
    );
    assert_eq!(
        seen["figures"],
        json!([accounts.allocated, waiting, accounts.reserved]),
        "{name}"
    );
    assert_eq!(
        seen["layers"],
        json!(accounts.active),
        "{name}: the layers of the timeline add up to what is active"
    );
    let pinned: u64 = explanation
        .pinned
        .iter()
        .map(|segment| segment.free.get())
        .sum();
    assert_eq!(seen["pinned"], json!(pinned), "{name}");
    assert_eq!(
        seen["peak"][1], seen["peak"][2],
        "{name}: the peak is the highest moment"
    );
    assert_eq!(
        seen["flame"], seen["peak"][1],
        "{name}: the flame graph's root is what was allocated at the peak"
    );
    seen
}

/// Checks the effects of operating the page.
fn can_be_used(name: &str, seen: &Value) {
    let range = |of: &str| (seen[of][0].as_f64().unwrap(), seen[of][1].as_f64().unwrap());
    let length = |of: &str| range(of).1 - range(of).0;
    assert!(
        length("zoomed") < length("all") / 2.0,
        "{name}: the wheel zooms: {seen}"
    );
    assert!(
        range("zoomed").0 > 0.0 && range("panned").0 < range("zoomed").0,
        "{name}: the mouse moves what is shown: {seen}"
    );
    assert!(
        (length("panned") - length("zoomed")).abs() < 1e-6 * length("all"),
        "{name}: moving does not zoom"
    );
    assert_eq!(range("back"), range("all"), "{name}");
    let clicked = seen["clicked_moment"][0].as_u64().unwrap();
    let events = seen["events"].as_u64().unwrap();
    assert!(
        clicked > events / 4 && clicked < events * 3 / 4,
        "{name}: a click in the middle chooses a moment there: {clicked} of {events}"
    );
    assert_eq!(
        seen["next_moment"],
        clicked + 1,
        "{name}: the arrow key goes one event on"
    );
    assert!(
        seen["painted"][0].as_u64() > Some(10_000) && seen["painted"][1].as_u64() > Some(1000),
        "{name}: {}",
        seen["painted"]
    );
    let selected = &seen["selected"];
    assert!(
        selected["bar"]
            .as_str()
            .unwrap()
            .contains(selected["site"].as_str().unwrap()),
        "{name}: {selected}"
    );
    assert!(
        selected["links"].as_u64() > Some(1) && selected["history"].as_u64() > Some(1000),
        "{name}: {selected}"
    );
    assert_eq!(seen["cleared"], true, "{name}");
    assert_eq!(seen["wide"], true, "{name}: nothing sticks out at the side");
    assert!(seen["life"].as_f64() > Some(0.0), "{name}");
}

/// A training loop with a leak, as PyTorch records it: weights, then iterations that each leak one
/// small block.
fn program(iterations: usize) -> Snapshot {
    let mut snapshot = Snapshot::default();
    let mut site = |line: u32, name: &str| {
        let frame = |line, name: &str| Frame {
            name: name.to_owned(),
            file: "/srv/train.py".to_owned(),
            line,
            ..Frame::default()
        };
        let frames = [
            snapshot.stacks.intern_frame(frame(line, name)),
            snapshot.stacks.intern_frame(frame(90, "main")),
        ];
        snapshot.stacks.intern(&frames)
    };
    let (weights, activations, kept) = (
        site(10, "build"),
        site(41, "forward"),
        site(57, "log <b>&amp;</b>"),
    );
    let (base, mut time) = (0x7000_0000_0000, 1_700_000_000_000_000);
    let mut events = Vec::new();
    let mut event = |action, address, size, stack| {
        time += 7;
        events.push(Event {
            action,
            address,
            size: Bytes(size),
            stream: 0,
            time_us: Some(time),
            stack,
            extra: ExtraId::default(),
        });
    };
    event(Action::SegmentAlloc, base, 64 << 20, weights);
    event(Action::Alloc, base, 30 << 20, weights);
    let free = base + (30 << 20);
    let mut left = Vec::new();
    for iteration in 0..iterations as u64 {
        let address = free + (20 << 20) + iteration * 512;
        for layer in 0..8 {
            event(
                Action::Alloc,
                free + layer * (2 << 20),
                (2 << 20) - 100,
                activations,
            );
        }
        event(Action::Alloc, address, 512, kept);
        left.push(address);
        for layer in 0..8 {
            event(
                Action::FreeRequested,
                free + layer * (2 << 20),
                (2 << 20) - 100,
                activations,
            );
            event(
                Action::FreeCompleted,
                free + layer * (2 << 20),
                (2 << 20) - 100,
                activations,
            );
        }
    }
    let block = |address, size, state, stack| Block {
        address,
        size: Bytes(size),
        requested: Bytes(size),
        state,
        stack,
        extra: ExtraId::default(),
    };
    let mut blocks = vec![
        block(base, 30 << 20, BlockState::Allocated, weights),
        block(free, 20 << 20, BlockState::Inactive, activations),
    ];
    blocks.extend(
        left.iter()
            .map(|&address| block(address, 512, BlockState::Allocated, kept)),
    );
    let end = free + (20 << 20) + 512 * iterations as u64;
    blocks.push(block(
        end,
        base + (64 << 20) - end,
        BlockState::Inactive,
        kept,
    ));
    snapshot.segments = vec![Segment {
        device: 0,
        address: base,
        size: Bytes::mib(64),
        stream: 0,
        pool: PoolKind::Large,
        private_pool: MempoolId::DEFAULT,
        expandable: false,
        stack: weights,
        blocks,
        extra: ExtraId::default(),
    }];
    let mark = |begins, time_us| Annotation {
        begins,
        name: "step".to_owned(),
        device: 0,
        time_us,
        extra: ExtraId::default(),
    };
    snapshot.annotations = vec![
        mark(true, 1_700_000_000_000_010),
        mark(false, 1_700_000_000_000_400),
    ];
    snapshot.traces = vec![events];
    snapshot
}

fn a_browser_shows_the_numbers_and_can_be_used() {
    let snapshot = program(40);
    let seen = shows_the_numbers_of("program", &snapshot, &explained(&snapshot));
    can_be_used("program", &seen);
    assert_eq!(seen["by_time"], true);
    assert_eq!(seen["end"], json!([(30 << 20) + 40 * 512, 0, 64 << 20]));
    assert!(seen["selected"]["flame"].as_u64() > Some(0));
}

fn fifty_thousand_allocations_are_drawn_fluently() {
    let snapshot = program(5600);
    assert!(
        snapshot.traces[0]
            .iter()
            .filter(|event| event.action == Action::Alloc)
            .count()
            > 50_000
    );
    let page = page_of("large", &snapshot, &explained(&snapshot));
    let seen = seen_in_browser("large", &page, include_str!("page/time.js"), &[]);
    assert_eq!(seen["problems"], json!([]));
    // A tenth of it on an idle machine; this one may be busy.
    let slowest = seen["zoomed"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_f64)
        .fold(0.0, f64::max);
    assert!(slowest > 0.0 && slowest < 500.0, "{seen}");
    assert!(
        seen["history"].as_f64() < Some(1000.0) && seen["opened"].as_f64() < Some(2000.0),
        "{seen}"
    );
    eprintln!("milliseconds: {seen}");
}

fn a_snapshot_without_events_shows_its_segments() {
    let snapshot = Snapshot {
        traces: Vec::new(),
        annotations: Vec::new(),
        ..program(3)
    };
    let seen = shows_the_numbers_of("no-events", &snapshot, &explained(&snapshot));
    assert!(seen["painted"][1].as_u64() > Some(1000), "{seen}");
}

fn several_ranks_have_a_table_and_a_choice() {
    let snapshots = [program(5), program(9)];
    let names = ["/runs/a/rank0.pickle", "/runs/a/rank1.pickle"];
    let ranks = snapshots
        .iter()
        .zip(names)
        .map(|(snapshot, name)| RankData::new(name, snapshot, &explained(snapshot)));
    let data = PageData::new(
        "run",
        vec!["rank1 holds more at train.py:57".to_owned()],
        ranks.collect(),
    );
    let seen = used("ranks", &page(&data));
    assert_eq!(seen["problems"], json!([]));
    assert_eq!(seen["rank_rows"], 2);
    assert_eq!(seen["choices"], json!(["rank0.pickle", "rank1.pickle"]));
    assert_eq!(
        seen["other_rank"],
        json!([
            "/runs/a/rank1.pickle · device 0",
            snapshots[1].traces[0].len(),
            1
        ])
    );
}

/// A folder of recordings, which are not part of the project.
fn recordings(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared")
        .join(folder)
}

fn recorded(path: &Path) -> Snapshot {
    Snapshot::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn recorded_snapshots_are_shown_with_their_numbers() {
    for name in SNAPSHOTS {
        let snapshot = recorded(&recordings("snapshots").join(format!("{name}.pickle.gz")));
        let explanation = explained(&snapshot);
        assert!(
            page_of(name, &snapshot, &explanation).len() < LARGEST_PAGE,
            "{name}"
        );
        let seen = shows_the_numbers_of(name, &snapshot, &explanation);
        can_be_used(name, &seen);
    }
}

/// Compares the page's data without a browser.
fn the_data_of_recorded_snapshots_match_their_explanations() {
    for folder in ["snapshots", "real-snapshots"] {
        for entry in fs::read_dir(recordings(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "gz") {
                continue;
            }
            let (file, snapshot) = (path.display().to_string(), recorded(&path));
            let explanation = explained(&snapshot);
            let data = serde_json::to_value(PageData::new(
                &file,
                Vec::new(),
                vec![RankData::new(&file, &snapshot, &explanation)],
            ))
            .unwrap();
            let of = |name: &str| data["ranks"][0][name].as_u64().unwrap();
            let accounts = explanation.accounts;
            let waiting = accounts.active.saturating_sub(accounts.allocated).get();
            assert_eq!(
                (of("allocated"), of("pending"), of("reserved")),
                (accounts.allocated.get(), waiting, accounts.reserved.get()),
                "{file}"
            );
        }
    }
}
