# Rows of onebit-bench, each a flat JSON object a line, or lines of gpu_tests, to verdicts: a JSON
# object a target with "target", "measured", "wanted" and "verdict", which is ok, missed or why
# there is none.

function field(name, at, rest) {
  at = index($0, "\"" name "\":")
  if (!at)
    return ""
  rest = substr($0, at + length(name) + 3)
  return rest ~ /^"/ ? substr(rest, 2, index(substr(rest, 2), "\"") - 1) : rest + 0
}

function verdict(target, measured, wanted, holds) {
  if (emulated)
    holds = "not measured: emulated"
  else if (holds == 0 || holds == 1)
    holds = holds ? "ok" : "missed"
  printf "{\"target\":\"%s\",\"measured\":\"%s\",\"wanted\":\"%s\",\"verdict\":\"%s\"}\n",
    target, emulated ? "-" : measured, wanted, holds
}

# What a kernel moves a second, beside the copy of the same rounds; a tenth may be lost, and
# of compress a little less.
function judge_kernel(name, wanted, size) {
  name = field("row")
  wanted = name == "compress" ? 0.91 : 0.9
  size = field("bytes") / 1048576
  if (name == "compress")
    name = "compress float32"
  verdict(name (field("members") ? " of " field("members") : "") ", " size " MB",
    sprintf("%.2f TB/s, %.3f of the copy beside it", field("gbs") / 1000, field("of_copy")),
    sprintf("%.2f", wanted), field("of_copy") >= wanted)
}

/"benchmark":"codec"/ && !/"row":"cudaMemcpyAsync"/ { judge_kernel() }
/"right":(true|false)/ { compared++; wrong += /"right":false/ }

# gpu_tests: OUTCOME NAME SECONDS s
/^(passed|FAILED|skipped|not run) +kernels/ { note("kernels") }
/^(passed|FAILED|skipped|not run) .*over NCCL/ { note("nccl") }
/^(passed|FAILED|skipped|not run) +graphs\/replayed/ { note("graphs") }

function note(group) {
  tried[group]++
  good[group] += $1 == "passed"
  bad[group] += $1 == "FAILED"
}

function judge_tests(group, target) {
  if (tried[group])
    verdict(target, good[group] " of " tried[group] " tests passed", "all",
      bad[group] || good[group] == tried[group] ? !bad[group] : "not measured: left out or skipped")
}

END {
  if (compared)
    verdict(target, compared - wrong " of " compared " rows equal the host's", "all", !wrong)
  judge_tests("kernels", "kernels equal the processor's codecs in every bit")
  judge_tests("nccl", "ranks over NCCL's sockets equal loopback in every bit")
  judge_tests("graphs", "a graph replayed 1,000 times equals the calls")
}
