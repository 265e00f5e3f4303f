//! Bytes by site: how much allocated memory each site of a scenario holds. A site is a step's line with its buffer's
//! name and, in a workload, the purpose of the memory. Numbered buffers of a step share a site.
//!
//! Tracked only if a step needs it ([`Rig::watch_sites`]), and never in a timed run.

use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::device::DevicePtr;
use harness_allocator::units::Bytes;

use super::Rig;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    line: u32,
    /// The name of the buffer, without a number, or of the workload.
    name: String,
    /// The purpose of the memory, or empty.
    purpose: &'static str,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.purpose {
            "" => write!(f, "{} (line {})", self.name, self.line),
            purpose => write!(f, "{purpose} of {} (line {})", self.name, self.line),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Sites {
    numbers: BTreeMap<Site, usize>,
    /// Allocated bytes, by site number.
    bytes: Vec<u64>,
    /// The site number and size of each live block.
    live: BTreeMap<DevicePtr, (usize, Bytes)>,
    /// The site of the next blocks.
    pub(super) current: Option<Site>,
}

impl Sites {
    /// Starts the site of a buffer or workload.
    pub(super) fn begin(&mut self, name: &str, line: u32) {
        let name = name.split('[').next().unwrap_or_default().to_owned();
        self.current = Some(Site { line, name, purpose: "" });
    }

    pub(super) fn allocated(&mut self, address: DevicePtr, size: Bytes) {
        let Some(site) = &self.current else { return };
        let number = match self.numbers.get(site) {
            Some(number) => *number,
            None => {
                self.numbers.insert(site.clone(), self.bytes.len());
                self.bytes.push(0);
                self.bytes.len() - 1
            }
        };
        self.bytes[number] += size.0;
        self.live.insert(address, (number, size));
    }

    pub(super) fn freed(&mut self, address: DevicePtr) {
        if let Some((number, size)) = self.live.remove(&address) {
            self.bytes[number] -= size.0;
        }
    }
}

impl Rig {
    /// Tracks the bytes of each site from now on, except in timed runs.
    pub fn watch_sites(&mut self) {
        if !self.is_timed() {
            self.sites = Some(Sites::default());
        }
    }

    /// The allocated bytes of all sites by number; `None` if sites are not tracked. Later sites have higher numbers.
    pub fn site_bytes(&self) -> Option<&[u64]> {
        self.sites.as_ref().map(|sites| sites.bytes.as_slice())
    }

    /// The sites by number.
    pub fn sites(&self) -> Vec<&Site> {
        let Some(sites) = &self.sites else { return Vec::new() };
        let mut all: Vec<(&Site, usize)> = sites.numbers.iter().map(|(site, number)| (site, *number)).collect();
        all.sort_by_key(|(_, number)| *number);
        all.into_iter().map(|(site, _)| site).collect()
    }

    /// Sets the purpose of the step's next allocations.
    pub fn name_purpose(&mut self, purpose: &'static str) {
        if let Some(site) = self.sites.as_mut().and_then(|sites| sites.current.as_mut()) {
            site.purpose = purpose;
        }
    }
}
