//! Builds snapshots for tests.

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{
    Action, Block, Event, ExtraId, Frame, MempoolId, RecordedSettings, Segment, Snapshot, StackId,
};

pub(crate) const MIB: u64 = 1 << 20;

/// A snapshot of one device under construction.
#[derive(Default)]
pub(crate) struct Example {
    pub(crate) snapshot: Snapshot,
    next: u64,
}

impl Example {
    pub(crate) fn new(conf: &str) -> Self {
        let settings = RecordedSettings {
            conf: conf.to_owned(),
            ..RecordedSettings::default()
        };
        let snapshot = Snapshot {
            traces: vec![Vec::new()],
            settings: Some(settings),
            ..Snapshot::default()
        };
        Self {
            snapshot,
            next: 1 << 40,
        }
    }

    /// The stack of one line of `model.py`.
    pub(crate) fn line(&mut self, line: u32) -> StackId {
        let frame = Frame {
            name: "forward".to_owned(),
            file: "/srv/model.py".to_owned(),
            line,
            ..Frame::default()
        };
        let frame = self.snapshot.stacks.intern_frame(frame);
        self.snapshot.stacks.intern(&[frame])
    }

    pub(crate) fn event(
        &mut self,
        action: Action,
        address: u64,
        size: u64,
        stack: StackId,
    ) -> usize {
        let time_us = Some(1_000_000 + 1_000 * self.snapshot.traces[0].len() as u64);
        let event = Event {
            action,
            address,
            size: Bytes(size),
            stream: 0,
            time_us,
            stack,
            extra: ExtraId::default(),
        };
        self.snapshot.traces[0].push(event);
        self.snapshot.traces[0].len() - 1
    }

    /// A failed request.
    pub(crate) fn oom(&mut self, requested: u64, free: u64) {
        let stack = self.line(99);
        self.event(Action::Oom, free, requested, stack);
    }

    /// Adds a segment. Each block has a state (`a` allocated, `p` pending free, `.` free), a size
    /// and, if allocated, a line.
    pub(crate) fn segment(&mut self, blocks: &[(char, u64, u32)]) -> &mut Segment {
        let (start, size) = (self.next, blocks.iter().map(|block| block.1).sum::<u64>());
        self.next += size + (1 << 30);
        let stacks: Vec<StackId> = blocks
            .iter()
            .map(|&(_, _, line)| {
                if line > 0 {
                    self.line(line)
                } else {
                    StackId::EMPTY
                }
            })
            .collect();
        let mut address = start;
        self.event(Action::SegmentAlloc, start, size, StackId::EMPTY);
        let mut made = Vec::new();
        for (&(kind, size, _), stack) in blocks.iter().zip(stacks) {
            let state = match kind {
                'a' => BlockState::Allocated,
                'p' => BlockState::PendingFree,
                _ => BlockState::Inactive,
            };
            if state != BlockState::Inactive {
                self.event(Action::Alloc, address, size, stack);
            }
            if state == BlockState::PendingFree {
                self.event(Action::FreeRequested, address, size, stack);
            }
            made.push(Block {
                address,
                size: Bytes(size),
                requested: Bytes(size),
                state,
                stack,
                extra: ExtraId::default(),
            });
            address += size;
        }
        let segment = Segment {
            device: 0,
            address: start,
            size: Bytes(size),
            stream: 0,
            pool: if size == 2 * MIB {
                PoolKind::Small
            } else {
                PoolKind::Large
            },
            private_pool: MempoolId::DEFAULT,
            expandable: false,
            stack: StackId::EMPTY,
            blocks: made,
            extra: ExtraId::default(),
        };
        self.snapshot.segments.push(segment);
        self.snapshot.segments.last_mut().expect("just pushed")
    }
}
