use super::*;

const START: u64 = 1 << 40;

fn range(start: u64, mib: u64) -> MemoryRange {
    MemoryRange::new(DevicePtr(START + (start << 20)), Bytes::mib(mib))
}

fn starts(pages: Option<Vec<(DevicePtr, Bytes, char)>>) -> Option<String> {
    pages.map(|pages| pages.into_iter().map(|page| page.2).collect())
}

#[test]
fn pages_map_once_inside_their_reservation_and_unmap_whole() {
    let mut table = PageTable::new(Bytes::mib(2));
    table.reserve(DevicePtr(START), Bytes::mib(40));
    assert!(
        table.check_mappable(range(0, 42), Bytes::mib(2)).is_err(),
        "beyond its end"
    );
    assert!(
        table.check_mappable(range(1, 2), Bytes::mib(2)).is_err(),
        "not a multiple of the granularity"
    );
    assert!(
        table.check_mappable(range(0, 6), Bytes::mib(4)).is_err(),
        "not whole pages"
    );
    assert!(
        table.check_mappable(range(0, 6), Bytes::ZERO).is_err(),
        "pages of nothing"
    );
    assert!(
        table
            .check_mappable(
                MemoryRange::new(DevicePtr(START), Bytes(u64::MAX)),
                Bytes(u64::MAX)
            )
            .is_err()
    );
    assert_eq!(table.check_mappable(range(0, 20), Bytes::mib(20)), Ok(()));
    table.map(DevicePtr(START), Bytes::mib(20), 'a');
    assert!(
        table.check_mappable(range(10, 2), Bytes::mib(2)).is_err(),
        "mapped already"
    );
    table.map(range(20, 2).start, Bytes::mib(2), 'b');
    table.map(range(22, 2).start, Bytes::mib(2), 'c');
    assert!(
        table.is_mapped(range(0, 24))
            && table.is_mapped(range(7, 14))
            && !table.is_mapped(range(0, 26))
    );
    assert!(!table.is_mapped(MemoryRange::new(DevicePtr(START), Bytes(u64::MAX))));
    assert_eq!(starts(table.whole_pages(range(0, 10))), None, "half a page");
    assert_eq!(
        starts(table.whole_pages(range(10, 14))),
        None,
        "starts in the middle of a page"
    );
    assert_eq!(
        starts(table.whole_pages(range(0, 22))).as_deref(),
        Some("ab")
    );
    assert_eq!(
        table.check_unreservable(DevicePtr(START)),
        None,
        "pages are mapped"
    );
    for page in ['a', 'b', 'c'] {
        let found = table
            .pages()
            .find(|found| found.2 == page)
            .expect("it is mapped");
        table.unmap(found.0);
    }
    assert_eq!(
        table.check_unreservable(range(2, 2).start),
        None,
        "no reservation starts there"
    );
    assert_eq!(
        table.check_unreservable(DevicePtr(START)),
        Some(Bytes::mib(40))
    );
    assert!(table.is_reserved(range(39, 1).start) && !table.is_reserved(range(40, 1).start));
    table.unreserve(DevicePtr(START));
    assert_eq!(table.reservations().len(), 0);
}
