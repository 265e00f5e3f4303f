//! An explanation as one self-contained HTML page: [`page`].
//!
//! The page contains its style, script and data. The data ([`PageData`]) is JSON with columns of
//! integers (`columns.rs`). The script computes derived values, which keeps the page small.

mod columns;
mod data;
pub mod lifetimes;

#[cfg(test)]
mod tests;

use crate::escape::between_tags;

pub use data::{PageData, RankData};

const PAGE: &str = include_str!("page.html");
/// Part of the head of each page.
const MARK: &str = "<meta name=\"generator\" content=\"harness explain\">";
pub(crate) const STYLE: &str = include_str!("page.css");
/// Scripts in the order of execution.
const SCRIPTS: [&str; 7] = [
    include_str!("script/data.js"),
    include_str!("script/draw.js"),
    include_str!("script/causes.js"),
    include_str!("script/timeline.js"),
    include_str!("script/segments.js"),
    include_str!("script/flame.js"),
    include_str!("script/main.js"),
];

/// Returns whether a text is such a page.
pub fn is_page(text: &[u8]) -> bool {
    let head = &text[..text.len().min(PAGE.len())];
    head.windows(MARK.len()).any(|part| part == MARK.as_bytes())
}

pub fn page(data: &PageData) -> String {
    let json =
        serde_json::to_string(data).expect("plain data with text keys always has a JSON form");
    // A `<` could end the script element that contains the data:
    // https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    let json = json.replace('<', "\\u003c");
    let parts = PAGE
        .split("{{")
        .flat_map(|part| part.split("}}"))
        .enumerate();
    let filled = parts.map(|(index, part)| match part {
        text if index % 2 == 0 => text.to_owned(),
        "title" => between_tags(&data.title),
        "style" => STYLE.to_owned(),
        "script" => SCRIPTS.concat(),
        "data" => json.clone(),
        slot => unreachable!("the page has no slot {slot}"),
    });
    filled.collect()
}
