"""Full-precision master weights under a model that computes in another dtype, and their optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from verl.algorithms.metric import Metric
from verl.config import OptimConfig
from verl.errors import CheckpointError


class MasterWeights:
    """Parameters that the optimizer sees: the model's own where it computes in float32, float32 copies elsewhere.

    Gradients of several backward passes add up in the masters' dtype, whatever the model computes in.

    Args:
        model: loaded in the masters' dtype.
        compute_dtype: what ``cast`` parameters become.
        cast: whether a parameter of this name computes in ``compute_dtype``; None: all do.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, cast: Callable[[str], bool] | None = None) -> None:
        self.masters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # (computing parameter, master)
        for name, parameter in model.named_parameters():
            if parameter.dtype == compute_dtype or (cast is not None and not cast(name)):
                self.masters[name] = parameter
                continue
            master = nn.Parameter(parameter.detach())
            parameter.data = parameter.detach().to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(_gradient_mover(master))
            self.masters[name] = master
            self._copies.append((parameter, master))

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the computing parameters up to date with their masters."""
        for parameter, master in self._copies:
            parameter.copy_(master)


def _gradient_mover(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over master weights, with gradient clipping once an optimizer step.

    Norms and biases (parameters of fewer than two dimensions) are not decayed. A step whose gradient is not finite
    changes nothing and is counted. A step whose gradient is exactly zero has nothing to teach (every group's rewards
    are equal, say) and changes nothing either: decay and momentum alone would move the weights.

    Args:
        name: of the role, for the metrics.
        weights: of one model.
        grad_clip: most norm of the whole gradient.
    """

    def __init__(self, name: str, weights: MasterWeights, config: OptimConfig, grad_clip: float) -> None:
        self._name, self._weights, self._grad_clip = name, weights, grad_clip
        masters = list(weights.masters.values())
        groups = [
            {"params": [p for p in masters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def step(self, learning_rate: float) -> dict[str, Metric]:
        """Apply the gradients that have added up, and clear them; norm, learning rate and skips as metrics."""
        masters = list(self._weights.masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self._grad_clip))
        finite = math.isfinite(norm)
        if finite and norm > 0:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._weights.publish()
        self.clear()
        return {
            f"{self._name}/grad_norm": Metric(norm if finite else 0.0, float(finite), "mean"),
            f"{self._name}/lr": Metric(learning_rate, 1.0, "mean"),
            f"{self._name}/skipped_steps": Metric(float(not finite), 1.0, "sum"),
        }

    def clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, flat, as ``exp_avg/<name of parameter>``; empty before the first step."""
        flat = {}
        for name, master in self._weights.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                flat[f"{key}/{name}"] = value
        return flat

    def load_state(self, flat: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        self._adamw.state.clear()
        for key, value in flat.items():
            part, _, name = key.partition("/")
            if name not in self._weights.masters:
                raise CheckpointError(f"the {self._name}'s optimizer state does not fit its model", name)
            master = self._weights.masters[name]
            if part != "step" and value.shape != master.shape:
                raise CheckpointError(f"the {self._name}'s optimizer state does not fit its model", key)
            self._adamw.state.setdefault(master, {})[part] = value.clone()
