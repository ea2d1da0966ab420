"""Each hand-written backward against torch's own derivative of the forward reference, in float64."""

from __future__ import annotations

import pytest
import torch
from recipes import every_recipe
from torch import Tensor

from mhckit import Recipe
from mhckit.ops.activate import activate_reference
from mhckit.ops.coefficients import Parameters, coefficients_reference
from mhckit.ops.enter import enter_reference
from mhckit.ops.expand import expand_reference
from mhckit.ops.head import head_reference
from mhckit.ops.junction import junction_reference
from mhckit.ops.post import post_reference
from mhckit.ops.pre import pre_reference
from mhckit.ops.project import project_reference
from mhckit.ops.sinkhorn import sinkhorn_reference
from mhckit.testing import OPERATORS, make_call

RECIPES = every_recipe()
EPS = 1e-6


def _reference(operator: str, t: dict[str, Tensor], recipe: Recipe) -> tuple[Tensor, ...]:
    """The outputs of the operator, computed by its reference alone, which autograd sees through."""

    def get(*names: str) -> list[Tensor]:
        return [t.get(name) for name in names]  # type: ignore[misc]

    read = get("phi", "scale", "bias", "norm_weight", "out_norm_weight")
    write = get("x", "f", "f_bias", "mix_post", "mix_res")
    shifted_pre = t.get("mix_pre") if recipe.shifted else None
    x, f, f_bias, post, res = write
    runs = {
        "project": lambda: project_reference(*get("x", "phi", "norm_weight")),
        "activate": lambda: activate_reference(*get("z", "mean_square", "scale", "bias"), recipe),
        "sinkhorn": lambda: (sinkhorn_reference(t["logits"], recipe),),
        "coefficients": lambda: coefficients_reference(x, Parameters(*read[:4]), recipe)[:3],
        "pre": lambda: pre_reference(*get("x", "pre", "out_norm_weight"), EPS, torch.float64)[:1],
        "post": lambda: (post_reference(*get("x", "f", "f_bias", "post", "res")),),
        "expand": lambda: (expand_reference(t["h"], recipe.streams),),
        "head": lambda: head_reference(*get("x", "fn", "scale", "base", "pre"), torch.float64, recipe)[:1],
        "enter": lambda: (x, *enter_reference(x, *read, EPS, torch.float64, recipe)[:4]),
        "junction": lambda: junction_reference(x, f, f_bias, shifted_pre, post, res, *read, EPS, torch.float64, recipe)[
            :5
        ],
        "leave": lambda: (post_reference(*write),),
    }
    return tuple(output for output in runs[operator]() if output is not None)


CASES = [
    (operator, name)
    for operator in OPERATORS
    for name, recipe in RECIPES.items()
    if not (operator == "sinkhorn" and recipe.residual == "identity")
]


@pytest.mark.parametrize(("operator", "name"), CASES, ids=[f"{o}-{n}" for o, n in CASES])
def test_backward_is_the_derivative_of_forward(operator: str, name: str) -> None:
    recipe = RECIPES[name]
    ours = make_call(operator, recipe, lead=(3, 2), channels=7, seed=4).requires_grad()
    theirs = ours.requires_grad()
    outputs = ours()
    references = [o for o in _reference(operator, theirs.tensors, recipe) if o.numel()]
    weights = [torch.randn(o.shape, dtype=o.dtype) for o in outputs]
    for got, want, weight in zip(outputs, references, weights, strict=True):
        want = want.reshape(got.shape).expand(got.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        (got * weight).sum().backward(retain_graph=True)
        (want * weight).sum().backward(retain_graph=True)
    for key, tensor in ours.tensors.items():
        want = theirs.tensors[key].grad
        if want is None:
            assert tensor.grad is None or not tensor.grad.any(), key
        else:
            torch.testing.assert_close(tensor.grad, want, rtol=1e-9, atol=1e-11, msg=key)
