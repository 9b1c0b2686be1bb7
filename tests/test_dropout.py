"""Dropout on a CPU: torch's in all but the numbers drawn."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.families import BERT, GPT2, LLAMA, MASKED
from toolkit.dropout import KERNEL, Dropout, attend, install

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
    kernel = model.config._attn_implementation
    install(model, attention=True)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    assert not any(type(module) is nn.Dropout for module in model.modules())
    undropped = mock.patch("torch.nn.functional.dropout", lambda input, *args, **how: input)
    with undropped, mock.patch("toolkit.dropout._scale", side_effect=lambda like, p: torch.ones_like(like)) as scale:
        given = model.train()(input_ids=ids, attention_mask=mask).logits
    assert scale.called
    assert (given - expected).abs().max() < 1e-5
    assert model.config._attn_implementation == (KERNEL if kernel == "sdpa" else kernel)
    assert KERNEL not in str(model.config.to_dict())  # nobody else knows it


@pytest.mark.parametrize("case", ["mask", "no mask", "causal", "grouped", "float mask"])
def test_attention_is_torchs_where_nothing_is_dropped(case):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = nn.Module()
    module.num_key_value_groups = 2 if case == "grouped" else 1
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8) for heads in (4, *(4 // module.num_key_value_groups,) * 2))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, :, 4:] = False
    if case == "float mask":
        mask = torch.zeros(2, 1, 6, 6).masked_fill(~mask, -torch.inf)
    how = {"attention_mask": None if case in ("no mask", "causal") else mask, "is_causal": case == "causal"}
    expected, _ = sdpa_attention_forward(module, query, key, value, dropout=0.0, **how)
    with mock.patch("toolkit.dropout._scale", side_effect=lambda like, p: torch.ones_like(like)) as scale:
        given, _ = attend(module, query, key, value, dropout=1e-4, **how)
    assert scale.called == (case in ("mask", "no mask"))
    assert (given - expected).abs().max() < (1e-5 if scale.called else 1e-1)
