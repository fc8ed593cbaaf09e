#!/usr/bin/env bash
# Checks and times the GPU path in at most 8 minutes, without network:  PYTHON=python3.12 scripts/gpu_check.sh [OUT]
#
# PYTHON names an interpreter that has PyTorch >= 2.11 and the packages of requirements.txt; nothing is installed. Prints
# the GPU tests, the time of an update eagerly and as a graph, then for the compressed and the raw replay: steps/s of
# Breakout on 16 lanes after learning began, the GPU's busy share, and its memory at 1,000 and 50,000 transitions.
# Without a GPU it runs the same on the CPU, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-runs/gpu_check}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

"$PYTHON" - <<'PROBE'
import torch
print("PyTorch", torch.__version__)
if torch.cuda.is_available():
    print("GPU:", torch.cuda.get_device_name(), torch.cuda.get_device_capability())
else:
    print("NO GPU HERE: what follows ran on the CPU and says nothing about one")
PROBE
has_gpu=$("$PYTHON" -c 'import torch; print(int(torch.cuda.is_available()))')

echo "== tests"
if [ "$has_gpu" = 1 ]; then
    timeout 120 "$PYTHON" -m pytest -q -m gpu || echo "the GPU tests FAILED"
else
    timeout 120 "$PYTHON" -m pytest -q tests/test_networks.py tests/test_learner.py || echo "the tests FAILED"
fi

echo "== one update of 32"
timeout 60 "$PYTHON" -m benchmarks.learn --rounds 5

steps=$([ "$has_gpu" = 1 ] && echo 260000 || echo 8000)
start=$([ "$has_gpu" = 1 ] && echo 50000 || echo 2000)
for codec in zstd raw; do
    echo "== breakout, 16 lanes, codec $codec"
    busy=$OUT/busy-$codec.txt
    : > "$busy"
    watch=''
    if [ "$has_gpu" = 1 ]; then
        nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits -l 1 > "$busy" &
        watch=$!
    fi
    timeout 150 "$PYTHON" -m dqn train --config configs/breakout.yaml --run "$OUT/$codec" --fresh --env.num_envs 16 \
        --replay.codec "$codec" --replay.capacity 100000 --learner.learning_starts_steps "$start" \
        --budget.max_steps "$steps" --budget.max_hours 0.035 --evaluation.episodes 1 --evaluation.max_frames 400 \
        > "$OUT/$codec.txt" 2>&1 || echo "ended with exit code $? (75: the time was up)"
    [ -n "$watch" ] && kill "$watch"
    "$PYTHON" - "$OUT/$codec" "$busy" "$start" <<'REPORT'
import csv, statistics, sys
folder, busy, start = sys.argv[1], sys.argv[2], int(sys.argv[3])
rows = list(csv.DictReader(open(f"{folder}/memory.csv")))
learning = [row for row in rows if int(row["step"]) > start + 1000]
if len(learning) > 1:
    first, last = learning[0], learning[-1]
    seconds = float(last["wall_s"]) - float(first["wall_s"])
    print(f"{(int(last['step']) - int(first['step'])) / seconds:,.0f} steps/s after learning began")
for step in (1_000, 50_000):
    row = min(rows, key=lambda row: abs(int(row["step"]) - step))
    print(f"GPU memory near step {row['step']}: {row['cuda_mib']} MiB; RSS {row['rss_mib_max']} MiB")
shares = [float(line.split(",")[0]) for line in open(busy) if line.strip()]
if shares:
    print(f"GPU busy: {statistics.mean(shares[len(shares) // 2:]):.0f} % over the second half")
REPORT
done
