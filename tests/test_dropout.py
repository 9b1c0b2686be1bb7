"""Dropout on a CPU: torch's in all but the numbers drawn."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.families import BERT, GPT2, LLAMA, MASKED
from toolkit import attention
from toolkit.dropout import Dropout, install

DROPPING = {"attention_probs_dropout_prob": 0.1}
FAMILIES = {
    **{name: {**MASKED[name], **DROPPING} for name in ("Bert", "Roberta")},
    **{name: {**MASKED[name], "attention_dropout": 0.1} for name in ("DistilBert", "ModernBert")},
    **{name: {**BERT, **DROPPING} for name in ("Electra", "Albert", "XLMRoberta", "MPNet", "DebertaV2")},
    "GPT2": {**GPT2, "attn_pdrop": 0.1, "pad_token_id": 0},
    "Llama": {**LLAMA, "attention_dropout": 0.1, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_goes_and_the_scale_of_the_rest(p, dtype):
    torch.manual_seed(0)
    count = 400_001  # not a multiple of what is drawn at once
    ones = torch.ones(count, dtype=dtype, requires_grad=True)
    dropped = Dropout(p)(ones)
    assert dropped.dtype == dtype
    zero, scaled = dropped.unique().tolist()
    assert zero == 0 and scaled == nn.functional.dropout(torch.ones(99, dtype=dtype), p).max()
    share = (dropped == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5
    # Neighbours go independently of each other, also those of one draw.
    gone = (dropped[: count // 4 * 4] == 0).double().view(-1, 4)
    assert torch.corrcoef(gone.T).fill_diagonal_(0).abs().max() < 0.02
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped.detach())


def test_evaluation_and_the_extremes_are_torchs():
    values = torch.randn(7, 5)
    assert Dropout(0.3).eval()(values) is values
    assert torch.equal(Dropout(0.0)(values), values)
    assert torch.equal(Dropout(1.0)(values), torch.zeros(7, 5))
    assert Dropout(0.3)(values.to("meta")).device.type == "meta"
    assert Dropout(0.3)(torch.ones(0, 4)).shape == (0, 4)


def test_the_seed_rules_and_a_recomputed_pass_drops_the_same():
    layers = nn.Sequential(nn.Linear(16, 64), Dropout(0.3), nn.Linear(64, 1))
    inputs = torch.randn(9, 16)

    def gradient(run):
        layers.zero_grad()
        torch.manual_seed(5)
        run(inputs).sum().backward()
        return layers[0].weight.grad.clone()

    once = gradient(layers)
    assert torch.equal(gradient(layers), once)
    assert torch.equal(gradient(lambda x: checkpoint(layers, x, use_reentrant=False)), once)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_the_same_but_for_what_it_drops(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], num_labels=2)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    ids = torch.randint(5, 90, (3, 12))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    ids[0, 8:] = config.pad_token_id
    expected = model.eval()(input_ids=ids, attention_mask=mask).logits
    install(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    attention.install(model)
    assert not any(type(module) is nn.Dropout for module in model.modules())
    undropped = mock.patch("torch.nn.functional.dropout", lambda input, *args, **how: input)
    ones = {"side_effect": lambda like, p: torch.ones_like(like)}
    modules, scores = (mock.patch(f"toolkit.{name}.factors", **ones) for name in ("dropout", "attention"))
    with undropped, modules as of_modules, scores as of_scores:
        given = model.train()(input_ids=ids, attention_mask=mask).logits
    assert of_modules.called or of_scores.called
    assert (given - expected).abs().max() < 1e-5
