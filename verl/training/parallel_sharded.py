"""Weights, gradients and optimizer state spread over the ranks (FSDP2), for models that do not fit on every one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from verl.config.schema_data import Fp16Config
from verl.errors import ConfigError
from verl.models.policy import PolicyModel, ValueModel, follow_row_rule
from verl.models.rows import forget_packed
from verl.models.support import check_support
from verl.training.optimizer import MasterWeights
from verl.training.parallel import Ranks

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def master_weights(
    role: PolicyModel | ValueModel,
    compute_dtype: torch.dtype,
    fp16: Fp16Config,
    ranks: Ranks,
    device: torch.device,
    reshard: bool = True,
    adapt: bool = False,
) -> MasterWeights:
    """Those of a model loaded in float32; sharded where the ranks go in lockstep (``actor.strategy=fsdp2``)."""
    if ranks.lockstep:
        return ShardedWeights(role, compute_dtype, fp16, ranks, device, reshard, adapt)
    if isinstance(role, PolicyModel):
        return MasterWeights(role.model, compute_dtype, None, fp16, ranks)
    return MasterWeights(role, compute_dtype, lambda name: not name.startswith("value_head"), fp16, ranks)


class ShardedWeights(MasterWeights):
    """Each rank holds its part of every float32 master, cut along the first dimension.

    A layer is whole, in the compute dtype, only while it computes; the root's own parameters (embedding, vocabulary
    projection) are whole within the root's forward and backward. Gradients add up in float32 and are summed over ranks
    once an optimizer step, in its last backward pass.

    Args:
        role: whose forward is called, loaded in float32; on any device.
        device: to compute on.
        reshard: layers are given up between forward and backward, and gathered again.
        adapt: a pass for which one rank has no memory can be broken off on all of them (:meth:`abandon`).

    Raises:
        ConfigError: ``adapt``, and this torch cannot do it.
    """

    sharded = True

    def __init__(
        self,
        role: PolicyModel | ValueModel,
        compute_dtype: torch.dtype,
        fp16: Fp16Config,
        ranks: Ranks,
        device: torch.device,
        reshard: bool,
        adapt: bool = False,
    ) -> None:
        named: nn.Module = role.model if isinstance(role, PolicyModel) else role
        decoder = role.model if isinstance(role, PolicyModel) else role.backbone
        _settle_rows(role, decoder, compute_dtype, device)
        mesh = init_device_mesh(device.type, (ranks.size,))
        wide = next(role.parameters()).dtype
        plain = MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)
        narrow = None if wide == compute_dtype else compute_dtype
        mixed = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False)
        if isinstance(role, ValueModel):
            fully_shard(role.value_head, mesh=mesh, mp_policy=plain)
        for layer in [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
        fully_shard(role, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
        self._fsdp = [module for module in role.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp:  # plain sums: losses are addends already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if adapt:
                _require_reset()
                module.set_custom_all_gather(_Gather(ranks))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_ReduceScatter(ranks))  # type: ignore[arg-type]
        super().__init__(nn.Module(), compute_dtype, None, fp16, ranks)
        self._compute_dtype = compute_dtype
        self._parameters: dict[str, DTensor] = dict(named.named_parameters())  # type: ignore[arg-type]
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self.masters = {name: nn.Parameter(p.to_local().detach()) for name, p in self._parameters.items()}

    def publish(self) -> None:
        """What is still whole was made of the masters before their step."""
        for module in self._fsdp:
            module.reshard()

    def rest(self) -> None:
        """The layers that are still whole are given up."""
        self.publish()

    def abandon(self) -> None:
        """Layers that were whole are given up, and so are gradients of earlier micro-batches, which FSDP keeps."""
        states: list[Any] = [module._get_fsdp_state() for module in self._fsdp]
        if states[0]._is_root is None:  # there was no forward yet
            return
        self._fsdp[0].reset_iter_state()
        for parameter in [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def before_backward(self, last: bool) -> None:
        for module in self._fsdp:
            module.set_requires_gradient_sync(last, recurse=False)

    def reduce_gradients(self) -> dict[str, Tensor]:
        for name, parameter in self._parameters.items():
            gradient, master = parameter.grad, self.masters[name]
            if isinstance(gradient, DTensor) and master.grad is None:  # else it was spoilt
                master.grad = gradient.to_local()
        return {name: m.grad for name, m in self.masters.items() if m.grad is not None}

    def total(self, sums: list[float]) -> list[float]:
        return self.ranks.summed(sums, "sums over the parts of a gradient")

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """One exchange a parameter, of what is cast already: the same bits that the sharded forward computes with."""
        for name, master in self.masters.items():
            yield name, self.gather(name, master.detach().to(self._compute_dtype))

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole of what each rank has a part of, as of this master."""
        rows, *rest = self.shapes[name]
        share = -(-rows // self.ranks.size)
        if len(part) < share:
            part = torch.cat([part, part.new_zeros(share - len(part), *rest)])
        whole = part.new_empty(self.ranks.size * share, *rest)
        with self.ranks.waiting_for(f"all parts of {name}"):
            _all_gather(whole, part)
        return whole[:rows]

    def rows(self, shape: Sequence[int]) -> slice:
        share = -(-shape[0] // self.ranks.size)
        return slice(*(min(share * rank, shape[0]) for rank in (self.ranks.rank, self.ranks.rank + 1)))


class _Exchange:
    """One of FSDP's, which begins when every rank has memory for it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Exchange):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._ranks.go_on("word that all have memory for a layer's weights")
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Exchange):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._ranks.go_on("word that all have memory for a layer's gradients")
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _require_reset() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(
            "actor.auto_micro_batch cannot start a pass over whose layers are gathered from all ranks, with this torch",
            torch.__version__,
            "install torch 2.13 or newer; or set actor.auto_micro_batch=false and lower "
            "actor.ppo_max_token_len_per_gpu; or actor.strategy=replicate",
        )


def _settle_rows(
    role: PolicyModel | ValueModel, decoder: Any, compute_dtype: torch.dtype, device: torch.device
) -> None:
    """Choose the row rule while weights are whole. A weight in oneDNN's layout goes when the weight itself goes."""
    check_support(decoder)
    role.rows = follow_row_rule(decoder, compute_dtype)
    head = decoder.get_output_embeddings()  # a critic's decoder has none
    for module in decoder.modules():
        layers = [layer for layer in module.children() if isinstance(layer, nn.Linear | Conv1D) and layer is not head]
        if layers:  # a fused MLP calls its layers' weights, not its layers
            # Also when checkpointing breaks off a forward, having all that its backward needs.
            module.register_forward_hook(partial(_forget_weights, layers), always_call=True)
    if head is not None:

        def forget_head(*_: Any) -> None:
            forget_packed(head.weight)

        role.register_forward_pre_hook(forget_head)  # of the last backward pass
        role.register_forward_hook(forget_head)


def _forget_weights(layers: Iterable[nn.Linear | Conv1D], *_: Any) -> None:
    for layer in layers:
        forget_packed(layer.weight)
