#!/usr/bin/env bash
# The GPU path checked and measured, in at most 8 minutes on one GPU (see gpu_step.py; no figures have been taken yet):
#
#   benchmarks/gpu.sh --out results              on a machine with a GPU: results/gpu.json, results/gpu.md
#   benchmarks/gpu.sh --out results --dry-run    the same code at CPU size, about a minute
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec timeout --signal=INT --kill-after=10 480 "$python" benchmarks/gpu_step.py "$@"
