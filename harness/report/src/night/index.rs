//! The index of all nights: what the folder is, and for each device its latest verdict, its trend and links.

use super::super::escape::{code, prose};
use super::super::page::Page;
use super::super::picture::Picture;
use super::super::unique;
use super::super::words::{Align, NOTHING, count};
use super::important;
use super::picture::trend::{self, Small};
use super::series::Trend;
use super::words::{self, Outcomes};
use harness_base::files::slug;
use harness_bench::nights::{INDEX, REPORT};
use harness_bench::record::{Machine, NightRecord};

/// Nights listed before the fold.
const LISTED: usize = 7;

/// One night: its folder, relative to the index.
type Place<'a> = (&'a str, &'a NightRecord);

/// Renders [`INDEX`] and the pictures that it links to before it. The folders are relative to it; nights may come in any order, of any
/// machines.
#[must_use]
pub fn index(nights: &[(String, NightRecord)]) -> Vec<(String, String)> {
    let mut page = Page::default();
    page.block("# Reports");
    page.block(
        "What the harness found, night after night: each night is a folder with a report to read, its pictures and the record that both are \
         made from (`harness report render` makes them again, byte for byte). This page is made by the tool: do not edit it.",
    );
    let devices = devices(nights);
    if devices.is_empty() {
        page.block("There is no night yet: `harness bench` makes one.");
    } else {
        overview(&mut page, &devices);
    }
    for device in &devices {
        section(&mut page, device);
    }
    page.end();
    let pictures = page.pictures.into_iter().map(|picture| (picture.file_name, picture.svg));
    pictures.chain([(INDEX.to_owned(), page.text)]).collect()
}

/// All nights of one device.
struct Device<'a> {
    /// A name for links, unique on the page.
    slug: String,
    /// Of the machine as it is now, oldest first; never empty.
    nights: Vec<Place<'a>>,
    /// Of the device when something else of the machine was different, latest first.
    before: Vec<Place<'a>>,
}

impl<'a> Device<'a> {
    fn latest(&self) -> Place<'a> {
        *self.nights.last().expect("a device is made with its first night")
    }
}

/// Devices in the order of their names, those that run on real hardware first.
fn devices(nights: &[(String, NightRecord)]) -> Vec<Device<'_>> {
    let mut ordered: Vec<Place<'_>> = nights.iter().map(|(folder, night)| (folder.as_str(), night)).collect();
    ordered.sort_by_key(|(folder, night)| {
        (night.machine.cost_model.is_some(), &night.machine.device, &night.machine.uuid_hash, &night.started, *folder)
    });
    let same_device = |a: &Place<'_>, b: &Place<'_>| {
        let key = |machine: &Machine| (machine.device.clone(), machine.clock, machine.uuid_hash.clone());
        key(&a.1.machine) == key(&b.1.machine)
    };
    let mut names = std::collections::BTreeSet::new();
    ordered
        .chunk_by(same_device)
        .map(|all| {
            let latest = &all[all.len() - 1].1.machine;
            let (nights, mut before): (Vec<Place<'_>>, Vec<Place<'_>>) = all.iter().partition(|(_, night)| night.machine == *latest);
            before.reverse();
            Device { slug: unique(&slug(&latest.device), "-", &mut names), nights, before }
        })
        .collect()
}

/// One line a device.
fn overview(page: &mut Page, devices: &[Device<'_>]) {
    let heads = [("device", Align::Left), ("latest night", Align::Left), ("verdict", Align::Left), ("nights", Align::Right)];
    let columns = heads.map(|(head, align)| (head.to_owned(), align));
    let rows = devices.iter().map(|device| {
        let (folder, night) = device.latest();
        let contended = if night.conditions.contended.is_empty() { "" } else { " (contended)" };
        vec![
            format!("[{}](#{})", prose(&night.machine.device), device.slug),
            format!("[{}]({})", words::moment(&night.started), link(folder)),
            format!("{}{contended}", verdict(night)),
            (device.nights.len() + device.before.len()).to_string(),
        ]
    });
    page.table(&columns, rows.collect::<Vec<_>>());
}

fn verdict(night: &NightRecord) -> String {
    prose(&important::verdict(night))
}

/// A path as the target of a link.
fn link(folder: &str) -> String {
    let folder = folder.trim_end_matches('/');
    let path = if folder.is_empty() { REPORT.to_owned() } else { format!("{folder}/{REPORT}") };
    path.chars().map(|c| if c.is_whitespace() || "()<>".contains(c) { format!("%{:02X}", u32::from(c)) } else { c.to_string() }).collect()
}

fn section(page: &mut Page, device: &Device<'_>) {
    let (folder, latest) = device.latest();
    page.anchor(&device.slug);
    page.block(format!("## {}", prose(&latest.machine.device)));
    page.block(format!(
        "**{}** [The night of {}]({}), {}.",
        verdict(latest),
        words::moment(&latest.started),
        link(folder),
        words::commit(&latest.build)
    ));
    trends(page, device);
    let recent: Vec<Place<'_>> = device.nights.iter().rev().copied().collect();
    list(page, &recent[..recent.len().min(LISTED)]);
    if recent.len() > LISTED {
        page.fold(&format!("{} before", count(recent.len() - LISTED, "night")), |page| list(page, &recent[LISTED..]));
    }
    if !device.before.is_empty() {
        let title = format!("{} on the same device, when something else was different", count(device.before.len(), "night"));
        page.fold(&title, |page| before(page, device));
    }
}

/// A small line for each suite and quantity, and its figures in a table for those who do not see the picture.
fn trends(page: &mut Page, device: &Device<'_>) {
    let nights: Vec<&NightRecord> = device.nights.iter().map(|(_, night)| *night).collect();
    let (_, latest) = device.latest();
    let mut lines = Vec::new();
    for suite in &latest.suites {
        let trend = Trend::new(&suite.name, &nights);
        for quantity in important::quantities(suite.entries.iter().map(|entry| entry.quantity)) {
            lines.push(Small { title: format!("{}, {}", suite.name, words::shortest(quantity)), levels: trend.index(quantity) });
        }
    }
    let title = format!("{}: every suite over the nights", latest.machine.device);
    if let Some(svg) = trend::small(&title, &lines) {
        let file_name = format!("trend-{}.svg", device.slug);
        page.block(format!("![{}]({file_name})", prose(&title)));
        page.pictures.push(Picture { file_name, svg });
    }
}

fn list(page: &mut Page, nights: &[Place<'_>]) {
    let heads =
        [("night", Align::Left), ("commit", Align::Left), ("worse", Align::Right), ("better", Align::Right), ("failed", Align::Right)];
    let heads = heads.into_iter().chain([("skipped", Align::Right), ("entries", Align::Right), ("conditions", Align::Left)]);
    let columns: Vec<(String, Align)> = heads.map(|(head, align)| (head.to_owned(), align)).collect();
    page.table(&columns, nights.iter().map(|(folder, night)| night_cells(folder, night)));
}

fn night_cells(folder: &str, night: &NightRecord) -> Vec<String> {
    let counts = night.comparison.as_ref().map(|comparison| important::Counts::of(&comparison.changes));
    let outcomes = Outcomes::of(night);
    let number = |number: Option<usize>| number.map_or_else(|| NOTHING.to_owned(), |number| number.to_string());
    let contended = &night.conditions.contended;
    vec![
        format!("[{}]({})", words::moment(&night.started), link(folder)),
        night.build.commit.as_deref().map_or_else(|| NOTHING.to_owned(), |commit| code(&commit.chars().take(10).collect::<String>())),
        number(counts.map(|counts| counts.worse)),
        number(counts.map(|counts| counts.better)),
        outcomes.failed.to_string(),
        outcomes.skipped.to_string(),
        (outcomes.measured + outcomes.failed + outcomes.skipped).to_string(),
        if contended.is_empty() { "uncontended".to_owned() } else { format!("contended: {}", prose(&contended.join("; "))) },
    ]
}

/// Nights that are not compared with those of today, and why not.
fn before(page: &mut Page, device: &Device<'_>) {
    let now = &device.latest().1.machine;
    let columns = [("night", Align::Left), ("what was different", Align::Left)].map(|(head, align)| (head.to_owned(), align));
    let rows = device.before.iter().map(|(folder, night)| {
        vec![format!("[{}]({})", words::moment(&night.started), link(folder)), prose(&differences(&night.machine, now).join("; "))]
    });
    page.table(&columns, rows.collect::<Vec<_>>());
}

/// What was different of a machine, with the values that it had.
fn differences(then: &Machine, now: &Machine) -> Vec<String> {
    let rows = super::machine_rows(then).into_iter().zip(super::machine_rows(now));
    rows.filter(|((_, then), (_, now))| then != now).map(|((what, then), (_, now))| format!("{what}: {then}, now {now}")).collect()
}
