"""What every operator promises, whatever it computes: gradients, PyTorch's machinery, shapes, strides, dtypes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from recipes import every_preset_and_width, every_recipe
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mhckit import Recipe
from mhckit.ops import _register
from mhckit.testing import OPERATORS, Call, make_call

RECIPES = every_recipe()
WITHOUT_RECIPE = ("project", "pre", "post", "expand")


def _cases() -> list[tuple[str, str]]:
    """Every operator under every recipe that means something to it."""
    return [
        (operator, name)
        for operator, (name, recipe) in itertools.product(OPERATORS, RECIPES.items())
        if (operator not in WITHOUT_RECIPE or name == "paper")
        and not (operator == "sinkhorn" and (recipe.residual == "identity" or not recipe.dynamic))
        and not (operator in ("head", "leave") and not recipe.dynamic)
        # many steps, which gradcheck runs hundreds of times; junction has the code of these
        and not (operator in ("enter", "coefficients") and recipe.residual == "projection")
    ]


CASES = _cases()
each_case = pytest.mark.parametrize(("operator", "name"), CASES, ids=[f"{o}-{n}" for o, n in CASES])
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar in which every element of every output has a weight of its own, exact in every dtype."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator).bfloat16().double().to(o.device) for o in outputs]
    return torch.stack([(o.double() * weight).sum() for o, weight in zip(outputs, weights, strict=True)]).sum()


def _gradients(call: Call) -> dict[str, Tensor]:
    call = call.requires_grad()
    _loss(call()).backward()
    return {name: _gradient(call, name) for name in call.tensors}


def _gradient(call: Call, name: str) -> Tensor:
    """The gradient after backward. Only an unshifted read leaves an argument unused: the pre of the Mix it is given."""
    tensor = call.tensors[name]
    unused = name == "mix_pre" and (call.operator == "leave" or not call.recipe.shifted)
    assert (tensor.grad is None) == unused, name
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@each_case
def test_gradcheck(operator: str, name: str) -> None:
    call = make_call(operator, RECIPES[name], lead=(2,), channels=3).requires_grad()
    assert torch.autograd.gradcheck(call.positional, tuple(call.tensors.values()))


WIDE = every_preset_and_width()


@pytest.mark.parametrize(("preset", "streams"), WIDE, ids=[f"{p}-{n}" for p, n in WIDE])
def test_gradcheck_for_every_number_of_streams(preset: str, streams: int) -> None:
    recipe = Recipe.preset(preset, streams=streams)
    for operator in OPERATORS:
        if operator == "sinkhorn" and recipe.residual == "identity":
            continue
        call = make_call(operator, recipe, lead=(3,), channels=5, seed=streams).requires_grad()
        assert torch.autograd.gradcheck(call.positional, tuple(call.tensors.values()), fast_mode=True), operator


@each_case
def test_opcheck(operator: str, name: str) -> None:
    """torch.library's own checks of the registered forward and backward: schema, fakes, autograd, compilation."""
    for optional in (True, False):
        call = make_call(operator, RECIPES[name], lead=(2, 3), channels=5, dtype=torch.float32, optional=optional)
        for op, args in _registered_calls(call):
            torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


class _Record(TorchDispatchMode):
    """Every mhckit op that runs, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "mhckit":
            self.seen.append((func, tuple(a.detach() if isinstance(a, Tensor) else a for a in args), result))
        return result


def _registered_calls(call: Call) -> list[tuple]:
    """The registered forward and backward that the call dispatches, with their arguments."""
    with _Record() as record:
        _loss(call.requires_grad()()).backward()
    assert [op.__name__.split(".")[0].rsplit("_", 1)[1] for op, _, _ in record.seen] == ["fwd", "bwd"]
    return [(op, args) for op, args, _ in record.seen]


@each_operator
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_breaks(operator: str, backend: str) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], dtype=torch.float32).requires_grad()
    torch._dynamo.reset()
    compiled = torch.compile(call.positional, fullgraph=True, backend=backend)
    outputs = compiled(*call.tensors.values())
    for got, want in zip(outputs, call(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    _loss(outputs).backward()
    expected = _gradients(call)
    for name in call.tensors:
        torch.testing.assert_close(_gradient(call, name), expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("recipe", [RECIPES["deepseek_v4"], RECIPES["mhc_lite"], RECIPES["paper-static"]])
def test_a_new_number_of_tokens_does_not_recompile(recipe: Recipe) -> None:
    call = make_call("junction", recipe, dtype=torch.float32)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(call.positional, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (6, 7, 33):
        other = make_call("junction", recipe, lead=(tokens,), dtype=torch.float32).requires_grad()
        outputs = compiled(*other.tensors.values())
        torch.testing.assert_close(outputs, other(), rtol=0, atol=0)
        _loss(outputs).backward()
    assert counter.frame_count == 1


@each_operator
@pytest.mark.parametrize("strict", [False, True])
def test_exports(operator: str, strict: bool) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], dtype=torch.float32)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return call.positional(*tensors)

    program = torch.export.export(Module(), tuple(call.tensors.values()), strict=strict)
    called = [str(node.target) for node in program.graph.nodes if "mhckit" in str(node.target)]
    expected = "post" if operator == "leave" else operator
    assert called == [f"mhckit.{expected}_fwd.default"]
    for got, want in zip(program.module()(*call.tensors.values()), call(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_operator
def test_selective_checkpointing_sees_the_operator(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy can keep an operator's results, so that its forward does not run again in backward, or not."""
    bodies = _count_bodies(monkeypatch)
    for policy, forwards_in_backward in ((CheckpointPolicy.MUST_SAVE, 0), (CheckpointPolicy.MUST_RECOMPUTE, 1)):
        call = make_call(operator, RECIPES["deepseek_v4"]).requires_grad()
        outputs = checkpoint(
            lambda *tensors, call=call: tuple(output.sin() for output in call.positional(*tensors)),
            *call.tensors.values(),
            use_reentrant=False,
            context_fn=lambda policy=policy: create_selective_checkpoint_contexts(
                lambda ctx, op, *args, **kwargs: policy if op.namespace == "mhckit" else CheckpointPolicy.MUST_RECOMPUTE
            ),
        )
        bodies.clear()
        _loss(outputs).backward()
        assert len(bodies) == forwards_in_backward + 1  # and the backward operator itself
        uncheckpointed = call.requires_grad()
        _loss(tuple(output.sin() for output in uncheckpointed())).backward()
        for name in call.tensors:
            torch.testing.assert_close(_gradient(call, name), _gradient(uncheckpointed, name), rtol=0, atol=0, msg=name)


def _count_bodies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one each time the body of an operator runs."""
    ran: list[str] = []
    original = _register._without_autocast
    monkeypatch.setattr(_register, "_without_autocast", lambda device: ran.append(device) or original(device))
    return ran


@each_operator
def test_autocast_changes_nothing(operator: str) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], lead=(32,), channels=33, dtype=torch.float32)
    plain = call()
    with torch.autocast("cpu", torch.bfloat16):
        cast = call()
        gradients = _gradients(call)
    for got, want in zip(cast, plain, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    for name, want in _gradients(call).items():
        torch.testing.assert_close(gradients[name], want, rtol=0, atol=0, msg=name)


@each_operator
def test_inference_mode_and_no_grad(operator: str) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], dtype=torch.float32).requires_grad()
    want = call()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            outputs = call()
        for got, wanted in zip(outputs, want, strict=True):
            assert got.grad_fn is None
            assert torch.equal(got, wanted)


@each_operator
def test_func_grad_and_vmap(operator: str) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], lead=(2,))
    tensors = tuple(call.tensors.values())
    got = torch.func.grad(lambda *t: _loss(call.positional(*t)), argnums=tuple(range(len(tensors))))(*tensors)
    expected = _gradients(call)
    for name, gradient in zip(call.tensors, got, strict=True):
        torch.testing.assert_close(gradient, expected[name], msg=name)
    gradient_of_first = torch.func.grad(lambda *t: _loss(call.positional(*t)))
    per_sample = torch.func.vmap(gradient_of_first, randomness="same")(*(t[None] for t in tensors))
    torch.testing.assert_close(per_sample[0], expected[next(iter(call.tensors))])
    with pytest.raises(ValueError, match="vmap over an empty batch"):
        torch.func.vmap(call.positional)(*(t.new_empty(0, *t.shape) for t in tensors))
    batched = torch.func.vmap(call.positional)(*(torch.stack([t, 2 * t]) for t in tensors))
    doubled = call.to(lambda tensor: 2 * tensor)()
    for got_output, first, second in zip(batched, call(), doubled, strict=True):
        torch.testing.assert_close(got_output, torch.stack([first, second]))


@each_operator
def test_a_second_derivative_is_an_error_not_a_wrong_number(operator: str) -> None:
    """Also under a linear loss, whose incoming gradients are constants, and in torch.func."""
    for loss in (lambda o: o.square().sum(), lambda o: o.sum()):
        call = make_call(operator, RECIPES["deepseek_v4"]).requires_grad()
        tensor = next(iter(call.tensors.values()))
        outputs = sum(loss(o) for o in call())
        (gradient,) = torch.autograd.grad(outputs, tensor, create_graph=True)  # type: ignore[arg-type]
        if operator == "expand" and gradient.grad_fn is None:
            assert not gradient.requires_grad  # linear in everything: the second derivative is zero
            continue
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            gradient.square().sum().backward()
    call = make_call(operator, RECIPES["deepseek_v4"])
    name, tensor = next(iter(call.tensors.items()))

    def first(t: Tensor) -> Tensor:
        return torch.func.grad(lambda u: sum(o.square().sum() for o in call(**{name: u})))(t)

    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        torch.func.grad(lambda t: first(t).square().sum())(tensor)


@each_case
def test_no_tokens(operator: str, name: str) -> None:
    """T = 0: empty outputs of the right shape, and zero gradients for parameters."""
    full = make_call(operator, RECIPES[name], lead=(2, 3), dtype=torch.float32)()
    call = make_call(operator, RECIPES[name], lead=(2, 0), dtype=torch.float32).requires_grad()
    outputs = call()
    tokenless = operator == "activate" and not RECIPES[name].dynamic
    for got, want in zip(outputs, full, strict=True):
        assert got.shape == (want.shape if tokenless else (*want.shape[:1], 0, *want.shape[2:]))
    _loss(outputs).backward()
    for key, tensor in call.tensors.items():
        gradient = _gradient(call, key)
        assert gradient.shape == tensor.shape
        assert tokenless or not gradient.any()


@each_case
def test_no_leading_dimensions(operator: str, name: str) -> None:
    """One token without any leading axis equals the same token inside a batch."""
    batch = make_call(operator, RECIPES[name], lead=(1,))
    per_token = {"x", "h", "f", "z", "mean_square", "logits", "pre", "post", "res", "mix_pre", "mix_post", "mix_res"}
    alone = batch(**{k: t[0] for k, t in batch.tensors.items() if k in per_token})
    for got, want in zip(alone, batch(), strict=True):
        torch.testing.assert_close(got, want.reshape(got.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@each_operator
def test_dtypes(operator: str, dtype: torch.dtype) -> None:
    """Activations keep their dtype, coefficients are at least float32, gradients have their tensor's dtype."""
    call = make_call(operator, RECIPES["deepseek_v4"], dtype=dtype).requires_grad()
    outputs = call()
    accumulator = torch.promote_types(dtype, torch.float32)
    wanted = {
        "enter": [dtype, dtype, accumulator, accumulator, accumulator],
        "junction": [dtype, dtype, accumulator, accumulator, accumulator],
        "pre": [dtype],
        "post": [dtype],
        "leave": [dtype],
        "head": [dtype],
        "expand": [dtype],
    }.get(operator, [accumulator] * len(outputs))
    assert [o.dtype for o in outputs] == wanted
    _loss(outputs).backward()
    for name, tensor in call.tensors.items():
        assert _gradient(call, name).dtype == tensor.dtype, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "junction"])
def test_rounds_once(operator: str, dtype: torch.dtype) -> None:
    """Against float64 on the same (rounded) inputs: half a bit of the output's dtype, and float32 sums inside.

    A junction rounds twice by definition, y and then what is computed from it: tests/ops/test_junction.py.
    """
    call = make_call(operator, RECIPES["deepseek_v4"], lead=(17,), channels=37, dtype=dtype)
    exact = call.to(torch.Tensor.double)
    pairs = [*zip(call(), exact(), strict=True)]
    pairs += zip(_gradients(call).values(), _gradients(exact).values(), strict=True)
    for got, want in pairs:
        half_a_bit = 0.5 * torch.finfo(got.dtype).eps * want.abs()
        assert ((got.double() - want).abs() <= half_a_bit + 3e-6 * want.abs().max()).all()


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@each_case
def test_every_device_here(operator: str, name: str, device: str) -> None:
    """float32 on each device of this machine against float64 on the CPU, forward and backward."""
    exact = make_call(operator, RECIPES[name], lead=(5,), channels=7)
    call = exact.to(lambda tensor: tensor.to(device, torch.float32))
    pairs = [*zip(call(), exact(), strict=True)]
    pairs += zip(_gradients(call).values(), _gradients(exact).values(), strict=True)
    for got, want in pairs:
        assert got.device.type == device
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5 * max(1.0, float(want.abs().max())))


@each_case
def test_strided_inputs(operator: str, name: str) -> None:
    """Transposed, offset and expanded inputs give the bits of contiguous ones, forward and backward."""
    call = make_call(operator, RECIPES[name], lead=(4,))

    def strided(tensor: Tensor) -> Tensor:
        padded = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
        view = padded.movedim(0, -1).contiguous().movedim(-1, 0)[..., 1::2]
        return view.copy_(tensor)

    other = call.to(strided)
    assert not all(t.is_contiguous() for t in other.tensors.values())
    for got, want in zip(other(), call(), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    for key, want in _gradients(call).items():
        torch.testing.assert_close(_gradients(other)[key], want, rtol=0, atol=0, msg=key)


@each_operator
def test_parameters_of_other_dtypes(operator: str) -> None:
    """bfloat16 parameters are promoted, not an error, and get bfloat16 gradients."""
    call = make_call(operator, RECIPES["deepseek_v4"], dtype=torch.float32)
    names = [k for k in call.tensors if k not in ("x", "f", "h", "z", "mean_square", "logits")]
    lowered, promoted = dict(call.tensors), dict(call.tensors)
    for name in names:
        lowered[name] = call.tensors[name].bfloat16()
        promoted[name] = lowered[name].float()
    low = dataclasses.replace(call, tensors=lowered)
    high = dataclasses.replace(call, tensors=promoted)
    for got, want in zip(low(), high(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    want_gradients = _gradients(high)
    for name, got in _gradients(low).items():
        assert got.dtype == lowered[name].dtype
        torch.testing.assert_close(got, want_gradients[name].to(got.dtype), rtol=0, atol=0, msg=name)


EXPENSIVE = {  # parameters whose gradients cost a pass of their own
    "project": ("phi", "norm_weight"),
    "coefficients": ("phi", "norm_weight"),
    "pre": ("out_norm_weight",),
    "head": ("fn",),
    "enter": ("phi", "norm_weight", "out_norm_weight"),
    "junction": ("phi", "norm_weight", "out_norm_weight"),
}


@pytest.mark.parametrize("operator", EXPENSIVE)
def test_frozen_parameters_cost_nothing(operator: str) -> None:
    """The other gradients are the same, and those that nobody needs are not computed."""
    call = make_call(operator, RECIPES["deepseek_v4"])
    expected = _gradients(call)
    leaves = call.requires_grad()
    for name in EXPENSIVE[operator]:
        leaves.tensors[name].requires_grad_(False)
    with _Record() as record:
        _loss(leaves()).backward()
    *_, (_, _, results) = record.seen
    not_given = operator in ("head", "junction")  # no pre of a shifted recipe
    assert sum(result.numel() == 0 for result in results) == len(EXPENSIVE[operator]) + not_given
    for name, tensor in leaves.tensors.items():
        if name in EXPENSIVE[operator]:
            assert tensor.grad is None
        elif tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, expected[name], msg=name)


@each_operator
def test_same_input_same_bits(operator: str) -> None:
    call = make_call(operator, RECIPES["deepseek_v4"], lead=(64,), channels=65, dtype=torch.bfloat16)
    first, first_gradients = call(), _gradients(call)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))
        assert all(torch.equal(g, first_gradients[k]) for k, g in _gradients(call).items())
