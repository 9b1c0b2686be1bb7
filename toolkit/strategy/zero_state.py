"""The portable state of a ZeRO engine, whose masters and moments lie in flat buffers split over ranks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.strategy.distributed import Distributed
from toolkit.strategy.portable import MODEL, Read


class ZeROState(Distributed):
    """Reads and writes the engine's tensors one parameter at a time, by DeepSpeed's own means."""

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, tensor in self.saved():
            if name in self.parameters:
                yield f"{MODEL}/{name}", safe_get_full_fp32_param(tensor).detach()
            else:
                yield f"{MODEL}/{name}", self._gathered(tensor)
        self._link()
        for moment in self.moments:
            for name, p in self.parameters.items():
                full = safe_get_full_optimizer_state(p, moment) if self.updates else None
                shape = getattr(p, "ds_shape", p.shape)
                yield f"{moment}/{name}", torch.zeros(shape) if full is None else full.detach().view(shape)

    def restore(self, read: Read, updates: int) -> None:
        if updates and self.moments:
            self._make_state()
        with torch.no_grad():
            for name, tensor in self.saved():
                full = read(MODEL, name).to(self.device)
                self._put_working(tensor, full)
                if name in self.parameters:
                    # The engine steps from masters of its own, of which the weights are copies.
                    self._put_state(tensor, full)
            for moment in self.moments if updates else ():
                for name, p in self.parameters.items():
                    self._put_state(p, read(moment, name).to(self.device), moment)
        for state in self.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"], dtype=torch.float32), updates)
        self.updates = updates

    def _make_state(self) -> None:
        """Moments come into being with the first step: one of zero gradients at rate 0."""
        with self.synchronised(last=True):
            self.backward(self.rows(self.probe.to(self.device))[:0].sum())
        self.update(0.0, torch.zeros((), device=self.device))
        self._link()

    def _link(self) -> None:
        """Tie parameters to their moments in stages 1 and 2.

        The engine does so after the first step of the first parameter group, when the others have none yet.
        """
        if self.stage < 3 and self.updates:
            from deepspeed.utils import lazy_init_hp_params_optimizer_state

            zero = self.optimizer
            for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
                lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """A tensor that is not trained, whole."""
        if not hasattr(tensor, "ds_id"):
            return tensor.detach()
        from deepspeed import zero

        with zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def _put_state(self, parameter: nn.Parameter, full: Tensor, *moment: str) -> None:
        """This rank's part of a parameter's master, or of a moment."""
        from deepspeed import utils

        if self.stage < 3:
            put = utils.safe_set_full_optimizer_state if moment else utils.safe_set_full_fp32_param
            put(parameter, full, *moment)
            return
        # The engine's own way to set a full tensor fails where the ranks do not divide it: the last part is padded.
        size = parameter.ds_tensor.numel()
        padded = F.pad(full.flatten(), (0, size * self.world_size - full.numel()))
        put = utils.safe_set_local_optimizer_state if moment else utils.safe_set_local_fp32_param
        put(parameter, padded[size * self.rank : size * (self.rank + 1)], *moment)

    def _put_working(self, tensor: Tensor, full: Tensor) -> None:
        """What the passes use."""
        if not hasattr(tensor, "ds_id"):
            tensor.copy_(full)
            return
        from deepspeed import zero

        with zero.GatheredParameters([tensor], modifier_rank=0):
            tensor.copy_(full)
