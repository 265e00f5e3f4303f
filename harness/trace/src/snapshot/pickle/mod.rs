//! A reader of pickles that executes data opcodes only, made for snapshots: [`read`] runs the opcodes of protocols 1 to 5, as Python and PyTorch's C++
//! pickler write them, and leaves [`Objects`]. What would call code is refused. <https://docs.python.org/3/library/pickletools.html> has the opcodes.

mod input;
mod machine;
mod objects;
pub(super) mod opcode;
mod texts;

pub(super) use self::machine::read;
pub(super) use self::objects::{Item, Object, Objects, Wrong};
pub(super) use self::texts::TextId;
