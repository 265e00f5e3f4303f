use std::mem::MaybeUninit;

use super::*;

#[test]
fn a_plan_has_the_configuration_that_it_was_made_of() {
    let object = |kind: i32| {
        Arc::new(Object {
            kind,
            state: Mutex::default(),
        })
    };
    let (config, plan, copy) = (
        object(kind::ENGINE_CONFIG),
        object(kind::PLAN),
        object(kind::ENGINE_CONFIG),
    );
    config.state().plan = Some((object(15), 2));
    plan.state()
        .objects
        .insert(attribute::PLAN_CONFIG, vec![config]);
    let mut place = [Arc::as_ptr(&copy)];
    let mut count = MaybeUninit::new(-7);
    // SAFETY: the objects live until the end, and the array has one object.
    let status = unsafe {
        cudnnBackendGetAttribute(
            Arc::as_ptr(&plan),
            attribute::PLAN_CONFIG,
            OBJECTS,
            1,
            Some(&mut count),
            place.as_mut_ptr().cast(),
        )
    };
    // SAFETY: the count was initialized.
    assert_eq!((status, unsafe { count.assume_init() }), (0, 1));
    assert_eq!(copy.state().plan.as_ref().map(|(_, plan)| *plan), Some(2));
}
