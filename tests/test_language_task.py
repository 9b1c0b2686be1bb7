"""Language modelling as a task, against plain loops over single documents."""

import csv
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.families import LLAMA, make
from tests.language import byte_tokenizer
from tests.runs import run_here
from toolkit.data.plan import order
from toolkit.errors import UserError
from toolkit.language import packing
from toolkit.language.corpus import Corpus
from toolkit.language.masking import Masker
from toolkit.language.samples import IGNORED, Around, cut
from toolkit.language.task import LanguageModeling

BLOCK, GLOBAL, EPOCHS, SEED, RATE = 24, 5, 3, 7, 5e-5


def words(*flags):
    return [str(word) for word in flags]


# Samples


def corpus(*documents, prompt=0):
    """Documents of token ids; the first `prompt` tokens of each are context."""
    tokens = np.concatenate([np.array(document, np.int32) for document in documents])
    target = np.concatenate([np.arange(len(document)) >= max(1, prompt) for document in documents])
    return Corpus(tokens, target, np.cumsum([0, *map(len, documents)]), 100, 90)


def test_causal_chunks():
    samples = cut(corpus([10, 11, 12, 13, 14, 15], [20, 21]), 4, "none")
    rows = [samples[i] for i in range(len(samples))]
    assert [row["tokens"].tolist() for row in rows] == [[10, 11, 12, 13], [13, 14, 15], [20, 21]]
    assert [row["labels"].tolist() for row in rows] == [[11, 12, 13, IGNORED], [14, 15, IGNORED], [21, IGNORED]]
    assert samples.lengths.tolist() == [4, 3, 2]
    assert samples.documents().tolist() == [0, 0, 1]


def test_packed_chunks():
    samples = cut(corpus([10, 11, 12, 13, 14, 15], [20, 21], [30, 31, 32]), 5, "best_fit")
    assert samples.lengths.tolist() == [5, 5, 2] and [len(block) for block in samples.blocks] == [1, 2, 1]
    row = samples[1]  # best fit decreasing: the chunk of 3 and the first one of 2
    assert row["tokens"].tolist() == [14, 15, 30, 31, 32]
    assert row["labels"].tolist() == [15, IGNORED, 31, 32, IGNORED]
    assert row["positions"].tolist() == [0, 1, 0, 1, 2]


def test_concatenated_blocks_see_each_other():
    samples = cut(corpus([10, 11, 12], [20, 21, 22]), 4, "concatenate")
    assert [samples[i]["tokens"].tolist() for i in range(2)] == [[10, 11, 12, 20], [20, 21, 22]]
    # The first token of a document is no target, whatever stands before it.
    assert [samples[i]["labels"].tolist() for i in range(2)] == [[11, 12, IGNORED, IGNORED], [21, 22, IGNORED]]


def test_chunks_without_targets_are_left_out():
    samples = cut(corpus(range(10, 20), prompt=8), 4, "none")
    assert [samples[i]["tokens"].tolist() for i in range(len(samples))] == [[16, 17, 18, 19]]
    assert samples[0]["labels"].tolist() == [IGNORED, 18, 19, IGNORED]


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 7])
def test_strided_windows_score_each_token_once_with_enough_context(stride):
    length, block = 29, 8
    samples = cut(corpus(range(length)), block, "none", stride=stride)
    scored = []
    for i in range(len(samples)):
        row = samples[i]
        targets = row["labels"][row["labels"] != IGNORED].tolist()
        context = [target - row["tokens"][0] for target in targets]
        assert i == 0 or min(context) >= block - stride
        scored += targets
    assert sorted(scored) == list(range(1, length))


def test_masked_chunks_have_their_special_tokens():
    samples = cut(corpus(range(10, 17), prompt=0), 6, "none", Around([1], [2]))
    assert [samples[i]["tokens"].tolist() for i in range(2)] == [[1, 10, 11, 12, 13, 2], [1, 14, 15, 16, 2]]
    assert samples[1]["labels"].tolist() == [IGNORED, 14, 15, 16, IGNORED]


@pytest.mark.parametrize("around", [None, Around([1], [2])])
def test_no_target_is_lost_or_doubled(around):
    draw = np.random.RandomState(0)
    documents = [draw.randint(5, 90, draw.randint(2, 60)) for _ in range(100)]
    data = corpus(*documents)
    for how in ("none", "best_fit"):
        samples = cut(data, 16, how, around)
        rows = [samples[i] for i in range(len(samples))]
        found = np.concatenate([row["labels"][row["labels"] != IGNORED] for row in rows])
        assert sorted(found) == sorted(data.tokens[data.target])
        assert max(samples.lengths) <= 16
        assert [len(row["tokens"]) for row in rows] == samples.lengths.tolist()


def test_a_fingerprint_knows_the_cut():
    data = corpus(range(10, 40), [5, 6, 7])
    found = {cut(data, size, how).fingerprint() for size in (8, 9) for how in ("none", "best_fit", "concatenate")}
    assert len(found) == 6
    assert cut(data, 8, "none").fingerprint() in found


# Masks


@pytest.fixture(scope="module")
def wordpiece():
    """Words, of which some go on with ##."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{i}" for i in range(40)),
        *(f"##s{i}" for i in range(40)),
    ]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def masked_sample(chunks=1, length=400, seed=0):
    draw = np.random.RandomState(seed)
    parts = [[2, *draw.randint(5, 85, length - 2), 3] for _ in range(chunks)]
    tokens = np.concatenate(parts).astype(np.int32)
    labels = np.where(tokens < 5, IGNORED, tokens).astype(np.int64)
    positions = np.tile(np.arange(length), chunks)
    return {"tokens": tokens, "labels": labels, "positions": positions, "chunks": np.arange(chunks) + 10 * seed}


def test_masks_are_those_of_bert(wordpiece):
    masker = Masker(wordpiece, 0.15, False, 1)
    sample = masked_sample(chunks=50)
    found = masker(sample, 0)
    chosen = found["labels"] != IGNORED
    assert (found["labels"][chosen] == sample["tokens"][chosen]).all()
    assert (found["tokens"][~chosen] == sample["tokens"][~chosen]).all()
    assert not chosen[sample["tokens"] < 5].any()
    assert chosen.sum() / (sample["labels"] != IGNORED).sum() == pytest.approx(0.15, abs=0.01)
    hidden, seen = found["tokens"][chosen], sample["tokens"][chosen]
    assert (hidden == 4).mean() == pytest.approx(0.8, abs=0.02)
    assert ((hidden != 4) & (hidden != seen)).mean() == pytest.approx(0.1, abs=0.02)
    assert (hidden[hidden != 4] >= 5).all()  # no special token in a hidden one's place


def test_a_mask_is_a_function_of_seed_epoch_and_chunk(wordpiece):
    def hidden(seed=1, epoch=0, **sample):
        return Masker(wordpiece, 0.15, False, seed)(masked_sample(**sample), epoch)["tokens"].tolist()

    assert hidden() == hidden()
    assert hidden(seed=2) != hidden() != hidden(epoch=1)
    # The same words under another number are hidden elsewhere; packed with others, a chunk keeps its mask.
    other = {**masked_sample(), "chunks": np.array([5])}
    assert Masker(wordpiece, 0.15, False, 1)(other, 0)["tokens"].tolist() != hidden()
    assert hidden(chunks=3)[:400] == hidden()


def test_every_chunk_gets_a_target(wordpiece):
    masker = Masker(wordpiece, 0.01, False, 1)
    for seed in range(30):
        sample = masked_sample(length=5, seed=seed)
        assert (masker(sample, 0)["labels"] != IGNORED).sum() >= 1
    special = {**sample, "labels": np.full(5, IGNORED)}
    assert (masker(special, 0)["labels"] == IGNORED).all()


def test_whole_words_are_hidden_together(wordpiece):
    masker = Masker(wordpiece, 0.3, True, 1)
    sample = masked_sample(chunks=20)
    chosen = masker(sample, 0)["labels"] != IGNORED
    goes_on = sample["tokens"] >= 45  # ##…
    inside = goes_on[1:] & (sample["tokens"][:-1] >= 5)
    assert (chosen[1:] == chosen[:-1])[inside].all()
    assert 0.2 < chosen.mean() < 0.4


def test_whole_words_of_byte_level_tokens():
    from tests.language import word_tokenizer

    lines = ["the quick brown fox jumps over the lazy dog"] * 3
    tokenizer = word_tokenizer(lines, 300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ids = np.array(tokenizer(lines[0], add_special_tokens=False)["input_ids"])
    masker = Masker(tokenizer, 0.5, True, 0)
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    assert masker._begins(ids).tolist() == [i == 0 or name.startswith("Ġ") for i, name in enumerate(names)]


def test_tokenizers_that_cannot_mask_are_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(UserError, match="no mask token"):
        Masker(byte_tokenizer(), 0.15, False, 0)
    words_only = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<mask>": 1}, unk_token="a")), mask_token="<mask>"
    )
    Masker(words_only, 0.15, False, 0)
    with pytest.raises(UserError, match="where words begin"):
        Masker(words_only, 0.15, True, 0)


# Runs


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama over bytes, 260 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 260, "initializer_range": 0.1}))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """40 documents of 3 to 60 letters, separated by blank lines."""
    draw = np.random.RandomState(5)
    documents = ["".join(draw.choice(list("abcdefgh \n"), draw.randint(3, 60))) for _ in range(40)]
    documents = ["x" + re.sub(r"\s*\n\s*", "\n", document) + "y" for document in documents]
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return file


def documents_of(file, tokenizer):
    """Token ids of each document with its end, as a reader of the flags' help would expect."""
    texts = file.read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts], texts


def chunks_of(documents, block):
    """Chunks of each document, the last token of one being the first of the next."""
    return [doc[at : at + block] for doc in documents for at in range(0, len(doc) - 1, block - 1)]


def loss_of(model, chunk):
    """Sum over a chunk by itself."""
    logits = model(input_ids=torch.tensor([chunk])).logits[0].float()
    return F.cross_entropy(logits[:-1], torch.tensor(chunk[1:]), reduction="sum")


def flags(model, data, out, *more):
    return words(
        *("--model_name_or_path", model, "--train_file", data, "--output_dir", out, "--block_size", BLOCK),
        *("--global_batch_size", GLOBAL, "--num_train_epochs", EPOCHS, "--learning_rate", RATE, "--seed", SEED),
        *("--cache_dir", out.parent / "cache"),
        *more,
    )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_training_is_that_of_a_plain_loop_over_single_chunks(packed, llama, text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    documents, _ = documents_of(text, AutoTokenizer.from_pretrained(llama))
    chunks = chunks_of(documents, BLOCK)
    samples = packing.best_fit([len(chunk) for chunk in chunks], BLOCK) if packed else [[i] for i in range(len(chunks))]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(samples) // GLOBAL)
    losses, norms = [], []
    for epoch in range(EPOCHS):
        for ids in order(SEED, epoch, len(samples), GLOBAL):
            rows = [chunks[i] for sample in ids for i in samples[sample]]
            loss = sum(loss_of(model, row) for row in rows) / sum(len(row) - 1 for row in rows)
            loss.backward()
            losses.append(loss.item())
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - (len(losses) - 1) / steps)
            optimizer.step()
            optimizer.zero_grad()
    out = tmp_path / "out"
    more = ["--per_device_train_batch_size", 2, "--packing", "best_fit" if packed else "none"]
    rows = run_here(flags(llama, text, out, *more), task="language_modeling")
    assert len(rows) == steps
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=5e-5)
    assert rows[-1]["tokens"] == EPOCHS * sum(map(len, chunks))


@pytest.fixture(scope="module")
def evaluated(llama, text, tmp_path_factory):
    """Figures of one file under many cuts, at a learning rate of 0."""
    folder = tmp_path_factory.mktemp("evaluated")
    found = {}
    cuts = {
        "packed": [],
        "packed, rows of 1": ["--per_device_eval_batch_size", 1],
        "padded": ["--packing", "none"],
        "padded, rows of 3": ["--packing", "none", "--per_device_eval_batch_size", 3],
        "trained concatenated": ["--packing", "concatenate"],
        "strided": ["--eval_stride", 5],
    }
    for name, more in cuts.items():
        out = folder / name.replace(" ", "_")
        given = flags(llama, text, out, "--validation_file", text, "--learning_rate", 0, "--max_steps", 1, *more)
        rows = run_here(words(*given, "--global_batch_size", 100, "--test_file", text), task="language_modeling")
        found[name] = {"rows": rows, "folder": out, **json.loads((out / "eval_results.json").read_text())}
    return found


@pytest.fixture(scope="module")
def zero_shot(llama, text):
    """The text's sum of losses and targets, chunk by chunk and with a stride of 5; its bytes and characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    documents, texts = documents_of(text, AutoTokenizer.from_pretrained(llama))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = sum(loss_of(model, chunk).item() for chunk in chunks_of(documents, BLOCK))
        strided = 0.0
        for document in documents:
            for at in range(1, len(document)):
                # The window is the first one of a grid of 5 that holds the token.
                first = max(0, -(-(at - BLOCK + 1) // 5) * 5)
                logits = model(input_ids=torch.tensor([document[first:at]])).logits[0, -1]
                strided += F.cross_entropy(logits, torch.tensor(document[at])).item()
    return plain, strided, sum(len(document) - 1 for document in documents), texts, documents


@pytest.mark.parametrize("name", ["packed", "packed, rows of 1", "padded", "padded, rows of 3", "trained concatenated"])
def test_evaluation_counts_tokens_however_they_are_cut(name, evaluated, zero_shot):
    total, _, targets, _, _ = zero_shot
    assert evaluated[name]["eval_loss"] == pytest.approx(total / targets, rel=1e-6)
    assert evaluated[name]["eval_perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-5)


def test_strided_evaluation(evaluated, zero_shot):
    plain, strided, targets, _, _ = zero_shot
    assert evaluated["strided"]["eval_loss"] == pytest.approx(strided / targets, rel=1e-6)
    assert abs(strided - plain) / plain > 1e-4


def test_evaluation_shifts_labels_as_training_does(evaluated):
    """At a learning rate of 0 the loss of one step over all samples is that of evaluation."""
    for name in ("packed", "padded"):
        assert evaluated[name]["rows"][0]["loss"] == pytest.approx(evaluated[name]["eval_loss"], rel=1e-6)


def test_report_and_predictions(evaluated, zero_shot):
    total, _, targets, texts, documents = zero_shot
    folder = evaluated["packed"]["folder"]
    report = json.loads((folder / "eval_report.json").read_text())
    assert report["documents"] == len(texts) and report["targets"] == targets
    bits = total / math.log(2)
    assert evaluated["packed"]["eval_bits_per_byte"] == pytest.approx(bits / report["bytes"], rel=1e-6)
    assert evaluated["packed"]["eval_bits_per_character"] == pytest.approx(bits / report["characters"], rel=1e-6)
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["targets"]) for row in rows] == [len(document) - 1 for document in documents]
    counted = sum(float(row["loss"]) * int(row["targets"]) for row in rows)
    assert counted == pytest.approx(total, rel=1e-4)
    card = (folder / "README.md").read_text()
    assert "AutoModelForCausalLM" in card and "text-generation" in card


def test_the_saved_model_is_a_plain_one(evaluated, llama):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = evaluated["packed"]["folder"]
    tokens = torch.tensor([[5, 6, 7, 8]])
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(saved.lm_head) is torch.nn.Linear
    before = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert torch.equal(saved(input_ids=tokens).logits, before(input_ids=tokens).logits)
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


def test_concatenated_training_lets_documents_see_each_other(evaluated):
    assert evaluated["trained concatenated"]["rows"][0]["loss"] != pytest.approx(
        evaluated["packed"]["rows"][0]["loss"], rel=1e-3
    )


# Masked models


@pytest.fixture(scope="module")
def masked_runs(wordpiece, tmp_path_factory):
    from tokenizers import processors

    folder = tmp_path_factory.mktemp("masked")
    model = make("Bert")
    model.save_pretrained(folder / "model")
    wordpiece.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wordpiece.save_pretrained(folder / "model")
    draw = np.random.RandomState(0)
    lines = [
        "".join([f"w{draw.randint(40)}", *(f"s{i}" for i in draw.randint(40, size=draw.randint(0, 30)))])
        for _ in range(30)
    ]
    file = folder / "lines.txt"
    file.write_text("\n".join(lines) + "\n")
    found = {}
    for name, more in {
        "padded": [],
        "rows of 2": ["--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 3],
        "packed": ["--packing", "best_fit"],
        "whole words": ["--whole_word_mask"],
    }.items():
        out = folder / name.replace(" ", "_")
        given = flags(folder / "model", file, out, "--objective", "masked", "--document_separator", "line", *more)
        rows = run_here(words(*given, "--validation_file", file, "--learning_rate", 1e-3), task="language_modeling")
        logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[name] = {
            "rows": rows,
            "evaluations": [row["eval_loss"] for row in logged if "eval_loss" in row],
            "out": out,
        }
    return found


def test_masked_training_does_not_depend_on_the_cut(masked_runs):
    losses = [[row["loss"] for row in masked_runs[name]["rows"]] for name in ("padded", "rows of 2")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert masked_runs["padded"]["evaluations"] == pytest.approx(masked_runs["rows of 2"]["evaluations"], rel=1e-5)
    assert losses[0][-1] != losses[0][0]


def test_masked_evaluation_has_fixed_masks_whatever_the_packing(wordpiece, masked_runs, tmp_path):
    """Without an update, packed and padded evaluation are one number, every time."""
    found = []
    for packing_ in ("none", "best_fit"):
        out = tmp_path / packing_
        given = flags(
            masked_runs["padded"]["out"].parent / "model",
            masked_runs["padded"]["out"].parent / "lines.txt",
            out,
            "--objective",
            "masked",
            "--document_separator",
            "line",
            "--packing",
            packing_,
            "--learning_rate",
            0,
        )
        run_here(
            words(*given, "--validation_file", masked_runs["padded"]["out"].parent / "lines.txt"),
            task="language_modeling",
        )
        logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found += [row["eval_loss"] for row in logged if "eval_loss" in row]
    assert len(found) == 2 * EPOCHS
    assert found == pytest.approx([found[0]] * len(found), rel=1e-5)


def test_masked_card(masked_runs):
    assert "fill-mask" in (masked_runs["padded"]["out"] / "README.md").read_text()
    results = json.loads((masked_runs["padded"]["out"] / "eval_results.json").read_text())
    assert "eval_bits_per_byte" not in results


# Mistakes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_length", 10], "--block_size"),
        (["--label_smoothing_factor", 0.1], "not supported"),
        (["--mlm_probability", 0.2], "--objective masked"),
        (["--block_size", 2], "at least 3"),
        (["--eval_stride", 24], "from 1 to 23"),
        (["--attn_implementation", "flash_attention_2"], "--packing none"),
        (["--attn_implementation", "nonsense"], "nonsense: unknown attention implementation, expected one of eager, "),
        (["--objective", "masked"], "no mask token"),
        (["--objective", "masked", "--packing", "concatenate"], "--objective causal"),
        (["--streaming"], "needs --max_steps"),
    ],
)
def test_contradictions_are_said_before_anything_is_read(given, message, llama, text, tmp_path):
    with pytest.raises(UserError, match=message):
        run_here(words(*flags(llama, text, tmp_path / "out"), *given), task="language_modeling")


def test_the_default_block_is_what_the_model_allows(llama, text, tmp_path):
    """64 positions, not 1024."""
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse

    given = ["--model_name_or_path", llama, "--train_file", text, "--cache_dir", tmp_path]
    task = LanguageModeling(parse(LanguageModelingArguments, words(*given)))
    task.prepare()
    assert task.block_size == 64


def test_an_overflowing_perplexity_is_infinite(llama):
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse

    task = LanguageModeling(parse(LanguageModelingArguments, ["--model_name_or_path", str(llama)]))
    task.splits = {"validation": cut(corpus([5, 6, 7]), 8, "none")}
    assert task.score("validation", np.array([[1600.0, 2.0]]))["perplexity"] == math.inf


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--objective", "masked"], "--model_name_or_path"), (["--validation_file", "x"], "--train_file")],
)
def test_what_the_demo_has_no_default_for(words, said):
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse
    from toolkit.language.demo import set_demo_flags

    with pytest.raises(UserError, match=said):
        set_demo_flags(parse(LanguageModelingArguments, words))


# Real text


@pytest.fixture(scope="module")
def stories(real_data):
    """A real Llama of 260,032 parameters, trained on TinyStories."""
    folder = real_data.parent / "models" / "stories260K" / "hf"
    if not folder.is_dir():
        pytest.skip("TOOLKIT_TEST_DATA holds no models/stories260K")
    return folder


@pytest.fixture(scope="module")
def real_texts(real_data, tmp_path_factory):
    """The first 60,000 characters of WikiText-2's validation text, and of the last tenth of tinyshakespeare."""
    shakespeare = (real_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    wikitext = (real_data / "wikitext2_valid_test" / "valid.txt").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("real")
    for name, text in {"wikitext": wikitext, "shakespeare": shakespeare[len(shakespeare) * 9 // 10 :]}.items():
        (folder / f"{name}.txt").write_text(text[:60_000], encoding="utf-8")
    (folder / "train.txt").write_text(shakespeare[:150_000], encoding="utf-8")
    return folder


def plain_score(folder, file):
    """Mean loss of a text, a chunk of at most 512 tokens of a document at a time; and its characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = re.sub(r"^(?:[^\S\n]*\n)+", "", file.read_text(encoding="utf-8"))  # blank lines before the first
    parts = re.split(r"\n(?:[^\S\n]*\n)+", text)
    parts = [part.strip("\n") for part in parts if part.strip()]
    documents = [[*tokenizer(part)["input_ids"], tokenizer.eos_token_id] for part in parts]
    chunks = chunks_of(documents, 512)
    with torch.no_grad():
        total = sum(loss_of(model, chunk).item() for chunk in chunks)
    return total, sum(len(chunk) - 1 for chunk in chunks), sum(map(len, parts))


@pytest.mark.parametrize("name", ["wikitext", "shakespeare"])
def test_zero_shot_perplexity_of_a_real_model(name, stories, real_texts, tmp_path):
    from accelerate.state import AcceleratorState

    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse
    from toolkit.data.feed import collate
    from toolkit.data.plan import Bound
    from toolkit.evaluate import outputs
    from toolkit.launch.environment import connect
    from toolkit.strategy import choose
    from toolkit.strategy.base import OptimizerRule

    file = real_texts / f"{name}.txt"
    total, targets, characters = plain_score(stories, file)
    for packing_ in ("best_fit", "none"):
        AcceleratorState._reset_state()
        given = ["--model_name_or_path", stories, "--train_file", file, "--validation_file", file]
        args = parse(LanguageModelingArguments, words(*given, "--cache_dir", tmp_path, "--packing", packing_))
        task, strategy = LanguageModeling(args), choose(connect(args, []), args)
        samples = task.prepare()["validation"]
        rule = OptimizerRule("adamw", (0.9, 0.999), 1e-8, 0.0, 1.0)
        strategy.build(task, rule, collate(task, samples, np.arange(2), 0))
        for rows in (1, 3, 16):
            figures = task.score("validation", outputs(strategy, task, samples, Bound(rows)))
            assert figures["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-5)
            assert figures["bits_per_character"] == pytest.approx(total / math.log(2) / characters, rel=1e-5)


def test_a_real_model_learns_a_real_text(stories, real_texts, tmp_path):
    """From 4.8 bits per character to below 3.3 in 60 steps; a whole epoch goes below 2.3."""
    out = tmp_path / "out"
    given = {
        "--model_name_or_path": stories,
        "--train_file": real_texts / "train.txt",
        "--validation_file": real_texts / "shakespeare.txt",
        "--output_dir": out,
        "--block_size": 128,
        "--global_batch_size": 8,
        "--max_steps": 60,
        "--learning_rate": 4e-3,
        "--warmup_steps": 0.05,
        "--cache_dir": tmp_path,
    }
    rows = run_here(words(*(word for pair in given.items() for word in pair)), "bf16", task="language_modeling")
    results = json.loads((out / "eval_results.json").read_text())
    assert rows[0]["loss"] > 4.5
    assert results["eval_bits_per_character"] < 3.3
