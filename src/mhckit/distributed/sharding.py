r"""Sharding rules for DTensors: streams are sharded over tokens, parameters are replicated.

    tokens     x, f, mix, z, ...    Shard(d), the same d for all, over any of the leading dimensions
    parameters phi, scale, ...      Replicate()
    results    y, x_in, mix, ...    Shard(d);     gradients of tokens Shard(d), of parameters Partial()

Every token is computed alone, so this needs no communication. What a rule needs is in an operator's schema: names of
arguments tell parameters from tokens, and the leading dimensions come first in every tensor of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mhckit.recipe import Recipe

OPERATORS = (
    "activate",
    "coefficients",
    "enter",
    "expand",
    "head",
    "junction",
    "post",  # and `leave`
    "pre",
    "project",
    "sinkhorn",
)
PARAMETERS = ("phi", "scale", "bias", "norm_weight", "out_norm_weight", "f_bias", "fn", "base")

# How many axes follow the leading ones in the tensor that tells how many of those there are.
_TRAILING = {"x": 2, "dx": 2, "h": 1, "z": 1}


def register_sharding() -> None:
    """Let mhckit's operators, forward and backward, take DTensors; call it once per process, more often does no harm.

    Guaranteed for tensors of tokens sharded over any leading dimensions, evenly or not, on meshes of any number of
    dimensions, with replicated parameters: each process computes its own tokens without communication, results are
    sharded as the streams are, and gradients of parameters come out as ``Partial``: they are summed over processes
    where DTensor needs them whole (``full_tensor()``, FSDP2), or by `reduce_gradients`.

    Anything else is redistributed first, which costs communication: streams sharded over N or C, partial sums, sharded
    parameters, tensors of tokens that are sharded differently. A mesh dimension that is larger than the dimension it
    shards computes every token everywhere. As everywhere with DTensors, plain tensors among them raise: replicate
    parameters with ``distribute_tensor`` or ``distribute_module``.

    Partial gradients are rounded to their parameter's dtype before they are summed; in float32 this is no concern.

    torch.compile turns missing gradients into plain zeros, which DTensor refuses; inside
    ``torch.distributed.tensor.experimental.implicit_replication()`` compiled forward and backward work.
    """
    if not torch.distributed.is_available():
        raise RuntimeError("register_sharding needs torch.distributed, which this build of torch does not have")
    _register_all()


def reduce_gradients(parameters: nn.Module | Iterable[torch.Tensor]) -> None:
    """Sum partial gradients over processes and leave each placed like its parameter; collective, call it everywhere.

    Call it between backward and whatever reads gradients process by process. Plain tensors are left alone.
    """
    from torch.distributed.tensor import DTensor

    for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


@functools.cache
def _register_all() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for name in OPERATORS:
        for direction in ("fwd", "bwd"):
            op = getattr(torch.ops.mhckit, f"{name}_{direction}").default
            register_sharding(op)(functools.partial(acceptable_shardings, op))
            # DTensor remembers a call's placements and shapes by its tensors and, as registered above, by no argument
            # that is not an int: neither a recipe, a dtype or a flag, nor which of the tensors is None. Count them all.
            schema_info = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
            DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = schema_info


def acceptable_shardings(op: Any, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """Placements of results and arguments on one dimension of a mesh: all replicated, or sharded over a token axis.

    args are those of the operator, with a DTensorSpec for every tensor.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=True))
    tensors = [name for name in names if hasattr(given[name], "tensor_meta")]
    gradients = [f"d{name}" for name in PARAMETERS]
    results = [(r.name in gradients, shape) for r, shape in zip(op._schema.returns, _shapes(op, args), strict=True)]

    def place(tokens: Any, parameters: Any, sums: Any) -> tuple[list[Any], list[Any]]:
        inputs = {name: parameters if name in PARAMETERS else tokens for name in tensors}
        absent = Replicate()
        outputs = [absent if shape == (0,) else sums if is_sum else tokens for is_sum, shape in results]
        return outputs, [inputs.get(name) for name in names]

    replicated = place(Replicate(), Replicate(), Replicate())
    return [replicated, *(place(Shard(axis), Replicate(), Partial()) for axis in range(_leading(given)))]


def _leading(given: dict[str, Any]) -> int:
    """The number of leading dimensions; none for a static recipe's `activate`, which has no tokens."""
    if given.get("logits") is not None:
        permutation = Recipe.from_key(given["recipe"]).residual == "permutation"
        return given["logits"].ndim - (1 if permutation else 2)
    return next((given[name].ndim - axes for name, axes in _TRAILING.items() if given.get(name) is not None), 0)


def _shapes(op: Any, args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Shapes of an operator's results."""

    def without_memory(arg: Any) -> Any:
        meta = getattr(arg, "tensor_meta", None)
        return arg if meta is None else torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    results = op(*map(without_memory, args))
    return [tuple(result.shape) for result in ([results] if isinstance(results, torch.Tensor) else results)]
