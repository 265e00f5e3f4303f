//! How the double behaves: written to environment variables by a test, read from them by the shared library in its child.

use std::env;
use std::str::FromStr;

/// How the double behaves. All sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory of each device. `DOUBLE_CAPACITY`.
    pub capacity: u64,
    /// What a context takes of it. `DOUBLE_OVERHEAD`.
    pub overhead: u64,
    /// Number of devices. `DOUBLE_DEVICES`.
    pub devices: u32,
    /// What another process holds of each device. `DOUBLE_OTHERS`.
    pub others: u64,
    /// Whether NVML numbers this process otherwise than it sees itself, as in a container. `DOUBLE_CONTAINER`.
    pub container: bool,
    /// Whether NVML names the devices as multi-instance slices. `DOUBLE_MIG`.
    pub mig: bool,
    /// Whether the devices have addresses and physical memory apart (virtual memory management). `DOUBLE_MAPPING`.
    pub mapping: bool,
    /// Whether the devices have stream-ordered pools. `DOUBLE_POOLS`.
    pub pools: bool,
    /// Whether other programs can be on the devices: each that writes a file of its own number, with the bytes that it holds of each device, to
    /// the folder `DOUBLE_PROCESSES`, until it ends. A matter of [`crate::Staging`].
    pub processes: bool,
    /// Whether the name of each call is written to a file, for [`crate::calls`]. A matter of [`crate::Staging`].
    pub list_calls: bool,
    /// Calls that fail. `DOUBLE_FAIL`.
    pub fail: Vec<Failure>,
    /// A fill that writes one byte wrongly. `DOUBLE_WRONG_WRITE`.
    pub wrong_write: Option<WrongWrite>,
    /// Whether there is an NVML library; a matter of [`crate::Staging`], not of a variable.
    pub nvml: bool,
}

/// The code of a [`Failure`] that never returns.
pub const HANGS: u32 = u32::MAX;

/// The n-th call of a function fails with a code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exported name, for example `cuMemAlloc_v2`.
    pub function: String,
    /// Which call, counted from 1; 0 means every call.
    pub nth: u64,
    /// The code, which may be one that no header knows.
    pub code: u32,
}

/// The n-th fill kernel that writes anything flips a bit of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongWrite {
    /// Which fill, counted from 1.
    pub nth: u64,
    /// Which byte of what that kernel writes.
    pub offset: u64,
}

impl Default for Config {
    /// One GPU of 2 GiB, of which a context takes 300 MiB, with NVML and nothing wrong.
    fn default() -> Self {
        Self {
            capacity: 2 << 30,
            overhead: 300 << 20,
            devices: 1,
            others: 0,
            container: false,
            mig: false,
            mapping: true,
            pools: true,
            processes: false,
            list_calls: false,
            fail: Vec::new(),
            wrong_write: None,
            nvml: true,
        }
    }
}

impl Config {
    /// With one more failing call.
    #[must_use]
    pub fn failing(mut self, function: &str, nth: u64, code: u32) -> Self {
        self.fail.push(Failure { function: function.to_owned(), nth, code });
        self
    }

    /// The variables that carry this to the shared library.
    #[must_use]
    pub fn to_env(&self) -> Vec<(&'static str, String)> {
        let failures = self.fail.iter().map(|failure| format!("{}:{}:{}", failure.function, failure.nth, failure.code));
        let wrong_write = self.wrong_write.map(|wrong| format!("{}:{}", wrong.nth, wrong.offset));
        vec![
            ("DOUBLE_CAPACITY", self.capacity.to_string()),
            ("DOUBLE_OVERHEAD", self.overhead.to_string()),
            ("DOUBLE_DEVICES", self.devices.to_string()),
            ("DOUBLE_OTHERS", self.others.to_string()),
            ("DOUBLE_CONTAINER", u8::from(self.container).to_string()),
            ("DOUBLE_MIG", u8::from(self.mig).to_string()),
            ("DOUBLE_MAPPING", u8::from(self.mapping).to_string()),
            ("DOUBLE_POOLS", u8::from(self.pools).to_string()),
            ("DOUBLE_FAIL", failures.collect::<Vec<_>>().join(",")),
            ("DOUBLE_WRONG_WRITE", wrong_write.unwrap_or_default()),
        ]
    }

    /// What the variables of this process say; what is not set is as in [`Config::default`]. A malformed variable is a sentence.
    pub(crate) fn from_env() -> Result<Self, String> {
        Self::read(|name| env::var(name).ok().filter(|text| !text.is_empty()))
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let default = Self::default();
        let fail = variable("DOUBLE_FAIL").unwrap_or_default();
        let failures = fail.split(',').filter(|text| !text.is_empty()).map(|text| match text.split(':').collect::<Vec<_>>()[..] {
            [function, nth, code] => Ok(Failure { function: function.to_owned(), nth: number(nth)?, code: number(code)? }),
            _ => Err(format!("DOUBLE_FAIL takes FUNCTION:NTH:CODE, not `{text}`")),
        });
        let wrong_write = variable("DOUBLE_WRONG_WRITE").map(|text| match text.split(':').collect::<Vec<_>>()[..] {
            [nth, offset] => Ok(WrongWrite { nth: number(nth)?, offset: number(offset)? }),
            _ => Err(format!("DOUBLE_WRONG_WRITE takes NTH:OFFSET, not `{text}`")),
        });
        Ok(Self {
            capacity: variable("DOUBLE_CAPACITY").map_or(Ok(default.capacity), |text| number(&text))?,
            overhead: variable("DOUBLE_OVERHEAD").map_or(Ok(default.overhead), |text| number(&text))?,
            devices: variable("DOUBLE_DEVICES").map_or(Ok(default.devices), |text| number(&text))?,
            others: variable("DOUBLE_OTHERS").map_or(Ok(default.others), |text| number(&text))?,
            container: variable("DOUBLE_CONTAINER").map_or(Ok(0_u8), |text| number(&text))? != 0,
            mig: variable("DOUBLE_MIG").map_or(Ok(0_u8), |text| number(&text))? != 0,
            mapping: variable("DOUBLE_MAPPING").map_or(Ok(1_u8), |text| number(&text))? != 0,
            pools: variable("DOUBLE_POOLS").map_or(Ok(1_u8), |text| number(&text))? != 0,
            fail: failures.collect::<Result<_, _>>()?,
            wrong_write: wrong_write.transpose()?,
            processes: default.processes,
            list_calls: default.list_calls,
            nvml: default.nvml,
        })
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number that fits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_read_back_as_it_was_written() {
        let config = Config {
            capacity: 5 << 30,
            devices: 3,
            others: 7 << 20,
            container: true,
            mig: true,
            mapping: false,
            pools: false,
            wrong_write: Some(WrongWrite { nth: 2, offset: 77 }),
            ..Config::default()
        }
        .failing("cuMemAlloc_v2", 3, 2)
        .failing("cuInit", 1, 9999);
        let env = config.to_env();
        let read = Config::read(|name| env.iter().find(|pair| pair.0 == name).map(|pair| pair.1.clone()).filter(|text| !text.is_empty()));
        assert_eq!(read, Ok(config));
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(Config::read(|_| None), Ok(Config::default()));
    }

    #[test]
    fn a_malformed_variable_is_told() {
        let read = Config::read(|name| (name == "DOUBLE_FAIL").then(|| "cuInit:1".to_owned()));
        assert_eq!(read, Err("DOUBLE_FAIL takes FUNCTION:NTH:CODE, not `cuInit:1`".to_owned()));
    }
}
