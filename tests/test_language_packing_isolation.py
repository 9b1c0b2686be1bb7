"""A packed document gets what it gets alone: no token sees another document."""

import pytest
import torch

from tests.families import CAUSAL, LEAKING, MASKED, make
from toolkit.data.encoding import first_position
from toolkit.errors import UserError
from toolkit.language import isolation

DOCUMENTS = [[9, 5, 13], [4, 1, 6, 10]]  # lengths in each row, longer than the sliding windows of the models


def packed_rows():
    """Two rows of documents, the shorter one padded by a document of its own."""
    draw = torch.Generator().manual_seed(1)
    longest = max(map(sum, DOCUMENTS))
    rows = [[*lengths, longest - sum(lengths)] for lengths in DOCUMENTS]
    documents = [[torch.randint(5, 90, (length,), generator=draw) for length in row if length] for row in rows]
    tokens = torch.stack([torch.cat(row) for row in documents])
    positions = torch.stack([torch.cat([torch.arange(len(part)) for part in row]) for row in documents])
    return documents, tokens, positions


def furthest_from_alone(model):
    """The largest difference of a packed document's logits from its own, of the largest logit."""
    documents, tokens, positions = packed_rows()
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions).logits
        worst, largest = 0.0, packed.abs().max().item()
        for row, parts in zip(packed, documents):
            for part, logits in zip(parts, row.split([len(part) for part in parts])):
                alone = model(input_ids=part[None]).logits[0]
                worst = max(worst, (logits - alone).abs().max().item() / largest)
    return worst


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_keep_documents_apart_by_their_positions(family, kernel):
    model = make(family)
    if family != "Falcon":  # which chooses its attention when it is made
        model.set_attn_implementation(kernel)
    assert furthest_from_alone(model) < 1e-5
    isolation.check(model)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MASKED)
def test_masked_models_keep_documents_apart_by_a_mask_of_ours(family, kernel):
    model = make(family)
    model.set_attn_implementation(kernel)
    with pytest.raises(UserError, match="--packing none"):
        isolation.check(model)
    isolation.separate(model, first_position(model.config))
    assert furthest_from_alone(model) < 1e-5
    isolation.check(model)


def test_under_autocast_too():
    model = make("Bert")
    isolation.separate(model, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert furthest_from_alone(model) < 2e-2


@pytest.mark.parametrize("spread", [0.02, 0.2], ids=["as initialised", "as trained"])
@pytest.mark.parametrize("family", LEAKING)
def test_models_that_let_documents_see_each_other_are_refused(family, spread):
    model = make(family, spread)
    with pytest.raises(UserError, match=f"{family}ForCausalLM does not keep documents apart"):
        isolation.check(model)


def test_a_mask_that_is_given_lets_documents_see_each_other():
    """The trap that the check is for: with an attention mask the positions alone separate nothing."""
    model = make("Llama")
    _, tokens, positions = packed_rows()
    with torch.no_grad():
        apart = model(input_ids=tokens, position_ids=positions).logits
        together = model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    assert (apart - together).abs().max() > 1e-2


def test_kernels_that_were_not_tried_are_refused():
    assert isolation.kernel_problems("sdpa") == isolation.kernel_problems(None) == []
    assert "--packing none" in isolation.kernel_problems("flash_attention_2")[0]
