//! The backend of cuDNN: objects with attributes. The frontend builds plans for convolutions and
//! attention from them.
//!
//! With cuDNN's own [`library`], all calls go there. Otherwise every graph of operations has three
//! plans, with the workspaces W, W/2 and zero. Real workspaces depend on the algorithm; W is a
//! model, see [`harness_gpu_settings::workspaces`].

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::{collections::BTreeMap, ptr, slice};

use harness_allocator::sync::lock;
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use super::answer;
use super::library::{Descriptor, library};
use crate::calls::append;
use crate::world::{forget_output, machine};
use harness_gpu_settings::workspaces::{Convolution, Direction, Element, Workspace, round_up};

/// Numbers of `cudnnBackendDescriptorType_t` (cudnn_graph.h of cuDNN 9).
mod kind {
    pub(super) const ENGINE: i32 = 2;
    pub(super) const ENGINE_CONFIG: i32 = 3;
    pub(super) const HEURISTIC: i32 = 4;
    pub(super) const PLAN: i32 = 5;
    pub(super) const FORWARD: i32 = 10;
    pub(super) const FILTER_GRADIENT: i32 = 11;
    pub(super) const DATA_GRADIENT: i32 = 12;
    pub(super) const MATRIX_PRODUCT: i32 = 19;
    pub(super) const REDUCTION: i32 = 22;
}

/// Numbers of `cudnnBackendAttributeName_t`.
mod attribute {
    /// Stride, padding in front, dilation.
    pub(super) const GEOMETRY: [i32; 3] = [103, 105, 102];
    pub(super) const HEURISTIC_GRAPH: i32 = 201;
    pub(super) const HEURISTIC_RESULTS: i32 = 202;
    pub(super) const CONFIG_ENGINE: i32 = 300;
    pub(super) const CONFIG_WORKSPACE: i32 = 303;
    pub(super) const CONFIG_SHARED_MEMORY: i32 = 304;
    pub(super) const PLAN_CONFIG: i32 = 401;
    pub(super) const PLAN_WORKSPACE: i32 = 402;
    pub(super) const GRAPH_OPERATIONS: i32 = 801;
    pub(super) const TENSOR_TYPE: i32 = 901;
    pub(super) const TENSOR_SIZES: i32 = 902;
    pub(super) const TENSOR_STRIDES: i32 = 903;
    pub(super) const ENGINE_INDEX: i32 = 1301;
    pub(super) const REDUCTION_INPUT: i32 = 1610;
    pub(super) const REDUCTION_OUTPUT: i32 = 1611;
}

/// The attribute type whose elements are objects.
const OBJECTS: i32 = 15;
/// The type of attributes that are addresses of operands.
const POINTERS: i32 = 6;
/// Plans per graph.
const PLANS: usize = 3;

type Handle = Arc<Object>;

struct Object {
    kind: i32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The bytes of attributes, by number.
    values: BTreeMap<i32, Vec<u8>>,
    /// Attributes that are objects, by number.
    objects: BTreeMap<i32, Vec<Handle>>,
    /// The graph for which a heuristic or a configuration created the object, and the index of the
    /// plan.
    plan: Option<(Handle, usize)>,
}

impl Object {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn objects(&self, number: i32) -> Vec<Handle> {
        self.state()
            .objects
            .get(&number)
            .cloned()
            .unwrap_or_default()
    }

    fn numbers(&self, number: i32) -> Vec<i64> {
        let state = self.state();
        let bytes = state.values.get(&number).map_or(&[][..], Vec::as_slice);
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|word| i64::from_le_bytes(*word))
            .collect()
    }

    fn number(&self, number: i32) -> Option<i32> {
        self.state()
            .values
            .get(&number)
            .and_then(|bytes| Some(i32::from_le_bytes(*bytes.first_chunk()?)))
    }

    fn element(&self) -> Element {
        // Numbers of `cudnnDataType_t`.
        match self.number(attribute::TENSOR_TYPE) {
            Some(1 | 11) => Element::Double,
            Some(2 | 18) => Element::Half,
            Some(9) => Element::Bfloat16,
            Some(3 | 5 | 12..=14) => Element::Byte,
            _ => Element::Float,
        }
    }

    fn is_channels_last(&self) -> bool {
        let (sizes, strides) = (
            self.numbers(attribute::TENSOR_SIZES),
            self.numbers(attribute::TENSOR_STRIDES),
        );
        strides.get(1) == Some(&1) && sizes.get(1).is_some_and(|channels| *channels > 1)
    }

    /// The convolutions of this graph with their workspaces.
    fn workspaces(&self) -> Vec<(Convolution, Workspace)> {
        let settings = &machine().settings;
        let operations = self.objects(attribute::GRAPH_OPERATIONS);
        let convolutions = operations
            .iter()
            .filter_map(|operation| operation.convolution());
        convolutions
            .map(|convolution| {
                let workspace = settings
                    .cudnn_workspace
                    .of(&convolution, settings.gpu.capability);
                (convolution, workspace)
            })
            .collect()
    }

    fn workspace(&self, plan: usize) -> i64 {
        let whole = self
            .workspaces()
            .iter()
            .map(|(_, workspace)| workspace.bytes)
            .sum::<i64>()
            + self.attention_workspace();
        match plan {
            0 => whole,
            1 => round_up(whole / 2),
            _ => 0,
        }
    }

    /// What attention needs beyond what the frontend adds: 256 bytes, and the gradients of keys and
    /// values for each head of the queries if heads share keys and values. An H200 with torch
    /// 2.11.0+cu130 needs exactly this in 12 shapes.
    fn attention_workspace(&self) -> i64 {
        let operations = self.objects(attribute::GRAPH_OPERATIONS);
        if operations
            .iter()
            .all(|operation| operation.kind != kind::MATRIX_PRODUCT)
        {
            return 0;
        }
        let reductions = operations
            .iter()
            .filter(|operation| operation.kind == kind::REDUCTION);
        let shared = reductions.filter_map(|reduction| {
            let [input, output] = [attribute::REDUCTION_INPUT, attribute::REDUCTION_OUTPUT]
                .map(|number| reduction.objects(number));
            let (input, output) = (
                input.first()?,
                output.first()?.numbers(attribute::TENSOR_SIZES),
            );
            let sizes = input.numbers(attribute::TENSOR_SIZES);
            (sizes.get(1) != output.get(1))
                .then(|| sizes.iter().product::<i64>() * input.element().size())
        });
        256 + shared.sum::<i64>()
    }

    fn note_estimates(&self) {
        let machine = machine();
        for (convolution, Workspace { bytes, least, most }) in self.workspaces() {
            if least < most {
                machine
                    .counters
                    .note_workspace(bytes.abs_diff(least), most.abs_diff(bytes));
                if let Some(path) = &machine.unmeasured_file {
                    append(
                        path,
                        &convolution.row(machine.settings.gpu.capability, bytes),
                    );
                }
            }
        }
    }

    /// The convolution, if the operation is one. The attributes are descriptor, filter, input and
    /// output.
    fn convolution(&self) -> Option<Convolution> {
        let (direction, [descriptor, filter, input, output]) = match self.kind {
            kind::FORWARD => (Direction::Forward, [702, 703, 704, 705]),
            kind::FILTER_GRADIENT => (Direction::FilterGradient, [714, 715, 716, 717]),
            kind::DATA_GRADIENT => (Direction::DataGradient, [708, 709, 710, 711]),
            _ => return None,
        };
        let tensor = |number: i32| self.objects(number).into_iter().next();
        let (filter, input, output) = (tensor(filter)?, tensor(input)?, tensor(output)?);
        let sizes = |tensor: &Object| tensor.numbers(attribute::TENSOR_SIZES);
        Some(Convolution {
            direction,
            input: sizes(&input),
            filter: sizes(&filter),
            output: sizes(&output),
            element: input.element(),
            channels_last: input.is_channels_last(),
            geometry: attribute::GEOMETRY.map(|number| {
                tensor(descriptor).map_or_else(Vec::new, |descriptor| descriptor.numbers(number))
            }),
        })
    }
}

/// Bytes per element, by `cudnnBackendAttributeType_t`.
const fn element_size(kind: i32) -> usize {
    match kind {
        0 | 3 | 5 | 6 | OBJECTS | 26 => 8,
        2 | 24 => 1,
        _ => 4,
    }
}

/// Adds a reference to an object of a program.
///
/// # Safety
/// [`cudnnBackendCreateDescriptor`] returned the pointer, and the object is not destroyed.
unsafe fn handle(pointer: *const Object) -> Handle {
    // SAFETY: as the caller promises, the program's own reference still exists.
    unsafe {
        Arc::increment_strong_count(pointer);
        Arc::from_raw(pointer)
    }
}

export! {
    cudnnBackendCreateDescriptor(kind: c_int, descriptor: Out<'_, *const Object>) = {
        if let Some(library) = library() {
            return descriptor.map_or_else(
                || answer(false),
                |place| library.create(kind, place.as_mut_ptr().cast()),
            );
        }
        answer(write(descriptor, Arc::into_raw(Arc::new(Object { kind, state: Mutex::default() }))))
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendFinalize(descriptor: Descriptor) -> c_int {
    // SAFETY: the program passes a descriptor of the library.
    library().map_or(0, |library| unsafe { (library.finalize)(descriptor) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *const Object) -> c_int {
    if let Some(library) = library() {
        // SAFETY: the program passes a descriptor of the library.
        return unsafe { (library.destroy)(descriptor.cast_mut().cast()) };
    }
    if !descriptor.is_null() {
        // SAFETY: the program releases its reference once; other objects keep theirs.
        drop(unsafe { Arc::from_raw(descriptor) });
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendSetAttribute(
    descriptor: *const Object,
    number: c_int,
    kind: c_int,
    count: i64,
    elements: *const c_void,
) -> c_int {
    if kind == POINTERS {
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the program passes `count` pointers.
            forget_output(unsafe { elements.cast::<u64>().add(index).read_unaligned() });
        }
    }
    if let Some(library) = library() {
        // SAFETY: the program passes a descriptor of the library and `count` elements.
        return unsafe { library.set(descriptor.cast_mut().cast(), number, kind, count, elements) };
    }
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the program passes an object and `count` elements of the type. Elements of type 15
    // are objects.
    unsafe {
        let mut state = (*descriptor).state();
        if kind == OBJECTS {
            let objects = (0..count)
                .map(|index| *elements.cast::<*const Object>().add(index))
                .filter(|object| !object.is_null());
            state
                .objects
                .insert(number, objects.map(|object| handle(object)).collect());
        } else {
            let bytes = if count == 0 {
                Vec::new()
            } else {
                slice::from_raw_parts(elements.cast::<u8>(), count * element_size(kind)).to_vec()
            };
            state.values.insert(number, bytes);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendGetAttribute(
    descriptor: *const Object,
    number: c_int,
    kind: c_int,
    requested: i64,
    count: Out<'_, i64>,
    elements: *mut c_void,
) -> c_int {
    if let Some(library) = library() {
        let count = count.map_or(ptr::null_mut(), |count| count.as_mut_ptr());
        // SAFETY: the program passes a descriptor of the library, and an array of `requested`
        // elements or null. A workspace is one number.
        return unsafe {
            let status = (library.get)(
                descriptor.cast_mut().cast(),
                number,
                kind,
                requested,
                count,
                elements,
            );
            if status == 0
                && number == attribute::PLAN_WORKSPACE
                && !elements.is_null()
                && requested == 1
            {
                library.note_estimate(
                    descriptor.cast_mut().cast(),
                    elements.cast::<u64>().read_unaligned(),
                );
            }
            status
        };
    }
    // SAFETY: the program passes an object, and an array of `requested` elements or null.
    let (object, into) = unsafe {
        let into = if elements.is_null() {
            &mut []
        } else {
            slice::from_raw_parts_mut(
                elements.cast::<u8>(),
                element_size(kind) * usize::try_from(requested).unwrap_or(0),
            )
        };
        (&*descriptor, into)
    };
    let found = if kind == OBJECTS {
        // SAFETY: elements of this type are objects of the program.
        unsafe { get_objects(object, number, into) }
    } else {
        get_numbers(object, number, into)
    };
    // The place for the count may be null.
    write(count, found);
    0
}

/// Fills objects of the program with the parts of an object. Returns the number of parts.
///
/// # Safety
/// `into` holds pointers to objects of the program.
unsafe fn get_objects(object: &Object, number: i32, into: &[u8]) -> i64 {
    let targets: Vec<Handle> = into
        .as_chunks()
        .0
        .iter()
        .map(|word| usize::from_ne_bytes(*word))
        .filter(|address| *address != 0)
        .map(|address| {
            // SAFETY: as the caller promises.
            unsafe { handle(ptr::with_exposed_provenance(address)) }
        })
        .collect();
    match (object.kind, number) {
        (kind::HEURISTIC, attribute::HEURISTIC_RESULTS) => {
            let graph = object
                .objects(attribute::HEURISTIC_GRAPH)
                .into_iter()
                .next();
            for (plan, config) in targets.iter().enumerate() {
                config.state().plan = graph.clone().map(|graph| (graph, plan));
            }
            if into.is_empty() {
                PLANS as i64
            } else {
                targets.len().min(PLANS) as i64
            }
        }
        (kind::PLAN, attribute::PLAN_CONFIG) => {
            let plan = object
                .objects(attribute::PLAN_CONFIG)
                .first()
                .and_then(|config| of_config(config));
            targets
                .iter()
                .for_each(|config| config.state().plan = plan.clone());
            1
        }
        (kind::ENGINE_CONFIG, attribute::CONFIG_ENGINE) => {
            let plan = of_config(object);
            targets
                .iter()
                .for_each(|engine| engine.state().plan = plan.clone());
            1
        }
        _ => 0,
    }
}

/// The graph and the plan of a configuration. If a program created it for an engine, they are the
/// engine's.
fn of_config(config: &Object) -> Option<(Handle, usize)> {
    let own = config.state().plan.clone();
    own.or_else(|| {
        config
            .objects(attribute::CONFIG_ENGINE)
            .first()?
            .state()
            .plan
            .clone()
    })
}

/// Writes the numbers of an attribute. Returns their count.
fn get_numbers(object: &Object, number: i32, into: &mut [u8]) -> i64 {
    let mut write = |bytes: &[u8]| {
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        1
    };
    match (object.kind, number) {
        (kind::PLAN, attribute::PLAN_WORKSPACE) => {
            let config = object.objects(attribute::PLAN_CONFIG).into_iter().next();
            let plan = config.as_deref().and_then(of_config);
            if let Some((graph, 0)) = &plan {
                graph.note_estimates();
            }
            write(
                &plan
                    .map_or(0, |(graph, plan)| graph.workspace(plan))
                    .to_le_bytes(),
            )
        }
        (kind::ENGINE_CONFIG, attribute::CONFIG_WORKSPACE) => write(
            &of_config(object)
                .map_or(0, |(graph, plan)| graph.workspace(plan))
                .to_le_bytes(),
        ),
        // The frontend compares it with a limit, even if it is not written.
        (kind::ENGINE_CONFIG, attribute::CONFIG_SHARED_MEMORY) => write(&0_i32.to_le_bytes()),
        (kind::ENGINE, attribute::ENGINE_INDEX) => write(&0_i64.to_le_bytes()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
