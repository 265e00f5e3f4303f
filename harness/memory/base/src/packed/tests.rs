#![allow(clippy::unwrap_used)]

use super::*;

fn packed(text: &str) -> Vec<u8> {
    pack(text)
}

fn read(bytes: &[u8]) -> io::Result<String> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(bytes)?;
    let mut text = String::new();
    open(file.path())?.read_to_string(&mut text).map(|_| text)
}

#[test]
fn a_file_reads_the_same_whether_it_is_packed_once_in_pieces_or_not_at_all() {
    let pieces = [packed("a 1 512 0\n"), packed("f 1\n")].concat();
    for bytes in [
        b"a 1 512 0\nf 1\n".to_vec(),
        packed("a 1 512 0\nf 1\n"),
        pieces,
    ] {
        assert_eq!(read(&bytes).unwrap(), "a 1 512 0\nf 1\n");
    }
    assert_eq!(
        (read(b"").unwrap(), read(b"d").unwrap()),
        (String::new(), "d".to_owned())
    );
}

#[test]
fn what_unfolds_into_too_much_is_an_error_before_it_fills_memory() {
    let zeros = vec![0; 1 << 20];
    let mut bomb = Vec::new();
    let mut encoder = GzEncoder::new(&mut bomb, Compression::best());
    for _ in 0..=MAX_UNPACKED >> 20 {
        encoder.write_all(&zeros).unwrap();
    }
    encoder.finish().unwrap();
    assert!(bomb.len() < 200 << 10, "{}", bomb.len());
    assert_eq!(read(&bomb).unwrap_err().kind(), ErrorKind::FileTooLarge);
    let mut text = String::new();
    let endless =
        unpack(io::repeat(0), MAX_UNPACKED).and_then(|mut file| file.read_to_string(&mut text));
    assert_eq!(endless.unwrap_err().kind(), ErrorKind::FileTooLarge);
}

#[test]
fn a_packed_file_that_was_cut_off_is_an_error() {
    let whole = packed("a 1 512 0\nf 1\n");
    assert!(read(&whole[..whole.len() - 3]).is_err());
}
