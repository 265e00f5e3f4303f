use super::*;

fn key(command: &[&str]) -> Vec<String> {
    Setups::key(&Planned {
        cell: MatrixCell::default(),
        options: Vec::new(),
        command: command.iter().map(|&word| word.to_owned()).collect(),
    })
}

#[test]
fn runs_share_a_setup_only_if_they_start_the_same_programs() {
    let first = key(&["env", "sh", "train", "8"]);
    assert_eq!(first, key(&["env", "sh", "train", "16"]));
    assert_ne!(first, key(&["env", "cat", "train", "8"]));
    assert_ne!(key(&["sh", "-c", "a 1"]), key(&["sh", "-c", "b 1"]));
}
