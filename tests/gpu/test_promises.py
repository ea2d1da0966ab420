"""The same bits every time and in every batch; graphs, compilation, no waiting for the GPU, no recompilation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from accuracy import PARAMETERS, cotangents_of, run
from recipes import every_recipe
from triton.runtime.jit import JITFunction

import mhckit
from mhckit import HyperConnection, HyperHead, Streams
from mhckit.kernels import _launcher
from mhckit.testing import OPERATORS, make_call

RECIPES = every_recipe()
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def _call(operator: str, tokens: int = 513, channels: int = 5128, name: str = "deepseek_v4", **options):
    options = {"dtype": torch.bfloat16, **options}
    return make_call(operator, RECIPES[name], lead=(tokens,), channels=channels, device="cuda", **options)


@each_operator
@pytest.mark.parametrize(("channels", "dtype"), [(5128, torch.bfloat16), (37, torch.float32)])
def test_twenty_runs_give_the_same_bits(operator: str, channels: int, dtype: torch.dtype) -> None:
    call = _call(operator, channels=channels, dtype=dtype)
    first = run(call, "triton")
    for _ in range(19):
        again = run(call, "triton")
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@each_operator
@pytest.mark.parametrize("optional", [True, False])
def test_a_repeated_call_does_as_one_through_triton(
    operator: str, optional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of a kind repeats the launches of the first, on tensors of its own."""
    first, other = (_call(operator, tokens=65, channels=136, optional=optional, seed=seed) for seed in (1, 2))
    run(first, "triton")
    repeated = run(other, "triton")
    monkeypatch.setattr(_launcher, "observer", _launcher.run_now)
    for name, value in run(other, "triton").items():
        assert torch.equal(value, repeated[name]), name


@each_operator
def test_inference_mode(operator: str) -> None:
    call = _call(operator, tokens=66, channels=136)
    want = call()
    for _ in range(2):
        with torch.inference_mode():
            for got, value in zip(_call(operator, tokens=66, channels=136)(), want, strict=True):
                assert torch.equal(got, value)


@each_operator
@pytest.mark.parametrize("name", ["deepseek_v4", "paper", "deepseek_v41"])
@pytest.mark.parametrize(("dtype", "channels"), [(torch.bfloat16, 5128), (torch.bfloat16, 4096), (torch.float32, 5128)])
def test_a_token_alone_and_in_a_batch(operator: str, name: str, dtype: torch.dtype, channels: int) -> None:
    """Outputs and per-token gradients of single tokens, bit for bit as inside 8449 of them.

    So many that every multiprocessor of an H200 has a program, 132 of 64 tokens, and one program adds up all channels;
    of 4096 in F1's form for Hopper, a program for each of four parts.
    """
    batch = _call(operator, tokens=8449, channels=channels, name=name, dtype=dtype)
    leaves = batch.requires_grad()
    outputs = leaves()
    cotangents = cotangents_of(outputs)
    torch.autograd.backward(outputs, cotangents)
    for token in (0, 1, 15, 16, 63, 2048, 8447, 8448):
        one = batch.to(lambda t, token=token: t[token : token + 1] if t.shape[:1] == (8449,) else t).requires_grad()
        alone = one()
        torch.autograd.backward(alone, [c[token : token + 1] for c in cotangents])
        for got, want in zip(alone, outputs, strict=True):
            assert torch.equal(got[0], want[token]), token
        for key, tensor in one.tensors.items():
            assert (tensor.grad is None) == (leaves.tensors[key].grad is None), key
            if key not in PARAMETERS and tensor.grad is not None:
                assert torch.equal(tensor.grad[0], leaves.tensors[key].grad[token]), (key, token)


@each_operator
def test_nothing_waits_for_the_gpu(operator: str) -> None:
    call = _call(operator).requires_grad()
    outputs = call()  # compiles
    cotangents = [torch.ones_like(o) for o in outputs]
    torch.autograd.backward(outputs, cotangents)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            torch.autograd.backward(call(), cotangents)
            with pytest.raises(RuntimeError, match="synchronizing"):
                cotangents[0].flatten()[0].item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("channels", [5128, 4096, 1281])
def test_a_new_number_of_tokens_compiles_nothing(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call("junction", tokens=5, channels=channels)
    run(call, "triton")
    head = _call("head", tokens=5, channels=channels)
    run(head, "triton")
    compiled: list[str] = []
    original = JITFunction._do_compile
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda self, *a, **k: compiled.append(self.__name__) or original(self, *a, **k)
    )
    for tokens in (1, 7, 16, 128, 4097, 65536):
        run(_call("junction", tokens=tokens, channels=channels), "triton")
        run(_call("head", tokens=tokens, channels=channels), "triton")
    assert compiled == []
    run(_call("junction", tokens=5, channels=channels + 3), "triton")  # a size that no other test has
    assert compiled, "this test cannot see compilations"


class Scale(torch.nn.Module):
    """A sublayer without matrix products, whose bits could depend on what cuBLAS chooses."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(dim))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h * self.weight).tanh()


def _network(recipe: str, layers: int = 3, dim: int = 96) -> tuple[list[torch.nn.ModuleList], HyperHead]:
    torch.manual_seed(0)
    kind = RECIPES[recipe]
    blocks = [
        torch.nn.ModuleList([HyperConnection(dim, kind, layer_index=i, norm=True), Scale(dim)]).cuda()
        for i in range(layers)
    ]
    return blocks, HyperHead(dim, kind).cuda()


def _forward(blocks: list, head: HyperHead, h: torch.Tensor) -> torch.Tensor:
    streams = Streams.expand(h, 4)
    for connection, layer in blocks:
        read, streams = connection(streams)
        streams = streams.write(layer(read))
    return head(streams)


@pytest.mark.parametrize(
    "recipe", ["deepseek_v4", "paper", "deepseek_v41", "hy_v4", "mhc_lite", "projection", "paper-static"]
)
def test_cuda_graph(recipe: str) -> None:
    """enter, junctions, leave and head, forward and backward, captured once and replayed on other inputs."""
    blocks, head = _network(recipe)
    parameters = [p for module in (*blocks, head) for p in module.parameters()]
    static = torch.randn(4, 33, 96, device="cuda")

    def step() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = _forward(blocks, head, static).square().mean()
        loss.backward()
        return loss

    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gradients were first accumulated on another stream, the warm-up's
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = step()
    gradients = [p.grad for p in parameters]
    for seed in (1, 2):
        static.copy_(torch.randn(4, 33, 96, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        loss, replayed = captured.clone(), [None if g is None else g.clone() for g in gradients]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(loss, step())
        for parameter, gradient in zip(parameters, replayed, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)


@each_operator
def test_compiled(operator: str) -> None:
    """torch.compile(fullgraph) runs the same kernels: the same bits."""
    call = _call(operator).requires_grad()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(call.positional, fullgraph=True)
        outputs = compiled(*call.tensors.values())
        torch.autograd.backward(outputs, cotangents_of(outputs))
    want = run(call, "auto")
    for i, output in enumerate(outputs):
        assert torch.equal(output, want[f"output {i}"]), i
    assert {f"d{name}" for name, tensor in call.tensors.items() if tensor.grad is not None} <= want.keys()
    for name, tensor in call.tensors.items():
        if f"d{name}" in want:
            assert torch.equal(tensor.grad, want[f"d{name}"]), name


def test_compiled_network() -> None:
    blocks, head = _network("deepseek_v4")
    h = torch.randn(4, 33, 96, device="cuda")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(_forward, fullgraph=True)(blocks, head, h)
        got.square().mean().backward()
    gradients = [p.grad.clone() for p in blocks[0].parameters()]
    for module in (*blocks, head):
        module.zero_grad()
    want = _forward(blocks, head, h)
    want.square().mean().backward()
    torch.testing.assert_close(got, want)
    for gradient, parameter in zip(gradients, blocks[0].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_the_module_path_says_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4, 8, device="cuda")
    assert mhckit.explain(x) == "Triton kernels: backend is 'auto' and x is float32 on cuda:0"
    assert mhckit.explain(x.cpu()) == "torch reference: backend is 'auto' and x is float32 on cpu"
    launched = []
    connection = HyperConnection(8).cuda()

    def observe(kernel: JITFunction, grid: Any, args: Any, constants: Any) -> None:
        launched.append(kernel.__name__)
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    connection(Streams(x))
    assert launched == ["write_project_kernel", "read_kernel"]
    launched.clear()
    HyperConnection(8)(Streams(x.cpu()))
    HyperConnection(8, backend="reference").cuda()(Streams(x))
    assert launched == []
    with pytest.raises(TypeError, match=r"'enter' got float64; use mhckit.backend\('reference'\)"):
        connection(Streams(x.double()))
    with pytest.raises(ValueError, match="at most 8 streams"):
        mhckit.expand(x[:, 0], 9)
