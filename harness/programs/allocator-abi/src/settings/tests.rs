use super::*;

#[test]
fn each_allocator_reads_its_own_settings() {
    let Ok(Settings::Bfc(bfc)) = Kind::Bfc.parse("allow_growth:False, memory_limit_mb:512") else {
        panic!("valid settings")
    };
    assert_eq!(
        bfc,
        BfcConfig {
            allow_growth: false,
            memory_limit: Some(Bytes::mib(512)),
            garbage_collection: true
        }
    );
    let Ok(Settings::RmmPool(rmm)) =
        Kind::RmmPool.parse("initial_pool_size_mb:64,maximum_pool_size_mb:128,")
    else {
        panic!("valid settings")
    };
    assert_eq!(
        rmm,
        RmmPoolConfig {
            initial_pool_size: Some(Bytes::mib(64)),
            maximum_pool_size: Some(Bytes::mib(128))
        }
    );
    let Ok(Settings::Caching(config)) = Kind::Caching.parse("max_split_size_mb:64") else {
        panic!("valid settings")
    };
    assert_eq!(config.to_string(), "max_split_size_mb:64");
}

#[test]
fn an_unknown_setting_is_refused_with_a_list_of_all() {
    let refusal = |kind: Kind, text: &str| kind.parse(text).expect_err(text).to_string();
    assert_eq!(
        refusal(Kind::Bfc, "allow_growth:true"),
        "HARNESS_BFC_CONF: unknown setting `allow_growth:true`: write `allow_growth:True` or \
         `False`, `garbage_collection:True` or `False`, \
             `memory_limit_mb:N`, separated by commas"
    );
    assert!(
        refusal(Kind::RmmPool, "initial_pool_size:1GiB")
            .starts_with("HARNESS_RMM_POOL_CONF: unknown setting `initial_pool_size:1GiB`")
    );
    assert!(refusal(Kind::Caching, "max_split:1").starts_with("HARNESS_ALLOCATOR_CONF: "));
}
