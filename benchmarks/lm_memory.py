"""Peak memory of a forward and backward pass at a large vocabulary: full logits against losses in pieces.

    python benchmarks/lm_memory.py                 # both ways, each in a fresh process
    python benchmarks/lm_memory.py --way pieces    # one of them; prints JSON

A Llama of 2 layers, width 256, vocabulary 150,000, over 2 rows of 2,048 tokens, float32. The peak is the process'
resident memory above that of the loaded model.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS, WIDTH = 2, 256


def measure(way: str, length: int, vocabulary: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.language.head import install

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(vocabulary, (ROWS, length))
    labels = tokens.roll(-1, 1)
    if way == "pieces":
        install(model)
    before, watch = resident(), Watch()
    started = time.perf_counter()
    with watch:
        if way == "pieces":
            loss = model(input_ids=tokens, labels=labels).logits[:, 0].sum() / labels.numel()
        else:
            loss = F.cross_entropy(model(input_ids=tokens).logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
    seconds = time.perf_counter() - started
    return {"way": way, "loss": loss.item(), "peak_bytes": watch.peak - before, "seconds": round(seconds, 1)}


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Watch(threading.Thread):
    """The most memory that is resident while the context lasts, looked up every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("full", "pieces"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.length, args.vocabulary)))
        return
    for way in ("full", "pieces"):
        words = [sys.executable, __file__, "--way", way, "--length", str(args.length)]
        words += ["--vocabulary", str(args.vocabulary)]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        print(f"{way:<8}{found['peak_bytes'] / 2**20:8.0f} MiB  {found['seconds']:6.1f} s  loss {found['loss']:.6f}")


if __name__ == "__main__":
    main()
