"""param_groups: every trainable parameter in exactly one group, those of hyper-connections apart from the others."""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import pytest
import torch
from networks import Connected, make
from torch import nn

from mhckit import MHC, HyperConnection, HyperHead, Recipe, param_groups

RECIPE = Recipe.preset("deepseek_v4")


def _by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({group["name"] for group in groups}) == len(groups)
    return {group["name"]: group for group in groups}


def _names(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Names of the parameters in each group; every trainable one must be in exactly one."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {group["name"]: {name_of[id(parameter)] for parameter in group["params"]} for group in groups}


def _model(recipe: Recipe = RECIPE, **options: Any) -> Connected:
    return make(recipe, depth=2, **options)[1]


def test_groups_of_a_model() -> None:
    model = _model(norm=True, projection_norm_weight=True)
    groups = param_groups(model, weight_decay=0.1)
    names = _names(model, groups)
    connections = [f"connections.{index}" for index in range(2)]
    assert names["mhc"] == {*(f"{c}.phi" for c in connections), "head.fn"}
    vectors = ("scale", "bias", "norm_weight", "out_norm_weight")
    assert names["mhc_no_decay"] == {*(f"{c}.{v}" for c in connections for v in vectors), "head.scale", "head.base"}
    assert names["other"] == {f"sublayers.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")}
    rest = ("norm.weight", "up.bias", "down.bias")
    assert names["other_no_decay"] == {f"sublayers.{i}.{parameter}" for i in range(2) for parameter in rest}
    assert [group["name"] for group in groups] == ["mhc", "mhc_no_decay", "other", "other_no_decay"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    assert all(set(group) == {"name", "params", "weight_decay"} for group in groups)


def test_no_decay_where_it_would_move_the_coefficients() -> None:
    """With zero gradients a step is weight decay alone."""
    model = _model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(param_groups(model, weight_decay=0.5), lr=0.1).step()
    for name, parameter in model.named_parameters():
        kept = parameter.ndim < 2
        torch.testing.assert_close(parameter, before[name] * (1 if kept else 0.95), msg=name)


def test_options_of_the_mhc_groups() -> None:
    model = _model()
    optimiser = torch.optim.AdamW(param_groups(model, weight_decay=0.1, mhc={"lr": 1e-4, "weight_decay": 0.2}), lr=1e-2)
    seen = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimiser.param_groups}
    assert seen == {
        "mhc": (1e-4, 0.2),
        "mhc_no_decay": (1e-4, 0.0),
        "other": (1e-2, 0.1),
        "other_no_decay": (1e-2, 0.0),
    }


def test_an_optimiser_resumes() -> None:
    """Its state dict carries the groups and their names."""
    _, model, h = make(RECIPE, depth=2)
    twin = copy.deepcopy(model)
    optimisers = [torch.optim.AdamW(param_groups(m, weight_decay=0.1), lr=1e-2) for m in (model, twin)]

    def step(trained: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        trained(h).square().mean().backward()
        optimiser.step()

    step(model, optimisers[0])
    twin.load_state_dict(model.state_dict())
    optimisers[1].load_state_dict(copy.deepcopy(optimisers[0].state_dict()))
    names = [group["name"] for group in optimisers[1].param_groups]
    assert names == ["mhc", "mhc_no_decay", "other", "other_no_decay"]
    for trained, optimiser in zip((model, twin), optimisers, strict=True):
        step(trained, optimiser)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("taken", [("other",), ("mhc", "other")])
def test_muon_takes_the_matrices(taken: tuple[str, ...]) -> None:
    _, model, h = make(RECIPE, depth=2)
    groups = _by_name(param_groups(model))
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon([groups[name] for name in taken], lr=1e-2),
        torch.optim.AdamW([group for name, group in groups.items() if name not in taken], lr=1e-2),
    ]
    losses = []
    for _ in range(5):
        loss = (model(h) - h.sin()).square().mean()
        model.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_frozen_parameters_are_left_out() -> None:
    model = _model()
    model.sublayers.requires_grad_(False)
    model.connections[0].requires_grad_(False)
    names = _names(model, param_groups(model))
    assert names == {
        "mhc": {"connections.1.phi", "head.fn"},
        "mhc_no_decay": {"connections.1.scale", "connections.1.bias", "head.scale", "head.base"},
    }
    assert param_groups(model.requires_grad_(False)) == []


def test_shared_parameters_are_listed_once() -> None:
    """A connection used twice, and a parameter that another module holds too: it stays the connection's."""
    model = nn.ModuleDict({"other": nn.Linear(32, 24), "first": HyperConnection(8), "embed": nn.Embedding(5, 8)})
    model["again"], model["second"] = model["first"], HyperConnection(8)
    model["second"].bias = model["first"].bias
    model["out"] = nn.Linear(8, 5, bias=False)
    model["out"].weight = model["embed"].weight
    model["other"].weight = model["first"].phi
    names = _names(model, param_groups(model))
    assert names["mhc"] == {"other.weight", "second.phi"}
    assert names["mhc_no_decay"] == {"first.scale", "first.bias", "second.scale"}
    assert names["other"] == {"embed.weight"}


def test_static_recipes_and_wrapped_layers() -> None:
    static = _model(Recipe.preset("paper", dynamic=False))
    assert _names(static, param_groups(static))["mhc_no_decay"] == {"connections.0.bias", "connections.1.bias"}
    wrapped = MHC(nn.Linear(8, 8), 8)
    names = _names(wrapped, param_groups(wrapped))
    assert names["mhc"] == {"connection.phi"}
    assert names["other"] == {"layer.weight"}
    plain = nn.Linear(8, 8)
    assert set(_names(plain, param_groups(plain))) == {"other", "other_no_decay"}
    head = HyperHead(8, "deepseek_v4")
    assert set(_names(head, param_groups(head))) == {"mhc", "mhc_no_decay"}


def test_a_name_alone_makes_no_connection() -> None:
    """Neither a module of that name with other parameters, nor one with those parameters and another name."""

    class OddHyperConnection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn, self.gate = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))

    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn, self.scale, self.base = (nn.Parameter(torch.zeros(*shape)) for shape in ((2, 2), (1,), (2,)))

    for module in (OddHyperConnection(), Affine()):
        assert set(_names(module, param_groups(module))) == {"other", "other_no_decay"}


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next", "hy_v4"])
def test_models_of_transformers(family: str, patched: bool) -> None:
    pytest.importorskip("transformers")
    from mhckit.integrations.transformers import apply

    model = importlib.import_module("tiny").tiny(family)
    model = apply(model) if patched else model
    names = _names(model, param_groups(model))
    connections = {name for name, _ in model.named_modules() if name.endswith(("attn_hc", "ffn_hc"))}
    heads = {name.rsplit(".", 1)[0] for name, _ in model.named_parameters() if name.endswith("hc_fn")}
    assert len(connections) == 2 * (3 if family == "hy_v4" else 4)  # two in each layer
    assert len(heads) == (0 if family == "glm5_next" else 1)
    assert names["mhc"] == {*(f"{c}.fn" for c in connections), *(f"{h}.hc_fn" for h in heads)}
    assert names["mhc_no_decay"] == {
        *(f"{c}.{key}" for c in connections for key in ("scale", "base")),
        *(f"{h}.{key}" for h in heads for key in ("hc_scale", "hc_base")),
    }


def test_errors() -> None:
    model = HyperConnection(8)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        param_groups(list(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight_decay must be a number, got '0\.1'"):
        param_groups(model, weight_decay="0.1")  # type: ignore[arg-type]
    for decay in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weight_decay must be finite and not negative"):
            param_groups(model, weight_decay=decay)
    with pytest.raises(ValueError, match=re.escape("mhc['weight_decay'] must be finite and not negative, got -1")):
        param_groups(model, mhc={"weight_decay": -1})
    with pytest.raises(ValueError, match="got 'params', which param_groups sets"):
        param_groups(model, mhc={"params": []})
