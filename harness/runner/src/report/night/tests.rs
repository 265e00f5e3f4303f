#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn the_same_records_give_the_same_bytes() {
    assert_eq!(render(&examples::eventful(), &examples::before()), render(&examples::eventful(), &examples::before()));
}
