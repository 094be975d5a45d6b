# tests/scripts/check-preload and check-preload-nccl source this file. Each defines a function
# run_preloaded, which runs a program with the library preloaded, counts in $tried, and leaves its exit
# status in $status and its output in $work/out and $work/err.
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
bad=0 tried=0 status=0
unset LD_PRELOAD ONEBIT_GRADIENTS ONEBIT_COMMAND ONEBIT_RULES ONEBIT_REPORT ONEBIT_REQUIRE
export ONEBIT_TUNING=none

# Prints the absolute path of a file in the build.
built_path() { case $BUILD in /*) echo "$BUILD/$1" ;; *) echo "$PWD/$BUILD/$1" ;; esac; }

report_failure() { # WORDS
  echo "$*"
  sed 's/^/    /' "$work/out" "$work/err"
  bad=1
}

expect_status() { # STATUS ARGUMENTS-OF-run_preloaded...
  run_preloaded "${@:2}"
  [ "$status" = "$1" ] || report_failure "${*:2}: status $status, not $1"
}

expect_failure() { # ARGUMENTS-OF-run_preloaded...
  run_preloaded "$@"
  [ "$status" != 0 ] || report_failure "$*: does not fail"
}

expect_output() { # out|err EXTENDED-REGULAR-EXPRESSION
  grep -qE -- "$2" "$work/$1" || report_failure "std$1 has no \"$2\""
}

expect_no_output() {
  if grep -qE -- "$2" "$work/$1"; then report_failure "std$1 has \"$2\""; fi
}
