#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# benchmarks/on_gpu.sh tests|ops|benchmarks [folder]: what waits for an NVIDIA GPU, offline, in three commands of at most
# 8 minutes each, which do not need each other.
#   tests       builds, says what it finds of NVIDIA's libraries, runs the instructions alone, then all tests marked gpu
#   ops         the tests of the CPU's ops on the GPU, every row at the sizes of real models, compute-sanitizer
#   benchmarks  with their peers
# Each step has a time limit, and the next runs whatever became of it. What is printed, and the benchmarks' JSON, go into
# the folder (default benchmarks/results). Rows of cuDNN want LOWBIT_CUDNN_INCLUDE, a folder that tools/cudnn_headers fills.
# The variables below are for a fake run (tests/cuda/test_emulated.py).
set -euo pipefail
part=${1:?tests, ops or benchmarks}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(realpath -m "${2-$root/benchmarks/results}")
gpu=${LOWBIT_GPU-cuda:0} ops=${LOWBIT_OPS-$root/tests/ops} processes=${LOWBIT_PROCESSES-8}
mkdir -p "$out"
cd "$out"  # so that the installed package is imported, not python/
exec > >(tee "$out/on_gpu_$part.txt") 2>&1
failed=()

step() {  # name, seconds, command
  echo "== [$SECONDS s] $1"
  timeout -k 5 "$2" "${@:3}" || failed+=("$1 ($?)")
}
build() {
  local headers=${LOWBIT_CUDNN_INCLUDE+-C cmake.define.LOWBIT_CUDNN_INCLUDE=$LOWBIT_CUDNN_INCLUDE}
  # shellcheck disable=SC2086
  step build 180 pip install -q --no-build-isolation --no-deps $headers "$root"
}
export PYTEST_TIMEOUT=60  # for each test, where pytest-timeout is installed
tests() { step "$1" "$2" python -m pytest -q -p no:cacheprovider -c "$root/pyproject.toml" --rootdir "$root" "${@:3}"; }

case $part in
  tests)
    build
    step gpu 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    step info 30 python -m lowbit info
    # First what no emulation can show: instructions, and 29 KB of arguments of a launch that a graph has captured.
    tests "instructions, a captured step" 60 -m gpu "$root/tests/cuda/test_primitives.py" \
      "$root/tests/cuda/test_on_gpu.py::test_a_graph_replays_the_steps"
    tests "tests marked gpu" 240 -m gpu -n "$processes" "$root/tests/cuda" --ignore "$root/tests/cuda/test_real_sizes.py"
    ;;
  ops)
    build
    # Of the rows alone: other tests provoke errors, which on a GPU end the context of their process.
    LOWBIT_TEST_DEVICE=$gpu tests "the CPU's tests of ops" 180 -n "$processes" --share 20 -k "cuda or cublas or cudnn" "$ops"
    tests "real sizes" 180 -n "$processes" "$root/tests/cuda/test_real_sizes.py"
    for tool in memcheck racecheck; do
      if command -v compute-sanitizer > /dev/null; then
        step "compute-sanitizer $tool" 60 compute-sanitizer --tool $tool --error-exitcode 1 python -m pytest -q -p no:cacheprovider \
          -c "$root/pyproject.toml" --rootdir "$root" "$root/tests/cuda/test_on_gpu.py" -k "budget and (int4 or prompt or causal)"
      else
        failed+=("no compute-sanitizer")
      fi
    done
    ;;
  benchmarks)
    build
    for name in optim linear attention decode; do
      arguments="--rounds 5 --out ${name}_cuda.json"
      [[ $name == optim ]] && arguments="--device cuda --parameters 512 $arguments"
      [[ $name == optim ]] && script=bench_optim.py || script=bench_${name}_cuda.py
      # shellcheck disable=SC2086
      step "$name" 100 python "$root/benchmarks/$script" ${LOWBIT_BENCH_ARGUMENTS-$arguments}
    done
    ;;
  *) echo "$part: wanted tests, ops or benchmarks" >&2; exit 2 ;;
esac
echo "== [$SECONDS s] done; failed: ${failed[*]-nothing}"
((${#failed[@]} == 0))
