# shellcheck shell=bash disable=SC2034,SC2154,SC2086,SC2046 # of tests/gpu/run; lists are split
# tests/gpu/run includes this file. The functions write tables as text, JSON and Markdown to $output.
# They also find the tools of the machine and set NVCC, nccl (a version, or none), sanitizer (a path,
# or empty) and cuda (the arguments of make).

report_line() { printf '%s\n' "$*" | tee -a "$output/summary.txt"; }

add_results() { # PASSED FAILED SKIPPED
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

leave_out() { # WHAT WHY
  report_line "not run: $1: $2"
  printf '%s: %s\n' "$1" "$2" >>"$output/left-out.txt"
}

# Prints lines of "name: value" as one JSON object.
facts_as_json() {
  sed 's/\\/&&/g; s/"/\\"/g' | awk -F ': ' '
    { printf "%s\"%s\":\"%s\"", NR == 1 ? "{" : ",", $1, substr($0, length($1) + 3) }
    END { print "}" }'
}

# Prints the number before WORDS in the last summary of gpu_tests, or nothing if the summary has no
# such number.
read_count() { # FILE WORDS
  sed -nE '/^[0-9]+ passed, [0-9]+ failed/s/^(.*, )?([0-9]+) '"$2"'.*/\2/p' "$1" | tail -n 1
}

# Prints flat JSON objects, one per line, as a table whose columns are as wide as their values.
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

# Joins JSON objects, one per line, with commas.
join_objects() { paste -sd, "$@" 2>/dev/null; }

# Prints verdicts by a sed replacement in which \1 is the target, \2 measured, \3 wanted and \4 the
# verdict.
format_verdicts() { # PATTERN FILE
  sed -nE 's/^\{"target":"(.*)","measured":"(.*)","wanted":"(.*)","verdict":"(.*)"\}$/'"$1"'/p' "$2"
}

# Prints the verdicts on the results in a file. The verdicts ok and missed count as a passed and a
# failed test.
judge_results() { # FILE [TARGET]
  local line
  awk -v emulated="$emulated" -v target="${2:-}" -f tests/gpu/verdicts.awk "$1" \
    >"$output/verdicts.new"
  cat "$output/verdicts.new" >>"$output/verdicts.json"
  while IFS= read -r line; do
    report_line "$line"
  done < <(format_verdicts '\1: \2 (\3 wanted): \4' "$output/verdicts.new")
  add_results "$(grep -c '"verdict":"ok"' "$output/verdicts.new")" \
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
    "$(cat "$output/machine.json")" "$(join_objects "$output/verdicts.json")" \
    "$(sed 's/\\/&&/g; s/"/\\"/g; s/.*/"&"/' "$output/left-out.txt" | join_objects)" \
    $passed $failed $skipped >"$output/summary.json"
}

# Writes a page for docs/measured.
write_page() {
  local table
  {
    printf '# Measured %s: %s, by tests/gpu/run\n' "$(date -u +%F)" \
      "$(sed -n 's/^card: //p' "$output/machine.txt")"
    echo
    sed 's/^/- /' "$output/machine.txt"
    printf '\n## Verdicts\n\n| target | measured | wanted | verdict |\n|---|---|---|---|\n'
    format_verdicts '| \1 | \2 | \3 | \4 |' "$output/verdicts.json"
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

require_command() { # COMMAND WHAT-TO-DO
  command -v "$1" >/dev/null && return
  print_error "$1 is missing: $2"
  missing=1
}

# Prints the folders of the NVIDIA packages that pip has installed, one per line.
list_pip_folders() {
  python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null
}

# Prints the first argument that names an existing file.
find_first_file() {
  local path
  for path in "$@"; do
    [ -f "$path" ] && echo "$path" && return
  done
  return 1
}

find_nvcc() {
  local usual=/usr/local/cuda/bin/nvcc # the installer's place, which is in no PATH
  [ -n "${NVCC:-}" ] || NVCC=$(command -v nvcc || { [ -x $usual ] && echo $usual; } || echo nvcc)
  require_command "$NVCC" "install the CUDA toolkit, or say NVCC=/where/it/is/bin/nvcc"
}

nccl_version() { # [OPTION...]
  printf '#include <nccl.h>\n nccl NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH' |
    "$NVCC" -E "$@" -x c++ - 2>/dev/null | sed -n 's/^ *nccl //p' | tr -d ' '
}

# Looks for NCCL in NCCL_HOME if that is set. Otherwise looks where the compiler finds it, and after
# that in pip's packages.
find_nccl() {
  local folder=${NCCL_HOME:-}
  nccl=none
  [ "${NCCL:-1}" != 0 ] || return 0
  if [ -z "$folder" ]; then
    nccl=$(nccl_version)
    [ -z "$nccl" ] || { cuda+=(NCCL=1) && return 0; }
    folder=$(find_first_file $(list_pip_folders | sed 's|$|/nccl/include/nccl.h|'))
    folder=${folder%/include/nccl.h}
  fi
  nccl=$([ ! -f "$folder/include/nccl.h" ] || nccl_version -I "$folder/include")
  cuda+=(NCCL=1 NCCL_HOME="$folder")
  [ -n "$nccl" ] || {
    print_error "NCCL is missing (nccl.h): install libnccl-dev or pip's nvidia-nccl-cu13, say" \
      "NCCL_HOME=/where/its/include/and/lib/are, or NCCL=0 to go without"
    missing=1
  }
}

# Looks for compute-sanitizer in the toolkit, and in pip's nvidia-cuda-sanitizer-api.
find_sanitizer() {
  local bin
  bin=$(dirname "$(command -v "$NVCC")")
  sanitizer=$(PATH=$PATH:$bin command -v compute-sanitizer) ||
    sanitizer=$(find_first_file "$bin"/../compute-sanitizer/compute-sanitizer \
      $(list_pip_folders | sed 's|$|/cu13/compute-sanitizer/compute-sanitizer|')) || sanitizer=
  [ -z "$sanitizer" ] || [ -x "$sanitizer" ] || sanitizer=
}

# Limits the build to this GPU's architecture, which halves the compiler's work.
find_archs() {
  local arch
  [ -z "${CUDA_ARCHS:-}" ] || return 0
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    tr -d . | sort -u | paste -sd' ')
  [[ ! $arch =~ ^[0-9\ ]+$ ]] || cuda+=(CUDA_ARCHS="$arch")
}

find_tools() {
  require_command "${MAKE%% *}" "install it, for example with apt-get install make"
  require_command "$CC" "install a C compiler, for example with apt-get install gcc, or say CC=..."
  if [ "$emulated" = 1 ]; then
    cuda=(CUDA=emulated NCCL="${NCCL:-1}") nccl=emulated sanitizer=
    [ "${NCCL:-1}" != 0 ] || nccl=none
    require_command "$CXX" "install a C++ compiler, for example with apt-get install g++, or say CXX=..."
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
