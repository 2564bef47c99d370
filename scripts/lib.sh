# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/setup, run and test: steps that say what they do and how long they took.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
script=$(basename "$0")
started=$SECONDS
export CLICOLOR_FORCE=0 CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi

fail() {
  printf '%s: FAILED: %s\n' "$script" "$*" >&2
  exit 1
}

# step NAME COMMAND...: a failing command ends the script, which names the step.
step() {
  local name=$1 begin=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@" || fail "$name"
  printf '== %s: done in %d s\n' "$name" $((SECONDS - begin))
}

# build PRESET [TARGET...]: configures and builds build/PRESET.
build() {
  local preset=$1
  shift
  cmake --preset "$preset" ${configure_flags[@]+"${configure_flags[@]}"} || return 1
  cmake --build "build/$preset" ${*:+--target "$@"}
}
