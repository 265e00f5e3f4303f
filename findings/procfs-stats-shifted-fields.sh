#!/usr/bin/env bash
# procfs-stats 1.0.2 (https://www.npmjs.com/package/procfs-stats) returns the virtual size of a process as its resident one, and its state as its parent,
# without an error, if the name of its program has a space.
#
# /proc/PID/stat has the name in parentheses, and it can contain spaces (proc_pid_stat(5),
# https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html). Names such as "tmux: server" do. The library splits the line at each space (index.js,
# `stat`), so each space moves all fields after the name by one. The resident size has the unit of pages and the virtual one has bytes, so the memory
# of the process is too large by thousands of times. @stroncium/procfs 1.2.1 reads all fields correctly.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Linux, Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" procfs-stats@1.0.2 @stroncium/procfs@1.2.1
for name in gpu-worker "gpu worker"; do
    cp "$(command -v sleep)" "$folder/$name"
done
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { spawn } from "node:child_process";
import { promisify } from "node:util";
import { procfs } from "@stroncium/procfs";
import procfsStats from "procfs-stats";

for (const name of ["gpu-worker", "gpu worker"]) {
  const child = spawn(`./${name}`, ["600"]);
  const reader = procfsStats(child.pid);
  let found, expected, before;
  do {
    before = JSON.stringify(procfs.processStat(child.pid));
    found = await promisify(reader.stat.bind(reader))();
    expected = procfs.processStat(child.pid);
  } while (expected.comm !== name || expected.state !== "S" || JSON.stringify(expected) !== before);
  const { rss, vsize } = expected;
  const source = (value) => ({ [rss]: "the resident size", [vsize]: "the virtual size" })[value] ?? "another field";
  const parent = Number(found.ppid) === process.pid ? "the parent" : found.ppid;
  console.log(`${found.comm}: state ${found.state}, ppid ${parent}, rss is ${source(found.rss)}, threads ${found.num_threads}`);
  console.log(`  @stroncium/procfs: ${expected.comm}, state ${expected.state}, threads ${expected.threads}`);
  child.kill();
}
JAVASCRIPT
cd "$folder"
seen=$(node program.mjs)
expected='(gpu-worker): state S, ppid the parent, rss is the resident size, threads 1
  @stroncium/procfs: gpu-worker, state S, threads 1
(gpu: state worker), ppid S, rss is the virtual size, threads 0
  @stroncium/procfs: gpu worker, state S, threads 1'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
