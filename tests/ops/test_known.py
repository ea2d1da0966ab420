"""Calls like an earlier one: what is taken for one, what is not, and what a function skips for it."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import mhckit
from mhckit import Recipe
from mhckit.ops import _known, _register
from mhckit.ops._check import Checked
from mhckit.ops._known import Known
from mhckit.testing import OPERATORS, Call, make_call

RECIPE = Recipe.preset("deepseek_v4")
# Functions whose checks take longer than to recognise a call.
REMEMBER = ("coefficients", "post", "head", "enter", "junction", "leave")


def _x(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 4))


def _known_one() -> Known:
    known = Known()
    known.keep((_x(), None, _x(5)), ("recipe", 2), "value")
    return known


def test_a_call_like_an_earlier_one_is_found() -> None:
    assert _known_one().find((_x(), None, _x(5)), ("recipe", 2)) == "value"


@pytest.mark.parametrize(
    ("tensors", "constants"),
    [
        (lambda: (_x(), None, _x(5)), ("another", 2)),
        (lambda: (_x(), None, _x(5)), ("recipe", 3)),
        (lambda: (_x(), _x(5), None), ("recipe", 2)),
        (lambda: (_x(), None, None), ("recipe", 2)),
        (lambda: (_x(), _x(5), _x(5)), ("recipe", 2)),
        (lambda: (_x(4, 3), None, _x(5)), ("recipe", 2)),
        (lambda: (_x(), None, _x(6)), ("recipe", 2)),
        (lambda: (_x(), None, _x(5, 1)), ("recipe", 2)),
        (lambda: (_x(4, 3).T, None, _x(5)), ("recipe", 2)),
        (lambda: (_x(), None, _x(10)[::2]), ("recipe", 2)),
        (lambda: (_x().double(), None, _x(5)), ("recipe", 2)),
        (lambda: (_x(), None, _x(5).half()), ("recipe", 2)),
        (lambda: (_x(), None, _x(5).to("meta")), ("recipe", 2)),
        (lambda: (_x(), None, _x(5).requires_grad_()), ("recipe", 2)),
        (lambda: (torch.nn.Parameter(_x(), False), None, _x(5)), ("recipe", 2)),
        (lambda: (_x(), None, torch.ops.aten._neg_view(_x(5))), ("recipe", 2)),
        (lambda: (_x(), None, torch.ops.aten._efficientzerotensor((5,))), ("recipe", 2)),
        (lambda: (_x(), None, _x(5).to_sparse()), ("recipe", 2)),
        (lambda: (_x(), None, [1.0]), ("recipe", 2)),
    ],
)
def test_another_call_is_not(tensors: Callable[[], tuple[Any, ...]], constants: tuple[Any, ...]) -> None:
    assert _known_one().find(tensors(), constants) is None


def test_modes_make_another_call() -> None:
    """The dispatcher goes by autocast, and inference makes tensors of another kind; gradients may be on or off."""
    known = _known_one()
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            tensors = (_x(), None, _x(5))
            assert known.find(tensors, ("recipe", 2)) is None
            known.keep(tensors, ("recipe", 2), "in the mode")
            assert known.find(tensors, ("recipe", 2)) == "in the mode"
    with torch.no_grad():
        assert known.find((_x(), None, _x(5)), ("recipe", 2)) == "value"


def test_transforms_make_another_call() -> None:
    known = Known()
    known.keep((_x(3),), (), "value")
    found = []
    torch.func.vmap(lambda x: found.append(known.find((x,), ())) or x)(_x(2, 3))
    torch.func.grad(lambda x: found.append(known.find((x,), ())) or x.sum())(_x(3))
    assert found == [None, None] and known.find((_x(3),), ()) == "value"


def test_a_tensor_given_twice_is_not_kept() -> None:
    known, x = Known(), _x()
    known.keep((x, x), (), "value")
    assert known.find((x, x), ()) is None and known.find((_x(), _x()), ()) is None


def test_what_is_known_is_not_kept_again() -> None:
    known = _known_one()
    known.keep((_x(), None, _x(5)), ("recipe", 2), "another")
    assert known.find((_x(), None, _x(5)), ("recipe", 2)) == "value"
    assert [len(variants) for variants in known._kinds.values()] == [1]


def test_sizes_that_are_symbols() -> None:
    """They have no hash, and a trace of a call goes on as if no call had been seen."""
    call = make_call("post", RECIPE, lead=(3,), channels=8, dtype=torch.float32)
    call()
    x, f, post, res = (call.tensors[name] for name in ("x", "f", "post", "res"))
    traced = make_fx(lambda x, f, post, res: mhckit.post(x, f, post, res), tracing_mode="symbolic")(x, f, post, res)
    assert torch.equal(traced(x, f, post, res), mhckit.post(x, f, post, res))


def test_no_tensor_is_kept_alive() -> None:
    known, x = Known(), _x()
    alive = weakref.ref(x)
    known.keep((x,), (), "value")
    known.find((x,), ())
    del x
    gc.collect()
    assert alive() is None


def test_kinds_and_variants_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_known, "MAX_KINDS", 3)
    monkeypatch.setattr(_known, "MAX_VARIANTS", 2)
    known = Known()
    for tokens in range(1, 9):
        for other in range(1, 5):
            known.keep((_x(tokens), _x(other)), (), (tokens, other))
        assert known.find((_x(tokens), _x(4)), ()) == (tokens, 4)
        assert known.find((_x(tokens), _x(1)), ()) is None, "the oldest was forgotten"
        assert len(known._kinds) <= 3 and all(len(variants) <= 2 for variants in known._kinds.values())


def test_threads_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread finds what belongs to its call, or nothing."""
    monkeypatch.setattr(_known, "MAX_KINDS", 3)
    known, wrong = Known(), []

    def work(thread: int) -> None:
        for step in range(300):
            size = 1 + (thread + step) % 5
            found = known.find((_x(size), _x(thread)), (step % 2,))
            if found not in (None, (size, thread, step % 2)):
                wrong.append(found)
            known.keep((_x(size), _x(thread)), (step % 2,), (size, thread, step % 2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("guards", [None, lambda: None])
def test_without_torchs_guards_nothing_is_known(guards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are private: another torch may have none, or others."""
    monkeypatch.setattr(_known, "TensorGuards", guards)
    known = _known_one()
    assert known.find((_x(), None, _x(5)), ("recipe", 2)) is None


@pytest.mark.parametrize("operator", REMEMBER)
def test_checks_run_once_for_a_kind_of_call(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    original = Checked.remember
    monkeypatch.setattr(Checked, "remember", lambda self, *call: checked.append(1) or original(self, *call))
    own = 2 if operator == "leave" else 1  # it calls post
    channels = 31 + REMEMBER.index(operator)  # which no other test has
    for lead in ((3, 7), (7, 3)):
        for seed in (1, 2):
            make_call(operator, RECIPE, lead=lead, channels=channels, seed=seed)()
        assert len(checked) == own
        make_call(operator, RECIPE, lead=lead, channels=channels).requires_grad()()
        assert len(checked) == 2 * own, "another kind: it requires gradients"
        checked.clear()


@pytest.mark.parametrize("operator", [name for name in REMEMBER if name != "post"])
def test_a_call_with_another_recipe_is_checked(operator: str) -> None:
    call = make_call(operator, RECIPE, lead=(3,), dtype=torch.float32)
    call()
    for recipe in (RECIPE.replace(streams=3), "deepseek_v4", ["deepseek_v4"]):
        with pytest.raises((ValueError, TypeError)):
            Call(operator, recipe, call.tensors)()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPERATORS["junction"])
def test_nested_tensors_are_errors(name: str) -> None:
    """Torch's guards would end the process."""
    call = make_call("junction", RECIPE, lead=(3,), dtype=torch.float32)
    call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.as_nested_tensor([torch.randn(2), torch.randn(3)])
    with pytest.raises(RuntimeError, match="NestedTensorImpl"):
        call(**{name: nested})


def test_constants_that_are_equal_but_wrong() -> None:
    x, pre = torch.randn(3, 4, 5), torch.randn(3, 4)
    mhckit.pre(x, pre, out_norm_weight=torch.ones(5), out_norm_eps=1.0)
    with pytest.raises(TypeError, match="out_norm_eps must be a number, got True"):
        mhckit.pre(x, pre, out_norm_weight=torch.ones(5), out_norm_eps=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_autograd_looks_after_the_results_alone(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for backward is no output; and nothing is differentiated where gradients are off."""
    applied: list[str] = []
    for subclass in _register.Operator.__subclasses__():
        original = subclass._apply_eagerly

        def apply(*args: Any, original: Callable[..., Any] = original, name: str = subclass.__name__) -> Any:
            applied.append(name)
            return original(*args)

        monkeypatch.setattr(subclass, "_apply_eagerly", apply)
    call = make_call(operator, RECIPE).requires_grad()
    outputs = call()
    assert len(applied) == 1
    node: Any = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    while node.name() != f"{applied[0]}Backward":
        node = node.next_functions[0][0]
    assert len(node._input_metadata) == len(outputs)
    with torch.no_grad():
        call()
    assert len(applied) == 1


@pytest.mark.parametrize("gradients", [True, False])
def test_forward_mode_is_an_error_not_a_wrong_number(gradients: bool) -> None:
    call = make_call("post", RECIPE)
    x = call.tensors["x"]
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients), pytest.raises(NotImplementedError, match="jvp"):
        call(x=forward_ad.make_dual(x, torch.ones_like(x)))
