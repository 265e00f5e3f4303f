#!/usr/bin/env bash
# @security-alert/sarif-to-markdown 1.11.1 (https://www.npmjs.com/package/@security-alert/sarif-to-markdown) leaves an error out of its report if the
# rule has no default level, and reports a note as an error.
#
# In SARIF, the level of a result has precedence over the one of its rule (section 3.27.10 of
# https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html). The converter reads only that of the rule (lib/sarif-to-markdown.js, lines 83
# and 153). For the first result, the report has "Nothing here.", and with `failOn: ["error"]` a pipeline passes. With the second one, it fails.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @security-alert/sarif-to-markdown@1.11.1
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import markdown from "@security-alert/sarif-to-markdown";

const rules = [
  { id: "leak", shortDescription: { text: "Leak" } },
  { id: "style", shortDescription: { text: "Style" }, defaultConfiguration: { level: "error" } },
];
const region = { startLine: 1, startColumn: 1, endLine: 1, endColumn: 2 };
const locations = [{ physicalLocation: { artifactLocation: { uri: "main.c" }, region } }];
const convert = markdown.sarifToMarkdown({ owner: "o", repo: "r", branch: "main", sourceRoot: "", failOn: ["error"], simple: true });
for (const [ruleId, level] of [["leak", "error"], ["style", "note"], ["style", "error"]]) {
  const results = [{ ruleId, level, message: { text: "found" }, locations }];
  const [{ body, shouldFail }] = convert({ version: "2.1.0", runs: [{ tool: { driver: { name: "Analyzer", rules } }, results }] });
  const reported = body.split("\n").filter((line) => line.includes(`[${ruleId}]`));
  console.log(`${ruleId}, level ${level}: reported ${reported[0] ?? "nothing"}; should fail ${shouldFail}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='leak, level error: reported nothing; should fail false
style, level note: reported - **[ERROR]** **[style]**  `found`; should fail true
style, level error: reported - **[ERROR]** **[style]**  `found`; should fail true'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
