//! An explanation as one self-contained HTML page: [`page`].
//!
//! The page contains its style, script and data. The data ([`PageData`]) is JSON with columns of integers (`columns.rs`). The
//! script computes derived values, which keeps the page small.

mod columns;
mod data;
pub mod lifetimes;

#[cfg(test)]
mod tests;

pub use data::{PageData, RankData};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
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

pub fn page(data: &PageData) -> String {
    let json = serde_json::to_string(data).expect("plain data with text keys always has a JSON form");
    // A `<` could end the script element that contains the data:
    // https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements
    let json = json.replace('<', "\\u003c");
    let mut page = String::with_capacity(json.len() + (64 << 10));
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once("{{") {
        let (slot, after) = after.split_once("}}").expect("every slot of the page is closed");
        page.push_str(before);
        match slot {
            "title" => page.push_str(&escape(&data.title)),
            "style" => page.push_str(STYLE),
            "script" => SCRIPTS.iter().for_each(|script| page.push_str(script)),
            "data" => page.push_str(&json),
            _ => unreachable!("the page has no slot {slot}"),
        }
        rest = after;
    }
    page.push_str(rest);
    page
}

/// Escapes text between tags.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
