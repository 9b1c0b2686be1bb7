"""Training speed on one machine: this toolkit, HF Trainer and a bare PyTorch loop, interleaved.

    python benchmarks/speed.py --data DIR [--repetitions 3] [--output docs/speed.md]

DIR holds SST-2 as train.csv and dev.csv (label, text). Each figure is the median over repetitions of
samples per second in the training loop, start-up left out, on the first 2,048 training sentences with
MiniLM, batch 32, AdamW, one epoch. Absolute figures move with the machine's load: compare within one run.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROWS, BATCH, RATE = 2048, 32, 2e-4
VARIANTS = {
    "hf_default": "HF Trainer, default flags",
    "hf_best": "HF Trainer, bf16 and group_by_length",
    "toolkit": "toolkit, bf16, order of samples unchanged",
    "toolkit_grouped": "toolkit, bf16, --train_sampling_strategy group_by_length",
    "bare": "bare PyTorch loop, bf16, the toolkit's micro-batches",
}


def read(path):
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def run_toolkit(data, seed, out, *more):
    config = ROOT / "accelerate_configs" / "single_gpu_bf16.yaml"
    flags = {
        "--train_file": data / "train.csv",
        "--validation_file": data / "dev.csv",
        "--max_train_samples": ROWS,
        "--num_train_epochs": 1,
        "--eval_strategy": "no",  # the final evaluation comes after the training loop's clock
        "--global_batch_size": BATCH,
        "--learning_rate": RATE,
        "--seed": seed,
        "--output_dir": out / "run",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    command = ["accelerate", "launch", "--quiet", "--config_file", str(config), str(ROOT / "tasks" / "classify.py")]
    subprocess.run([*command, *words, *more], check=True, capture_output=True)
    results = json.loads((out / "run" / "all_results.json").read_text())
    settings = json.loads((out / "run" / "run.json").read_text())
    return results["train_samples_per_second"], results["eval_accuracy"], settings["cut"]["padding_share"]


def run_hf(data, seed, out, best):
    import numpy as np
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from toolkit.data.demo import demo_model

    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(demo_model(), num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(demo_model())

    def encoded(rows):
        table = Dataset.from_dict({"text": [r["text"] for r in rows], "label": [int(r["label"]) for r in rows]})
        return table.map(lambda part: tokenizer(part["text"], truncation=True), batched=True, remove_columns=["text"])

    flags = {"bf16": True, "use_cpu": True, "train_sampling_strategy": "group_by_length"} if best else {}
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        num_train_epochs=1,
        learning_rate=RATE,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **flags,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=encoded(read(data / "train.csv")[:ROWS]),
        eval_dataset=encoded(read(data / "dev.csv")),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float(np.mean(p.predictions.argmax(-1) == p.label_ids))},
    )
    speed = trainer.train().metrics["train_samples_per_second"]
    return speed, trainer.evaluate()["eval_accuracy"], None


def run_bare(data, seed, out):
    """The best that plain PyTorch does with these micro-batches: cut and collated before the clock starts."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from tasks.classify import ClassifyArguments
    from toolkit.arguments import parse
    from toolkit.attention import unpads
    from toolkit.classification.task import Classification
    from toolkit.data.feed import Feed
    from toolkit.launch.machine import detect
    from toolkit.settings import make_schedule
    from toolkit.strategy.cost import overhead
    from toolkit.strategy.memory import default_bound

    flags = ["--train_file", str(data / "train.csv"), "--validation_file", str(data / "dev.csv")]
    flags += ["--max_train_samples", str(ROWS), "--num_train_epochs", "1", "--seed", str(seed)]
    task = Classification(parse(ClassifyArguments, flags))
    splits = task.prepare()
    cpu = torch.device("cpu")
    schedule = make_schedule(task.args, BATCH, splits["train"].lengths)
    feed = Feed(task, splits["train"], schedule, 0, 1, default_bound(None, 1, cpu), overhead(cpu, "bf16", detect().amx))
    model = task.model(dtype=torch.float32).train()
    feed.padding = not unpads(model)
    work = list(feed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    start = time.perf_counter()
    for number, step in enumerate(work):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for batch in step.batches:
                logits = model(**batch.inputs).logits.float()
                (F.cross_entropy(logits, batch.targets, reduction="sum") / len(step.step.ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(work))
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    model.eval()
    rows, right = splits["validation"], 0
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for at in range(0, len(rows), 64):
            ids = range(at, min(at + 64, len(rows)))
            batch = task.collate([rows[i] for i in ids], list(ids), 0)
            right += int(np.sum((model(**batch.inputs).logits.argmax(-1) == batch.targets).numpy()))
    return ROWS / seconds, right / len(rows), None


def run_one(name, data, seed, file):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if name.startswith("hf"):
            figures = run_hf(data, seed, out, best=name == "hf_best")
        elif name == "bare":
            figures = run_bare(data, seed, out)
        else:
            more = ["--train_sampling_strategy", "group_by_length"] if name == "toolkit_grouped" else []
            figures = run_toolkit(data, seed, out, *more)
    Path(file).write_text(json.dumps(figures))


def table(results):
    """A markdown table of medians, with ratios to both ways of HF Trainer and to the bare loop."""
    speed = {name: statistics.median(figures[0] for figures in runs) for name, runs in results.items()}
    lines = [
        "| | samples/s, median (least to most) | x HF default | x HF best | x bare loop | dev accuracy, median |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in VARIANTS.items():
        each = sorted(figures[0] for figures in results[name])
        ratios = " | ".join(f"{speed[name] / speed[other]:.2f}" for other in ("hf_default", "hf_best", "bare"))
        accuracy = statistics.median(figures[1] for figures in results[name])
        spread = f"{speed[name]:.1f} ({each[0]:.1f} to {each[-1]:.1f})"
        lines.append(f"| {title} | {spread} | {ratios} | {accuracy:.3f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to write the table to")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--run", nargs=3, metavar=("VARIANT", "SEED", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_one(args.run[0], args.data, int(args.run[1]), args.run[2])
        return
    results = {name: [] for name in args.variants}
    for repetition in range(args.repetitions):
        for name in args.variants:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                words = [sys.executable, __file__, "--data", args.data, "--run", name, str(42 + repetition), file.name]
                subprocess.run(list(map(str, words)), check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
                results[name].append(json.loads(Path(file.name).read_text()))
            print(f"{repetition + 1}/{args.repetitions} {name}: {results[name][-1]}", flush=True)
    if set(args.variants) == set(VARIANTS):
        print(table(results))
        if args.output:
            args.output.write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
