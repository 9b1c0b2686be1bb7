"""A model cut into stages: every stage by hand, in one process, against the whole model."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.errors import UserError
from toolkit.strategy.anatomy import examine
from toolkit.strategy.schedule import BACKWARD, FORWARD, idle_share, order
from toolkit.strategy.stages import Stage, make_plan, partition
from toolkit.task import Batch

VOCABULARY, CLASSES = 40, 3
BLOCKS = 3
LENGTHS = [[9, 4], [12, 12, 3], [5]]  # of the rows of each micro-batch
IGNORED = -100

# Sizes by the names that each family gives them.
BERT = {
    "num_hidden_layers": BLOCKS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "num_hidden_layers": BLOCKS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "use_cache": False,
}
GPT2 = {"n_layer": BLOCKS, "n_embd": 32, "n_head": 4, "n_positions": 64, "use_cache": False}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DISTILBERT = {"n_layers": BLOCKS, "dim": 32, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
MODERNBERT = {
    "num_hidden_layers": BLOCKS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "classifier_dropout": 0.0,
}
MODELS = {
    "Bert classification": ("BertForSequenceClassification", BERT),
    "Bert masked language model": ("BertForMaskedLM", BERT),
    "Roberta classification": ("RobertaForSequenceClassification", BERT),
    "DistilBert classification": ("DistilBertForSequenceClassification", {**DISTILBERT, "seq_classif_dropout": 0.0}),
    "ModernBert classification": ("ModernBertForSequenceClassification", MODERNBERT),
    "Electra classification": ("ElectraForSequenceClassification", {**BERT, "embedding_size": 16}),
    "GPT2 classification": ("GPT2ForSequenceClassification", {**GPT2, **NO_DROPOUT}),
    "Llama classification": ("LlamaForSequenceClassification", LLAMA),
    "Qwen2 classification": ("Qwen2ForSequenceClassification", LLAMA),
    "GPT2 tied": ("GPT2LMHeadModel", {**GPT2, **NO_DROPOUT}),
    "Llama tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "Llama untied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": False}),
    "Qwen2 tied": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
}


class Sums:
    """The loss of a task: of each row's label, or of each row's tokens."""

    def loss(self, outputs, batch):
        logits = outputs["logits"].float()
        if batch.targets.dim() == 1:
            return F.cross_entropy(logits, batch.targets, reduction="none")
        return F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORED, reduction="none").sum(1)


def make_model(name, **more):
    import transformers

    class_name, settings = MODELS[name]
    model_class = getattr(transformers, class_name)
    special = {"vocab_size": VOCABULARY, "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    # Wide weights, so that no gradient is near zero by itself.
    config = model_class.config_class(**{**special, "initializer_range": 0.2, **settings, **more})
    return model_class(config)


def make_batches(name):
    draw = torch.Generator().manual_seed(1)
    batches = []
    for lengths in LENGTHS:
        tokens = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=draw)
        mask = torch.tensor([[i < length for i in range(max(lengths))] for length in lengths]).long()
        labels = torch.randint(0, CLASSES, (len(lengths),), generator=draw)
        if "classification" not in name:
            labels = torch.where(mask.bool(), tokens.roll(-1, 1), IGNORED)
        inputs = {"input_ids": tokens * mask, "attention_mask": mask}
        batches.append(Batch(inputs, labels, list(range(len(lengths))), float(len(lengths)), int(mask.sum())))
    return batches


def whole_gradients(model, batches):
    """Each micro-batch through the whole model: losses, and gradients by the state's names."""
    model.eval()
    losses = [Sums().loss(model(**batch.inputs), batch).sum() for batch in batches]
    sum(losses).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def cut(make, stages, probe):
    """All stages of a model, each cut from a copy of its own, as each rank would."""
    result = []
    for number in range(stages):
        model = make()
        seen = examine(model, Sums(), probe, nullcontext())
        plan = make_plan(model, seen, stages)
        stage = Stage(model, seen, plan, number)
        stage.check(seen, plan.layers[number], probe, nullcontext())
        result.append(stage)
    return result, plan


def run_by_hand(stages, batch):
    """One micro-batch up and down the stages; its loss."""
    passes, hidden = [], None
    for stage in stages:
        received = None if hidden is None else hidden.detach().requires_grad_()
        hidden = stage(batch.inputs, received)
        passes.append((received, hidden))
    loss = Sums().loss(hidden, batch).sum()
    loss.backward()
    for (received, _), (_, given) in zip(passes[:0:-1], passes[-2::-1]):
        given.backward(received.grad)
    return loss.item()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_gradients_of_the_whole_model(name, stages, tmp_path):
    batches = make_batches(name)
    model = make_model(name)
    losses, expected = whole_gradients(model, batches)
    parts, plan = cut(lambda: make_model(name), stages, batches[0])
    for batch, loss in zip(batches, losses):
        assert run_by_hand(parts, batch) == pytest.approx(loss, rel=1e-6)
    found = {}
    for part in parts:
        for key, parameter in part.parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[key] = found[key] + gradient if key in found else gradient
    assert set(found) == set(expected)  # every parameter somewhere
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    worst = max((found[key] - expected[key]).abs().max().item() for key in expected)
    assert worst < 1e-6 * largest
    tied = bool(model.config.tie_word_embeddings) and "classification" not in name
    assert bool(plan.tied) == tied
    counts = [sum(p.numel() for p in part.parameters.values()) for part in parts]
    assert counts == plan.parameters
    shared = sum(p.numel() for key, p in parts[0].parameters.items() if key in plan.tied)
    assert sum(counts) == sum(p.numel() for p in model.parameters()) + shared
    assert list(plan.state) == list(model.state_dict())
    # What the stages hold together is the whole model, which the first one can save.
    state = {key: parts[saved.stage].tensors()[saved.name].detach() for key, saved in plan.state.items()}
    parts[0].model.save_pretrained(tmp_path, state_dict=state)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0].inputs).logits, model(**batches[0].inputs).logits)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_layers_that_run_again_in_the_backward_pass():
    def checkpointed():
        model = make_model("Qwen2 tied")
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    batches = make_batches("Qwen2 tied")
    losses, expected = whole_gradients(make_model("Qwen2 tied"), batches)
    parts, _ = cut(checkpointed, 3, batches[0])
    runs = []
    for part in parts:
        part.model.train()
        for block in part.model.model.layers:
            if any(True for _ in block.parameters()):
                block.mlp.register_forward_pre_hook(lambda *ignored: runs.append(1))
    assert [run_by_hand(parts, batch) for batch in batches] == pytest.approx(losses, rel=1e-6)
    assert len(runs) == 2 * BLOCKS * len(batches)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for part in parts:
        for key, parameter in part.parameters.items():
            if key not in ("model.embed_tokens.weight", "lm_head.weight"):
                assert (parameter.grad - expected[key]).abs().max().item() < 1e-6 * largest


@pytest.mark.parametrize(
    ("class_name", "settings", "reason"),
    [
        # All blocks are one.
        ("AlbertForSequenceClassification", {**BERT, "embedding_size": 16}, "not each called once and in order"),
        ("T5ForSequenceClassification", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}, "with a decoder"),
        # Relative positions go into every block, from one table.
        (
            "DebertaV2ForSequenceClassification",
            {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            "encoder.rel_embeddings.weight is used beside its blocks",
        ),
    ],
)
def test_models_that_are_no_chain_of_blocks_are_refused(class_name, settings, reason, monkeypatch):
    monkeypatch.setitem(MODELS, "odd classification", (class_name, settings))
    with pytest.raises(UserError, match=f"{class_name} cannot be cut .*{reason}.*/fsdp2.yaml"):
        cut(lambda: make_model("odd classification"), 2, make_batches("odd classification")[0])


class Remembers(nn.Module):
    """A final norm that also reads what the first block was given."""

    def __init__(self, model):
        super().__init__()
        self.norm = model.model.norm
        model.model.layers[0].register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, module, args, kwargs):
        self.kept = args[0]

    def forward(self, hidden):
        return self.norm(hidden + self.kept)


def test_a_path_beside_the_hidden_state_is_noticed():
    def remembering():
        model = make_model("Llama classification")
        model.model.norm = Remembers(model)
        return model

    with pytest.raises(UserError, match=r"stage 1 needs more than the hidden state of the one before.*/fsdp2\.yaml"):
        cut(remembering, 2, make_batches("Llama classification")[0])


def test_more_stages_than_blocks():
    with pytest.raises(UserError, match=r"--pipeline_stages 4: LlamaForCausalLM has only 3 blocks \(model\.layers\)"):
        cut(lambda: make_model("Llama tied"), 4, make_batches("Llama tied")[0])


def test_unused_parameters_stay_with_the_first_stage():
    def with_spare():
        model = make_model("Bert classification")
        model.spare = nn.Linear(4, 4)
        return model

    probe = make_batches("Bert classification")[0]
    assert examine(with_spare(), Sums(), probe, nullcontext()).unused == ["spare.weight", "spare.bias"]
    parts, plan = cut(with_spare, 2, probe)
    assert ["spare.weight" in part.parameters for part in parts] == [True, False]
    assert plan.state["spare.weight"].stage == 0


def test_stages_are_balanced_by_their_parameters():
    # A large embedding: the first stage has one block, and the others share the rest.
    _, plan = cut(lambda: make_model("Llama untied", vocab_size=800), 2, make_batches("Llama untied")[0])
    assert plan.layers == [range(0, 2), range(2, 3)]
    _, plan = cut(lambda: make_model("Bert classification", vocab_size=2000), 2, make_batches("Bert classification")[0])
    assert plan.layers == [range(0, 1), range(1, 3)]
    assert plan.describe().startswith("stages: block 0 (")


def test_the_largest_part_is_as_small_as_can_be():
    def cuts(count, stages):
        if stages == 1:
            yield [count]
            return
        for size in range(1, count - stages + 2):
            yield from ([size, *rest] for rest in cuts(count - size, stages - 1))

    def largest(costs, sizes):
        at = [sum(sizes[:i]) for i in range(len(sizes))]
        return max(sum(costs[start : start + size]) for start, size in zip(at, sizes))

    for costs in ([5, 1, 1, 1, 1, 9], [1] * 7, [3, 1, 4, 1, 5, 9, 2, 6], [10, 1, 1]):
        for stages in range(1, min(5, len(costs)) + 1):
            found = partition(costs, stages)
            assert [i for part in found for i in part] == list(range(len(costs)))
            assert all(len(part) for part in found)
            best = min(largest(costs, sizes) for sizes in cuts(len(costs), stages))
            assert largest(costs, [len(part) for part in found]) == best


def play(stages, micro_batches, schedule):
    """Passes of one unit of time each, done as soon as their input is there: (length, passes by stage, in flight)."""
    ends, clocks, most = {}, [0] * stages, [0] * stages
    queues = [order(stage, stages, micro_batches, schedule) for stage in range(stages)]
    passes = [list(queue) for queue in queues]
    flying = [0] * stages
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, index = queue[0]
            needed = (kind, index, stage - 1 if kind == FORWARD else stage + 1)
            if kind == BACKWARD and stage == stages - 1:
                needed = (FORWARD, index, stage)
            if (kind, stage) != (FORWARD, 0) and needed not in ends:
                continue
            clocks[stage] = ends[kind, index, stage] = max(clocks[stage], ends.get(needed, 0)) + 1
            flying[stage] += 1 if kind == FORWARD else -1
            most[stage] = max(most[stage], flying[stage])
            queue.pop(0)
            moved = True
        assert moved, "the stages wait for each other for ever"
    return max(clocks), passes, most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_schedules(schedule, stages, micro_batches):
    length, passes, in_flight = play(stages, micro_batches, schedule)
    assert 1 - 2 * micro_batches / length == pytest.approx(idle_share(stages, micro_batches))
    for stage, own in enumerate(passes):
        for kind in (FORWARD, BACKWARD):
            assert [index for name, index in own if name == kind] == list(range(micro_batches))
        assert in_flight[stage] == (micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage))
