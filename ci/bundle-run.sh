#!/usr/bin/env bash
# Runs the GPU suite of this bundle. Needs a driver and a GPU, bash, coreutils and grep; no Rust, no network. Works in any folder.
# Usage: run.sh OUT [DEVICE]
#   OUT     a new or empty folder for what it writes: a log for each step, report/, squeeze/, summary.md
#   DEVICE  cuda [default]: the first CUDA device, choose another with CUDA_VISIBLE_DEVICES
#           sim: the simulated device, to try the bundle where there is no GPU
# Exit code: 0 if all steps passed, otherwise the code of the first failed step (see ci/README.md); 64 if OUT or DEVICE is
# invalid.
set -uo pipefail

step_limit=20m

usage() {
    echo "usage: run.sh OUT [cuda|sim]" >&2
    exit 64
}

(($# == 1 || $# == 2)) || usage
device=${2:-cuda}
[[ $device == cuda || $device == sim ]] || usage
mkdir -p "$1" || exit 64
out=$(cd "$1" && pwd) || exit 64
if [[ -n $(ls -A "$out") ]]; then
    # Files of an earlier run could be mistaken for this run's.
    echo "run.sh: $out is not empty: name a new folder" >&2
    exit 64
fi
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 4
# The test binaries were built elsewhere; this is where they find scenarios/.
HARNESS_ROOT=$PWD
export HARNESS_ROOT
unset HARNESS_DEVICE

suite=0
running=
trap 'kill -TERM "$running" 2>/dev/null; echo "interrupted"; exit 130' INT TERM
printf '| step | exit code | seconds |\n| --- | ---: | ---: |\n' >"$out/summary.md"

# Runs one step, writes its output to NAME.txt and its exit code to the summary: `step NAME COMMAND…`.
step() {
    local name=$1 code=0 start=$SECONDS
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    # Runs in the background, so the trap answers immediately; with a limit, so a hung driver ends only this step.
    timeout --kill-after=30 "$step_limit" "$@" >"$out/$name.txt" 2>&1 </dev/null &
    running=$!
    wait "$running" || code=$?
    running=
    cat "$out/$name.txt"
    if [[ $code == 0 && $1 == tests/* ]] && ! grep -Eq '^test result: ok\. [1-9][0-9]* passed; 0 failed;' "$out/$name.txt"; then
        echo "$name: no test ran: the device is missing"
        code=3
    fi
    printf '== %s: exit code %d\n' "$name" "$code"
    printf '| %s | %d | %d |\n' "$name" "$code" $((SECONDS - start)) >>"$out/summary.md"
    ((suite != 0)) || suite=$code
}

cat bundle.txt
case $device in
    cuda)
        step doctor ./harness doctor --require-gpu
        step scenarios tests/scenarios ::cuda
        # The row of the GPU. `cargo test` runs all rows.
        step contract tests/contract cuda_limited
        ;;
    sim)
        step doctor ./harness doctor
        # The step `catalogue` runs all scenarios.
        step scenarios tests/scenarios oom_retry::caching::sim
        # These tests load every library of the bundle. `cargo test` runs all.
        step contract tests/contract cuda_on_the_simulated_gpu_limited::allocator::library
        ;;
esac
step catalogue ./harness run scenarios --device "$device" --report "$out/report"
step replay ./harness replay --verify recordings/*.jsonl.gz
# A training that catches OutOfMemoryError, if PyTorch is installed; the bundle has none.
if [[ $device == cuda ]] && python3 -c 'import torch' >/dev/null 2>&1; then
    rows=131072
    step squeeze ./harness exec --leave-free 4GiB --report "$out/squeeze/" -- python3 train.py "$rows"
    if grep -qx "rows $rows" "$out/squeeze.txt"; then
        echo "squeeze: the training did not run out of memory"
        ((suite != 0)) || suite=1
    fi
fi

printf '\n'
cat "$out/summary.md"
cp bundle.txt "$out/"
exit "$suite"
