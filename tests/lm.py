"""Language modelling in a few lines, and training without files, to test the step by itself."""

import os
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.arguments import Arguments, parse
from toolkit.data.feed import Feed
from toolkit.fit import _prepare
from toolkit.launch.environment import connect
from toolkit.settings import batch_sizes, check_flags, learning_rate, make_schedule
from toolkit.step import Stepper
from toolkit.strategy import choose
from toolkit.strategy.base import Strategy, Update
from toolkit.task import Batch

# Two runs agree where every weight does: nothing hides a wrong gradient.
EXACT = ["--optim", "sgd", "--learning_rate", "1", "--lr_scheduler_type", "constant", "--max_grad_norm", "0"]
IGNORED = -100


@dataclass
class Rows:
    """Token ids of each row, and the token to predict at each position (IGNORED: none)."""

    tokens: list[list[int]]
    labels: list[list[int]]

    @property
    def lengths(self):
        return np.array([len(row) for row in self.tokens])

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, sample):
        return {"tokens": self.tokens[sample], "labels": self.labels[sample]}


def random_rows(lengths, seed=0) -> Rows:
    """Rows of random tokens of a vocabulary of 50, each predicting the next one."""
    draw = np.random.RandomState(seed)
    tokens = [draw.randint(1, 50, length).tolist() for length in lengths]
    return Rows(tokens, [[*row[1:], IGNORED] for row in tokens])


class TinyLM:
    """See `toolkit.task.Task`. GPT-2: 2 layers, width 32, tied embeddings."""

    name = "lm"

    def __init__(self, rows: Rows, **config) -> None:
        self.samples = rows
        self.config = config
        self.seen: list[list[int]] = []  # ids of every collated micro-batch, fillers included

    def model(self, **how):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 50}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, "use_cache": False, **self.config}))

    def collate(self, rows, ids, epoch):
        self.seen.append(list(ids))
        length = max(len(row["tokens"]) for row in rows)
        fill = lambda row, name, value: row[name] + [value] * (length - len(row[name]))  # noqa: E731
        labels = torch.tensor([fill(row, "labels", IGNORED) for row in rows])
        inputs = {
            "input_ids": torch.tensor([fill(row, "tokens", 0) for row in rows]),
            "attention_mask": torch.tensor([[i < len(row["tokens"]) for i in range(length)] for row in rows]).long(),
        }
        targets = int((labels != IGNORED).sum())
        return Batch(inputs, labels, list(ids), targets, sum(len(row["tokens"]) for row in rows))

    def loss(self, outputs, batch):
        logits = outputs["logits"].float().transpose(1, 2)
        return F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="none").sum(1)

    def columns(self, outputs, batch):
        return self.loss(outputs, batch)[:, None]


@dataclass
class Trained:
    strategy: Strategy
    feed: Feed
    stepper: Stepper
    updates: list[Update] = field(default_factory=list)
    ids: list[list[list[int]]] = field(default_factory=list)  # of this rank's micro-batches, step by step

    @property
    def weights(self):
        return dict(self.strategy.model.named_parameters())

    @property
    def losses(self):
        return [update.loss for update in self.updates]

    @property
    def norms(self):
        return [update.grad_norm for update in self.updates]


def prepare(task, flags, precision="no") -> Trained:
    """What `toolkit.fit` has before the first step."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    args = parse(Arguments, [str(word) for word in flags])
    with mock.patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": precision}):
        world = connect(args, check_flags(args))
    strategy = choose(world, args)
    sizes, _ = batch_sizes(args, strategy.data_world * strategy.devices)
    schedule = make_schedule(args, sizes.global_batch, task.samples.lengths)
    feed = _prepare(task, args, world, strategy, task.samples, schedule, sizes.rows)
    stepper = Stepper(strategy, feed, learning_rate(args, schedule.total_steps), args.seed, args.skip_nonfinite_steps)
    return Trained(strategy, feed, stepper)


def train(task, flags, precision="no") -> Trained:
    """All steps of a run, without evaluation and files."""
    trained = prepare(task, flags, precision)
    for work in trained.feed:
        trained.ids.append([batch.ids for batch in work.batches])
        trained.updates.append(trained.stepper.take(work)[0])
    return trained


def plain_steps(model, rows: Rows, batches, rate=1.0):
    """Textbook SGD over whole padded batches with the mean loss over their targets: losses, norms, weights."""
    losses, norms = [], []
    for ids in batches:
        length = max(len(rows.tokens[i]) for i in ids)
        tokens = torch.zeros(len(ids), length, dtype=torch.long)
        mask = torch.zeros(len(ids), length, dtype=torch.long)
        labels = torch.full((len(ids), length), IGNORED)
        for at, i in enumerate(ids):
            count = len(rows.tokens[i])
            tokens[at, :count] = torch.tensor(rows.tokens[i])
            labels[at, :count] = torch.tensor(rows.labels[i])
            mask[at, :count] = 1
        logits = model(input_ids=tokens, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(float(torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients))))
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= rate * gradient
    return losses, norms, dict(model.named_parameters())


def furthest(left, right) -> float:
    """The largest absolute difference of two sets of named tensors."""
    assert set(left) == set(right)
    return max((left[name] - right[name]).abs().max().item() for name in left)
