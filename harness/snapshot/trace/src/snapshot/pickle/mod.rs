//! Reads pickles of snapshots. [`read`] executes the data opcodes of protocols 1 to 5, as Python
//! and PyTorch's C++ pickler write them, and returns [`Objects`]. It rejects opcodes that call
//! code. Opcodes: <https://docs.python.org/3/library/pickletools.html>.

mod input;
mod machine;
mod objects;
pub(super) mod opcode;
mod texts;

pub(super) use self::objects::{Fields, Item, Object, Objects, Wrong};
pub(super) use self::{machine::check_format, machine::read, texts::TextId};
