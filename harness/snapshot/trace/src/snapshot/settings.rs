//! The allocator settings of a snapshot.

use harness_allocator::allocator::caching::Config;

use super::extras::Value;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedSettings {
    /// The program's `PYTORCH_CUDA_ALLOC_CONF`. In old files, derived from the individual settings.
    pub conf: String,
    pub all: Vec<(String, Value)>,
}

/// The key of the version of PyTorch in snapshots of the harness. PyTorch writes none.
pub(super) const TORCH: &str = "torch";

impl RecordedSettings {
    /// The settings of a caching allocator, with its version of PyTorch.
    pub fn of(config: &Config) -> Self {
        let pairs = [
            ("PYTORCH_CUDA_ALLOC_CONF", config.to_string()),
            (TORCH, config.torch.to_string()),
        ];
        Self::new(
            pairs
                .map(|(key, value)| (key.to_owned(), Value::Text(value)))
                .into(),
        )
    }

    /// Derives the settings from the keys of a file.
    pub fn new(all: Vec<(String, Value)>) -> Self {
        let recorded = all
            .iter()
            .find(|(key, _)| key.ends_with("ALLOC_CONF"))
            .and_then(|(_, value)| value.as_text());
        let conf = recorded.map_or_else(|| conf_of(&all), str::to_owned);
        Self { conf, all }
    }

    pub fn value(&self, key: &str) -> Option<&Value> {
        self.all
            .iter()
            .find_map(|(name, value)| (name == key).then_some(value))
    }
}

/// Builds `PYTORCH_CUDA_ALLOC_CONF` from settings that affect placement and differ from the
/// default.
fn conf_of(all: &[(String, Value)]) -> String {
    let mut parts = Vec::new();
    for (key, value) in all {
        match (key.as_str(), value) {
            ("max_split_size", Value::Int(bytes)) if (1..i64::MAX.into()).contains(bytes) => {
                parts.push(format!("max_split_size_mb:{}", bytes >> 20))
            }
            ("garbage_collection_threshold", Value::Float(bits)) if f64::from_bits(*bits) > 0.0 => {
                parts.push(format!("{key}:{}", f64::from_bits(*bits)))
            }
            ("expandable_segments", Value::Bool(true)) => {
                parts.push("expandable_segments:True".to_owned())
            }
            ("roundup_power2_divisions", Value::Dict(divisions)) => {
                parts.extend(roundup_of(divisions))
            }
            _ => {}
        }
    }
    parts.join(",")
}

/// Converts a dictionary of divisions by size in MiB. Returns `None` if sizes are not rounded.
fn roundup_of(divisions: &[(Value, Value)]) -> Option<String> {
    let of = |(size, divisions): &(Value, Value)| {
        let size = size
            .as_text()
            .map_or_else(|| size.as_u64(), |text| text.parse().ok())?;
        Some((size, divisions.as_u64()?))
    };
    let divisions: Vec<(u64, u64)> = divisions.iter().filter_map(of).collect();
    let (&(_, first), rest) = divisions.split_first()?;
    if divisions.iter().all(|&(_, each)| each == 0) {
        return None;
    }
    if rest.iter().all(|&(_, each)| each == first) {
        return Some(format!("roundup_power2_divisions:{first}"));
    }
    let each: Vec<String> = divisions
        .iter()
        .map(|(size, each)| format!("{size}:{each}"))
        .collect();
    Some(format!("roundup_power2_divisions:[{}]", each.join(",")))
}
