# shellcheck shell=bash disable=SC2034,SC2154,SC2086,SC2046 # of tests/gpu/run; lists are split
# What tests/gpu/run wants of the machine: sets NVCC, nccl (a version, or none), sanitizer (a path,
# or nothing) and cuda (what make is told).

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
