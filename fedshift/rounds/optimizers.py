"""Local optimizers other than SGD: functions of the trained parameters and the learning rate.

An optimizer is made again for each client and round, so its state starts at zero, like the velocity of SGD.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# a class of torch.optim, `Adam` below, or a user's function
MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
TRIED = 8  # steps of a user's optimizer before training, of which one must change a parameter


@dataclass(frozen=True)
class Adam:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = (1 - lr decay) w - lr m' / (sqrt(v') + eps)

    with m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at step t of a round, and betas = (b1, b2). AdamW has a `decay`;
    in Adam, g includes the weight decay. The batched engine computes the same for stacked clients.

    >>> w = nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> w.grad = torch.tensor([0.5, -3.0])
    >>> _ = Adam()([w], 0.1).step()  # in the first step, m' / sqrt(v') is the sign of the gradient
    >>> w.detach()
    tensor([0.9000, 1.1000])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0

    def __call__(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, self.betas, self.eps, self.decay, fused=True)


class Stepper:
    """Steps of one client in one round, with an optimizer of torch; groups keep the ratio of their rates to `lr`."""

    def __init__(self, make: MakeOptimizer, parameters: list[nn.Parameter], lr: float) -> None:
        self.parameters, self.optimizer = parameters, make(parameters, lr)
        self.ratios = [group["lr"] / lr if lr else 1.0 for group in self.optimizer.param_groups]

    def step(self, grads: list[Tensor], lr: float) -> None:
        """Change the parameters in place."""
        for p, grad in zip(self.parameters, grads, strict=True):
            alike = grad.dtype == p.dtype and grad.stride() == p.stride()  # fused optimizers ignore strides
            p.grad = grad if alike else torch.empty_like(p, requires_grad=False).copy_(grad)
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = ratio * lr
        self.optimizer.step()
        for p in self.parameters:
            p.grad = None


def check_optimizer(make: MakeOptimizer, parameters: list[nn.Parameter]) -> None:
    """Take steps with copies of the parameters; TypeError or ValueError if the optimizer does not fit.

    An optimizer may collect the gradients of several steps, and need not change every parameter.
    """
    trial = [nn.Parameter(p.detach().clone()) for p in parameters]
    with torch.random.fork_rng(devices=[]):
        made = make(trial, 0.1)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"returns {type(made).__name__}; it must return a torch.optim.Optimizer")
        if not all("lr" in group for group in made.param_groups):
            raise ValueError("its groups of parameters must have a learning rate 'lr', which the schedule sets")
        before = [p.data_ptr() for p in trial]
        stepper = Stepper(lambda *_: made, trial, 0.1)
        for _ in range(TRIED):
            stepper.step([torch.ones_like(p) for p in trial], 0.1)
            changed = not all(torch.equal(p, trained) for p, trained in zip(trial, parameters, strict=True))
            if changed:
                break
    if [p.data_ptr() for p in trial] != before:
        raise ValueError("it must change parameters in place, but replaced the memory of one")
    if not changed:
        raise ValueError(f"it changed no parameter in {TRIED} steps; step() must change the parameters in place")
