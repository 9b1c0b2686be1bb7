"""In which order the stages of a pipeline do their passes."""

FORWARD, BACKWARD = "forward", "backward"


def order(stage: int, stages: int, micro_batches: int, schedule: str) -> list[tuple[str, int]]:
    """The passes of one stage in one step: (forward or backward, micro-batch).

    Both directions go through the micro-batches in ascending order on every stage, so messages between two
    stages need no label. `gpipe` (Huang et al. 2019) does all forward passes first; `1f1b` (PipeDream-Flush,
    Narayanan et al. 2021) begins a backward pass as soon as it can, and holds the activations of at most
    stages - stage micro-batches.
    """
    # Forward passes before the first backward one: until the first micro-batch has come back from the last stage.
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    passes = [(FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches):
        passes.append((BACKWARD, index))
        if ahead + index < micro_batches:
            passes.append((FORWARD, ahead + index))
    return passes


def idle_share(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage waits, for stages and micro-batches of equal cost.

    (S - 1) / (M + S - 1), the same for both schedules: Huang et al. 2019, section 2.3 (GPipe's bubble);
    Narayanan et al. 2021, section 2.2, give the same time relative to the computation, (S - 1) / M.
    """
    return (stages - 1) / (micro_batches + stages - 1)
