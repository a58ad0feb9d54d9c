#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# benchmarks/on_gpu.sh [folder]: all that waits for an NVIDIA GPU, offline and in a few minutes: builds, says what it
# finds of NVIDIA's libraries, runs the tests marked gpu, then the benchmarks with their peers. What it prints, and the
# benchmarks' JSON, go into the folder (default benchmarks/results).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1-benchmarks/results}")
mkdir -p "$out"
exec > >(tee "$out/on_gpu.txt") 2>&1
started=$SECONDS
step() { echo "== [$((SECONDS - started)) s] $*"; }

step "build"
pip install -q --no-build-isolation --no-deps .
cd "$out"  # so that the installed package is imported, not python/
step "info"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
python -m lowbit info
step "tests"
code=0
python -m pytest -q -p no:cacheprovider -c "$OLDPWD/pyproject.toml" -m gpu "$OLDPWD/tests/cuda" || code=$?
step "optimizers"
python "$OLDPWD/benchmarks/bench_optim.py" --device cuda --parameters 512 --rounds 8 --out optim_cuda.json || code=$?
step "linear layers"
python "$OLDPWD/benchmarks/bench_linear_cuda.py" --rounds 5 --out linear_cuda.json || code=$?
step "attention"
python "$OLDPWD/benchmarks/bench_attention_cuda.py" --rounds 5 --out attention_cuda.json || code=$?
step "decoding over a cache"
python "$OLDPWD/benchmarks/bench_decode_cuda.py" --rounds 5 --out decode_cuda.json || code=$?
step "done"
exit "$code"
