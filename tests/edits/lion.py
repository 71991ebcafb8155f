"""Lion, as a package would have it: https://arxiv.org/abs/2302.06675."""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - second)
