# Reads rows of onebit-bench (a flat JSON object on each line) or lines of gpu_tests, and prints a
# verdict for each target. A verdict is a JSON object with "target", "measured", "wanted" and
# "verdict". The last is ok, missed, or the reason why nothing was measured.

function read_field(name, at, rest) {
  at = index($0, "\"" name "\":")
  if (!at)
    return ""
  rest = substr($0, at + length(name) + 3)
  return rest ~ /^"/ ? substr(rest, 2, index(substr(rest, 2), "\"") - 1) : rest + 0
}

function print_verdict(target, measured, wanted, holds) {
  if (emulated)
    holds = "not measured: emulated"
  else if (holds == 0 || holds == 1)
    holds = holds ? "ok" : "missed"
  printf "{\"target\":\"%s\",\"measured\":\"%s\",\"wanted\":\"%s\",\"verdict\":\"%s\"}\n",
    target, emulated ? "-" : measured, wanted, holds
}

# Compares the bytes per second of a kernel with those of a plain copy in the same rounds. A kernel
# may be a tenth slower; for compress the limit is a little stricter.
function judge_kernel(name, wanted, size) {
  name = read_field("row")
  wanted = name == "compress" ? 0.91 : 0.9
  size = read_field("bytes") / 1048576
  if (name == "compress")
    name = "compress float32"
  print_verdict(name (read_field("members") ? " of " read_field("members") : "") ", " size " MB",
    sprintf("%.2f TB/s, %.3f of the copy beside it", read_field("gbs") / 1000, read_field("of_copy")),
    sprintf("%.2f", wanted), read_field("of_copy") >= wanted)
}

/"benchmark":"codec"/ && !/"row":"cudaMemcpyAsync"/ { judge_kernel() }
/"right":(true|false)/ { compared++; wrong += /"right":false/ }

# Lines of gpu_tests are: OUTCOME NAME SECONDS s
/^(passed|FAILED|skipped|not run) +kernels/ { count_test("kernels") }
/^(passed|FAILED|skipped|not run) .*over NCCL/ { count_test("nccl") }
/^(passed|FAILED|skipped|not run) +graphs\/replayed/ { count_test("graphs") }

function count_test(group) {
  tried[group]++
  good[group] += $1 == "passed"
  bad[group] += $1 == "FAILED"
}

function judge_tests(group, target) {
  if (tried[group])
    print_verdict(target, good[group] " of " tried[group] " tests passed", "all",
      bad[group] || good[group] == tried[group] ? !bad[group] : "not measured: left out or skipped")
}

END {
  if (compared)
    print_verdict(target, compared - wrong " of " compared " rows equal the host's", "all", !wrong)
  judge_tests("kernels", "kernels equal the processor's codecs in every bit")
  judge_tests("nccl", "ranks over NCCL's sockets equal loopback in every bit")
  judge_tests("graphs", "a graph replayed 1,000 times equals the calls")
}
