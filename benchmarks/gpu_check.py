"""What gpu_check.sh runs: the demo under several configs on the GPU, against fp32 on the CPU."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS, PARITY_STEPS, BATCH = 150, 8, 128
FULL, HALF = (1e-4, 1e-3), (1e-2, 2e-2)  # tolerances of loss and grad norm
TOLERANCE = {"single_gpu": FULL, "single_gpu_bf16": HALF, "single_gpu_fp16": HALF, "zero2": FULL, "fsdp2": FULL}


def matrix_rate(dtype, size=8192, seconds=1.0):
    """Measured floating-point operations per second of a large matrix product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
        torch.cuda.synchronize()
    return 2 * size**3 * count / (time.perf_counter() - start)


def write_data(folder):
    """The demo's data as files, so that every run has all of it, whatever its device."""
    from toolkit.data.demo import stdlib_docstrings

    folder.mkdir(parents=True, exist_ok=True)
    for split, table in stdlib_docstrings().items():
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), *zip(table.columns["text"], table.columns["label"])])


def run(config, out, steps, cpu=False, **flags):
    """One run of the demo; its step rows and settings."""
    data = Path(out).parent
    words = {"--train_file": data / "train.csv", "--validation_file": data / "validation.csv"}
    words |= {"--output_dir": out, "--max_steps": steps, "--eval_strategy": "no", **flags}
    words = [str(word) for pair in words.items() for word in pair]
    command = ["accelerate", "launch", "--quiet", "--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    command += ["--num_processes", "1"]
    script = [str(ROOT / "tasks" / "classify.py"), "--overwrite_output_dir", *words]
    script += ["--data_parallel"] * (config == "data_parallel")
    subprocess.run([*command, *script], check=True, env={**os.environ, **hidden})
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], json.loads((Path(out) / "run.json").read_text())


def main():
    folder = Path(sys.argv[1])
    write_data(folder)
    same = {"--dropout": 0, "--global_batch_size": 32}
    reference, _ = run("single_gpu", folder / "cpu", PARITY_STEPS, cpu=True, **same)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| config | samples/s | peak memory, MiB | loss | grad norm | share of matrix rate |")
    print("|---|---|---|---|---|---|")
    failed = False
    devices = torch.cuda.device_count()
    for config, (loss, norm) in (TOLERANCE | ({"data_parallel": FULL} if devices > 1 else {})).items():
        rows, _ = run(config, folder / f"{config}_parity", PARITY_STEPS, **same)
        pairs = list(zip(rows, reference))
        a = max(abs(row["loss"] / other["loss"] - 1) for row, other in pairs)
        b = max(abs(row["grad_norm"] / other["grad_norm"] - 1) for row, other in pairs)
        failed |= a > loss or b > norm
        rows, settings = run(config, folder / config, STEPS, **{"--global_batch_size": BATCH})
        steady = rows[STEPS // 3 :]
        seconds = sum(row["seconds"] for row in steady)
        tokens = steady[-1]["tokens"] - rows[STEPS // 3 - 1]["tokens"]
        dtype = torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32
        # 6 operations per token and matrix parameter, forward and backward (Kaplan et al. 2020, section 2.1).
        share = 6 * settings["matrix_parameters"] * tokens / seconds / matrix_rate(dtype)
        speed = BATCH * len(steady) / seconds
        memory = settings.get("peak_memory_bytes", 0) / 2**20
        print(f"| {config} | {speed:.0f} | {memory:.0f} | {a:.1e} | {b:.1e} | {share:.1%} |")
    if devices == 1:
        print("data_parallel: left out, it needs two devices.")
    print("zero2 and fsdp2: in one process, with nothing to split.")
    print("loss and grad norm: largest relative difference to fp32 on the CPU over the first steps, dropout 0.")
    sys.exit("gpu_check: parity failed" if failed else 0)


if __name__ == "__main__":
    main()
