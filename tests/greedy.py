"""tasks/classify.py on a machine whose memory ends in the fifth step as soon as there are several processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    import torch

    from tasks import classify
    from toolkit.strategy.single import SingleProcess

    run = SingleProcess.run

    def exhausted(self, batches, weight, seed):
        if self.world_size > 1 and seed.step == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(self, batches, weight, seed)

    SingleProcess.run = exhausted
    classify.main()


if __name__ == "__main__":
    from toolkit.launch.guard import guarded

    guarded(main)
