//! Host memory and copies. Host memory has its own address range, so one mechanism tracks the order
//! and contents of copies and of device work. Host memory is unlimited.

use std::collections::BTreeMap;

use super::addresses::{Addresses, HOST};
use super::{AddressOrder, SimDevice};
use crate::device::{
    Access, AccessKind, DeviceError, DevicePtr, HostId, HostMemory, MemoryRange, StreamId,
};
use crate::units::{Bytes, Nanos};

#[derive(Clone, Debug)]
pub(super) struct SimHost {
    held: BTreeMap<u32, Piece>,
    next: u32,
    addresses: Addresses,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    range: MemoryRange,
    pinned: bool,
    /// The completion time of all copies so far.
    ready: Nanos,
}

const ALIGNMENT: u64 = 4096;

impl SimHost {
    pub(super) fn new(order: AddressOrder) -> Self {
        Self {
            held: BTreeMap::new(),
            next: 0,
            addresses: Addresses::new(HOST, Bytes(ALIGNMENT), order),
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.held.len() as u64
    }

    fn piece(&mut self, host: HostId) -> Result<&mut Piece, DeviceError> {
        self.held
            .get_mut(&host.0)
            .ok_or(DeviceError::unknown_handle("host memory", host.0))
    }
}

impl SimDevice {
    pub(super) fn take_host(
        &mut self,
        size: Bytes,
        memory: &HostMemory,
    ) -> Result<HostId, DeviceError> {
        let pinned = memory.is_pinned();
        let refused = |why: &str| DeviceError::HostMemory {
            call: memory.call(),
            requested: size,
            why: why.to_owned(),
        };
        if size == Bytes::ZERO {
            return Err(refused("request at least one byte"));
        }
        let charged = size
            .checked_round_up(Bytes(ALIGNMENT))
            .ok_or_else(|| refused("no host has that much memory"))?;
        let next = self
            .host
            .next
            .checked_add(1)
            .ok_or_else(|| refused("all host memory numbers are used"))?;
        let start = self
            .host
            .addresses
            .take(charged)
            .ok_or_else(|| refused("no host has that much memory"))?;
        let number = std::mem::replace(&mut self.host.next, next);
        self.spend(self.config.cost.host_alloc_time(charged, pinned));
        let range = MemoryRange::new(DevicePtr(start), size);
        self.host.held.insert(
            number,
            Piece {
                range,
                pinned,
                ready: Nanos::ZERO,
            },
        );
        Ok(HostId(number))
    }

    pub(super) fn give_host_back(&mut self, host: HostId) -> Result<(), DeviceError> {
        let Piece { range, ready, .. } = *self.host.piece(host)?;
        self.wait_until(ready);
        self.host.held.remove(&host.0);
        self.contents.forget(range);
        self.races.forget(range);
        if let Some(charged) = range.len.checked_round_up(Bytes(ALIGNMENT)) {
            self.host.addresses.give_back(range.start.0, charged);
        }
        Ok(())
    }

    /// The first `len` bytes of host memory.
    pub(super) fn host_range(
        &mut self,
        host: HostId,
        len: Bytes,
    ) -> Result<MemoryRange, DeviceError> {
        let MemoryRange { start, len: size } = self.host.piece(host)?.range;
        if len > size {
            return Err(DeviceError::HostRange {
                number: host.0,
                copied: len,
                size,
            });
        }
        Ok(MemoryRange::new(start, len))
    }

    /// Queues a copy between host and device memory. The host waits for a copy of pageable memory,
    /// but the wait orders nothing: a real driver may wait or not.
    pub(super) fn copy(
        &mut self,
        stream: StreamId,
        host: HostId,
        from: MemoryRange,
        to: MemoryRange,
    ) -> Result<(), DeviceError> {
        let pinned = self.host.piece(host)?.pinned;
        for (range, kind) in [(from, AccessKind::Read), (to, AccessKind::Write)] {
            let access = Access {
                kind,
                stream,
                place: self.place,
            };
            if !HOST.contains(&range.start.0) {
                self.check_allocated(range, access)?;
            }
            self.order(range, access)?;
        }
        self.submit(stream, self.config.cost.copy_time(from.len, pinned))?;
        self.contents.copy(from, to);
        let ready = self.stream(stream)?.ready;
        let piece = self.host.piece(host)?;
        piece.ready = piece.ready.max(ready);
        if !pinned {
            self.wait_until(ready);
        }
        Ok(())
    }
}
