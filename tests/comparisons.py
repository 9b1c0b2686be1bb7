"""Comparisons as `toolkit compare` writes them, made up: one of a machine with two GPUs, one of a rehearsal."""

import copy
import math

ODD = '<b>"zero2" & $x_1$</b> \u202egnp.yaml'  # a config's path may hold anything
GB, MB = 10**9, 10**6
PARAMETERS = 22_714_000
# name, title, devices, processes, samples/s, fullest device in GB, state held as multiples of 4 bytes a parameter
GPU = (
    ("single_gpu", "one process", 1, 1, 812.0, 9.6, (1, 1, 2)),
    ("data_parallel", "DataParallel", 2, 1, 931.0, 7.9, (1, 1, 2)),
    ("multi_gpu", "DDP", 2, 2, 1530.0, 5.4, (1, 1, 2)),
    ("zero1", "ZeRO-1", 2, 2, 1461.0, 5.1, (1, 1, 1.5)),
    (ODD, "ZeRO-2", 2, 2, 1395.0, 4.8, (1, 1, 1.5)),
    ("zero3", "ZeRO-3", 2, 2, 905.0, 4.2, (0.5, 0.5, 1.5)),
    ("fsdp2", "FSDP2", 2, 2, 1288.0, 4.0, (0.5, 0.5, 1)),
    ("tensor_parallel", "TP 2", 2, 2, 640.0, 5.6, (0.77, 0.77, 1.53)),
    ("pipeline_parallel --pipeline_stages 2", "pipeline of 2 stages", 2, 2, 1105.0, 4.4, (0.6, 0.6, 1.2)),
    ("zero3_offload", "ZeRO-3 with CPU offload", 2, 2, None, None, None),
)
PARTS = {"data": 0.02, "forward": 0.3, "backward": 0.5, "communication": 0.1, "optimizer": 0.05, "unattributed": 0.03}


def gpu() -> dict:
    """Ten configs on two GPUs; DataParallel fills its first device, one config ran out of memory."""
    return {
        "created": "2026-11-30T21:40:00",
        "rehearsal": False,
        "machine": {
            "name": "2 x NVIDIA H200",
            "cpu": "Xeon",
            "cores": 32,
            "memory": 512 * GB,
            "gpus": ["NVIDIA H200", "NVIDIA H200"],
        },
        "versions": {"toolkit": "0.1.0", "python": "3.12.3", "torch": "2.13.0", "accelerate": "1.15.0"},
        "settings": {
            "script": "tasks/classify.py",
            "flags": ["--train_file", "a train.csv"],
            "global_batch_size": 16,
            "warmup_steps": 3,
            "steps": 8,
            "repetitions": 2,
            "model": "all-MiniLM-L6-v2",
            "parameters": PARAMETERS,
        },
        "reference": "single_gpu",
        "resolution": 0.021,
        "configs": [_config(number, *row) for number, row in enumerate(GPU)],
    }


def rehearsal() -> dict:
    """The same configs as processes of one CPU."""
    comparison = copy.deepcopy(gpu())
    comparison |= {"rehearsal": True, "created": "2026-11-30T22:10:00"}
    comparison["machine"] = {"name": "EPYC", "cpu": "EPYC", "cores": 2, "memory": 8 * GB, "gpus": []}
    comparison["settings"] |= {"steps": 6}
    for config in comparison["configs"]:
        if config["failure"]:
            continue
        config["energy_joules_per_step"] = None
        config["memory"] = [
            {"rank": rank, "device": "cpu", "peak_allocated": None, "peak_reserved": None, "peak_resident": 700 * MB}
            for rank in range(config["processes"])
        ]
        config["memory_imbalance"] = 1.0
        for figure in config["throughput"].values():
            figure.update({key: figure[key] / 20 for key in ("median", "least", "most")})
            figure["all"] = [value / 20 for value in figure["all"]]
    return comparison


def _config(number, name, title, devices, processes, speed, peak, held) -> dict:
    config = {"name": name, "title": title, "precision": "no", "processes": processes, "devices": devices}
    if speed is None:
        return config | {"failure": "out of memory in step 2: 140 GB of 139 GB"}
    step = 16 / speed
    peaks = [peak * (1.0 if device == 0 or title != "DataParallel" else 0.41) for device in range(devices)]
    return config | {
        "failure": None,
        "throughput": {"samples_per_second": _spread(speed), "tokens_per_second": _spread(25.5 * speed)},
        "efficiency": None if number == 0 else speed / devices / GPU[0][4],
        "startup_seconds": _spread(9.0 + number),
        "step_seconds": _spread(step),
        "phases": {part: share * step for part, share in PARTS.items()} | {"total": step},
        "memory": [
            {
                "rank": device if processes > 1 else 0,
                "device": f"cuda:{device}",
                "peak_allocated": round(0.87 * size * GB),
                "peak_reserved": round(size * GB),
                "peak_resident": 2 * GB,
            }
            for device, size in enumerate(peaks)
        ],
        "memory_imbalance": max(peaks) / (sum(peaks) / devices),
        "held": [
            {kind: round(4 * PARAMETERS * part) for kind, part in zip(("parameters", "gradients", "optimizer"), held)}
        ]
        * processes,
        "bytes_sent": [0 if processes == 1 else 4 * PARAMETERS] * processes,
        "energy_joules_per_step": 400 * devices * step,
        "parity": {"loss": 1.1e-7 * number, "grad_norm": 3.1e-7 * number, "verdict": "equal"},
        "losses": [0.7 * math.exp(-at / 9) + 0.02 * math.sin(3 * at) + 1e-8 * number for at in range(11)],
    }


def _spread(median: float) -> dict:
    least, most = 0.985 * median, 1.015 * median
    return {"median": median, "least": least, "most": most, "all": [least, most]}
