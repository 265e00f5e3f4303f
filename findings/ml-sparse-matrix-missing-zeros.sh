#!/usr/bin/env bash
# ml-sparse-matrix 3.1.0 (https://www.npmjs.com/package/ml-sparse-matrix) keeps the 3 of a matrix if it multiplies it by the 0 of another one, and the
# cosine of 0 is 0, without an error.
#
# `a.mul(b)` multiplies element by element, as it does for the dense matrices of the same project. It visits only the elements of b that are not zero
# (src/index.js, line 498), so the elements of a stay where b has a zero. `and` is the same. `a.add(2)`, `cos`, `cosh` and `exp` visit only the elements
# of a that are not zero: a zero stays 0 instead of 2 or 1. Sums and differences of two matrices are right. ml-matrix 6.15.1 computes the expected numbers.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" ml-sparse-matrix@3.1.0 ml-matrix@6.15.1
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { Matrix } from "ml-matrix";
import { SparseMatrix } from "ml-sparse-matrix";

const first = [[1, 0, 2], [0, 3, 0]];
const second = [[5, 1, 0], [1, 0, 0]];
const round = (rows) => JSON.stringify(rows.map((row) => row.map((value) => Number(value.toFixed(4)))));

function show(name, operation) {
  const sparse = operation(new SparseMatrix(first), new SparseMatrix(second)).to2DArray();
  const dense = operation(new Matrix(first), new Matrix(second)).to2DArray();
  console.log(`${name}: ml-sparse-matrix ${round(sparse)}, ml-matrix ${round(dense)}`);
}

for (const name of ["add", "sub", "mul", "and"]) show(`a.${name}(b)`, (a, b) => a[name](b));
show("a.mul(2)", (a) => a.mul(2));
show("a.add(2)", (a) => a.add(2));
for (const name of ["sin", "cos", "cosh", "exp"]) show(`a.${name}()`, (a) => a[name]());
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='a.add(b): ml-sparse-matrix [[6,1,2],[1,3,0]], ml-matrix [[6,1,2],[1,3,0]]
a.sub(b): ml-sparse-matrix [[-4,-1,2],[-1,3,0]], ml-matrix [[-4,-1,2],[-1,3,0]]
a.mul(b): ml-sparse-matrix [[5,0,2],[0,3,0]], ml-matrix [[5,0,0],[0,0,0]]
a.and(b): ml-sparse-matrix [[1,0,2],[0,3,0]], ml-matrix [[1,0,0],[0,0,0]]
a.mul(2): ml-sparse-matrix [[2,0,4],[0,6,0]], ml-matrix [[2,0,4],[0,6,0]]
a.add(2): ml-sparse-matrix [[3,0,4],[0,5,0]], ml-matrix [[3,2,4],[2,5,2]]
a.sin(): ml-sparse-matrix [[0.8415,0,0.9093],[0,0.1411,0]], ml-matrix [[0.8415,0,0.9093],[0,0.1411,0]]
a.cos(): ml-sparse-matrix [[0.5403,0,-0.4161],[0,-0.99,0]], ml-matrix [[0.5403,1,-0.4161],[1,-0.99,1]]
a.cosh(): ml-sparse-matrix [[1.5431,0,3.7622],[0,10.0677,0]], ml-matrix [[1.5431,1,3.7622],[1,10.0677,1]]
a.exp(): ml-sparse-matrix [[2.7183,0,7.3891],[0,20.0855,0]], ml-matrix [[2.7183,1,7.3891],[1,20.0855,1]]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
