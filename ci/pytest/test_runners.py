"""Tests of `ci/runners`, which turn lists of CTest and nextest into a matrix of `harness exec`, and its rows into a plan for nextest."""
import json
import pathlib
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("jq"), reason="jq is missing")
RUNNERS = pathlib.Path(__file__).parents[1] / "runners"
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(tests NONE)
enable_testing()
add_test(NAME here COMMAND sh -c "test -f CTestTestfile.cmake")
add_test(NAME elsewhere COMMAND sh -c "test \\"$A\\" = 'b c' && test $PWD = / && exit 7")
set_tests_properties(elsewhere PROPERTIES ENVIRONMENT "A=b c" WORKING_DIRECTORY /)
"""


def rows_of(folder, tests):
    matrix = subprocess.run(["jq", "-f", RUNNERS / "matrix.jq"], input=tests, stdout=subprocess.PIPE, check=True)
    (folder / "tests.yaml").write_bytes(matrix.stdout)
    subprocess.run(["harness", "exec", "--matrix", "tests.yaml"], cwd=folder)
    return (folder / "tests.jsonl").read_text().splitlines()[1:]


def exit_codes(rows):
    return {row["program"]: row["exit_code"] for row in map(json.loads, rows)}


def test_tests_of_ctest(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    subprocess.run(["cmake", "-B", "build"], cwd=tmp_path, check=True)
    listed = subprocess.run(["ctest", "--test-dir", "build", "--show-only=json-v1"], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert exit_codes(rows_of(tmp_path, listed.stdout)) == {"here": 0, "elsewhere": 7}


def test_tests_of_nextest_and_their_plan(tmp_path):
    (tmp_path / "suite").write_text('#!/bin/sh\ntest "$2" = --exact && test -f suite && test "$1" = tests::passes\n')
    (tmp_path / "suite").chmod(0o755)
    case = lambda status: {"kind": "test", "ignored": False, "filter-match": {"status": status}}
    cases = {"tests::passes": case("matches"), "tests::fails": case("matches"), "tests::other": case("mismatch")}
    suite = {"binary-id": "crate::it", "binary-path": str(tmp_path / "suite"), "cwd": str(tmp_path), "testcases": cases}
    rows = rows_of(tmp_path, json.dumps({"rust-suites": {"crate::it": suite}}).encode())
    passes, fails = ("binary_id(crate::it) & test(=tests::%s)" % name for name in ("passes", "fails"))
    assert exit_codes(rows) == {passes: 0, fails: 1}
    large = [json.dumps(json.loads(row) | {"peak_reserved": 3 << 30}) for row in rows]
    plan = subprocess.run(["jq", "-rf", RUNNERS / "nextest.jq"], input="\n".join(large), stdout=subprocess.PIPE, text=True, check=True).stdout
    override = '[[profile.default.overrides]]\nfilter = "%s"\nthreads-required = %s\n'
    assert plan == override % (passes, "4") + override % (fails, '"num-test-threads"')
