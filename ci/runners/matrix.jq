# A matrix of `harness exec` with each test of a list of CTest or nextest.
def ctest: .tests[] | ([.properties[] | {(.name): .value}] | add) as $is
  | {(.name): (["env", "-C", $is.WORKING_DIRECTORY] + ($is.ENVIRONMENT // []) + .command)};
def nextest: ."rust-suites"[] as $suite | $suite.testcases | to_entries[]
  | select(.value."filter-match".status == "matches")
  | {"binary_id(\($suite."binary-id")) & test(=\(.key))":
      ["env", "-C", $suite.cwd, $suite."binary-path", .key, "--exact"]};
{programs: [if .tests then ctest else nextest end] | add}
