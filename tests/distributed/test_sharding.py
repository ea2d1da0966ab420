"""DTensors sharded over tokens on two processes: the values and gradients of one, without communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import WORLD, Model, run_in_two
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import mhckit
from mhckit import Recipe
from mhckit.distributed import reduce_gradients, register_sharding
from mhckit.distributed.sharding import OPERATORS, PARAMETERS
from mhckit.testing import make_call
from mhckit.testing.inputs import Call

RECIPES = {
    "deepseek_v4": Recipe.preset("deepseek_v4"),
    "shifted": Recipe.preset("deepseek_v41"),
    "identity": Recipe.preset("deepseek_v4", residual="identity"),
    "static": Recipe.preset("deepseek_v4", dynamic=False),
}
# Both leading dimensions can be sharded, and the second cannot be evenly.
LEAD, CHANNELS = (2, 5), 8


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def _place(call: Call, mesh: DeviceMesh, tokens: Placement) -> Call:
    """The call on DTensors that require gradients: parameters replicated, everything else placed like tokens."""
    placed = {
        name: distribute_tensor(tensor, mesh, [Replicate() if name in PARAMETERS else tokens]).requires_grad_()
        for name, tensor in call.tensors.items()
    }
    return Call(call.operator, call.recipe, placed)


def _weights(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]


def _close(got: Tensor, want: Tensor, message: str) -> None:
    assert isinstance(got, DTensor), f"{message}: {type(got)}"
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10, msg=lambda m: f"{message}: {m}")


def _check_operator(call: Call, mesh: DeviceMesh, axis: int, used: slice) -> None:
    """used: which of the outputs have gradients."""
    where = f"{call.operator} {call.recipe.key} over axis {axis}"
    single, sharded = call.requires_grad(), _place(call, mesh, Shard(axis))
    want = single()
    weights = _weights(want)
    gradients = [distribute_tensor(weight, mesh, [Shard(axis)]) for weight in weights]
    with CommDebugMode() as communication:
        outputs = sharded()
        torch.autograd.backward(outputs[used], gradients[used])
    assert communication.get_total_counts() == 0, f"{where}: {communication.get_comm_counts()}"
    torch.autograd.backward(want[used], weights[used])
    for got, expected in zip(outputs, want, strict=True):
        assert got.placements == (Shard(axis),), where
        assert got.shape == expected.shape
        _close(got, expected, where)
    for name, tensor in single.tensors.items():
        got = sharded.tensors[name].grad
        if tensor.grad is None:
            assert got is None, f"{where}: {name}"
            continue
        expected = (Partial(),) if name in PARAMETERS else (Shard(axis),)
        assert got.placements == expected, f"{where}: d{name} is {got.placements}"
        _close(got, tensor.grad, f"{where}: d{name}")


def _check_operators(rank: int, recipe: Recipe) -> None:
    register_sharding()
    register_sharding()
    mesh = _mesh()
    for operator in (*OPERATORS, "leave"):
        if operator == "activate" and not recipe.dynamic:
            continue  # has no tokens
        for axis in range(len(LEAD)):
            call = make_call(operator, recipe, lead=LEAD, channels=CHANNELS, optional=axis == 0)
            if call.tensors:
                _check_operator(call, mesh, axis, slice(None))
                _check_operator(call, mesh, axis, slice(0, 1))


@pytest.mark.parametrize("name", RECIPES)
def test_operators_shard_over_tokens(name: str, tmp_path: Path) -> None:
    run_in_two(_check_operators, tmp_path, RECIPES[name])


def _check_model(rank: int) -> None:
    """A module tree of DTensors, an optimiser's step included."""
    register_sharding()
    mesh, recipe = _mesh(), RECIPES["shifted"]
    single, model = Model(8, recipe), Model(8, recipe)
    model.load_state_dict(single.state_dict())
    distribute_module(model, mesh)
    h = torch.randn(*LEAD, 8)
    single(h).square().mean().backward()
    loss = model(distribute_tensor(h, mesh, [Shard(0)])).square().mean()
    loss.backward()
    assert any(p.grad.placements == (Partial(),) for p in model.parameters())
    reduce_gradients(model)
    for (name, parameter), plain in zip(model.named_parameters(), single.parameters(), strict=True):
        assert parameter.grad.placements == parameter.placements == (Replicate(),), name
        torch.testing.assert_close(parameter.grad.to_local(), plain.grad, msg=lambda m, name=name: f"{name}: {m}")
    for one in (single, model):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    for parameter, plain in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), plain)


def test_a_model_trains(tmp_path: Path) -> None:
    run_in_two(_check_model, tmp_path)


def _check_other_placements(rank: int) -> None:
    """Sharding over N or C, partial sums, sharded parameters: redistributed, and right."""
    mesh, recipe = _mesh(), RECIPES["deepseek_v4"]
    call = make_call("junction", recipe, lead=LEAD, channels=CHANNELS)
    plain = call()
    with pytest.raises(NotImplementedError, match=r"junction_fwd.*sharding strategy"):
        _place(call, mesh, Shard(0))()
    register_sharding()
    placed = _place(call, mesh, Shard(0))
    variants: list[dict[str, Any]] = [
        {"x": distribute_tensor(call.tensors["x"], mesh, [Shard(2)])},
        {"x": distribute_tensor(call.tensors["x"], mesh, [Shard(3)])},
        {"phi": distribute_tensor(call.tensors["phi"], mesh, [Shard(0)])},
        {"f": DTensor.from_local(call.tensors["f"] / WORLD, mesh, [Partial()])},
        {"f": distribute_tensor(call.tensors["f"], mesh, [Shard(1)])},
        # All of the tensors of tokens over N or C, as far as they have these axes.
        {
            name: distribute_tensor(call.tensors[name], mesh, [Shard(2)])
            for name in call.tensors
            if name not in PARAMETERS
        },
    ]
    for replaced in variants:
        for got, want in zip(placed(**replaced), plain, strict=True):
            _close(got, want, str({name: tensor.placements for name, tensor in replaced.items()}))
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        placed(bias=call.tensors["bias"])


def test_other_placements_are_redistributed(tmp_path: Path) -> None:
    run_in_two(_check_other_placements, tmp_path)


def _check_remembered(rank: int) -> None:
    """Calls that differ only in what is no tensor, or in which tensor is missing."""
    register_sharding()
    mesh, recipe = _mesh(), RECIPES["deepseek_v4"]
    tensors = _place(make_call("enter", recipe, lead=LEAD, channels=CHANNELS), mesh, Shard(0)).tensors
    x, phi, scale, bias = (tensors[name] for name in ("x", "phi", "scale", "bias"))
    for out_dtype in (torch.float32, torch.float64, torch.bfloat16):
        h = mhckit.enter(x, phi, scale, bias, recipe=recipe, out_dtype=out_dtype)[1]
        assert h.dtype == h._spec.tensor_meta.dtype == out_dtype
    for needed in (x, phi, x):  # what nobody needs is absent, an empty tensor
        mix = mhckit.coefficients(
            *(tensor if tensor is needed else tensor.detach() for tensor in (x, phi, scale, bias)), recipe=recipe
        )
        (gradient,) = torch.autograd.grad(mix.pre, needed, torch.ones_like(mix.pre))
        assert gradient.shape == gradient.full_tensor().shape == needed.shape
    # dpre and dpost look alike; sharded over N, what is left of them must go where it came from.
    plain = {name: tensor.full_tensor().detach().requires_grad_() for name, tensor in tensors.items()}
    single = mhckit.coefficients(*(plain[name] for name in ("x", "phi", "scale", "bias")), recipe=recipe)
    for field in ("pre", "post"):
        mix = mhckit.coefficients(x, phi, scale, bias, recipe=recipe)
        weight = _weights((mix.pre,))[0]
        placed = distribute_tensor(weight, mesh, [Shard(2)])
        (gradient,) = torch.autograd.grad(getattr(mix, field), x, placed)
        (want,) = torch.autograd.grad(getattr(single, field), plain["x"], weight, retain_graph=True)
        _close(gradient, want, field)


def test_calls_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    run_in_two(_check_remembered, tmp_path)


def _check_kernels(rank: int) -> None:
    """Calls on DTensors reach the rules also where a plain call goes past the dispatcher, straight to a kernel."""
    register_sharding()
    mesh = _mesh()
    call = make_call("junction", RECIPES["deepseek_v4"], lead=(4,), channels=16, dtype=torch.float32)
    single, sharded = call.requires_grad(), _place(call, mesh, Shard(0))
    with mhckit.backend("triton"):
        want, outputs = single(), sharded()
        weights = _weights(want)
        torch.autograd.backward(want, weights)
        torch.autograd.backward(outputs, [distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights])
    for got, expected in zip(outputs, want, strict=True):
        assert torch.equal(got.full_tensor(), expected)  # a token's bits do not depend on its neighbours
    for name, tensor in single.tensors.items():
        if tensor.grad is not None:
            torch.testing.assert_close(sharded.tensors[name].grad.full_tensor(), tensor.grad, rtol=1e-5, atol=1e-5)


def test_kernels_shard_over_tokens(tmp_path: Path) -> None:
    with mhckit.backend("triton"):
        implementation = mhckit.explain(torch.zeros(1, 4, 8))
    if implementation.startswith("raises"):
        pytest.skip(implementation)
    run_in_two(_check_kernels, tmp_path)


def _check_mesh_of_two_dimensions(rank: int) -> None:
    """Of the shape of data times sequence parallelism."""
    register_sharding()
    call = make_call("junction", RECIPES["deepseek_v4"], lead=LEAD, channels=CHANNELS)
    want = call()
    for shape in ((WORLD, 1), (1, WORLD)):
        mesh = init_device_mesh("cpu", shape)
        placed = {
            name: distribute_tensor(tensor, mesh, [Replicate()] * 2 if name in PARAMETERS else [Shard(0), Shard(1)])
            for name, tensor in call.tensors.items()
        }
        phi = placed["phi"].requires_grad_()
        outputs = Call(call.operator, call.recipe, placed)()
        for got, expected in zip(outputs, want, strict=True):
            assert got.placements == (Shard(0), Shard(1))
            _close(got, expected, f"{shape}")
        outputs[1].sum().backward()
        assert phi.grad.placements == (Partial(), Partial())


def test_mesh_of_two_dimensions(tmp_path: Path) -> None:
    run_in_two(_check_mesh_of_two_dimensions, tmp_path)


def test_every_operator_has_a_rule() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mhckit::")}
    assert registered == {f"mhckit::{name}_{way}" for name in OPERATORS for way in ("fwd", "bwd")}


def test_every_tensor_is_a_parameter_or_indexed_by_tokens() -> None:
    """PARAMETERS is complete: no other argument keeps its shape when the number of tokens changes."""
    for recipe in RECIPES.values():
        for operator in OPERATORS:
            few, many = (make_call(operator, recipe, lead=(tokens,)).tensors for tokens in (2, 3))
            assert {name for name in few if few[name].shape == many[name].shape} <= {*PARAMETERS}
            assert {name for name in few if few[name].shape != many[name].shape}.isdisjoint(PARAMETERS)
