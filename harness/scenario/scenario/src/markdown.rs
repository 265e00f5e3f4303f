//! Pieces of generated pages.

pub fn code(text: &str) -> String {
    format!("`{text}`")
}

pub fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(N));
    for row in rows {
        let cells = row.map(|cell| {
            cell.split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .replace('|', "\\|")
        });
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}
