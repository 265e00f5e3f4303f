pub mod html;
pub mod json;
pub mod markdown;
pub mod text;

#[cfg(test)]
mod tests;
