#!/usr/bin/env bash
# influx-line 1.0.0 (https://pypi.org/project/influx-line) writes a backslash before each space, comma and equals sign of a text, without an error. So the
# database stores "disk\ full" for "disk full".
#
# The line protocol of InfluxDB escapes these characters in names and tags. The value of a text field is in quotes, and only quotes and backslashes are
# escaped there (https://docs.influxdata.com/influxdb/v2/reference/syntax/line-protocol/#special-characters); another backslash belongs to the text. The
# package uses one function for both (influx_line.py, `add_field`). It also writes a missing number as an empty text. Tags are right.
# line-protocol-parser 2.0.1 reads the lines.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check influx-line==1.0.0 line-protocol-parser==2.0.1
cat >"$folder/program.py" <<'PYTHON'
from influx_line import InfluxLine
from line_protocol_parser import parse_line

for value in ["ok", "disk full", "a=1, b=2", 80, None]:
    line = InfluxLine("event")
    line.add_tag("host", "node 1")
    line.add_field("value", value)
    read = parse_line(str(line))
    print(f"{value!r}: {line} is read as {read['fields']['value']!r}, and its tag as {read['tags']['host']!r}")
PYTHON
seen=$("$folder/venv/bin/python" -W ignore "$folder/program.py")
expected=''\''ok'\'': event,host=node\ 1 value="ok" is read as '\''ok'\'', and its tag as '\''node 1'\''
'\''disk full'\'': event,host=node\ 1 value="disk\ full" is read as '\''disk\\ full'\'', and its tag as '\''node 1'\''
'\''a=1, b=2'\'': event,host=node\ 1 value="a\=1\,\ b\=2" is read as '\''a\\=1\\,\\ b\\=2'\'', and its tag as '\''node 1'\''
80: event,host=node\ 1 value=80 is read as 80.0, and its tag as '\''node 1'\''
None: event,host=node\ 1 value="" is read as '\'''\'', and its tag as '\''node 1'\'''
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
