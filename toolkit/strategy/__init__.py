"""How a step is cut: one file per way, chosen here."""

from toolkit.arguments import Arguments
from toolkit.launch.environment import World
from toolkit.strategy.base import Strategy


def choose(world: World, args: Arguments) -> Strategy:
    """The strategy for what the launcher started and the flags ask."""
    strategy = _choose(world, args)
    strategy.compiled = args.torch_compile  # where a strategy cannot, the flag was refused
    if not (args.diagnostics or args.profile):
        return strategy
    from toolkit.strategy.diagnostics import Measured

    return Measured(strategy, args.profile)


def _choose(world: World, args: Arguments) -> Strategy:
    if args.data_parallel:
        from toolkit.strategy.data_parallel import DataParallel

        return DataParallel(world, args.data_parallel_replicas, args.data_parallel_loss)
    if world.kind == "DEEPSPEED":
        from toolkit.strategy.zero import ZeRO

        return ZeRO(world)
    if world.kind == "FSDP":
        from toolkit.strategy.sharded import Sharded

        return Sharded(world)
    if args.pipeline_stages > 1:
        from toolkit.strategy.pipeline import Pipeline

        return Pipeline(world, args.pipeline_stages, args.pipeline_microbatches, args.pipeline_schedule)
    if world.size > 1:
        from toolkit.strategy.ddp import DDP

        return DDP(world)
    from toolkit.strategy.single import SingleProcess

    return SingleProcess(world)
