"""Evaluation: every sample exactly once, whatever the world size."""

import numpy as np
import torch

from toolkit.checkpoint.notice import Notice
from toolkit.data.feed import collate
from toolkit.data.plan import Bound, fullest, pieces
from toolkit.strategy.base import Strategy
from toolkit.task import Samples, Task


class Stopped(Exception):
    """A rank was asked to stop in the middle of an evaluation."""


def outputs(
    strategy: Strategy,
    task: Task,
    samples: Samples,
    bound: Bound,
    batches: int | None = None,
    notice: Notice | None = None,
) -> np.ndarray:
    """What scoring needs of every sample, float64 [n, k] in order of id, on every rank.

    The micro-batches depend on the bound alone and are dealt out to the ranks, so that a sample meets the
    same neighbours, and gets the same outputs, under any world size.

    Args:
        batches: stop after so many micro-batches per rank; rows not reached are NaN.
        notice: looked at before every micro-batch.

    Raises:
        Stopped: on all ranks, when one was asked to.
    """
    ranked = np.argsort(-samples.lengths, kind="stable")
    cuts = pieces(len(ranked), fullest(samples.lengths[ranked].tolist(), bound))
    turns = -(-len(cuts) // strategy.data_world)
    ids, rows = [], []
    with strategy.inference():
        for turn in range(turns if batches is None else min(turns, batches)):
            if notice is not None and strategy.agree(notice.come, notice.patience):
                raise Stopped
            at = turn * strategy.data_world + strategy.data_rank
            mine = ranked[slice(*cuts[at])] if at < len(cuts) else ranked[:0]
            batch = collate(task, samples, mine, 0)
            scored = task.columns(strategy.infer(batch), batch.to(strategy.device))[: len(batch.ids)]
            ids += batch.ids
            rows.append(scored)
        own = torch.cat(rows).cpu().double()
    table = np.full((len(samples), own.shape[1]), np.nan)
    own_ids = torch.tensor(ids, dtype=torch.float64).reshape(-1, 1)
    for part in strategy.gather(torch.cat([own_ids, own], dim=1)):
        table[part[:, 0].long().numpy()] = part[:, 1:].numpy()
    return table
