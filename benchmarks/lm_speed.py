"""Language-model training speed on one machine: packed blocks, padded micro-batches, a bare loop, HF Trainer.

    python benchmarks/lm_speed.py --data DIR [--repetitions 3] [--output docs/lm_speed.md] [--plot docs/lm_speed.png]

DIR is a folder as TOOLKIT_TEST_DATA names it: State of the Union addresses in data/state_union/train.txt, of which the
first paragraphs are trained on once, in bf16 and with AdamW, and the tokenizer of models/stories260K/hf. The model is a
Llama of 0.8M parameters (width 128, 4 layers) that has learnt nothing yet. Batches of 32 random paragraphs are padded
to their longest in the bare loop and by HF Trainer, which have the same targets in an epoch as the toolkit; a step of
packed blocks has as many targets as one of 32 paragraphs on average. Each figure is the median of targets (tokens to
predict) per second of the training loop, start-up left out, each in a fresh process. Absolute figures move with the
machine's load: compare within one run.
"""

import argparse
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

BATCH, BLOCK, RATE, CLIP = 32, 512, 1e-3, 1.0
VARIANTS = {
    "packed": "toolkit, packed",
    "padded": "toolkit, --packing none: micro-batches cut by length",
    "bare": "bare PyTorch loop, random batches padded to their longest",
    "hf": "HF Trainer, random batches padded to their longest",
}


def save_model(root, folder):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(root / "models" / "stories260K" / "hf")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=BLOCK,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def flags(args, out, seed):
    given = {
        "--model_name_or_path": args.model,
        "--train_file": args.data / "data" / "state_union" / "train.txt",
        "--document_separator": "line",
        "--max_train_samples": args.paragraphs,
        "--num_train_epochs": 1,
        "--block_size": BLOCK,
        "--learning_rate": RATE,
        "--max_grad_norm": CLIP,
        "--seed": seed,
        "--cache_dir": out / "cache",
        "--output_dir": out / "run",
    }
    return [str(word) for pair in given.items() for word in pair]


def make_task(words):
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse
    from toolkit.language.task import LanguageModeling

    return LanguageModeling(parse(LanguageModelingArguments, words))


def rows_of(args, out, seed):
    """The task, and its chunks: token ids of each."""
    task = make_task([*flags(args, out, seed), "--packing", "none"])
    samples = task.prepare()["train"]
    return task, [samples[i]["tokens"].tolist() for i in range(len(samples))]


def run_toolkit(args, seed, out, packing):
    from toolkit.fit import fit

    _, rows = rows_of(args, out, seed)
    tokens = sum(map(len, rows))
    batch = BATCH if packing == "none" else round(BATCH * tokens / len(rows) / BLOCK)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    task = make_task([*flags(args, out, seed), "--packing", packing, "--global_batch_size", str(batch)])
    fit(task, task.args)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": json.loads((out / "run" / "all_results.json").read_text())["train_runtime"],
        "targets": tokens - len(rows),
        "padding": json.loads((out / "run" / "run.json").read_text())["cut"]["padding_share"],
        "losses": [line["loss"] for line in lines if "loss" in line],
    }


def run_bare(args, seed, out):
    """What a tutorial would write, with the optimizer and precision of the others."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from toolkit.data.plan import order

    task, rows = rows_of(args, out, seed)
    model = plain_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    batches = order(seed, 0, len(rows), BATCH)
    losses, padded = [], 0
    start = time.perf_counter()
    for number, ids in enumerate(batches):
        parts = [torch.tensor(rows[i]) for i in ids]
        tokens = pad_sequence(parts, batch_first=True, padding_value=task.tokenizer.pad_token_id)
        labels = pad_sequence(parts, batch_first=True, padding_value=-100)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, attention_mask=(labels != -100).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(batches))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        padded += labels.numel()
    seconds = time.perf_counter() - start
    tokens = sum(map(len, rows))
    return {"seconds": seconds, "targets": tokens - len(rows), "padding": 1 - tokens / padded, "losses": losses}


def run_hf(args, seed, out):
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

    task, rows = rows_of(args, out, seed)
    set_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(out / "hf"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        bf16=True,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    # Not the collator for language models: where padding and end are one token, that one learns no end.
    collator = DataCollatorForSeq2Seq(task.tokenizer)
    trainer = Trainer(model=plain_model(args), args=arguments, train_dataset=data, data_collator=collator)
    seconds = trainer.train().metrics["train_runtime"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"seconds": seconds, "targets": sum(map(len, rows)) - len(rows), "padding": None, "losses": losses}


def plain_model(args):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False).train()


def run_one(args, name, seed, file):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if name in ("packed", "padded"):
            figures = run_toolkit(args, seed, out, "best_fit" if name == "packed" else "none")
        else:
            figures = {"bare": run_bare, "hf": run_hf}[name](args, seed, out)
    Path(file).write_text(json.dumps(figures))


def speed(run):
    return run["targets"] / run["seconds"]


def table(results):
    """A markdown table of medians, with packing's ratio to each."""
    medians = {name: statistics.median(map(speed, runs)) for name, runs in results.items()}
    lines = [
        "| | targets/s, median (least to most) | packed is x | targets a step | padding | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in VARIANTS.items():
        each = sorted(map(speed, results[name]))
        first = results[name][0]
        last = statistics.median(statistics.mean(run["losses"][-8:]) for run in results[name])
        padding = "" if first["padding"] is None else f"{first['padding']:.0%}"
        lines.append(
            f"| {title} | {medians[name]:,.0f} ({each[0]:,.0f} to {each[-1]:,.0f}) "
            f"| {medians['packed'] / medians[name]:.2f} | {first['targets'] / len(first['losses']):,.0f} "
            f"| {padding} | {last:.3f} |"
        )
    return "\n".join(lines)


def plot(results, file):
    """Loss of the first repetition against targets and against time, as means of 4 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, title in VARIANTS.items():
        run = results[name][0]
        steps = len(run["losses"])
        means = [statistics.mean(run["losses"][at : at + 4]) for at in range(0, steps, 4)]
        done = [min(at + 4, steps) / steps for at in range(0, steps, 4)]
        axes[0].plot([share * run["targets"] / 1000 for share in done], means, label=title)
        axes[1].plot([share * run["seconds"] for share in done], means)
    axes[0].set(xlabel="thousand targets", ylabel="training loss")
    axes[1].set(xlabel="seconds")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--paragraphs", type=int, default=960)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to write the table to")
    parser.add_argument("--plot", type=Path, help="file to draw the losses to")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=3, metavar=("VARIANT", "SEED", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_one(args, args.run[0], int(args.run[1]), args.run[2])
        return
    results = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        save_model(args.data, folder)
        for repetition in range(args.repetitions):
            for name in VARIANTS:
                file = Path(folder) / "figures.json"
                words = [__file__, "--data", args.data, "--paragraphs", args.paragraphs, "--model", folder]
                words = [sys.executable, *words, "--run", name, 42 + repetition, file]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                subprocess.run(list(map(str, words)), check=True, env=environment, capture_output=True)
                results[name].append(json.loads(file.read_text()))
                rate = f"{speed(results[name][-1]):,.0f} targets/s"
                print(f"{repetition + 1}/{args.repetitions} {name}: {rate}", flush=True)
    print(table(results))
    if args.output:
        args.output.write_text(table(results) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
