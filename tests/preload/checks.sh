# What tests/scripts/check-preload and check-preload-nccl have in common; they source it. Each has a
# function `preloaded` that runs a program with the library before it, counts in $tried, and leaves
# its exit in $status and what it says in $work/out and $work/err.
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
bad=0 tried=0 status=0
unset LD_PRELOAD ONEBIT_GRADIENTS ONEBIT_COMMAND ONEBIT_RULES ONEBIT_REPORT ONEBIT_REQUIRE
export ONEBIT_TUNING=none

# The path of a library in the build.
built() { case $BUILD in /*) echo "$BUILD/$1" ;; *) echo "$PWD/$BUILD/$1" ;; esac; }

wrong() { # WORDS
  echo "$*"
  sed 's/^/    /' "$work/out" "$work/err"
  bad=1
}

gives() { # STATUS ARGUMENTS-OF-preloaded...
  preloaded "${@:2}"
  [ "$status" = "$1" ] || wrong "${*:2}: status $status, not $1"
}

fails() { # ARGUMENTS-OF-preloaded...
  preloaded "$@"
  [ "$status" != 0 ] || wrong "$*: does not fail"
}

has() { # out|err EXTENDED-REGULAR-EXPRESSION
  grep -qE -- "$2" "$work/$1" || wrong "std$1 has no \"$2\""
}

has_not() {
  if grep -qE -- "$2" "$work/$1"; then wrong "std$1 has \"$2\""; fi
}
