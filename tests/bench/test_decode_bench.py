"""Inference, on the CPU and with a clock that does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mhckit
from mhckit import Mix
from mhckit.bench import correctness, decode
from mhckit.bench.cases import DECODE_BATCH, DECODE_RECIPES, Case
from mhckit.bench.chain import Chain
from mhckit.bench.correctness import WrongResult, check_own, check_same_bits
from mhckit.bench.decode import reference_junction
from mhckit.bench.launches import DeviceEvent
from mhckit.testing import Call

NAMES = ["mhckit", "reference", "reference, no graph", "reference, compiled"]


def _call(recipe: str = "deepseek_v41", tokens: int = 7) -> Call:
    return Case(tokens, 16).call("junction", recipe=recipe, device="cpu")


@pytest.mark.parametrize("recipe", DECODE_RECIPES)
def test_a_link_takes_what_the_one_before_returned(recipe: str) -> None:
    call = _call(recipe)
    chain, tensors = Chain(call, 3), call.tensors
    for parameter in (tensor for link in chain.parameters[1:] for tensor in link):
        parameter.mul_(0.5)  # tells links apart
    mix = Mix(tensors["mix_pre"], tensors["mix_post"], tensors["mix_res"])
    own = [tensors[name] for name in ("phi", "scale", "bias")]
    first = mhckit.junction(tensors["x"], tensors["f"], mix, *own, recipe=call.recipe)
    second = mhckit.junction(*first, *(0.5 * tensor for tensor in own), recipe=call.recipe)
    for links, want in ((1, first), (2, second)):
        for got, value in zip(_flat(chain.run(links=links)), _flat(want), strict=True):
            assert torch.equal(got, value)
    assert not torch.equal(chain.run()[0], second[0]), "three links unless asked for fewer"


def _flat(result: tuple[Tensor, Tensor, Mix]) -> tuple[Tensor, ...]:
    y, x_in, (pre, post, res) = result
    assert res is not None
    return y, x_in, pre, post, res


@pytest.mark.parametrize("recipe", DECODE_RECIPES)
def test_the_reference_is_what_the_operator_computes(recipe: str) -> None:
    chain = Chain(_call(recipe), 2)
    with mhckit.backend("reference"):
        want = _flat(chain.run())
    for got, value in zip(_flat(chain.run(reference_junction)), want, strict=True):
        assert torch.equal(got, value) and got.is_contiguous()


@torch.no_grad()
def test_a_chain_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reference returns, the next link is given in the same layout as the first."""
    graphs, compile_as_asked = [], torch.compile

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_as_asked(function, backend=backend, **how))
    chain = Chain(_call(), 3)
    got = _flat(chain.run(decode.compiled_reference()))
    assert len(graphs) == 1
    for value, want in zip(got, _flat(chain.run(reference_junction)), strict=True):
        assert torch.equal(value, want)


def _each_token_alone(x: Tensor, f: Tensor, mix: Mix, *parameters: Tensor, **options: Any) -> tuple[Any, ...]:
    return 2 * x, f + x[:, 0], mix


@pytest.mark.parametrize("output", [None, 0, 3])
def test_tokens_that_depend_on_their_batch_are_refused(output: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def junction(x: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        y, x_in, mix = _each_token_alone(x, *rest, **options)
        wrong = 1 + 1e-6 * len(x)
        return y * (wrong if output == 0 else 1), x_in, mix._replace(post=mix.post * (wrong if output == 3 else 1))

    monkeypatch.setattr(mhckit, "junction", junction)
    batch = _call(tokens=50).to(Tensor.double)
    if output is None:
        check_same_bits(batch, 7)
    else:
        with pytest.raises(WrongResult, match=f"output {output}: 7 tokens alone .* among 50"):
            check_same_bits(batch, 7)


def test_nothing_is_timed_whose_tokens_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for as many tokens as are compared with float64, and another form of a kernel for all that are timed."""
    call, checked = Case.call, []

    def junction(x: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        y, *others = _each_token_alone(x, *rest, **options)
        return 1.01 * y if len(x) > 300 else y, *others

    monkeypatch.setattr(Case, "call", lambda self, operator, **options: call(self, operator, device="cpu", **options))
    monkeypatch.setattr(correctness, "check", lambda _, call: checked.append(len(call.tensors["x"])))
    monkeypatch.setattr(mhckit, "junction", junction)
    check_own(Case(3, 8), "junction")
    check_own(Case(300, 8), "junction")
    with pytest.raises(WrongResult, match=r"output 0: 257 tokens alone .* among 301"):
        check_own(Case(301, 8), "junction")
    assert checked == [3, 257, 257]


def test_tokens_are_compared_with_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those from inside the batch, all that belongs to them, and parameters as they are."""
    calls: list[dict[str, Tensor]] = []
    monkeypatch.setattr(mhckit, "junction", _each_token_alone)
    call = Call.__call__
    monkeypatch.setattr(Call, "__call__", lambda self: calls.append(self.tensors) or call(self))
    batch = _call(tokens=50)
    check_same_bits(batch, 7)
    alone, _whole = calls
    for name, tensor in alone.items():
        among = batch.tensors[name] if name in ("phi", "scale", "bias") else batch.tensors[name][14:21]
        assert torch.equal(tensor, among), name


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Measurements without a GPU: a chain takes 200 us, 5000 if the host launches it; what was run, in order."""
    call, ran = Case.call, []

    def captured(prepare: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        ran.append(prepare()())
        return lambda: None

    def median(run: Callable[[], object], rep: int) -> float:
        assert not torch.is_grad_enabled()
        return 5000.0 if isinstance(run(), tuple) else 200.0

    def events(run: Callable[[], object]) -> list[DeviceEvent]:
        run()
        return [DeviceEvent("kernel", 1.0)] * 2

    monkeypatch.setattr(Case, "call", lambda self, operator, **options: call(self, operator, device="cpu", **options))
    monkeypatch.setattr(decode, "captured", captured)
    monkeypatch.setattr(decode, "median_microseconds", median)
    monkeypatch.setattr(decode, "device_events", events)
    monkeypatch.setattr(decode, "compiled_reference", lambda: reference_junction)
    monkeypatch.setattr(decode, "check_same_bits", lambda batch, tokens: ran.append((len(batch.tensors["x"]), tokens)))
    return ran


def test_a_line_per_implementation(timed: list[object]) -> None:
    lines = decode.measure_decode("deepseek_v41", Case(1, 16, compiled=True), rep=1)
    assert timed[0] == (DECODE_BATCH, 1), "bits are compared before anything is timed"
    assert [line["implementation"] for line in lines] == NAMES
    assert [line["microseconds"] for line in lines] == [10.0, 10.0, 250.0, 10.0], "of one of twenty links"
    assert [line["graph"] for line in lines] == [True, True, False, True]
    assert {(line["kind"], line["recipe"], line["tokens"], line["launches"], line["links"]) for line in lines} == {
        ("decode", "deepseek_v41", 1, 2, 20)
    }
    assert all("from memory" in line["inputs"] for line in lines)
    assert lines[0]["target_microseconds"] == 12 and lines[0]["same_bits_in"] == DECODE_BATCH
    assert not any("same_bits_in" in line for line in lines[1:])


def test_only_some_are_compiled_and_have_a_target(timed: list[object]) -> None:
    lines = decode.measure_decode("deepseek_v4", Case(2, 16), rep=1)
    assert [line["implementation"] for line in lines] == NAMES[:3] and "target_microseconds" not in lines[0]


def test_a_wrong_compiled_reference_is_refused_alone(timed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Mix]:
        y, x_in, mix = reference_junction(*args, **options)
        return y, 1.1 * x_in, mix

    monkeypatch.setattr(decode, "compiled_reference", lambda: wrong)
    lines = decode.measure_decode("deepseek_v4", Case(1, 16, compiled=True), rep=1)
    assert [line["kind"] for line in lines] == ["decode", "decode", "decode", "refused"]
    assert lines[-1]["measurement"] == "reference, compiled, deepseek_v4, 1 x 16, N = 4"
    assert lines[-1]["reason"].startswith("WrongResult: output 1")


def test_wrong_results_are_not_timed(timed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(batch: Call, tokens: int) -> None:
        raise WrongResult("bits")

    with monkeypatch.context() as wrong:
        wrong.setattr(decode, "check_same_bits", refuse)
        with pytest.raises(WrongResult, match="bits"):
            decode.measure_decode("deepseek_v4", Case(1, 16), rep=1)
    wrong_outputs = decode.mhckit_outputs
    monkeypatch.setattr(decode, "mhckit_outputs", lambda call: tuple(1.1 * each for each in wrong_outputs(call)))
    with pytest.raises(WrongResult, match="output 0"):
        decode.measure_decode("deepseek_v4", Case(1, 16), rep=1)
    assert timed == []
