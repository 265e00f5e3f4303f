//! [`Loaded`]: the modules that a program loads if kernels are no-ops, their functions and
//! variables. Libraries are modules, and their kernels are functions.

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;

use crate::code::Code;
use crate::image::{Image, Kernel};
use crate::objects::{delete_object, new_object};

/// Modules and functions by handle.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    modules: BTreeMap<usize, Module>,
    functions: BTreeMap<usize, Function>,
}

#[derive(Debug)]
struct Module {
    image: Image,
    /// The handles of the functions that the program has asked for.
    functions: BTreeMap<String, usize>,
    /// The ranges of the variables that the program has asked for.
    variables: BTreeMap<String, Range>,
}

/// Start and size of reserved addresses.
type Range = (u64, Bytes);

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) kernel: Kernel,
    /// Offset and size of its parameters; `None` if they are unknown.
    pub(crate) parameters: Option<Vec<(usize, usize)>>,
    /// The most dynamic shared memory of a block, if the program has set it.
    pub(crate) dynamic: Option<u32>,
}

/// An object of this crate: its handle is an address.
fn handle() -> usize {
    new_object().expose_provenance()
}

impl Loaded {
    pub(crate) fn add(&mut self, image: Image) -> usize {
        let handle = handle();
        self.modules.insert(
            handle,
            Module {
                image,
                functions: BTreeMap::new(),
                variables: BTreeMap::new(),
            },
        );
        handle
    }

    /// Removes a module. Returns the ranges of its variables.
    pub(crate) fn remove(&mut self, handle: usize) -> Result<Vec<Range>, Code> {
        let module = self.modules.remove(&handle).ok_or(Code::InvalidHandle)?;
        for object in module.functions.into_values().chain([handle]) {
            self.functions.remove(&object);
            // SAFETY: `handle` created the object, and this was the only place that had it.
            unsafe { delete_object(std::ptr::with_exposed_provenance_mut(object)) };
        }
        Ok(module.variables.into_values().collect())
    }

    /// The function of this name.
    pub(crate) fn function(&mut self, module: usize, name: &str) -> Result<usize, Code> {
        let module = self.modules.get_mut(&module).ok_or(Code::InvalidHandle)?;
        if let Some(known) = module.functions.get(name) {
            return Ok(*known);
        }
        let kernel = module.image.kernel(name).ok_or(Code::NotFound)?;
        let handle = handle();
        module.functions.insert(name.to_owned(), handle);
        let function = Function {
            kernel,
            parameters: module.image.parameters.get(name).cloned(),
            dynamic: None,
        };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    /// A function with metadata or a model of them.
    pub(crate) fn get_mut(&mut self, function: usize) -> Option<&mut Function> {
        self.functions.get_mut(&function)
    }

    /// What the kernel of a function needs. Other handles, such as those of the runtime, have the
    /// model.
    pub(crate) fn kernel(&self, function: usize) -> Kernel {
        self.functions
            .get(&function)
            .map_or_else(Kernel::default, |function| function.kernel)
    }

    /// The size of a variable, and its range if the program has asked for it.
    pub(crate) fn variable(&self, module: usize, name: &str) -> Result<(u64, Option<Range>), Code> {
        let module = self.modules.get(&module).ok_or(Code::InvalidHandle)?;
        let size = module.image.variables.get(name).ok_or(Code::NotFound)?;
        Ok((*size, module.variables.get(name).copied()))
    }

    /// Notes the range of a variable.
    pub(crate) fn note(&mut self, module: usize, name: &str, range: Range) {
        if let Some(module) = self.modules.get_mut(&module) {
            module.variables.insert(name.to_owned(), range);
        }
    }

    /// Forgets the ranges whose starts `is_kept` does not accept.
    pub(crate) fn forget_variables(&mut self, is_kept: impl Fn(u64) -> bool) {
        for module in self.modules.values_mut() {
            module.variables.retain(|_, (start, _)| is_kept(*start));
        }
    }
}
