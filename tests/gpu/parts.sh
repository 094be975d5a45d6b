# shellcheck shell=bash disable=SC2034,SC2154,SC2086,SC2046 # of tests/gpu/run; lists are split
# What tests/gpu/run includes: its tables as text, JSON and Markdown in $output; and what it wants of
# the machine, by which NVCC, nccl (a version, or none), sanitizer (a path, or nothing) and cuda (what
# make is told) are set.

say() { printf '%s\n' "$*" | tee -a "$output/summary.txt"; }

count() { # PASSED FAILED SKIPPED
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

leave_out() { # WHAT WHY
  say "not run: $1: $2"
  printf '%s: %s\n' "$1" "$2" >>"$output/left-out.txt"
}

# "name: value" lines as one JSON object.
facts_as_json() {
  sed 's/\\/&&/g; s/"/\\"/g' | awk -F ': ' '
    { printf "%s\"%s\":\"%s\"", NR == 1 ? "{" : ",", $1, substr($0, length($1) + 3) }
    END { print "}" }'
}

# The lines of gpu_tests as JSON, one object a test.
tests_as_json() {
  sed -nE 's/^(passed|FAILED|skipped) +([^ ].*[^ ]) +([0-9.]+) s( .*)?$/\1 \3 \2/p' |
    sed -E 's/^([^ ]+) ([^ ]+) (.*)$/{"test":"\3","outcome":"\1","seconds":\2}/'
}

# The number before these words in the last summary of gpu_tests; nothing where there is none.
figure() { # FILE WORDS
  sed -nE '/^[0-9]+ passed, [0-9]+ failed/s/^(.*, )?([0-9]+) '"$2"'.*/\2/p' "$1" | tail -n 1
}

# Flat JSON objects, one a line, as columns as wide as what is in them.
json_as_table() {
  awk '
    { line = $0; gsub(/^[{]|[}]$/, "", line); n[NR] = split(line, fields, /,"/)
      for (i = 1; i <= n[NR]; i++) {
        at = index(fields[i], ":"); name = substr(fields[i], 1, at - 1); gsub(/"/, "", name)
        value = substr(fields[i], at + 1); gsub(/"/, "", value)
        names[NR, i] = name; values[NR, i] = value
        if (length(name) > width[i]) width[i] = length(name)
        if (length(value) > width[i]) width[i] = length(value) } }
    END {
      for (r = 1; r <= NR; r++) {
        head = row = ""
        for (i = 1; i <= n[r]; i++) {
          head = head sprintf("%*s ", width[i], names[r, i])
          row = row sprintf("%*s ", width[i], values[r, i]) }
        if (head != before) print head
        before = head; print row } }'
}

# JSON objects, one a line, as the elements of an array.
joined() { paste -sd, "$@" 2>/dev/null; }

# Verdicts, one a line, by a pattern with \1 target, \2 measured, \3 wanted and \4 verdict.
verdicts_as() { # PATTERN FILE
  sed -nE 's/^\{"target":"(.*)","measured":"(.*)","wanted":"(.*)","verdict":"(.*)"\}$/'"$1"'/p' "$2"
}

# Verdicts of the lines of a file, which a card's count as tests.
judge() { # FILE [TARGET]
  local line
  awk -v emulated="$emulated" -v target="${2:-}" -f tests/gpu/verdicts.awk "$1" \
    >"$output/verdicts.new"
  cat "$output/verdicts.new" >>"$output/verdicts.json"
  while IFS= read -r line; do
    say "$line"
  done < <(verdicts_as '\1: \2 (\3 wanted): \4' "$output/verdicts.new")
  count "$(grep -c '"verdict":"ok"' "$output/verdicts.new")" \
    "$(grep -c '"verdict":"missed"' "$output/verdicts.new")" 0
  rm "$output/verdicts.new"
}

describe_machine() {
  {
    cat "$output/machine.txt"
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null |
      sed -nE '1s/^([0-9.]+)$/driver: \1/p'
    [ "$emulated" = 1 ] || echo "NCCL: $nccl"
    [ "$emulated" = 1 ] || "$NVCC" --version | sed -n 's/.*release.*, V/nvcc: /p'
    echo "processor: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
    echo "system: $(uname -sr)"
    echo "revision: $(git describe --always --dirty 2>/dev/null || echo "${REVISION:-unknown}")"
    echo "date: $(date -u +%FT%TZ)"
    echo "command: $command_line"
  } >"$output/machine.new"
  mv "$output/machine.new" "$output/machine.txt"
  facts_as_json <"$output/machine.txt" >"$output/machine.json"
  cat "$output/machine.txt"
}

write_summary() {
  touch "$output/verdicts.json" "$output/left-out.txt"
  printf '{"machine":%s,"verdicts":[%s],"not_run":[%s],"passed":%d,"failed":%d,"skipped":%d}\n' \
    "$(cat "$output/machine.json")" "$(joined "$output/verdicts.json")" \
    "$(sed 's/\\/&&/g; s/"/\\"/g; s/.*/"&"/' "$output/left-out.txt" | joined)" \
    $passed $failed $skipped >"$output/summary.json"
}

# As a page for docs/measured.
write_page() {
  local table
  {
    printf '# Measured %s: %s, by tests/gpu/run\n' "$(date -u +%F)" \
      "$(sed -n 's/^card: //p' "$output/machine.txt")"
    echo
    sed 's/^/- /' "$output/machine.txt"
    printf '\n## Verdicts\n\n| target | measured | wanted | verdict |\n|---|---|---|---|\n'
    verdicts_as '| \1 | \2 | \3 | \4 |' "$output/verdicts.json"
    printf '\n## Summary\n\n'
    sed 's/^/    /' "$output/summary.txt"
    for table in "$output"/bench-*.txt; do
      [ -e "$table" ] || continue
      printf '\n## %s\n\n' "$(head -n 1 "$table")"
      sed '1d; s/^/    /' "$table"
    done
  } >"$output/gpu.md"
}

# --- The machine

want() { # COMMAND WHAT-TO-DO
  command -v "$1" >/dev/null && return
  complain "$1 is missing: $2"
  missing=1
}

# pip's packages of NVIDIA: a folder a line.
pip_folders() {
  python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null
}

# The first of these that is a file.
first_of() {
  local path
  for path in "$@"; do
    [ -f "$path" ] && echo "$path" && return
  done
  return 1
}

find_nvcc() {
  local usual=/usr/local/cuda/bin/nvcc # where its installer puts it, and no PATH leads to
  [ -n "${NVCC:-}" ] || NVCC=$(command -v nvcc || { [ -x $usual ] && echo $usual; } || echo nvcc)
  want "$NVCC" "install the CUDA toolkit, or say NVCC=/where/it/is/bin/nvcc"
}

nccl_version() { # [OPTION...]
  printf '#include <nccl.h>\n nccl NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH' |
    "$NVCC" -E "$@" -x c++ - 2>/dev/null | sed -n 's/^ *nccl //p' | tr -d ' '
}

# NCCL_HOME as given; else what the compiler finds by itself; else pip's.
find_nccl() {
  local folder=${NCCL_HOME:-}
  nccl=none
  [ "${NCCL:-1}" != 0 ] || return 0
  if [ -z "$folder" ]; then
    nccl=$(nccl_version)
    [ -z "$nccl" ] || { cuda+=(NCCL=1) && return 0; }
    folder=$(first_of $(pip_folders | sed 's|$|/nccl/include/nccl.h|'))
    folder=${folder%/include/nccl.h}
  fi
  nccl=$([ ! -f "$folder/include/nccl.h" ] || nccl_version -I "$folder/include")
  cuda+=(NCCL=1 NCCL_HOME="$folder")
  [ -n "$nccl" ] || {
    complain "NCCL is missing (nccl.h): install libnccl-dev or pip's nvidia-nccl-cu13, say" \
      "NCCL_HOME=/where/its/include/and/lib/are, or NCCL=0 to go without"
    missing=1
  }
}

# Of the toolkit, or pip's nvidia-cuda-sanitizer-api.
find_sanitizer() {
  local bin
  bin=$(dirname "$(command -v "$NVCC")")
  sanitizer=$(PATH=$PATH:$bin command -v compute-sanitizer) ||
    sanitizer=$(first_of "$bin"/../compute-sanitizer/compute-sanitizer \
      $(pip_folders | sed 's|$|/cu13/compute-sanitizer/compute-sanitizer|')) || sanitizer=
  [ -z "$sanitizer" ] || [ -x "$sanitizer" ] || sanitizer=
}

# What this GPU runs, and nothing else: half of the compiler's work.
find_archs() {
  local arch
  [ -z "${CUDA_ARCHS:-}" ] || return 0
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    tr -d . | sort -u | paste -sd' ')
  [[ ! $arch =~ ^[0-9\ ]+$ ]] || cuda+=(CUDA_ARCHS="$arch")
}

find_tools() {
  want "${MAKE%% *}" "install it, for example with apt-get install make"
  want "$CC" "install a C compiler, for example with apt-get install gcc, or say CC=..."
  if [ "$emulated" = 1 ]; then
    cuda=(CUDA=emulated NCCL="${NCCL:-1}") nccl=emulated sanitizer=
    [ "${NCCL:-1}" != 0 ] || nccl=none
    want "$CXX" "install a C++ compiler, for example with apt-get install g++, or say CXX=..."
    [ $missing = 0 ]
    return
  fi
  find_nvcc
  [ $missing = 0 ] || return
  cuda=(CUDA=1 NVCC="$NVCC")
  find_nccl
  [ "$nccl" != none ] || cuda+=(NCCL=0)
  find_sanitizer
  find_archs
  [ $missing = 0 ]
}
