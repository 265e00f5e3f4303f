//! The opcodes of pickles: <https://github.com/python/cpython/blob/v3.13.0/Lib/pickletools.py>.

macro_rules! opcodes {
    ($($name:ident $code:literal)*) => {
        $(pub(in super::super) const $name: u8 = $code;)*
    };
}

opcodes! {
    PROTO 0x80 FRAME 0x95 STOP b'.'
    MARK b'(' POP b'0' POP_MARK b'1' DUP b'2'
    NONE b'N' NEWTRUE 0x88 NEWFALSE 0x89 BININT b'J' BININT1 b'K' BININT2 b'M' LONG1 0x8a LONG4 0x8b
    BINFLOAT b'G'
    BINSTRING b'T' SHORT_BINSTRING b'U' BINUNICODE b'X' SHORT_BINUNICODE 0x8c BINUNICODE8 0x8d
    BINBYTES b'B' SHORT_BINBYTES b'C' BINBYTES8 0x8e BYTEARRAY8 0x96
    EMPTY_LIST b']' APPEND b'a' APPENDS b'e' EMPTY_TUPLE b')' TUPLE b't' TUPLE1 0x85 TUPLE2 0x86
    TUPLE3 0x87
    EMPTY_DICT b'}' SETITEM b's' SETITEMS b'u' EMPTY_SET 0x8f ADDITEMS 0x90 FROZENSET 0x91
    BINGET b'h' LONG_BINGET b'j' BINPUT b'q' LONG_BINPUT b'r' MEMOIZE 0x94
    GLOBAL b'c' INST b'i'
}

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
