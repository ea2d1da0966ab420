"""Models of transformers with mhckit's operators compute what they compute without, in everything people do with them.

The unpatched models are the specification. They are tiny, random and on the CPU.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import FAMILIES, WITHOUT_CHOICES, logits_and_gradients, randomise, tiny, tiny_config, token_ids
from torch import Tensor, nn

import mhckit
from mhckit.integrations.transformers import AutoModelForCausalLM, apply, register, restore, unregister
from mhckit.testing import relative_error

# Raised inside transformers and accelerate, not by anything a user of mhckit wrote.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

OPTIONS = [
    dict(),
    dict(across_layers=True),
    dict(junction=False),
    dict(junction=False, head=False),
    dict(enter=False, junction=False),
]


def _assert_same(patched: tuple[Tensor, dict[str, Tensor]], plain: tuple[Tensor, dict[str, Tensor]]) -> None:
    """float32: logits to 1e-5, every gradient to 1e-4 in relative norm."""
    assert relative_error(patched[0], plain[0]) < 1e-5
    assert patched[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert relative_error(patched[1][name], gradient) < 1e-4, name


def _classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "all")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, options: dict[str, bool]) -> None:
    model, ids = tiny(family), token_ids()
    plain = logits_and_gradients(model, ids)
    assert apply(model, **options) is model
    _assert_same(logits_and_gradients(model, ids), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operators_are_mhckits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the original connections is left to run."""
    model = apply(tiny(family))
    for module in model.modules():
        if "Hyper" in type(module).__name__ or "DecoderLayer" in type(module).__name__:
            monkeypatch.setattr(type(module).replaced, "forward", None)
            assert type(module).__module__.startswith("mhckit.")
    model(input_ids=token_ids())


def _bfloat16_errors(family: str, seed: int) -> tuple[list[float], list[float]]:
    """Errors of the logits and of all gradients, unpatched and patched, against float64 with the same parameters."""
    model, ids = tiny(family, seed=seed, **WITHOUT_CHOICES).bfloat16(), token_ids(seed=seed)
    exact, exact_gradients = logits_and_gradients(copy.deepcopy(model).double(), ids)
    errors = []
    for change in (restore, apply):
        logits, gradients = logits_and_gradients(change(model), ids)
        errors.append(
            [relative_error(logits, exact), *(relative_error(gradients[n], g) for n, g in exact_gradients.items())]
        )
    return errors[0], errors[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_less_exact(family: str) -> None:
    """Most of the error is the sublayers' and the same for both; so of many tensors and models, at the median."""
    pairs = [_bfloat16_errors(family, seed) for seed in range(4)]
    plain, patched = (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
    assert (patched / plain.clamp(min=1e-12)).median() <= 1
    assert patched[:, 0].norm() <= plain[:, 0].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_steps_of_training(family: str) -> None:
    def losses(change: Any) -> Tensor:
        model = change(tiny(family, own_initialisation=True, **WITHOUT_CHOICES)).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for step in range(30):
            ids = token_ids(batch=4, tokens=12, seed=step % 5)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            curve.append(loss.item())
        return torch.tensor(curve)

    plain, patched = losses(restore), losses(apply)
    assert plain[-1] < 0.8 * plain[0]
    torch.testing.assert_close(patched, plain, rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache(family: str) -> None:
    model, ids = tiny(family), token_ids(tokens=11)
    options: dict[str, Any] = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, **options)
    assert torch.equal(apply(model, across_layers=True).generate(ids, **options), plain)
    assert plain.shape[1] > ids.shape[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    model, ids = tiny(family).train(), token_ids()
    plain = logits_and_gradients(model, ids)
    apply(model, across_layers=not reentrant)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    _assert_same(logits_and_gradients(model, ids), plain)


def test_reentrant_checkpointing_across_layers_raises() -> None:
    model = apply(tiny("deepseek_v4").train(), across_layers=True)
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    with pytest.raises(ValueError, match="reentrant gradient checkpointing loses"):
        model(input_ids=token_ids(), use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    model, ids = tiny(family, num_hidden_layers=1), token_ids()
    plain = logits_and_gradients(model, ids)
    compiled = torch.compile(apply(model), backend="aot_eager", fullgraph=bool(model._can_compile_fullgraph))
    _assert_same(logits_and_gradients(_Named(compiled, model), ids), plain)


class _Named:
    """A compiled model, with the parameters' names of the model."""

    def __init__(self, compiled: Any, model: nn.Module) -> None:
        self.compiled, self.zero_grad, self.named_parameters = compiled, model.zero_grad, model.named_parameters

    def __call__(self, **inputs: Any) -> Any:
        return self.compiled(**inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_restore(family: str) -> None:
    model, ids = tiny(family), token_ids()
    classes, attributes = _classes(model), [sorted(module.__dict__) for module in model.modules()]
    plain = logits_and_gradients(model, ids)
    assert _classes(restore(model)) == classes
    assert _classes(apply(model)) != classes
    assert restore(model) is model
    assert _classes(model) == classes
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    again = logits_and_gradients(model, ids)
    assert torch.equal(again[0], plain[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_apply_again(family: str) -> None:
    """Idempotent; and the last options count."""
    model = apply(tiny(family))
    classes = _classes(model)
    assert _classes(apply(model)) == classes
    apply(model, junction=False, head=False)
    changed = {type(module).__name__ for module in model.modules() if type(module).__module__.startswith("mhckit.")}
    assert len(changed) == 1 and changed.pop().endswith("HyperConnection")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_unchanged(family: str, tmp_path: Path) -> None:
    model, ids = tiny(family), token_ids()
    plain_keys, plain = list(model.state_dict()), model(input_ids=ids).logits
    apply(model)
    assert list(model.state_dict()) == plain_keys
    model.save_pretrained(tmp_path / "patched")
    restore(model).save_pretrained(tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "patched", experts_implementation="eager")
    assert relative_error(loaded(input_ids=ids).logits, plain) == 0
    assert relative_error(apply(loaded)(input_ids=ids).logits, plain) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_pickles(family: str) -> None:
    model, ids = apply(tiny(family)), token_ids()
    expected = model(input_ids=ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _classes(other) == _classes(model)
        assert torch.equal(other(input_ids=ids).logits, expected)
        assert torch.equal(restore(other)(input_ids=ids).logits, restore(copy.deepcopy(model))(input_ids=ids).logits)


def test_a_part_of_a_model() -> None:
    model, ids = tiny("deepseek_v4"), token_ids()
    expected = model(input_ids=ids).logits
    apply(model.model)
    assert relative_error(model(input_ids=ids).logits, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states(family: str) -> None:
    model, ids = tiny(family), token_ids()
    plain = model(input_ids=ids, output_hidden_states=True).hidden_states
    patched = apply(model)(input_ids=ids, output_hidden_states=True).hidden_states
    across = apply(model, across_layers=True)(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(plain) == len(patched) == len(across)
    for a, b, c in zip(plain, patched, across, strict=True):
        assert relative_error(b, a) < 1e-5
        assert relative_error(c.tensor if isinstance(c, mhckit.Streams) else c, a) < 1e-5


def test_a_connection_alone_returns_what_the_original_returns() -> None:
    model = tiny("deepseek_v4")
    connection, x = model.model.layers[1].attn_hc, torch.randn(2, 5, 4, 32)
    expected = connection(x)
    apply(model, junction=False)
    for value, wanted in zip(connection(x), expected, strict=True):
        assert value.shape == wanted.shape and relative_error(value, wanted) < 1e-5


def test_class_mapping() -> None:
    register()
    try:
        made = transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))
        with pytest.raises(ValueError):
            register()
        register(overwrite=True)
    finally:
        unregister()
    made.set_experts_implementation("eager")
    assert _classes(made) == _classes(apply(tiny("deepseek_v4")))
    ids = token_ids()
    assert (
        relative_error(randomise(made).eval()(input_ids=ids).logits, tiny("deepseek_v4")(input_ids=ids).logits) < 1e-5
    )
    assert _classes(restore(made)) == _classes(tiny("deepseek_v4"))
    unregister()
    later = transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))
    assert not any(kind.__module__.startswith("mhckit.") for kind in _classes(later))
    for model in (later, made, apply(later, junction=False)):
        assert len(model(input_ids=ids, output_hidden_states=True).hidden_states) == 5


def test_class_mapping_after_a_model_that_cannot_be_built() -> None:
    register()
    try:
        with pytest.raises(ValueError, match="norm_eps"):
            transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v4", rms_norm_eps=0.0))
    finally:
        unregister()
    assert not any(kind.__module__.startswith("mhckit.") for kind in _classes(tiny("deepseek_v4")))


def test_auto_model(tmp_path: Path) -> None:
    tiny("hy_v4").save_pretrained(tmp_path)
    patched = _classes(apply(tiny("hy_v4")))
    assert _classes(AutoModelForCausalLM.from_pretrained(tmp_path)) == patched
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert _classes(model) == patched and not info["missing_keys"]
    assert _classes(AutoModelForCausalLM.from_config(tiny_config("hy_v4"))) == patched


def test_bfloat16_loading_keeps_the_parameters_dtypes(tmp_path: Path) -> None:
    tiny("deepseek_v4").save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    patched = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert [p.dtype for p in patched.parameters()] == [p.dtype for p in plain.parameters()]
    assert patched.model.layers[0].attn_hc.fn.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family: str) -> None:
    model, ids = tiny(family, **WITHOUT_CHOICES), token_ids()
    exact = model(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        plain, patched = model(input_ids=ids).logits, apply(model)(input_ids=ids).logits
    assert patched.dtype == plain.dtype
    assert relative_error(patched, exact) < 1.5 * relative_error(plain, exact)


def test_qwen4_exp_has_another_kind_of_connection() -> None:
    config = transformers.AutoConfig.for_model("qwen4_exp")
    with pytest.raises(ValueError, match=r"qwen4_exp.* another kind of connection"):
        apply(_Configured(config))


class _Configured(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [dict(hc_eps=0.0), dict(hc_mult=1), dict(hc_mult=17)], ids=str)
def test_unusual_configurations(family: str, options: dict[str, Any]) -> None:
    model, ids = tiny(family, num_hidden_layers=1, **options), token_ids()
    plain = model(input_ids=ids, use_cache=False).logits
    assert relative_error(apply(model)(input_ids=ids, use_cache=False).logits, plain) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_model_is_left_as_it_was(family: str) -> None:
    model = tiny(family, rms_norm_eps=0.0)
    classes = _classes(model)
    with pytest.raises(ValueError, match="norm_eps is rms_norm_eps"):
        apply(model)
    assert _classes(model) == classes
    model(input_ids=token_ids())


def test_a_compiled_model_follows() -> None:
    model, ids = tiny("hy_v4", num_hidden_layers=1), token_ids()
    compiled = torch.compile(model, backend="aot_eager")
    plain = compiled(input_ids=ids).logits
    patched = apply(model)(input_ids=ids).logits
    assert not torch.equal(patched, plain)
    assert torch.equal(compiled(input_ids=ids).logits, patched)


def test_classes_made_from_ours_are_not_undone() -> None:
    model = apply(tiny("hy_v4"))
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPHYV4DecoderLayer", (type(layer),), {})
    for change in (apply, restore):
        with pytest.raises(ValueError, match=r"become a FSDPHYV4DecoderLayer.* before fully_shard"):
            change(model)
    model(input_ids=token_ids())


def test_errors() -> None:
    model = tiny("hy_v4")
    with pytest.raises(ValueError, match="junction=True needs enter=True"):
        apply(model, enter=False)
    with pytest.raises(ValueError, match="across_layers=True needs"):
        apply(model, head=False, across_layers=True)
    with pytest.raises(ValueError, match=r"supported type \(deepseek_v4.*this one has: llama"):
        apply(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, num_hidden_layers=0, vocab_size=8))
        )
    with pytest.raises(ValueError, match="no config with a model_type"):
        apply(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a model of transformers, got str"):
        apply("deepseek_v4")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="found no HYV4HyperConnection"):
        apply(_Configured(model.config))
    model.model.layers[0].forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="has been replaced by something else"):
        apply(model)


def test_a_decoder_layer_that_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("hy_v4")
    layer = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, something_new: None)
    with pytest.raises(NotImplementedError, match="takes hidden_states, something_new, and mhckit"):
        apply(model)
    apply(model, junction=False)
