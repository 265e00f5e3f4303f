#!/usr/bin/env bash
# tap.py 3.2.1 (https://pypi.org/project/tap.py) passes a failed test if its name contains "# TODO", without an error.
#
# Perl's Test::More writes such a name as "\# TODO", because an escaped # starts no directive. Version 14 of TAP made this a rule
# (https://testanything.org/tap-version-14-specification.html). Perl's TAP::Parser counts the failure. For tap.py, the backslash belongs to the name,
# and the rest is a directive (tap/parser.py, line 27). So the test is an expected failure, and the command `tappy` exits with 0. A name with
# "# skip" becomes a skipped test.
#
# Seen on 1 December 2026 on x86-64 Linux, with Perl 5.36: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Perl with its standard modules, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tap.py==3.2.1
cat >"$folder/tests.pl" <<'PERL'
use Test::More tests => 3;
ok(1, "reads a list");
ok(0, "reads the comment # TODO of a list");
ok(0, "reads the comment # skip of a list");
PERL
cat >"$folder/program.py" <<'PYTHON'
import sys

from tap.parser import Parser

for line in Parser().parse_file(sys.argv[1]):
    if line.category == "test":
        print(f"tap.py, test {line.number}: ok {line.ok}, expected failure {line.todo}, skipped {line.skip}")
PYTHON
perl "$folder/tests.pl" >"$folder/tests.tap" 2>/dev/null || true
seen=$(
    cat "$folder/tests.tap"
    perl -MTAP::Parser -e '$p = TAP::Parser->new({source => $ARGV[0]}); $p->run; print "TAP::Parser: failed @{[$p->failed]}\n"' "$folder/tests.tap"
    "$folder/venv/bin/python" "$folder/program.py" "$folder/tests.tap"
    "$folder/venv/bin/tappy" "$folder/tests.tap" >"$folder/log" 2>&1 && echo "tappy: exit code $?"
    tail -n 1 "$folder/log"
)
expected='1..3
ok 1 - reads a list
not ok 2 - reads the comment \# TODO of a list
not ok 3 - reads the comment \# skip of a list
TAP::Parser: failed 2 3
tap.py, test 1: ok True, expected failure False, skipped False
tap.py, test 2: ok False, expected failure True, skipped False
tap.py, test 3: ok False, expected failure False, skipped True
tappy: exit code 0
OK (skipped=1, expected failures=1)'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
