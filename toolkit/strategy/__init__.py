"""How a step is cut: one file per way, chosen here."""

from toolkit.arguments import Arguments
from toolkit.launch.environment import World
from toolkit.strategy.base import Strategy


def choose(world: World, args: Arguments) -> Strategy:
    """The strategy for what the launcher started and the flags ask."""
    if args.data_parallel:
        from toolkit.strategy.data_parallel import DataParallel

        return DataParallel(world, args.data_parallel_replicas, args.data_parallel_loss)
    if world.size > 1:
        from toolkit.strategy.ddp import DDP

        return DDP(world)
    from toolkit.strategy.single import SingleProcess

    return SingleProcess(world)
