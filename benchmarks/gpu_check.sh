#!/usr/bin/env bash
# One GPU in under 8 minutes: speed, memory and parity of single, bf16, fp16, ZeRO-2 and FSDP2 (and DataParallel where
# there are two), and the share of the device's measured matrix rate that a step reaches.
#     benchmarks/gpu_check.sh [OUTPUT_DIR]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: no GPU is visible to torch here (nvidia-smi, CUDA_VISIBLE_DEVICES, a CUDA build of torch?)." >&2
    exit 2
fi
exec python "$root/benchmarks/gpu_check.py" "${1:-gpu_check}"
