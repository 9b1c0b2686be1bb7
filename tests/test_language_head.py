"""The loss computed in the output layer, against cross-entropy over full logits."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.families import CAUSAL, MASKED, make
from tests.ranks import on_ranks
from tests.runs import run
from toolkit.errors import UserError
from toolkit.language import head
from toolkit.language.head import IGNORED, install
from toolkit.strategy.data_parallel import Rehearsal


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces, the last one smaller, also at a tiny vocabulary."""
    monkeypatch.setitem(head.PIECE, "cpu", 7 * 90)


def batch(seed=0):
    """Four rows of 12 tokens; a row without targets, positions without one, and padding at the end."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 90, (4, 12), generator=draw)
    labels = torch.randint(0, 90, (4, 12), generator=draw)
    labels[torch.rand(4, 12, generator=draw) < 0.3] = IGNORED
    labels[1] = IGNORED
    labels[2, 8:] = IGNORED
    mask = torch.ones_like(tokens)
    mask[2, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask}, labels


def plain(model, inputs, labels):
    logits = model(**inputs).logits.float().transpose(1, 2)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none").sum(1)


def gradients(model, loss):
    """Of a weighted sum, so that every row's own factor matters."""
    (loss * torch.tensor([1.0, 0.0, 0.5, 2.0])).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def furthest(left, right):
    """The largest difference, relative to the largest gradient there is: some are zero but for rounding."""
    assert set(left) == set(right)
    largest = max(gradient.abs().max() for gradient in right.values())
    return max(((left[name] - right[name]).abs().max() / largest).item() for name in left)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "GPTNeoX", *MASKED])
def test_losses_and_gradients_equal_those_of_full_logits(family, checkpointing):
    model = make(family)
    inputs, labels = batch()
    expected = plain(model, inputs, labels)
    reference = gradients(model, expected)
    names = set(model.state_dict())
    install(model)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()  # dropout is 0
    logits = model(**inputs, labels=labels).logits
    assert logits.shape == (4, 2) and logits.dtype == torch.float32
    assert torch.allclose(logits[:, 0], expected, rtol=1e-6, atol=1e-6)
    assert logits[:, 1].tolist() == (labels != IGNORED).sum(1).tolist()
    assert logits[1].tolist() == [0, 0]
    assert furthest(gradients(model, logits[:, 0]), reference) < 1e-6
    assert set(model.state_dict()) == names


def test_tied_weights_stay_tied():
    model = make("GPT2")
    install(model)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_without_labels_the_model_is_as_it_was():
    model = make("Llama")
    inputs, labels = batch()
    expected = model(**inputs).logits
    tokens = model.generate(input_ids=inputs["input_ids"][:1], max_new_tokens=5, do_sample=False)
    install(model)
    model(**inputs, labels=labels)  # leaves nothing behind
    assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(model.generate(input_ids=inputs["input_ids"][:1], max_new_tokens=5, do_sample=False), tokens)


@pytest.mark.parametrize("replicas", [2, 3])
def test_copies_of_the_model_have_labels_of_their_own(replicas):
    model = make("GPT2")
    inputs, labels = batch()
    install(model)
    expected = model(**inputs, labels=labels).logits
    reference = gradients(model, expected[:, 0])

    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return {"logits": self.model(**inputs).logits}

    logits = Rehearsal(Outputs(), replicas)(**inputs, labels=labels)["logits"]
    assert torch.allclose(logits, expected, rtol=1e-6)
    assert furthest(gradients(model, logits[:, 0]), reference) < 1e-6


def divided_over_two_ranks(folder):
    """Differences of outputs and gradients under tensor parallelism from those of the whole model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from toolkit.strategy.tensor import split

    dist.init_process_group("gloo")
    head.PIECE["cpu"] = 7 * 91
    whole, cut = make("Qwen2", vocab_size=91), make("Qwen2", vocab_size=91)  # tied, and not divisible by 2
    inputs, labels = batch()
    results = []
    for model in (whole, cut):
        install(model)
        if model is cut:
            split(model, init_device_mesh("cpu", (2,)))
        logits = model(**inputs, labels=labels).logits
        results.append((logits, gradients(model, logits[:, 0])))
    (expected, reference), (logits, found) = results
    found = {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in found.items()
    }
    divided = cut.get_output_embeddings().part is not None
    return [divided, (logits - expected).abs().max().item(), furthest(found, reference)]


def test_a_vocabulary_divided_over_ranks(tmp_path):
    for divided, outputs, gradient in on_ranks(divided_over_two_ranks, 2, tmp_path):
        assert divided
        assert outputs < 1e-4  # of sums of about 60
        assert gradient < 5e-6  # the ranks sum in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_as_full_logits(dtype):
    """Two passes in one context, as in a step: the cast weights that autocast keeps must not lose their gradients."""
    model = make("GPT2")
    batches = [batch(0), batch(1)]
    with torch.autocast("cpu", dtype):
        expected = sum(plain(model, *both) for both in batches)
    reference = gradients(model, expected)
    install(model)
    with torch.autocast("cpu", dtype):
        found = sum(model(**inputs, labels=labels).logits[:, 0] for inputs, labels in batches)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert furthest(gradients(model, found), reference) < (2e-2 if dtype is torch.bfloat16 else 3e-3)


def test_a_frozen_head_passes_gradients_on():
    model = make("Llama")
    inputs, labels = batch()
    model.lm_head.weight.requires_grad_(False)
    reference = gradients(model, plain(model, inputs, labels))
    install(model)
    found = gradients(model, model(**inputs, labels=labels).logits[:, 0])
    assert "lm_head.weight" not in found
    assert furthest(found, reference) < 1e-6


def test_a_batch_without_targets_has_zero_gradients_everywhere():
    """Where ranks exchange gradients, every parameter must have one."""
    model = make("Llama")
    inputs, labels = batch()
    install(model)
    found = gradients(model, model(**inputs, labels=torch.full_like(labels, IGNORED)).logits[:, 0])
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert max(gradient.abs().max() for gradient in found.values()) == 0


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_a_model_that_changes_its_logits_is_refused(family):
    model = make(family)
    with pytest.raises(UserError, match="scales or caps"):
        install(model)


def test_every_other_causal_family_has_a_plain_head():
    for family in CAUSAL:
        install(make(family))


def test_memory_is_far_below_that_of_full_logits():
    """The benchmark with a half of its length and a third of its vocabulary."""
    found = {}
    for way in ("full", "pieces"):
        words = ["--way", way, "--length", "1024", "--vocabulary", "50000"]
        result = run([sys.executable, "benchmarks/lm_memory.py", *words], 120, OMP_NUM_THREADS="1")
        assert result.returncode == 0, result.stdout + result.stderr
        found[way] = json.loads(result.stdout)["peak_bytes"]
    assert found["pieces"] < found["full"] / 3, found
