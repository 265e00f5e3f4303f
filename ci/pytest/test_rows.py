"""Tests of the Parquet files of `harness`, as DuckDB and Polars read them."""
import subprocess
import sys

import duckdb
import polars
import pytest

MATRIX = """
programs:
  passes: [{python}, -c, "print({{n}})"]
  fails: [{python}, -c, "raise SystemExit({{n}})"]
n: [1, 2]
"""


def test_rows_of_a_matrix(tmp_path):
    (tmp_path / "runs.yaml").write_text(MATRIX.format(python=sys.executable))
    subprocess.run(["harness", "exec", "--matrix", "runs.yaml"], cwd=tmp_path)
    merge = ["harness", "report", "merge", "runs.jsonl", "-o", "runs.parquet"]
    merged = subprocess.run(merge, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    if "is built without Parquet" in merged.stderr:
        pytest.skip("this wheel is built without Parquet; that of a release has it")
    assert merged.returncode == 0, merged.stderr
    file = tmp_path / "runs.parquet"
    query = f"""SELECT program, "values".n, exit_code, peak_reserved, doubts FROM '{file}' """
    rows = duckdb.sql(query).fetchall()
    expected = [
        ("passes", "1", 0, 0, []),
        ("passes", "2", 0, 0, []),
        ("fails", "1", 1, 0, []),
        ("fails", "2", 2, 0, []),
    ]
    assert rows == expected
    frame = polars.read_parquet(file)
    frame = frame.select("program", polars.col("values").struct["n"], "exit_code", "peak_reserved", "doubts")
    assert frame.rows() == expected
    version = "SELECT value FROM parquet_kv_metadata(?) WHERE key = 'harness_matrix_version'"
    assert duckdb.execute(version, [str(file)]).fetchall() == [(b"1",)]
