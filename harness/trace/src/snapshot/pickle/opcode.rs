//! The opcodes of pickles: <https://github.com/python/cpython/blob/v3.13.0/Lib/pickletools.py>.

pub(in super::super) const PROTO: u8 = 0x80;
pub(in super::super) const FRAME: u8 = 0x95;
pub(in super::super) const STOP: u8 = b'.';

pub(in super::super) const MARK: u8 = b'(';
pub(in super::super) const POP: u8 = b'0';
pub(in super::super) const POP_MARK: u8 = b'1';
pub(in super::super) const DUP: u8 = b'2';

pub(in super::super) const NONE: u8 = b'N';
pub(in super::super) const NEWTRUE: u8 = 0x88;
pub(in super::super) const NEWFALSE: u8 = 0x89;
pub(in super::super) const BININT: u8 = b'J';
pub(in super::super) const BININT1: u8 = b'K';
pub(in super::super) const BININT2: u8 = b'M';
pub(in super::super) const LONG1: u8 = 0x8a;
pub(in super::super) const LONG4: u8 = 0x8b;
pub(in super::super) const BINFLOAT: u8 = b'G';

pub(in super::super) const BINSTRING: u8 = b'T';
pub(in super::super) const SHORT_BINSTRING: u8 = b'U';
pub(in super::super) const BINUNICODE: u8 = b'X';
pub(in super::super) const SHORT_BINUNICODE: u8 = 0x8c;
pub(in super::super) const BINUNICODE8: u8 = 0x8d;
pub(in super::super) const BINBYTES: u8 = b'B';
pub(in super::super) const SHORT_BINBYTES: u8 = b'C';
pub(in super::super) const BINBYTES8: u8 = 0x8e;
pub(in super::super) const BYTEARRAY8: u8 = 0x96;

pub(in super::super) const EMPTY_LIST: u8 = b']';
pub(in super::super) const APPEND: u8 = b'a';
pub(in super::super) const APPENDS: u8 = b'e';
pub(in super::super) const EMPTY_TUPLE: u8 = b')';
pub(in super::super) const TUPLE: u8 = b't';
pub(in super::super) const TUPLE1: u8 = 0x85;
pub(in super::super) const TUPLE2: u8 = 0x86;
pub(in super::super) const TUPLE3: u8 = 0x87;
pub(in super::super) const EMPTY_DICT: u8 = b'}';
pub(in super::super) const SETITEM: u8 = b's';
pub(in super::super) const SETITEMS: u8 = b'u';
pub(in super::super) const EMPTY_SET: u8 = 0x8f;
pub(in super::super) const ADDITEMS: u8 = 0x90;
pub(in super::super) const FROZENSET: u8 = 0x91;

pub(in super::super) const BINGET: u8 = b'h';
pub(in super::super) const LONG_BINGET: u8 = b'j';
pub(in super::super) const BINPUT: u8 = b'q';
pub(in super::super) const LONG_BINPUT: u8 = b'r';
pub(in super::super) const MEMOIZE: u8 = 0x94;

pub(in super::super) const GLOBAL: u8 = b'c';
pub(in super::super) const INST: u8 = b'i';

/// The name of an opcode that calls code or requests an external object.
pub(super) fn calls_code(opcode: u8) -> Option<&'static str> {
    Some(match opcode {
        GLOBAL => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        INST => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return None,
    })
}

/// Returns true if it is a text opcode of protocol 0 or 1.
pub(super) fn is_text(opcode: u8) -> bool {
    b"FILSVgpdl".contains(&opcode)
}
