//! Bytes by site: how much each place of a scenario holds that is allocated. A site is a step in its place with the name of its buffer, and with what the memory is for where a
//! workload says it. Numbered buffers of a step are one site.
//!
//! Kept only where a step asks for it ([`Rig::watch_sites`]), and never in a timed run.

use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::device::DevicePtr;
use harness_allocator::units::Bytes;

use super::Rig;

/// A place that allocates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    line: u32,
    /// Of the buffer, without a number, or of the workload.
    name: String,
    /// What the memory is for; empty where nobody says it.
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

/// What each site holds.
#[derive(Debug, Default)]
pub(super) struct Sites {
    numbers: BTreeMap<Site, usize>,
    /// Allocated bytes, by number of the site.
    bytes: Vec<u64>,
    /// Whose each live block is, and its size.
    live: BTreeMap<DevicePtr, (usize, Bytes)>,
    /// Whose the next blocks are.
    current: Option<Site>,
}

impl Sites {
    /// Whose the next allocations are, for who leaves the step and comes back.
    pub(super) fn current(&self) -> Option<Site> {
        self.current.clone()
    }

    pub(super) fn go_back_to(&mut self, site: Option<Site>) {
        self.current = site;
    }

    /// The next allocations are of the buffer or workload of this name.
    pub(super) fn begin(&mut self, name: &str, line: u32) {
        let name = name.split('[').next().unwrap_or_default().to_owned();
        self.current = Some(Site { line, name, purpose: "" });
    }

    pub(super) fn handed_out(&mut self, address: DevicePtr, size: Bytes) {
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

    pub(super) fn taken_back(&mut self, address: DevicePtr) {
        if let Some((number, size)) = self.live.remove(&address) {
            self.bytes[number] -= size.0;
        }
    }
}

impl Rig {
    /// Keeps the bytes of each site from here on. A timed run keeps none.
    pub fn watch_sites(&mut self) {
        if !self.is_timed() {
            self.sites = Some(Sites::default());
        }
    }

    /// Allocated bytes of all sites so far, by their numbers; `None` where nobody keeps them. Sites that come later get higher numbers.
    #[must_use]
    pub fn site_bytes(&self) -> Option<&[u64]> {
        self.sites.as_ref().map(|sites| sites.bytes.as_slice())
    }

    /// The sites, by their numbers.
    #[must_use]
    pub fn sites(&self) -> Vec<&Site> {
        let Some(sites) = &self.sites else { return Vec::new() };
        let mut all: Vec<(&Site, usize)> = sites.numbers.iter().map(|(site, number)| (site, *number)).collect();
        all.sort_by_key(|(_, number)| *number);
        all.into_iter().map(|(site, _)| site).collect()
    }

    /// Tells what the following allocations of the step are for.
    pub fn name_purpose(&mut self, purpose: &'static str) {
        if let Some(site) = self.sites.as_mut().and_then(|sites| sites.current.as_mut()) {
            site.purpose = purpose;
        }
    }
}
