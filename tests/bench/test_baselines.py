"""The plain junction computes what mhckit's does, forward and backward; what is wrong is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhckit import Recipe
from mhckit.bench.baselines import PEERS, eager_junction
from mhckit.bench.cases import Case
from mhckit.bench.correctness import TOLERANCE_OF_OTHERS, WrongResult, check
from mhckit.bench.step import Step, mhckit_outputs
from mhckit.testing import Call

CASES = [Case(5, 6), Case(5, 6, streams=2), Case(5, 6, out_norm=True)]


def _exact_call(case: Case) -> Call:
    return case.call("junction", device="cpu").to(lambda tensor: tensor.double())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_mhckit_in_float64(case: Case) -> None:
    plain, ours = (Step(implementation, _exact_call(case)) for implementation in (eager_junction, mhckit_outputs))
    torch.testing.assert_close(plain.forward(), ours.forward())
    for gradient, expected in zip(plain.both(), ours.both(), strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, expected)


def test_liger_recipe_has_no_optional_tensors() -> None:
    call = Case(5, 6).call("junction", recipe="liger", device="cpu")
    assert call.recipe == Recipe.preset("liger")
    assert not {"f_bias", "norm_weight", "out_norm_weight"} & set(call.tensors)


def test_peers_are_optional() -> None:
    for peer in PEERS:
        try:
            assert callable(peer.load())
        except ImportError as error:
            assert "kernel" in str(error)


def test_right_results_pass() -> None:
    call = Case(5, 32).call("junction", device="cpu")
    check(mhckit_outputs, call)
    check(eager_junction, call, TOLERANCE_OF_OTHERS)


def test_without_gradients_outputs_alone_are_looked_at() -> None:
    call = Case(5, 32).call("junction", device="cpu")

    def detached(call: Call) -> tuple[Tensor, ...]:
        assert not torch.is_grad_enabled()
        return tuple(output.detach() for output in eager_junction(call))

    check(detached, call, TOLERANCE_OF_OTHERS, gradients=False)
    with pytest.raises(WrongResult, match="output 3"):
        check(lambda call: (*detached(call)[:3], call.tensors["mix_res"]), call, TOLERANCE_OF_OTHERS, gradients=False)


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_wrong_results_are_refused(wrong: str) -> None:
    def almost(call: Call) -> tuple[Tensor, ...]:
        y, x_in, post, res = eager_junction(call)
        return (y, x_in * 1.1, post, res) if wrong == "output" else (y, x_in, post.detach() + 0 * post, res)

    with pytest.raises(WrongResult, match=f"{wrong} .*relative error"):
        check(almost, Case(5, 32).call("junction", device="cpu"), TOLERANCE_OF_OTHERS)
