use super::*;

fn accounts() -> Accounts {
    Accounts::new(Some(Bytes::mib(8)))
}

#[test]
fn whole_pages_are_charged_and_nothing_above_the_limit() {
    let mut accounts = accounts();
    let charges = [Bytes(1), Bytes::mib(3)].map(|size| {
        accounts
            .charge(Bytes::ZERO, Call::Malloc, size)
            .expect("charge within the limit")
    });
    assert_eq!(accounts.used(), Bytes::mib(6));
    assert_eq!(
        accounts.charge(Bytes::ZERO, Call::Malloc, Bytes::mib(3)),
        None
    );
    assert_eq!(
        accounts.charge(Bytes::ZERO, Call::Malloc, Bytes(u64::MAX)),
        None
    );
    assert_eq!(
        accounts.used(),
        Bytes::mib(6),
        "a refused request is not charged"
    );
    accounts.discharge(charges[1]);
    assert!(
        accounts
            .charge(Bytes::ZERO, Call::Malloc, Bytes::mib(6))
            .is_some()
    );
}

#[test]
fn allocations_of_pools_share_pages() {
    let mut accounts = accounts();
    for _ in 0..4 {
        assert!(
            accounts
                .charge(Bytes::ZERO, Call::MallocAsync, Bytes::kib(500))
                .is_some()
        );
    }
    assert_eq!(accounts.used(), Bytes::mib(2));
    assert!(
        accounts
            .charge(Bytes::ZERO, Call::MallocAsync, Bytes::kib(500))
            .is_some()
    );
    assert_eq!(accounts.used(), Bytes::mib(4));
}

#[test]
fn the_program_sees_the_limit_but_never_more_than_the_device() {
    let mut accounts = accounts();
    assert!(
        accounts
            .charge(Bytes::ZERO, Call::Malloc, Bytes::mib(2))
            .is_some()
    );
    assert_eq!(
        accounts.visible_memory(Bytes::ZERO, Bytes::gib(70), Bytes::gib(80)),
        (Bytes::mib(6), Bytes::mib(8))
    );
    assert_eq!(
        accounts.visible_memory(Bytes::ZERO, Bytes::mib(1), Bytes::gib(80)),
        (Bytes::mib(1), Bytes::mib(8))
    );
    assert_eq!(
        Accounts::new(None).visible_memory(Bytes::ZERO, Bytes::gib(70), Bytes::gib(80)),
        (Bytes::gib(70), Bytes::gib(80))
    );
}

#[test]
fn memory_of_other_processes_counts_against_the_limit() {
    let mut accounts = accounts();
    assert_eq!(
        accounts.charge(Bytes::mib(6), Call::Malloc, Bytes::mib(3)),
        None
    );
    assert!(
        accounts
            .charge(Bytes::mib(6), Call::Malloc, Bytes::mib(2))
            .is_some()
    );
    assert_eq!(
        accounts.charge(Bytes(u64::MAX), Call::Malloc, Bytes::mib(1)),
        None
    );
    assert_eq!(
        accounts.visible_memory(Bytes::mib(4), Bytes::gib(70), Bytes::gib(80)),
        (Bytes::mib(2), Bytes::mib(8))
    );
    assert_eq!(
        accounts.visible_memory(Bytes::mib(7), Bytes::gib(70), Bytes::gib(80)),
        (Bytes::ZERO, Bytes::mib(8))
    );
}

#[test]
fn a_failed_free_restores_the_charge() {
    let mut accounts = accounts();
    let charge = accounts
        .charge(Bytes::ZERO, Call::Malloc, Bytes::mib(2))
        .expect("charge within the limit");
    accounts.place(0x1000, charge);
    assert_eq!(
        (accounts.take(0x1000), accounts.used()),
        (Some(charge), Bytes::ZERO)
    );
    accounts.put_back(0x1000, charge);
    assert_eq!(
        (
            accounts.used(),
            accounts.take(0x2000),
            accounts.take(0x1000)
        ),
        (Bytes::mib(2), None, Some(charge))
    );
}

#[test]
fn a_size_that_the_driver_chose_corrects_the_charge() {
    let mut accounts = accounts();
    let charge = accounts
        .charge(Bytes::ZERO, Call::Malloc, Bytes::mib(2))
        .expect("charge within the limit");
    accounts.place(0x1000, charge);
    accounts.correct(0x1000, Bytes::mib(5));
    assert_eq!(accounts.used(), Bytes::mib(6));
    accounts.correct(0x9000, Bytes::mib(5));
    assert!(accounts.take(0x1000).is_some() && accounts.used() == Bytes::ZERO);
}

#[test]
fn physical_memory_is_freed_with_its_last_handle_and_mapping() {
    let mut accounts = accounts();
    let charge = accounts
        .charge(Bytes::ZERO, Call::Malloc, Bytes::mib(2))
        .expect("charge within the limit");
    accounts.create(7, charge);
    accounts.map(0x20_0000, 7);
    accounts.retain(7);
    assert!(
        !accounts.release(7) && !accounts.release(7),
        "a mapping is left"
    );
    assert_eq!(
        (
            accounts.used(),
            accounts.unmap(0, 0x40_0000),
            accounts.used()
        ),
        (Bytes::mib(2), 1, Bytes::ZERO)
    );
}
