# shellcheck shell=bash disable=SC2034 # the scripts use the variables
# The scripts in this directory source this file, in the root of the checkout. It creates the
# directory $work, which is removed at the end, and defines functions that report failures.
set -u
: "${BUILD:=build}" "${MPI:=1}" "${FOR_MPI:=include [<\"](onebit/)?mpi\.h|with MPI=0}"
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
bad=0 tried=0 status=0

report_failure() { # WORDS: prints them, and the latest command's output in $work/log, out and err
  local file
  echo "$*"
  for file in log out err; do
    [ ! -s "$work/$file" ] || sed 's/^/    /' "$work/$file"
  done
  bad=1
}

expect_output() { # FILE-IN-$work EXTENDED-REGULAR-EXPRESSION
  grep -qE -- "$2" "$work/$1" || report_failure "$1 has no \"$2\""
}

list_headers() { # HEADER...: prints those whose functions are in this build
  local header
  for header; do
    case $header in
      */cuda.h) [ "${CUDA:-0}" != 0 ] || continue ;;
      */nccl.h) [ "${NCCL:-0}" = 1 ] || continue ;;
      *) [ "$MPI" = 1 ] || ! grep -qE "$FOR_MPI" "$header" || continue ;;
    esac
    echo "$header"
  done
}

end_check() { # WORDS: ends the script; prints WORDS if nothing has failed
  [ "$bad" = 0 ] && echo "$*"
  exit "$bad"
}
