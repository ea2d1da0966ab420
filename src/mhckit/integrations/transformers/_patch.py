"""apply, restore, register: which modules of a model are replaced, and the way back."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import transformers
from torch import nn

from ._shared import Layer, Replacement

Model = TypeVar("Model", bound=nn.Module)

_FAMILIES = {"deepseek_v4": "_deepseek_v4", "glm5_next_text": "_glm5_next", "hy_v4": "_hy_v4"}
_OTHER_KINDS = {"qwen4_exp": "reads every channel of its streams through a gate of its own"}


class Family(NamedTuple):
    """The replacements for one model type."""

    connection: type[Replacement]
    layer: type[Replacement]
    head: type[Replacement]


def apply(
    model: Model, *, enter: bool = True, junction: bool = True, head: bool = True, across_layers: bool = False
) -> Model:
    """Let a DeepSeek-V4, GLM-5-next or Hy-V4 model of transformers compute its hyper-connections with mhckit.

    Changes the class of some of the model's modules, in place, and nothing else: parameters, their names and dtypes,
    checkpoints, hooks and the library stay as they are. Apply again to change the options, `restore` to undo. Both come
    before what makes classes of its own (FSDP2's fully_shard, parametrizations). After an error the model is as before.

    Args:
        model: the model, whole or a part of it, plain or wrapped (PEFT, DDP).
        enter: replace the hyper-connections, which compute coefficients and collapse the streams.
        junction: replace the forward of the decoder layers: the output of the attention is written and the input of
            the MLP read in one pass, and the output of the MLP written in one. Needs enter.
        head: replace the final collapse.
        across_layers: fuse between layers too: a layer hands `mhckit.Streams` to the next one instead of a tensor,
            with the output of its MLP waiting to be written. The connections then move a sixth fewer bytes; but hooks
            see Streams, `output_hidden_states=True` returns them, and reentrant checkpointing raises. Needs junction
            and head.

    Returns:
        The same model.
    """
    if junction and not enter:
        raise ValueError("junction=True needs enter=True: a junction writes and reads in one pass")
    if across_layers and not (junction and head):
        raise ValueError(
            "across_layers=True needs junction=True and head=True: they take the Streams that layers hand on"
        )
    family = _family_of(model)
    if junction:
        _check_layer(family.layer)
    asked = ((family.connection, enter), (family.layer, junction), (family.head, head))
    changes = [
        (module, replacement, replacement.added_attributes(module))
        for replacement, wanted in asked
        if wanted
        for module in _modules_to_replace(model, replacement)
    ]
    restore(model)
    for module, replacement, attributes in changes:
        _change_class(module, replacement)
        vars(module).update(attributes)
        if issubclass(replacement, Layer):
            vars(module)["mhckit_across_layers"] = across_layers
    return model


def restore(model: Model) -> Model:
    """Undo `apply`, or what `register` did for this model. Does nothing to a model that was not changed."""
    changed = [module for module in model.modules() if isinstance(module, Replacement)]
    for module in changed:
        _check_is_no_subclass(module, type(module).replaced)
    for module in changed:
        for name in type(module).added_attributes(module):
            del vars(module)[name]
        _change_class(module, type(module).replaced)
    return model


def register(*, overwrite: bool = False) -> None:
    """From now on, let transformers itself build models with mhckit's classes, in `from_pretrained` and `from_config`.

    The route of `transformers.monkey_patching.register_patch_mapping`, for code that makes its models out of reach of
    `apply`; `unregister` ends it.
    """
    _monkey_patching().register_patch_mapping(_class_mapping(), overwrite=overwrite)


def unregister() -> None:
    """End `register`; models made in the meantime keep their classes. Does nothing if nothing is registered."""
    patching, mapping = _monkey_patching(), _class_mapping()
    registered = patching.get_patch_mapping()
    patching.unregister_patch_mapping([name for name, kind in mapping.items() if registered.get(name) is kind])
    for name, replacement in mapping.items():
        # transformers leaves the replacement there if building a model raises.
        setattr(sys.modules[replacement.replaced.__module__], name, replacement.replaced)


def _monkey_patching() -> Any:
    try:
        return importlib.import_module("transformers.monkey_patching")
    except ImportError as error:
        raise ImportError(
            f"transformers {transformers.__version__} has no class mapping (transformers.monkey_patching): "
            "use mhckit.integrations.transformers.apply(model)"
        ) from error


def _class_mapping() -> dict[str, type[Replacement]]:
    families = [_load(model_type) for model_type in _FAMILIES]
    for family in families:
        _check_layer(family.layer)
    return {replacement.replaced.__name__: replacement for family in families for replacement in family}


def _model_types(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(model_type, str):
            yield model_type


def _family_of(model: nn.Module) -> Family:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    found = list(dict.fromkeys(_model_types(model)))
    for model_type in found:
        if model_type in _FAMILIES:
            return _load(model_type)
        for kind, difference in _OTHER_KINDS.items():
            if model_type.startswith(kind):
                raise ValueError(f"{model_type} has another kind of connection, which {difference}: not mHC")
    raise ValueError(
        f"no model of a supported type ({', '.join(_FAMILIES)}) found; "
        + (f"this one has: {', '.join(found)}" if found else "this one has no config with a model_type")
    )


def _load(model_type: str) -> Family:
    try:
        module = importlib.import_module(f".{_FAMILIES[model_type]}", __package__)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {transformers.__version__} lacks what mhckit replaces of {model_type} ({error}); "
            "5.17 and 5.22 are tested"
        ) from error
    connection, layer, head = module.REPLACEMENTS
    return Family(connection, layer, head)


def _check_layer(layer: type[Replacement]) -> None:
    """A forward is replaced as a whole, so it must still take the arguments that the replacement was written for."""
    taken, known = (tuple(inspect.signature(kind.forward).parameters) for kind in (layer.replaced, layer))
    if taken != known:
        raise NotImplementedError(
            f"{layer.__name__}.forward of transformers {transformers.__version__} takes {_listed(taken)}, and mhckit "
            f"knows it with {_listed(known)}: pass junction=False, and please report this"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name for name in names if name != "self")


def _modules_to_replace(model: nn.Module, replacement: type[Replacement]) -> list[nn.Module]:
    """Those of the replaced class, or of the replacement already. There must be some, with a forward of their class."""
    modules = [module for module in model.modules() if isinstance(module, replacement.replaced)]
    if not modules:
        raise ValueError(
            f"found no {replacement.replaced.__name__} of transformers in this model: is it built from copies of the "
            "classes of transformers? Modules that are not there can be left out: enter=, junction=, head="
        )
    for module in modules:
        _check_is_no_subclass(module, replacement.replaced)
        forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
        if forward is not None and not _is_own_forward(module, forward):
            raise ValueError(
                f"the forward of a {replacement.__name__} has been replaced by something else "
                f"({getattr(forward, '__qualname__', type(forward).__name__)}): apply mhckit first"
            )
    return modules


def _check_is_no_subclass(module: nn.Module, replaced: type[nn.Module]) -> None:
    """Changing the class would undo what a subclass was made for."""
    kind = type(module)
    if kind is not replaced and kind.__dict__.get("replaced") is not replaced:
        raise ValueError(
            f"a {replaced.__name__} has become a {kind.__name__}, a class made from it: call apply and restore before "
            "fully_shard, before parametrizations, and on the classes of transformers themselves"
        )


def _is_own_forward(module: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__func__", None) is type(module).forward


def _change_class(module: nn.Module, to: type[nn.Module]) -> None:
    """Hooks of accelerate leave bound methods in the instance, which go with the class."""
    bound = [name for name in ("forward", "_old_forward") if _is_own_forward(module, module.__dict__.get(name))]
    module.__class__ = to
    for name in bound:
        module.__dict__[name] = to.forward.__get__(module)
