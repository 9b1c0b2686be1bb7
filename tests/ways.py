"""The ways to run a training that a checkpoint goes between: flags, and what the launcher says."""

from typing import NamedTuple


class Way(NamedTuple):
    """How a run is started."""

    processes: int
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # as `accelerate launch` sets it

    def run(self, flags: list[str]) -> dict:
        """The arguments of `tests.runs.run_here`."""
        return {"flags": [*flags, *self.flags], "environment": dict(self.environment)}


def zero(stage: int, processes: int = 2) -> Way:
    said = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": str(stage)}
    said |= {"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}
    return Way(processes, (), tuple((f"ACCELERATE_{name}", value) for name, value in said.items()))


def mesh(shards: int, tensors: int = 1) -> Way:
    said = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    if tensors > 1:
        said["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        said |= {"PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shards), "PARALLELISM_CONFIG_TP_SIZE": str(tensors)}
    return Way(shards * tensors, (), tuple(said.items()))


WAYS = {
    "one process": Way(1),
    "DDP x 2": Way(2),
    "ZeRO-1 x 2": zero(1),
    "ZeRO-2 x 2": zero(2),
    "ZeRO-3 x 2": zero(3),
    "FSDP2 x 2": mesh(2),
    "TP 2": mesh(1, 2),
    "pipeline 2": Way(2, ("--pipeline_stages", "2")),
    "DataParallel 2": Way(1, ("--data_parallel", "--data_parallel_replicas", "2")),
}
