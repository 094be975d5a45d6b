# tests/scripts/check-preload and check-preload-nccl source this file after tests/scripts/support.sh.
# Each of them defines a function run_preloaded RANKS "NAME=VALUE..." PROGRAM CASE..., which runs a
# program with the library preloaded (tests/preload/with). The function counts its runs in $tried, and
# leaves the exit status in $status and the output in $work/out and $work/err.
unset LD_PRELOAD ONEBIT_GRADIENTS ONEBIT_COMMAND ONEBIT_RULES ONEBIT_REPORT ONEBIT_REQUIRE
export ONEBIT_TUNING=none

# Prints the absolute path of a file in the build.
built_path() { case $BUILD in /*) echo "$BUILD/$1" ;; *) echo "$PWD/$BUILD/$1" ;; esac; }

expect_status() { # STATUS ARGUMENTS-OF-run_preloaded...
  run_preloaded "${@:2}"
  [ "$status" = "$1" ] || report_failure "${*:2}: status $status, not $1"
}

expect_failure() { # ARGUMENTS-OF-run_preloaded...
  run_preloaded "$@"
  [ "$status" != 0 ] || report_failure "$*: does not fail"
}

expect_no_output() {
  if grep -qE -- "$2" "$work/$1"; then report_failure "$1 has \"$2\""; fi
}

# Checks mistakes in rules, ONEBIT_REQUIRE and ONEBIT_REPORT=0. Also checks that the exit status is
# the program's own.
check_settings() {
  printf 'warmup 3\n\npass allreduce count=20000\ncompres all\n' >"$work/rules"
  expect_status 0 2 "ONEBIT_RULES=$work/rules" "$program" steady
  expect_output out '^1 done$'
  expect_output err "nothing is compressed: $work/rules:4: 'compres': a line begins with"
  expect_failure 2 ONEBIT_REQUIRE=1 "$program" foreign
  expect_output out '^1 done$' # the program has run to its end
  expect_output err 'nothing was compressed, which is required by ONEBIT_REQUIRE=1'
  expect_status 2 2 "" "$program" no-such-case
  expect_status 0 2 ONEBIT_REPORT=0 "$program" steady
  expect_no_output err onebit
  expect_failure 2 "ONEBIT_RULES=$work/rules ONEBIT_REQUIRE=1" "$program" steady
}

# Checks the report in JSON of a program that sums 20000 and 20001 elements, 40 times each.
check_report() { # ASSERTIONS: Python about the report r and its tensors t
  expect_no_output err 'in total'
  command -v python3 >/dev/null || return 0
  python3 - "$work/report.json" <<PY || report_failure "the JSON is not: $(cat "$work/report.json")"
import json, sys
r = json.load(open(sys.argv[1]))
t = r["tensors"]
assert r["ranks"] == 2 and {x["count"] for x in t} == {20000, 20001}, t
for x in t:
    assert x["calls"] == 40 == x["compressed"] + sum(x["passed"].values()), x
assert r["compressed"] == sum(x["compressed"] for x in t) >= 60
$1
PY
}
