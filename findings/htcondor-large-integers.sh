#!/usr/bin/env bash
# The ClassAds of htcondor 25.14.1 (https://pypi.org/project/htcondor) read an integer of 2^63 or more as 0, without an error, and a hexadecimal one
# too.
#
# ClassAds describe jobs and machines, and a `Requirements` expression compares them. HTCondor 10.9 reads 18446744073709551615, the value for no
# limit of many programs, as 2^63 - 1, and 0x100 as 256. HTCondor 23.10 and later read 0, and an octal integer as a decimal one. The comment of the
# lexer describes hexadecimal and octal integers (src/classad/lexer.cpp, `tokenizeNumber`). A real number of that size is right.
#
# An ad that is written has 16 digits of a real number, and a number of 64 bits can need 17: the largest one is read again as infinity.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check htcondor==25.14.1
cat >"$folder/program.py" <<'PYTHON'
import classad2

machine = classad2.ClassAd("[Limit = 18446744073709551615; Free = Limit - 1024; Fits = Limit > 1024]")
for name in ("Limit", "Free", "Fits"):
    print(name, machine.eval(name))
for text in ("9223372036854775807", "9223372036854775808", "9223372036854775808.0", "0x100", "0100"):
    print(text, "is", classad2.ExprTree(text).eval())
for number in (0.1, 123456789.12345679, 1.7976931348623157e308):
    print(number, "is read again as", classad2.parseOne(str(classad2.ClassAd({"Number": number})))["Number"])
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='Limit 0
Free -1024
Fits False
9223372036854775807 is 9223372036854775807
9223372036854775808 is 0
9223372036854775808.0 is 9.223372036854776e+18
0x100 is 0
0100 is 100
0.1 is read again as 0.1
123456789.12345679 is read again as 123456789.1234568
1.7976931348623157e+308 is read again as inf'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
