"""Full-precision master weights under a model that computes in another dtype, and their optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from verl.algorithms.metric import Metric
from verl.config import OptimConfig
from verl.config.schema_data import Fp16Config
from verl.errors import CheckpointError, VerlError
from verl.models.rows import forget_packed
from verl.training.parallel import ALONE, Ranks

WATCHED = 16  # numbers of each parameter, to see that it changes


class LossScale:
    """What the loss of a float16 model is multiplied by, so that small gradients do not vanish.

    Dynamic: halved when a gradient overflows, doubled after so many steps without one. Fixed where the configuration
    names a scale.
    """

    def __init__(self, config: Fp16Config) -> None:
        self._config, self._good_steps = config, 0
        self.value = config.loss_scale or 2.0**config.initial_scale_power

    @property
    def can_shrink(self) -> bool:
        return not self._config.loss_scale and self.value > 1.0

    def update(self, finite: bool) -> None:
        """After a step with a gradient."""
        if self._config.loss_scale:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._good_steps == self._config.loss_scale_window:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, Tensor]:
        return {"value": torch.tensor(self.value), "good_steps": torch.tensor(self._good_steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if not self._config.loss_scale:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])


class MasterWeights:
    """Parameters that the optimizer sees: the model's own where it computes in float32, float32 copies elsewhere.

    Gradients of several backward passes add up in the masters' dtype, whatever the model computes in.

    Args:
        model: loaded in the masters' dtype.
        compute_dtype: what ``cast`` parameters become.
        cast: whether a parameter of this name computes in ``compute_dtype``; None: all do.
        fp16: how the loss is scaled where ``compute_dtype`` is float16.
        ranks: that hold these weights too, and whose gradients are added up.

    Attributes:
        scale: of the loss; None where it needs none.
        shapes: of the whole masters.
    """

    sharded = False  # each rank holds a part of every master only

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        cast: Callable[[str], bool] | None = None,
        fp16: Fp16Config | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.scale = LossScale(fp16 or Fp16Config()) if compute_dtype == torch.float16 else None
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
        self.shapes = {name: master.shape for name, master in self.masters.items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the computing parameters up to date with their masters."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    def reduce_gradients(self) -> dict[str, Tensor]:
        """The gradient over all ranks, by name; what no rank has a gradient of is left out."""
        if self.ranks.size > 1:
            mine = [float(master.grad is not None) for master in self.masters.values()]
            counts = self.ranks.summed(mine, "which gradients there are")
            for master, count in zip(self.masters.values(), counts, strict=True):
                if count and master.grad is None:
                    master.grad = torch.zeros_like(master)
        gradients = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        self.ranks.sum_(list(gradients.values()), "the gradients of an optimizer step")
        return gradients

    def computing(self) -> list[Tensor]:
        """What forward and backward passes read, of this rank."""
        cast = {id(master) for _, master in self._copies}
        own = [master for master in self.masters.values() if id(master) not in cast]
        return [*own, *(parameter for parameter, _ in self._copies)]

    def apart(self) -> list[Tensor]:
        """Masters that only an optimizer step and a checkpoint read."""
        return [master for _, master in self._copies]

    def rest(self) -> None:
        """Drop what was made of the weights to compute with them."""
        for weight in self.computing():
            forget_packed(weight)

    def watched(self) -> Tensor:
        """A copy of up to 16 numbers of each whole parameter, spread over it; those of this rank."""
        found = []
        for name, master in self.masters.items():
            shape = self.shapes[name]
            every = max(1, -(-shape.numel() // WATCHED))
            before = (self.rows(shape).start or 0) * shape[1:].numel()  # of other ranks
            found.append(master.detach().reshape(-1)[-before % every :: every])
        return torch.cat(found)

    def abandon(self) -> None:
        """After a pass that was broken off somewhere, on all ranks: the next one begins as if there had been none."""

    def before_backward(self, last: bool) -> None:
        """Told of every backward pass, and which one is the last of the optimizer step."""

    def total(self, sums: list[float]) -> list[float]:
        """Sums over whole parameters or gradients, from those over what this rank has of them."""
        return sums

    def whole(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters as the model computes with them, by name, one at a time, for an engine with a copy of its
        own; nothing where it can compute with the model's own."""
        return ()

    def rows(self, shape: Sequence[int]) -> slice:
        """Which rows of a whole master this rank holds."""
        return slice(None)

    def clear_gradients(self) -> None:
        for parameter in [*self.masters.values(), *(parameter for parameter, _ in self._copies)]:
            parameter.grad = None


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

    Norms and biases (parameters of fewer than two dimensions) are not decayed, unless the configuration says so. A
    step whose gradient is not finite changes nothing and is counted, or ends the run (``on_nonfinite``); with a
    dynamic loss scale it halves the scale. A step whose gradient is exactly zero has nothing to teach (every group's
    rewards are equal, say) and changes nothing either: decay and momentum alone would move the weights.

    Args:
        name: of the role, for the metrics.
        weights: of one model.
        grad_clip: most norm of the whole gradient.
    """

    def __init__(self, name: str, weights: MasterWeights, config: OptimConfig, grad_clip: float) -> None:
        self._name, self._weights, self._config, self._grad_clip = name, weights, config, grad_clip
        masters = list(weights.masters.values())
        decayed = [p for p in masters if p.dim() >= 2 or config.decay_norms_and_biases]
        others = [p for p in masters if p.dim() < 2 and not config.decay_norms_and_biases]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add the gradient of one micro-batch's addend to the loss, times the loss scale.

        Args:
            last: of the optimizer step.
        """
        self._weights.before_backward(last)
        scale = self._weights.scale
        (loss if scale is None else loss * scale.value).backward()

    def spoil(self) -> None:
        """Make this step's gradient one that is not finite, on all ranks."""
        master = next(iter(self._weights.masters.values()))
        master.grad = torch.full_like(master, math.nan)

    @torch.no_grad()
    def step(self, learning_rate: float) -> dict[str, Metric]:
        """Apply the gradients that have added up, and clear them.

        Metrics: ``grad_norm``, before clipping, and its parts ``grad_norm/<part>`` (their squares add up to its
        square); ``layer_grad_norm/{min,max}``, of the layer with the least and of that with the most; ``lr``;
        ``skipped_steps``; ``weights_moved``, the share of watched weights that changed; ``loss_scale``, the one of this
        step.

        Raises:
            VerlError: a gradient that is not finite, and ``on_nonfinite`` is stop.
        """
        named = self._weights.reduce_gradients()
        scale = self._weights.scale
        unscale = 1.0 if scale is None else 1.0 / scale.value
        squares, layers = self._squares(named, unscale)
        norm = math.sqrt(sum(squares.values()))
        finite = math.isfinite(norm)
        metrics = {
            f"{self._name}/grad_norm": Metric(norm if finite else 0.0, float(finite), "mean"),
            f"{self._name}/lr": Metric(learning_rate, 1.0, "mean"),
            f"{self._name}/skipped_steps": Metric(float(not finite), 1.0, "sum"),
        }
        if finite:
            metrics |= {
                f"{self._name}/grad_norm/{part}": Metric(math.sqrt(x), 1.0, "mean") for part, x in squares.items()
            }
            metrics |= {
                f"{self._name}/layer_grad_norm/{end.__name__}": Metric(math.sqrt(end(layers)), 1.0, "mean")
                for end in (min, max)
                if layers
            }
        if scale is not None:
            metrics[f"{self._name}/loss_scale"] = Metric(scale.value, 1.0, "mean")
        if not finite and self._config.on_nonfinite == "stop" and not (scale is not None and scale.can_shrink):
            odd = self._weights.total([float(not bool(torch.isfinite(g).all())) for g in named.values()])
            raise _not_finite(self._name, next(key for key, found in zip(named, odd, strict=True) if found))
        if finite and norm > 0:
            before = self._weights.watched()
            # One product: a loss scale that is a power of two takes nothing from the bits of the gradient.
            factor = unscale * min(1.0, self._grad_clip / (norm + 1e-6))
            if factor != 1.0:
                torch._foreach_mul_(list(named.values()), factor)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            moved = self._weights.watched() != before
            share, count = self._weights.total([float(moved.sum()), float(moved.numel())])
            metrics[f"{self._name}/weights_moved"] = Metric(share, count, "mean")
            self._weights.publish()
        if scale is not None and norm != 0:
            scale.update(finite)
        self.clear()
        return metrics

    def _squares(self, named: dict[str, Tensor], unscale: float) -> tuple[dict[str, float], list[float]]:
        """Squared norms of the gradient by part of the model and by layer, in float64 (a tensor's own in its dtype)."""
        masters = self._weights.masters
        parts = dict.fromkeys((part_of(name, master.dim()) for name, master in masters.items()), 0.0)
        layers = dict.fromkeys(filter(None, map(layer_of, masters)), 0.0)
        norms = torch.stack(torch._foreach_norm(list(named.values()))).double() if named else torch.zeros(0)
        for (name, gradient), norm in zip(named.items(), (norms * unscale).tolist(), strict=True):
            parts[part_of(name, gradient.dim())] += norm * norm
            if (layer := layer_of(name)) is not None:
                layers[layer] += norm * norm
        total = self._weights.total([*parts.values(), *layers.values()])
        return dict(zip(parts, total, strict=False)), total[len(parts) :]

    def clear(self) -> None:
        self._weights.clear_gradients()

    def moments(self) -> list[Tensor]:
        """The large tensors of its state; none before the first step."""
        return [value for state in self._adamw.state.values() for value in state.values() if value.dim()]

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, flat, as ``exp_avg/<name of parameter>``; empty before the first step.

        With float16 also the loss scale, as ``loss_scale/...``.
        """
        flat = {}
        for name, master in self._weights.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                flat[f"{key}/{name}"] = value
        if self._weights.scale is not None:
            flat |= {f"loss_scale/{name}": value for name, value in self._weights.scale.state().items()}
        return flat

    def load_state(self, flat: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        self._adamw.state.clear()
        scale = {key.removeprefix("loss_scale/"): v for key, v in flat.items() if key.startswith("loss_scale/")}
        if scale and self._weights.scale is not None:
            self._weights.scale.load_state(scale)
        for key, value in flat.items():
            part, _, name = key.partition("/")
            if part == "loss_scale":
                continue
            if name not in self._weights.masters:
                raise CheckpointError(f"the {self._name}'s optimizer state does not fit its model", name)
            master = self._weights.masters[name]
            if part != "step" and value.shape != master.shape:
                raise CheckpointError(f"the {self._name}'s optimizer state does not fit its model", key)
            self._adamw.state.setdefault(master, {})[part] = value.clone()


def part_of(name: str, dimensions: int) -> str:
    """The part of a model that a parameter belongs to: embedding (a tied projection with it), attention, mlp, head,
    or norms_and_biases."""
    if dimensions < 2:
        return "norms_and_biases"
    if "attn" in name or "attention" in name:
        return "attention"
    if any(word in name for word in ("embed", "wte", "wpe")):
        return "embedding"
    return "head" if "head." in name else "mlp"


def layer_of(name: str) -> str | None:
    """The layer that a parameter belongs to, by its number; None of embedding, head and last norm."""
    found = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    return found and found[1]


def _not_finite(name: str, odd: str) -> VerlError:
    section, whose = (
        ("optim", "model") if name == "train" else (f"{name}.optim", name)
    )  # supervised: there is one model
    error = VerlError(
        f"the {whose}'s gradient is not finite, and {section}.on_nonfinite=stop",
        f"first in {odd}",
        f"lower {section}.lr or go on from an earlier checkpoint; on_nonfinite=skip leaves such steps out",
    )
    error.bad_input = False
    return error
