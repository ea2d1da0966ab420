r"""What the connections of a model compute in one forward, and what their streams are like.

Coefficients are small and are kept, [T, N] and [T, N, N] per sublayer. Streams are large: what is asked of them is
computed when they pass by, one sublayer at a time.

T tokens; N streams (O out, I in); C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhckit.health._coefficients import measure, stream_cosine
from mhckit.health._collect import collecting, find_connections, learned
from mhckit.modules import Streams
from mhckit.modules.streams import as_streams
from mhckit.ops import Mix
from mhckit.ops.activate import activate_reference, shape_residual_logits
from mhckit.ops.project import project_reference
from mhckit.ops.sinkhorn import sinkhorn_reference
from mhckit.recipe import Recipe

ITERATED_TOKENS = 64  # whose Sinkhorn iteration is done again, step by step: those with the largest errors


class Observed(NamedTuple):
    """A sublayer: pre, post [T, N], res [T, O, I] and the norms of the streams it read [T, N], float64 on the CPU.

    `numbers` are those of `mhckit.health`; similarity is of the streams after the sublayer, and nonfinite counts in
    its coefficients and in these streams.
    """

    name: str
    recipe: Recipe
    pre: Tensor
    post: Tensor
    res: Tensor
    norms: Tensor
    numbers: dict[str, float]
    errors: list[float]
    similarity: float
    nonfinite: int


class _Streams(NamedTuple):
    """What is kept of streams that passed by."""

    norms: Tensor
    similarity: float
    nonfinite: int


class _Read(NamedTuple):
    """A sublayer's read, with the logits of the residual map, [K, N, N] for some tokens, if they go into Sinkhorn."""

    streams: _Streams
    numbers: dict[str, float]
    logits: Tensor | None


@torch.no_grad()
def observe(model: nn.Module, forward: Callable[[], Any]) -> tuple[list[Observed], Any]:
    """Every sublayer, in the order in which they ran, and what `forward` returned, which runs the model once."""
    names = find_connections(model)
    reads: dict[nn.Module, _Read] = {}
    ends: list[_Streams] = []
    with _watching(model, list(names), reads, ends), collecting(model) as collected:
        result = forward()
    mixes = collected.mixes
    if len({mix.pre.shape for mix in mixes.values()}) > 1:
        raise ValueError("inspect follows one chain of sublayers, and this model has several of different shapes")
    seen = [reads[connection] for connection in mixes]
    # What a sublayer leaves is what the next one reads, and the head after the last one.
    after = [read.streams for read in seen[1:]] + ends[-1:]
    recipes = [recipe_of(connection) for connection in mixes]
    errors = _errors_by_iteration(recipes, [read.logits for read in seen])
    return [
        _observed(names[connection], recipe, mix, read, streams, error)
        for (connection, mix), recipe, read, streams, error in zip(
            mixes.items(), recipes, seen, after, errors, strict=True
        )
    ], result


def recipe_of(connection: nn.Module) -> Recipe:
    """The math of a connection, mhckit's own or a patched one of transformers."""
    return getattr(connection, "mhckit_recipe", None) or connection.recipe  # type: ignore[return-value]


def _observed(name: str, recipe: Recipe, mix: Mix, read: _Read, after: _Streams, errors: list[float]) -> Observed:
    pre, post = _wide(mix.pre).flatten(0, -2), _wide(mix.post).flatten(0, -2)
    if mix.res is None:
        res = torch.eye(pre.shape[-1], dtype=pre.dtype).expand(len(pre), -1, -1)
    else:
        res = _wide(mix.res).flatten(0, -3)
    nonfinite = int(read.numbers["nonfinite_coefficients"]) + after.nonfinite
    return Observed(name, recipe, pre, post, res, read.streams.norms, read.numbers, errors, after.similarity, nonfinite)


@contextmanager
def _watching(
    model: nn.Module, connections: list[nn.Module], reads: dict[nn.Module, _Read], ends: list[_Streams]
) -> Iterator[None]:
    """Fills `reads` when connections read, and `ends` when a head does."""

    def at_connection(module: nn.Module, _args: Any, output: Any) -> None:
        streams = output[1] if isinstance(output, tuple) and len(output) == 2 else None
        if isinstance(streams, Streams) and streams.mix is not None and module not in reads:
            reads[module] = _look(module, streams.x, streams.mix)

    def at_head(_module: nn.Module, args: Any) -> None:
        ends.append(_passing(as_streams(args[0]).tensor))

    hooks = [connection.register_forward_hook(at_connection) for connection in connections]
    hooks += [module.register_forward_pre_hook(at_head) for module in model.modules() if _is_head(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_head(module: nn.Module) -> bool:
    """Of mhckit, or a patched one of transformers, which all have this in their names."""
    return type(module).__name__.endswith("HyperHead")


def _look(connection: nn.Module, x: Tensor, mix: Mix) -> _Read:
    tokens = x.shape[:-2].numel()
    per_sublayer, _ = measure([mix], x, tokens)
    numbers = {name: float(values[0]) for name, values in per_sublayer.items()}
    return _Read(_passing(x), numbers, _logits_of_the_worst(connection, x, mix))


def _passing(x: Tensor) -> _Streams:
    x_TNC = x.flatten(0, -3)
    norms = torch.linalg.vector_norm(x_TNC, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    nonfinite = int(x_TNC.isfinite().logical_not().sum())
    return _Streams(_wide(norms), float(stream_cosine(x_TNC, len(x_TNC))), nonfinite)


def _logits_of_the_worst(connection: nn.Module, x: Tensor, mix: Mix) -> Tensor | None:
    """Of the tokens whose sums are off the most."""
    recipe = recipe_of(connection)
    if recipe.residual != "sinkhorn" or mix.res is None:
        return None
    worst = _sum_errors(mix.res.flatten(0, -3)).topk(min(ITERATED_TOKENS, x.shape[:-2].numel())).indices
    return _residual_logits(connection, x.flatten(0, -3)[worst], recipe).cpu()


def _errors_by_iteration(recipes: list[Recipe], logits: list[Tensor | None]) -> list[list[float]]:
    """For each sublayer the largest error of a row or column sum when Sinkhorn is stopped after 1, 2, ... iterations.

    Sublayers of one recipe are done at once: the iteration's many small steps cost the same for all as for one.
    """
    errors: list[list[float]] = [[] for _ in recipes]
    given = {index: each for index, each in enumerate(logits) if each is not None}
    for recipe in {recipes[index] for index in given}:
        chosen = [index for index in given if recipes[index] == recipe]
        logits_LKSS = torch.stack([given[index] for index in chosen])
        for count in range(1, recipe.iterations + 1):
            h_LKOI = sinkhorn_reference(logits_LKSS, recipe.replace(iterations=count))
            for index, error in zip(chosen, _sum_errors(h_LKOI).amax(-1).tolist(), strict=True):
                errors[index].append(error)
    return errors


def _sum_errors(h_TOI: Tensor) -> Tensor:
    """[T]: how far the worst row or column sum of a matrix is from 1."""
    rows, columns = (h_TOI.sum(-1) - 1).abs().amax(-1), (h_TOI.sum(-2) - 1).abs().amax(-1)
    return torch.maximum(rows, columns)


def _residual_logits(connection: nn.Module, x_TNC: Tensor, recipe: Recipe) -> Tensor:
    """[T, N, N]; those of a static recipe are the same for every token."""
    parameters = learned(connection)
    phi, scale, bias = parameters["phi"], parameters["scale"], parameters["bias"]
    assert bias is not None
    projected, mean_square = None, None
    if phi is not None:
        projected, mean_square = project_reference(x_TNC, phi, getattr(connection, "norm_weight", None))
    wide = bias.to(torch.promote_types(x_TNC.dtype, torch.float32))
    logits = shape_residual_logits(activate_reference(projected, mean_square, scale, wide, recipe)[2], recipe)
    assert logits is not None
    return logits.expand(len(x_TNC), -1, -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
