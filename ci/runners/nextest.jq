# A configuration of nextest in which a test takes a thread per GiB of the GPU, with 800 MiB for its context. Other tests run alone.
"[[profile.default.overrides]]
filter = \(.program | tojson)
threads-required = \(
  if .exit_code == 0 and .peak_reserved then (.peak_reserved + 838860800) / 1073741824 | ceil else "num-test-threads" | tojson end)"
