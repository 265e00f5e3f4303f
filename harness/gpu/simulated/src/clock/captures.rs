//! Captures of streams: the streams and events in them, and the calls that CUDA forbids meanwhile.
//!
//! Sources: the CUDA Programming Guide, section "Prohibited and Unhandled Operations" of CUDA
//! graphs
//! (<https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/cuda-graphs.html#prohibited-and-unhandled-operations>),
//! and in the manual of the runtime `cudaError_t`, `cudaStreamBeginCapture`, `cudaStreamEndCapture`
//! and `cudaThreadExchangeStreamCaptureMode`. An error invalidates the captures that it concerns,
//! except where the manual says otherwise.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::work::{NON_BLOCKING, Work};
use super::{LEGACY, Streams, key};
use crate::code::Code;

/// `cudaEventRecordExternal` and `cudaEventWaitExternal`: the event is no part of the capture.
const EXTERNAL: c_uint = 1;

/// The number of active captures. Without any, a launch looks up no stream.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn is_any_active() -> bool {
    ACTIVE.load(Ordering::Relaxed) > 0
}

/// `cudaStreamCaptureMode`: of a capture, or of the calls of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Global, Self::ThreadLocal, Self::Relaxed];

    fn of(number: c_int) -> Result<Self, Code> {
        usize::try_from(number)
            .ok()
            .and_then(|index| Self::ALL.get(index))
            .copied()
            .ok_or(Code::InvalidValue)
    }
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
    static THREAD: u64 = {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        THREADS.fetch_add(1, Ordering::Relaxed)
    };
}

/// Exchanges the mode of this thread's calls.
pub(crate) fn exchange_mode(mode: &mut c_int) -> Result<(), Code> {
    *mode = MODE.replace(Mode::of(*mode)?) as c_int;
    Ok(())
}

/// The calling thread, with the mode of its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    thread: u64,
    mode: Mode,
}

impl Caller {
    pub(crate) fn current() -> Self {
        Self {
            thread: THREAD.with(|thread| *thread),
            mode: MODE.get(),
        }
    }
}

/// A place in a capture: the work that comes before it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// The number of the capture.
    id: u64,
    before: Work,
}

/// The place of a node in a graph.
#[derive(Clone, Debug)]
pub(crate) enum Position {
    /// A node of the program, and the frees that come before it.
    Node { node: usize, after: BTreeSet<usize> },
    /// The last call of a stream in a capture, and the work that comes before its end.
    Captured {
        capture: u64,
        stream: usize,
        before: Work,
    },
}

impl Position {
    /// Returns whether the node of a free ends before another node begins.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Node { node, .. }, Self::Node { after, .. }) => after.contains(node),
            (
                Self::Captured {
                    capture,
                    stream,
                    before,
                },
                Self::Captured {
                    capture: of_other,
                    before: other,
                    ..
                },
            ) => capture == of_other && before.get(stream) <= other.get(stream),
            (Self::Node { .. }, Self::Captured { .. })
            | (Self::Captured { .. }, Self::Node { .. }) => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Capture {
    /// The stream in which it began.
    origin: usize,
    /// The graph that it adds to.
    graph: Option<usize>,
    /// The program gets the graph at the end.
    is_new: bool,
    thread: u64,
    mode: Mode,
    is_valid: bool,
    work: Work,
}

/// `cudaStreamCaptureStatus`, with the number of the capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    None,
    Active(u64),
    Invalidated(u64),
}

impl Streams {
    fn is_legacy(handle: usize) -> bool {
        matches!(handle, 0 | LEGACY)
    }

    /// The place of a stream in a capture.
    fn place(&self, stream: usize) -> Option<&Place> {
        self.streams.get(&stream)?.capture.as_ref()
    }

    pub(crate) fn captures(&self, handle: usize, current: usize) -> bool {
        self.place(key(handle, current)).is_some()
    }

    fn is_valid(&self, id: u64) -> bool {
        self.captures
            .get(&id)
            .is_some_and(|capture| capture.is_valid)
    }

    /// Invalidates captures. Returns the error.
    fn invalidated(&mut self, ids: &[u64], error: Code) -> Code {
        for (_, capture) in self.captures.iter_mut().filter(|(id, _)| ids.contains(id)) {
            capture.is_valid = false;
        }
        error
    }

    /// The captures with a stream of a device that `is_concerned`.
    fn captures_on(&self, device: usize, is_concerned: impl Fn(u32) -> bool) -> Vec<u64> {
        let streams = self
            .streams
            .values()
            .filter(|stream| stream.device == device && is_concerned(stream.flags));
        streams
            .filter_map(|stream| Some(stream.capture.as_ref()?.id))
            .collect()
    }

    /// Refuses the legacy stream while a stream that synchronizes with it captures.
    fn use_legacy(&mut self, handle: usize, current: usize) -> Result<(), Code> {
        if !Self::is_legacy(handle) {
            return Ok(());
        }
        let ids = self.captures_on(current, |flags| flags & NON_BLOCKING == 0);
        if ids.is_empty() {
            Ok(())
        } else {
            Err(self.invalidated(&ids, Code::CaptureImplicit))
        }
    }

    /// Adds work to a stream. Returns whether it is captured. Unknown streams are not refused here.
    pub(crate) fn submit(&mut self, handle: usize, current: usize) -> Result<bool, Code> {
        self.use_legacy(handle, current)?;
        let stream = key(handle, current);
        let Some(place) = self
            .streams
            .get_mut(&stream)
            .and_then(|stream| stream.capture.as_mut())
        else {
            return Ok(false);
        };
        let capture = self
            .captures
            .get_mut(&place.id)
            .filter(|capture| capture.is_valid)
            .ok_or(Code::CaptureInvalidated)?;
        let work = capture.work.entry(stream).or_default();
        *work += 1;
        place.before.insert(stream, *work);
        Ok(true)
    }

    /// The place in a valid capture at which a stream would record an event.
    fn place_of_record(&mut self, handle: usize, current: usize) -> Result<Option<Place>, Code> {
        self.use_legacy(handle, current)?;
        let place = self.place(key(handle, current)).cloned();
        if place.as_ref().is_none_or(|place| self.is_valid(place.id)) {
            Ok(place)
        } else {
            Err(Code::CaptureInvalidated)
        }
    }

    /// Refuses to wait for a stream that captures, or to query it.
    pub(crate) fn allow_wait(&mut self, handle: usize, current: usize) -> Result<(), Code> {
        self.use_legacy(handle, current)?;
        let Some(&Place { id, .. }) = self.place(key(handle, current)) else {
            return Ok(());
        };
        let error = if self.is_valid(id) {
            Code::CaptureUnsupported
        } else {
            Code::CaptureInvalidated
        };
        Err(self.invalidated(&[id], error))
    }

    /// Refuses to wait for a device while a stream of it captures.
    pub(crate) fn allow_wait_for_device(&mut self, device: usize) -> Result<(), Code> {
        let ids = self.captures_on(device, |_| true);
        if ids.is_empty() {
            Ok(())
        } else {
            Err(self.invalidated(&ids, Code::CaptureUnsupported))
        }
    }

    /// Refuses to wait for an event that a capturing stream recorded last, or to read it.
    pub(crate) fn allow_event(&mut self, event: usize) -> Result<(), Code> {
        let Some(id) = self
            .events
            .get(&event)
            .and_then(|event| Some(event.capture.as_ref()?.id))
        else {
            return Ok(());
        };
        Err(self.invalidated(&[id], Code::CapturedEvent))
    }

    /// Refuses calls that are potentially unsafe during a capture: no stream captures them.
    pub(crate) fn allow_unsafe(&mut self, Caller { thread, mode }: Caller) -> Result<(), Code> {
        let concerns = |capture: &Capture| match mode {
            Mode::Relaxed => false,
            _ if capture.thread == thread => capture.mode != Mode::Relaxed,
            Mode::Global => capture.mode == Mode::Global,
            Mode::ThreadLocal => false,
        };
        let ids: Vec<u64> = self
            .captures
            .iter()
            .filter(|(_, capture)| concerns(capture))
            .map(|(id, _)| *id)
            .collect();
        if ids.is_empty() {
            Ok(())
        } else {
            Err(self.invalidated(&ids, Code::CaptureUnsupported))
        }
    }

    /// Records an event in the capture of a stream. Returns `false` if the stream does not capture.
    pub(super) fn record_captured(
        &mut self,
        event: usize,
        handle: usize,
        current: usize,
        flags: c_uint,
    ) -> Result<bool, Code> {
        let place = self.place_of_record(handle, current)?;
        let event = self.event(event)?;
        match (place, flags & EXTERNAL != 0) {
            (None, true) => Err(Code::InvalidValue),
            (None, false) => Ok(false),
            // The launch of the graph records it.
            (Some(_), true) => Ok(true),
            (Some(place), false) => {
                event.capture = Some(place);
                Ok(true)
            }
        }
    }

    /// Makes a stream wait for an event. A stream that waits for a captured event joins its
    /// capture.
    pub(crate) fn wait_in_stream(
        &mut self,
        handle: usize,
        current: usize,
        event: usize,
        flags: c_uint,
    ) -> Result<(), Code> {
        let is_external = flags & EXTERNAL != 0;
        let stream = key(handle, current);
        let own = self.place(stream).map(|place| place.id);
        let Some(event) = self.events.get(&event) else {
            return Ok(());
        };
        let (recorded, of_event) = (event.record.is_some(), event.capture.clone());
        let work = event.record.as_ref().map(|record| record.work.clone());
        match (own, of_event) {
            (Some(own), _) if !self.is_valid(own) => Err(Code::CaptureInvalidated),
            (Some(_), None) if is_external || !recorded => Ok(()),
            (Some(own), None) => Err(self.invalidated(&[own], Code::CaptureIsolation)),
            (Some(own), Some(place)) if own == place.id => {
                if let Some(joined) = self
                    .streams
                    .get_mut(&stream)
                    .and_then(|stream| stream.capture.as_mut())
                {
                    for (stream, work) in place.before {
                        let before = joined.before.entry(stream).or_default();
                        *before = work.max(*before);
                    }
                }
                Ok(())
            }
            (Some(own), Some(place)) if self.captures.contains_key(&place.id) => {
                Err(self.invalidated(&[own, place.id], Code::CaptureMerge))
            }
            (Some(own), Some(_)) => Err(self.invalidated(&[own], Code::CaptureIsolation)),
            (None, None) if is_external => Err(Code::InvalidValue),
            (None, None) => {
                self.use_legacy(handle, current)?;
                self.order(stream, work.unwrap_or_default());
                Ok(())
            }
            (None, Some(place)) if !self.captures.contains_key(&place.id) => {
                Err(Code::CapturedEvent)
            }
            (None, Some(place)) if !self.is_valid(place.id) => Err(Code::CaptureInvalidated),
            // The legacy stream cannot capture.
            (None, Some(place)) if Self::is_legacy(handle) => {
                Err(self.invalidated(&[place.id], Code::CaptureImplicit))
            }
            (None, Some(place)) => {
                self.stream(handle, current)?.capture = Some(place);
                Ok(())
            }
        }
    }

    pub(crate) fn begin_capture(
        &mut self,
        handle: usize,
        current: usize,
        mode: c_int,
        Caller { thread, .. }: Caller,
    ) -> Result<(), Code> {
        let mode = Mode::of(mode)?;
        if Self::is_legacy(handle) {
            return Err(Code::CaptureUnsupported);
        }
        let (id, origin) = (self.captured + 1, key(handle, current));
        let stream = self.stream(handle, current)?;
        if stream.capture.is_some() {
            return Err(Code::IllegalState);
        }
        stream.capture = Some(Place {
            id,
            before: Work::new(),
        });
        self.captured = id;
        self.captures.insert(
            id,
            Capture {
                origin,
                graph: None,
                is_new: false,
                thread,
                mode,
                is_valid: true,
                work: Work::new(),
            },
        );
        ACTIVE.store(self.captures.len(), Ordering::Relaxed);
        Ok(())
    }

    /// The graph of an active capture.
    pub(crate) fn graph_of(&self, capture: u64) -> Option<usize> {
        self.captures.get(&capture)?.graph
    }

    /// The graph of the capture in a stream, and the position of the stream's last call.
    pub(crate) fn position(&self, handle: usize, current: usize) -> Option<(usize, Position)> {
        let stream = key(handle, current);
        let Place { id, before } = self.place(stream)?;
        let position = Position::Captured {
            capture: *id,
            stream,
            before: before.clone(),
        };
        Some((self.graph_of(*id)?, position))
    }

    /// Adds the captured calls of a stream to a new graph, or to one of the program.
    pub(crate) fn capture_to(&mut self, handle: usize, current: usize, graph: usize, is_new: bool) {
        let id = self.place(key(handle, current)).map(|place| place.id);
        if let Some(capture) = id.and_then(|id| self.captures.get_mut(&id)) {
            (capture.graph, capture.is_new) = (Some(graph), is_new);
        }
    }

    /// Takes the new graphs of captures that failed.
    pub(crate) fn take_failed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.failed)
    }

    /// Ends a capture in its stream. All work in it must come before the end. Returns its graph.
    pub(crate) fn end_capture(
        &mut self,
        handle: usize,
        current: usize,
        Caller { thread, .. }: Caller,
    ) -> Result<Option<usize>, Code> {
        let stream = key(handle, current);
        self.stream(handle, current)?;
        let Some(Place { id, before }) = self.place(stream).cloned() else {
            return Err(Code::IllegalState);
        };
        let Some(&Capture {
            origin,
            thread: began,
            mode,
            ..
        }) = self.captures.get(&id)
        else {
            return Err(Code::IllegalState);
        };
        if origin != stream {
            return Err(self.invalidated(&[id], Code::CaptureUnmatched));
        }
        if mode != Mode::Relaxed && began != thread {
            return Err(self.invalidated(&[id], Code::CaptureWrongThread));
        }
        let Some(capture) = self.leave(id) else {
            return Err(Code::IllegalState);
        };
        let mut work = capture.work.iter();
        let is_joined =
            work.all(|(stream, work)| before.get(stream).is_some_and(|before| before >= work));
        let failure = match (capture.is_valid, is_joined) {
            (true, true) => return Ok(capture.graph),
            (true, false) => Code::CaptureUnjoined,
            (false, _) => Code::CaptureInvalidated,
        };
        self.fail(&capture);
        Err(failure)
    }

    fn fail(&mut self, capture: &Capture) {
        self.failed.extend(capture.graph.filter(|_| capture.is_new));
    }

    /// Takes all streams out of a capture.
    fn leave(&mut self, id: u64) -> Option<Capture> {
        let capture = self.captures.remove(&id);
        for stream in self
            .streams
            .values_mut()
            .filter(|stream| stream.capture.as_ref().is_some_and(|place| place.id == id))
        {
            stream.capture = None;
        }
        ACTIVE.store(self.captures.len(), Ordering::Relaxed);
        capture
    }

    /// Ends the capture that began in a destroyed stream, so that it forbids no further calls.
    pub(super) fn drop_capture(&mut self, stream: usize) {
        let begun = self
            .captures
            .iter()
            .find(|(_, capture)| capture.origin == stream)
            .map(|(id, _)| *id);
        if let Some(capture) = begun.and_then(|id| self.leave(id)) {
            self.fail(&capture);
        }
    }

    /// The status of a stream. The manual's answer for the legacy stream invalidates nothing.
    pub(crate) fn capture_status(&mut self, handle: usize, current: usize) -> Result<Status, Code> {
        self.stream(handle, current)?;
        if Self::is_legacy(handle)
            && !self
                .captures_on(current, |flags| flags & NON_BLOCKING == 0)
                .is_empty()
        {
            return Err(Code::CaptureImplicit);
        }
        Ok(
            match self.place(key(handle, current)).map(|place| place.id) {
                None => Status::None,
                Some(id) if self.is_valid(id) => Status::Active(id),
                Some(id) => Status::Invalidated(id),
            },
        )
    }
}
