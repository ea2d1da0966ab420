"""Health: numbers that tell whether the streams of a model are kept in balance, sampled while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._coefficients import Numbers, measure
from ._collect import KINDS, collecting, find_connections, learned
from ._gradients import norms_and_nonfinite

_SCALES = ("scale_pre", "scale_post", "scale_res")

# One number for the model from those of its sublayers.
_OF_THE_MODEL: dict[str, Callable[[Tensor], Tensor]] = {
    "row_error_max": torch.amax,
    "column_error_max": torch.amax,
    "identity_distance": torch.mean,
    "uniform_distance": torch.mean,
    "prefix_gain_forward": torch.amax,
    "suffix_gain_backward": torch.amax,
    "pre_min": torch.amin,
    "pre_mean": torch.mean,
    "pre_max": torch.amax,
    "post_min": torch.amin,
    "post_mean": torch.mean,
    "post_max": torch.amax,
    "nonfinite_coefficients": torch.sum,
    **{name: torch.nanmean for name in _SCALES},
    "phi_grad_norm": torch.linalg.vector_norm,
    "scale_grad_norm": torch.linalg.vector_norm,
    "bias_grad_norm": torch.linalg.vector_norm,
    "nonfinite_gradients": torch.sum,
}


class _Sample(NamedTuple):
    connections: list[nn.Module]
    per_sublayer: Numbers
    whole: Numbers


class Health:
    """The state of a model's hyper-connections, as numbers on its device; nothing here waits for the device.

        health = Health(model)
        with health.sample():
            loss = model(tokens, targets)
        loss.backward()
        log(health.metrics())

    H is what mixes the streams of a sublayer, [out, in]; the numbers are of some tokens of the first forward inside the
    block, and of this process. `metrics` gives, each as "health/<name>":

        composite_gain_forward      largest row sum of |H_L ... H_1|: how much a signal may grow through all sublayers
        composite_gain_backward     largest column sum: how much a gradient may grow on its way back
        prefix_gain_forward         the largest such row sum over H_l ... H_1 for any l
        suffix_gain_backward        the largest such column sum over H_L ... H_l for any l
        row_error_max               largest |row sum of H - 1| of any sublayer
        column_error_max            largest |column sum of H - 1|
        identity_distance           Frobenius norm of H - I, mean over tokens and sublayers
        uniform_distance            Frobenius norm of H - 1/N, the same mean
        composite_uniform_distance  of H_L ... H_1, mean over tokens: 0 when all streams at the end are mixed alike
        mixing_depth                after how many sublayers H_l ... H_1 is half as far from uniform as I is; at most L
        stream_cosine               between the streams that the last sublayer reads, mean over pairs and tokens
        pre_*, post_*               min, mean and max of what reads and writes
        scale_pre, _post, _res      mean of the learned scales
        phi_, scale_, bias_grad_norm   over all sublayers; where there are gradients
        nonfinite_coefficients      how many, over all tokens
        nonfinite_gradients         how many, of phi, scale and bias

    Works with activation checkpointing (what runs again does not count again), `mhckit.recompute` and FSDP2, where
    every process has to call `metrics`, since it sums over the parts of gradients. A compiled block that holds
    connections runs without its compilation inside ``sample()``, with the time and memory this takes; compiled
    sublayers are unaffected.

    Args:
        model: any with HyperConnections, or one of transformers after `mhckit.integrations.transformers.apply`.
        tokens: how many tokens to look at, at most. They are evenly spaced.
    """

    def __init__(self, model: nn.Module, *, tokens: int = 256) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"tokens must be a positive int, got {tokens!r}")
        find_connections(model)
        self.model, self.tokens = model, tokens
        self._sample: _Sample | None = None

    @contextlib.contextmanager
    def sample(self) -> Iterator[None]:
        """Look at the coefficients of the first forward inside; after an exception the sample before stays."""
        with collecting(self.model) as collected:
            yield
        assert collected.last_x is not None
        with torch.no_grad():
            numbers = measure(list(collected.mixes.values()), collected.last_x, self.tokens)
        self._sample = _Sample(list(collected.mixes), *numbers)

    @property
    def names(self) -> list[str]:
        """The sublayers of the sample, as their connections are called in the model, in the order of `per_sublayer`."""
        names = find_connections(self.model)
        return [names[connection] for connection in self._sampled().connections]

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """What the class's docstring names, 0-dim and float32; for gradients as they come, call it before clipping."""
        whole = {name: _OF_THE_MODEL[name](values) for name, values in self.per_sublayer().items()}
        numbers = {**self._sampled().whole, **whole}
        return {f"health/{name}": value.float() for name, value in numbers.items()}

    @torch.no_grad()
    def per_sublayer(self) -> dict[str, Tensor]:
        """What is known of every sublayer: name -> [L], float32. NaN where a sublayer lacks what others have."""
        sample = self._sampled()
        device = sample.whole["stream_cosine"].device
        numbers = sample.per_sublayer | _scales(sample.connections, device) | _gradients(sample.connections, device)
        return {name: values.float() for name, values in numbers.items()}

    def _sampled(self) -> _Sample:
        if self._sample is None:
            raise RuntimeError("nothing was sampled yet: run the model inside `with health.sample():` first")
        return self._sample


def _scales(connections: list[nn.Module], device: torch.device) -> Numbers:
    """Of pre, post and the residual map; static recipes have none, and the identity has two."""
    scales = [learned(connection)["scale"] for connection in connections]
    values = [() if scale is None else _whole(scale).detach().to(device).unbind() for scale in scales]
    missing = torch.full((), torch.nan, device=device)
    return {
        name: torch.stack([row[index] if index < len(row) else missing for row in values])
        for index, name in enumerate(_SCALES[: max(map(len, values))])
    }


def _gradients(connections: list[nn.Module], device: torch.device) -> Numbers:
    """Norms of the gradients of each kind of parameter, and how many values are not finite; 0 where there is none."""
    gradients = {
        (kind, row): parameter.grad
        for row, connection in enumerate(connections)
        for kind, parameter in learned(connection).items()
        if parameter is not None and parameter.grad is not None
    }
    if not gradients:
        return {}
    norms, counts = norms_and_nonfinite(list(gradients.values()))
    norm_of = dict(zip(gradients, norms.to(device), strict=True))
    count_of = dict(zip(gradients, counts.to(device), strict=True))
    none, rows = torch.zeros((), device=device), range(len(connections))
    present = [kind for kind in KINDS if any(kind == key for key, _ in gradients)]
    numbers = {f"{kind}_grad_norm": torch.stack([norm_of.get((kind, row), none) for row in rows]) for kind in present}
    numbers["nonfinite_gradients"] = torch.stack(
        [torch.stack([count_of.get((kind, row), none) for kind in KINDS]).sum() for row in rows]
    )
    return numbers


def _whole(tensor: Tensor) -> Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
