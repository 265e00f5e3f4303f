use super::*;

const FLOATS: ArrayDescriptor = ArrayDescriptor {
    width: 1024,
    height: 512,
    depth: 0,
    format: 0x20,
    channels: 4,
    flags: 0,
};

#[test]
fn the_size_of_an_array_is_the_size_of_its_elements() {
    let flat = FlatDescriptor {
        width: 100,
        height: 0,
        format: 0x02,
        channels: 2,
    };
    assert_eq!(ArrayDescriptor::from(flat).bytes(1), Some(Bytes(400)));
    assert_eq!(FLOATS.bytes(1), Some(Bytes::mib(8)));
    assert_eq!(
        ArrayDescriptor { depth: 6, ..FLOATS }.bytes(1),
        Some(Bytes::mib(48))
    );
}

#[test]
fn each_mipmap_level_halves_the_extent_and_keeps_all_layers() {
    let cube = ArrayDescriptor {
        width: 4,
        height: 4,
        depth: 4,
        format: 0x01,
        channels: 1,
        flags: 0,
    };
    assert_eq!(cube.bytes(3), Some(Bytes(64 + 8 + 1)));
    assert_eq!(
        ArrayDescriptor {
            flags: LAYERED,
            ..cube
        }
        .bytes(3),
        Some(Bytes(64 + 16 + 4))
    );
}

#[test]
fn unknown_and_sparse_arrays_have_no_size() {
    assert_eq!(
        ArrayDescriptor {
            format: 0x91,
            ..FLOATS
        }
        .bytes(1),
        None
    );
    assert_eq!(
        ArrayDescriptor {
            flags: SPARSE,
            ..FLOATS
        }
        .bytes(1),
        None
    );
    assert_eq!(
        ArrayDescriptor {
            width: usize::MAX,
            ..FLOATS
        }
        .bytes(1),
        None
    );
}
