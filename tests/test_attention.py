"""Attention on a CPU, and blocks without padding: the model's own results in all but rounding."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from tests import families
from tests.families import BERT, CAUSAL, GPT2, LLAMA, MASKED
from toolkit.attention import PADDED, UNPADDED, Row, attend, install, keep_padding, rounded, row_or_mask, unpads

# Classifiers, and whether padding is left out of their blocks.
CLASSIFIERS = {
    "Bert": (MASKED["Bert"], True),
    "Roberta": (MASKED["Roberta"], True),
    "DistilBert": ({**MASKED["DistilBert"], "seq_classif_dropout": 0.0}, True),
    "ModernBert": (MASKED["ModernBert"], True),
    "Electra": (BERT, True),
    "XLMRoberta": ({**BERT, "pad_token_id": 1}, True),
    "GPT2": ({**GPT2, "pad_token_id": 0}, True),
    "Llama": (LLAMA, True),
    "Qwen2": (LLAMA, True),
    "Mistral": (CAUSAL["Mistral"], True),
    "MPNet": (BERT, False),
    "DebertaV2": (BERT, False),
}
LENGTHS = (3, 12, 1, 7, 12)


def classifier(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CLASSIFIERS[name][0], num_labels=3)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)  # tokens matter to each other
    return model


def texts(model, lengths=LENGTHS, side="right"):
    torch.manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(5, 90, mask.shape).masked_fill(~mask, model.config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask.long()}


def gradients(model, inputs, weigh):
    model.zero_grad()
    outputs = model(**inputs)
    weigh(outputs.logits).sum().backward()
    return outputs.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(given, expected, tolerance=2e-5):
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        # Relative to the largest, with room for gradients that are zero by mathematics, such as of BERT's key biases.
        assert (given[name] - value).abs().max() <= tolerance * value.abs().max() + 1e-5, name


# Encoders pool the first token, which is padding on the left.
@pytest.mark.parametrize(
    ("name", "side"), [*((name, "right") for name in CLASSIFIERS), ("GPT2", "left"), ("Llama", "left")]
)
def test_a_classifier_is_transformers_own(name, side):
    model = classifier(name)
    inputs = texts(model, side=side)
    weigh = lambda logits: logits.sin()  # noqa: E731
    logits, expected = gradients(model, inputs, weigh)
    install(model)
    assert unpads(model) == CLASSIFIERS[name][1]
    for training in (False, True):
        given_logits, given = gradients(model.train(training), inputs, weigh)
        assert (given_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
        same(given, expected)


@pytest.mark.parametrize("name", ["Bert", "ModernBert", "Llama", "GPT2"])
def test_a_language_model_of_padded_texts_is_transformers_own(name):
    model = families.make(name)
    model.config.pad_token_id = 0
    inputs = texts(model)
    real = inputs["attention_mask"].bool()
    weigh = lambda logits: logits[real].sin()  # noqa: E731
    logits, expected = gradients(model, inputs, weigh)
    install(model)
    assert unpads(model)
    given_logits, given = gradients(model, inputs, weigh)
    assert (given_logits - logits)[real].abs().max() <= 1e-5 * logits.abs().max()
    same(given, expected)


@pytest.mark.parametrize("lengths", [(1,), (31,), (32,), (33,), (5, 5, 5), (40, 1, 1, 1, 1, 1, 1, 1), (50, 20) * 16])
def test_blocks_see_real_tokens_alone(lengths):
    model = classifier("Bert")
    inputs = texts(model, lengths)
    expected = model(**inputs).logits
    install(model)
    seen = []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape[:2])))
    assert (model(**inputs).logits - expected).abs().max() < 1e-5
    assert len(set(seen)) == 1 and len(seen) == 2
    assert seen[0][0] == 1
    # A row as wide as the batch would be taken for one, and is made longer.
    assert seen[0][1] - rounded(sum(lengths)) in ((0,) if rounded(sum(lengths)) != max(lengths) else (32,))
    assert sum(lengths) < seen[0][1] <= sum(lengths) + 64


def test_a_row_that_would_be_as_long_as_its_batch():
    model = classifier("Bert")
    inputs = texts(model, (20, 32))
    inputs = {name: value[:1] for name, value in inputs.items()}  # 20 tokens, a row of 32, in a batch of 32
    expected = model(**inputs).logits
    install(model)
    assert (model(**inputs).logits - expected).abs().max() < 1e-5


def test_a_model_whose_tokens_meet_outside_of_attention_keeps_its_padding():
    class Mixing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden + hidden.roll(1, dims=1))

    model = classifier("Bert")
    layer = model.bert.encoder.layer[1]
    layer.intermediate = Mixing(layer.intermediate)
    inputs = texts(model, (6, 4, 5))
    expected = model(**inputs).logits
    install(model)
    assert not unpads(model)
    assert model.config._attn_implementation == PADDED
    assert (model(**inputs).logits - expected).abs().max() < 1e-5


def test_a_model_whose_blocks_need_a_mask_that_is_a_tensor_keeps_its_padding():
    model = classifier("Bert")
    layer = model.bert.encoder.layer[1]
    forward = layer.forward
    layer.forward = lambda hidden, mask, *args, **kwargs: forward(hidden, mask.clone(), *args, **kwargs)
    inputs = texts(model, (6, 4, 5))
    expected = model(**inputs).logits
    install(model)
    assert not unpads(model)
    assert (model(**inputs).logits - expected).abs().max() < 1e-5


def test_a_model_that_cannot_be_tried_keeps_its_padding():
    model = classifier("Bert")
    model.bert.embeddings.forward = mock.Mock(side_effect=ValueError("not like this"))
    install(model)  # whoever runs it in earnest says what is wrong
    assert model.config._attn_implementation == PADDED


def test_padding_can_be_kept():
    model = classifier("Bert")
    install(model)
    keep_padding(model)
    seen = []
    model.bert.encoder.layer[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(**texts(model))
    assert seen == [(5, 12, 32)]
    keep_padding(nn.Linear(2, 2))  # any other model is none of its business
    assert not unpads(nn.Linear(2, 2))


def test_checkpointed_blocks_drop_the_same_and_give_the_same_gradients():
    model = classifier("Bert")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.2
    install(model)
    inputs = texts(model)

    def run(model):
        torch.manual_seed(3)
        return gradients(model.train(), inputs, lambda logits: logits.sin())

    once, expected = run(model)
    other = copy.deepcopy(model)
    other.activation_checkpointing_enable({"use_reentrant": False})
    again, given = run(other)
    assert torch.equal(once, again)
    same(given, expected, 1e-6)
    assert not torch.equal(run(model.eval())[0], model.eval()(**inputs).logits)  # something was dropped


def test_bf16_is_as_far_from_fp32_as_with_padding():
    model = classifier("Bert")
    inputs = texts(model)
    exact = model(**inputs).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        padded = (model(**inputs).logits.float() - exact).abs().max()
        install(model)
        assert (model(**inputs).logits.float() - exact).abs().max() <= 2 * padded


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_its_place(seed):
    draw = torch.Generator().manual_seed(seed)
    texts_, length = (int(torch.randint(1, high, (), generator=draw)) for high in (40, 200))
    real = torch.rand(texts_, length, generator=draw) < torch.rand(texts_, 1, generator=draw)
    real[0, 0] = True
    row = Row(real, lambda **how: None)
    values = torch.randn(texts_, length, 3, generator=draw)
    inside = row.enter(values)
    assert inside.shape == (1, row.size, 3)
    assert torch.equal(inside[0, : row.tokens], values[real])
    assert torch.equal(row.leave(inside)[real], values[real])
    heads = inside.view(1, row.size, 3, 1).transpose(1, 2)
    parts = row.spread(heads)
    assert torch.equal(row.collect([part.transpose(1, 2) for part in parts])[0, : row.tokens, :, 0], values[real])
    # Texts are whole, in their order, and side by side with others that are not much longer.
    found = [part[i, :, :, 0].T for part in parts for i in range(len(part))]
    wanted = [values[i, real[i]] for i in range(texts_) if real[i].any()]
    for text in wanted:
        assert any(torch.equal(slot[: len(text)], text) for slot in found)
    slots = sum(part.shape[0] * part.shape[2] for part in parts)
    assert slots <= texts_ * (length + 7)


def test_what_cannot_be_a_row_gets_its_mask():
    how = {"batch_size": 2, "q_length": 3, "kv_length": 3}
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert isinstance(row_or_mask(mask, **how), Row)
    assert row_or_mask(mask, **how, use_vmap=True).shape == (2, 1, 3, 3)
    assert row_or_mask(mask, **{**how, "q_length": 1}).shape == (2, 1, 1, 3)  # one more token of a text, with a cache
    assert not isinstance(row_or_mask(torch.zeros_like(mask), **how), Row)
    assert not isinstance(row_or_mask(None, **how), Row)


def test_writing_without_a_cache_is_transformers_own():
    model = families.make("Llama")
    model.config.pad_token_id = 0
    inputs = texts(model, side="left")
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **how)
    install(model)
    assert unpads(model)
    assert torch.equal(model.generate(**inputs, **how), expected)


def test_nobody_else_meets_our_names():
    model = classifier("Bert")
    install(model)
    assert model.config._attn_implementation == UNPADDED
    assert "sdpa_cpu" not in str(model.config.to_dict())
    for changed in ("eager", "flex_attention"):
        other = classifier("Bert")
        other.set_attn_implementation(changed)
        install(other)
        assert other.config._attn_implementation == changed


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
    with mock.patch("toolkit.attention.factors", side_effect=lambda like, p: torch.ones_like(like)) as factors:
        given, _ = attend(module, query, key, value, dropout=1e-4, **how)
    assert factors.called == (case in ("mask", "no mask"))
    assert (given - expected).abs().max() < (1e-5 if factors.called else 1e-1)
