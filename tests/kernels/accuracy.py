"""Kernels judged against the reference in float64, by the error torch itself makes at the same dtype.

For a call, its outputs and the gradients of all its arguments must be at most twice as far from the float64 result as
the reference run at the call's dtypes, plus one rounding. Torch's error is the worst over a few orders of the tokens:
sums over tokens end in a handful of numbers, whose errors are a matter of luck in any single order.

float32 results (coefficients, gradients of parameters) may instead have a relative error of 2e-5: phi and dz are
multiplied as two bfloat16 parts, which keep 2^-16 of a value, and tensor cores cut off bits as they accumulate where
torch's float32 products round. What the parts of phi alone do to a result, worked out in float64, is allowed too:
sums over tokens that almost cancel, such as the gradient of scale, show more of it. For float32 streams the tests ask
for 1e-5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

import mhckit
from mhckit.testing import Call, relative_error

PARAMETERS = ("phi", "scale", "bias", "norm_weight", "out_norm_weight", "f_bias", "fn", "base")
ORDERS = 12
FLOAT32_RELATIVE = 2e-5


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Torch fills uninitialised memory with NaN: an element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all() and torch.ones(1).new_empty(2, dtype=torch.bfloat16).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(call: Call, backend: str, cotangents: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Outputs and gradients by name, for seeded gradients of the outputs that are exact in every dtype."""
    call = call.requires_grad()
    with mhckit.backend(backend):  # type: ignore[arg-type]
        outputs = call()
        if cotangents is None:
            cotangents = cotangents_of(outputs)
        torch.autograd.backward(outputs, cotangents)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"d{name}": t.grad for name, t in call.tensors.items() if t.grad is not None}


def cotangents_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(o.shape, generator=generator).bfloat16().to(o) for o in outputs]


def assert_accurate(call: Call, *, relative: float | None = None) -> None:
    """See the module; `relative` bounds the relative error of every result as well."""
    got = run(call, "triton")
    exact = run(call.to(lambda tensor: tensor.double()), "reference")
    in_parts = run(_with_phi_in_parts(call).to(lambda tensor: tensor.double()), "reference")
    torchs = [_run_in_order(call, order) for order in range(ORDERS)]
    assert got.keys() == exact.keys()
    for name, value in got.items():
        assert value.dtype == torchs[0][name].dtype and value.shape == exact[name].shape, name
        allowed = 2 * max(_error(results[name], exact[name]) for results in (*torchs, in_parts))
        allowed += torch.finfo(value.dtype).eps * (float(exact[name].abs().max()) if value.numel() else 0)
        error, ratio = _error(value, exact[name]), relative_error(value, exact[name])
        close = value.dtype == torch.float32 and ratio <= FLOAT32_RELATIVE
        assert error <= allowed or close, (
            f"{name}: error {error:.3g} against float64, {allowed:.3g} allowed; relative error {ratio:.3g}"
        )
        if relative is not None:
            assert ratio <= relative, name


def assert_nan_stays_in_its_token(call: Call, token: int) -> None:
    """The first and the last number of everything that this token has, gradients of outputs too, are NaN; the others
    have the bits that they have without.
    """

    def poisoned(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[token].view(-1)[[0, -1]] = torch.nan
        return tensor

    with torch.no_grad():
        cotangents = cotangents_of(call())
    clean = run(call, "triton", cotangents)
    per_token = call.tensors.keys() - PARAMETERS
    tensors = {name: poisoned(t) if name in per_token else t for name, t in call.tensors.items()}
    strange = run(Call(call.operator, call.recipe, tensors), "triton", [poisoned(c) for c in cotangents])
    for name, value in strange.items():
        if name.removeprefix("d") not in PARAMETERS:
            assert value[token].isnan().any(), name
            others = torch.arange(len(value), device=value.device) != token
            assert torch.equal(value[others], clean[name][others]), name


def _with_phi_in_parts(call: Call) -> Call:
    """The call in float64 with phi (times the weight over its columns) as the sum of its bfloat16 parts."""
    tensors = dict(call.tensors)
    for name in {"phi", "fn"} & tensors.keys():
        weight = tensors["norm_weight"].double() if "norm_weight" in tensors else 1.0
        product = (tensors[name].double() * weight).float()
        high = product.bfloat16()
        low = (product - high.float()).bfloat16()
        tensors[name] = (high.double() + low.double()) / weight
    return Call(call.operator, call.recipe, tensors)


def _run_in_order(call: Call, seed: int) -> dict[str, Tensor]:
    """The reference on permuted tokens, its per-token results put back in place."""
    tokens = next(t.shape[0] for name, t in call.tensors.items() if name not in PARAMETERS) if _has_tokens(call) else 0
    if seed == 0 or not tokens:
        return run(call, "reference")
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    permuted = Call(
        call.operator,
        call.recipe,
        {name: t if name in PARAMETERS else t[order.to(t.device)] for name, t in call.tensors.items()},
    )
    with mhckit.backend("reference"), torch.no_grad():
        outputs = permuted()
    cotangents = [c[order.to(c.device)] for c in cotangents_of(outputs)]
    results = run(permuted, "reference", cotangents)
    back = order.argsort()
    return {
        name: value if name.removeprefix("d") in PARAMETERS else value[back.to(value.device)]
        for name, value in results.items()
    }


def _has_tokens(call: Call) -> bool:
    return any(name not in PARAMETERS for name in call.tensors)


def _error(value: Tensor, exact: Tensor) -> float:
    """NaN fails every bound, and so does an infinity."""
    return float((value.double() - exact).abs().max()) if value.numel() else 0.0
