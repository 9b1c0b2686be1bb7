"""Streaming a file larger than memory: peak memory of the data pipeline, and whether every line arrives once.

    python benchmarks/stream.py                      # 5 MB, then 100 MB, two processes each
    python benchmarks/stream.py --megabytes 5 1000 --packing

Each process reads the whole stream, cuts every global batch by byte length, and tokenises its own part
(with --packing: every buffer, and takes its own blocks). Its line numbers are kept, and compared with the
file's at the end. Nothing is trained. Prints one JSON object.
"""

import argparse
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toolkit.data.plan import Bound, cut
from toolkit.language.stream import Stream
from toolkit.language.streamed import buffers
from toolkit.language.tokens import CAUSAL, Encoder

SOME_TEXT = "the a of to and in that was he it with as his on be at by had not are but from or have an they"
GLOBAL_BATCH = 256
BLOCK = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5, 100], help="sizes of the files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--buffer", type=int, default=10_000, help="records of the shuffle buffer")
    parser.add_argument("--packing", action="store_true")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.megabytes:
            path = Path(folder) / "lines.txt"
            runs.append({"megabytes": megabytes, **measure(path, write_lines(path, megabytes), options)})
    grown = max(run["peak_mb"] for run in runs) - runs[0]["peak_mb"]
    print(json.dumps({"runs": runs, "grown_mb": round(grown, 1)}, indent=1))


def write_lines(path, megabytes):
    """Lines of 1 to 60 words behind their number; returns how many."""
    words, draw = SOME_TEXT.split(), np.random.RandomState(0)
    written = count = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            line = " ".join(words[i] for i in draw.randint(0, len(words), draw.randint(1, 60)))
            written += file.write(f"{count} {line}\n")
            count += 1
    return count


def measure(path, lines, options):
    """One epoch, in fresh processes."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, max_tasks_per_child=1) as pool:
        parts = [pool.submit(read, rank, str(path), options) for rank in range(options.processes)]
        results = [part.result() for part in parts]
    times = sum((np.bincount(ids, minlength=lines) for _, _, ids in results), np.zeros(lines, int))
    return {
        "lines": lines,
        "lost": int((times == 0).sum()),
        "doubled": int((times > 1).sum()),
        "tokens": sum(tokens for _, tokens, _ in results),
        "peak_mb": round(max(peak for peak, _, _ in results), 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def read(rank, path, options):
    """One process's part of the first epoch: its peak memory in MB, its tokens, the numbers of its lines."""
    tokenizer = make_tokenizer()
    encoder = Encoder(tokenizer, CAUSAL)
    flags = SimpleNamespace(
        train_file=path,
        document_separator="line",
        seed=42,
        stream_buffer_size=options.buffer,
        max_steps=1,
        validation_split_percentage=None,
        train_file_weights=None,
        max_train_samples=None,
    )
    stream = Stream(flags, tokenizer, buffers(encoder, BLOCK, "best_fit") if options.packing else None)
    tokens, ids = 0, []
    for batch in stream.batches(GLOBAL_BATCH):
        pieces = cut([sample.size for sample in batch], options.processes, Bound(tokens=16_384))[rank]
        own = [batch[i] for piece in pieces for i in piece]
        if options.packing:
            rows = [block.row() for block in own]
            texts = [text for row in rows for text in documents(tokenizer, row)]
            tokens += sum(len(row["tokens"]) for row in rows)
        else:
            texts = [record.document().text for record in own]
            tokens += sum(len(encoded.tokens) for encoded in encoder(record.document() for record in own))
        # A chunk that continues a line does not begin with a number.
        ids += [int(found[0]) for found in map(re.compile(r"\d+(?= )").match, texts) if found]
        if stream.epoch:
            break
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tokens, np.array(ids, np.int32)


def documents(tokenizer, row):
    """The texts of a block's chunks."""
    starts = np.flatnonzero(row["positions"] == 0)
    return [tokenizer.decode(part, skip_special_tokens=True) for part in np.split(row["tokens"], starts[1:])]


def make_tokenizer():
    """Byte-level BPE, trained on the words above."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([f" {SOME_TEXT}"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


if __name__ == "__main__":
    main()
