"""The options of ``mhckit train``, made from the fields of the configuration: a new field is a new option."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer

from mhckit.models import ModelConfig

from .config import TrainConfig
from .presets import PRESETS

_MODEL_HELP = {
    "vocab_size": "Rows of the embedding; raised if the tokens need more.",
    "dim": "Width of the residual.",
    "layers": "Blocks, of attention and MLP each.",
    "heads": "Heads of queries.",
    "kv_heads": "Heads of keys and values.",
    "hidden": "Width inside the MLP.",
    "residual": "plain, mhc, hc, or any preset of Recipe.",
    "streams": "Streams of the residual.",
    "rope_theta": "Base of rotary positions.",
    "norm_eps": "Of every RMSNorm.",
    "tied": "The embedding is the output projection, too.",
    "dtype": "Of activations; weights are float32.",
}
_PANEL_OF_MODEL = "Model"


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose signature, for typer, has an option for every field after its own parameters.

    It is called with its own parameters, and ``flags``: the options that were given.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]  # the last one is flags
    parameters = [*own, *_parameters()]

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        kept = {parameter.name: arguments.pop(parameter.name) for parameter in own}
        command(**kept, flags={name: value for name, value in arguments.items() if value is not None})

    signed: Any = call
    signed.__signature__ = inspect.Signature(parameters)
    signed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del signed.__wrapped__  # or its signature would be found first
    return signed


def _parameters() -> Iterator[inspect.Parameter]:
    hints = get_type_hints(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        option = _option(field.name, _PANEL_OF_MODEL, _MODEL_HELP[field.name], "by preset")
        yield _parameter(field.name, hints[field.name], option)
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        if field.name != "model":
            default = "by preset" if _differs_by_preset(field.name) else field.default
            option = _option(field.name, field.metadata["panel"], field.metadata["help"], default)
            yield _parameter(field.name, hints[field.name], option)


def _parameter(name: str, hint: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[Optional[_type(hint)], option]  # noqa: UP045 (of a value, not of a type)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, panel: str, text: str, default: Any) -> Any:
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return typer.Option(help=text, rich_help_panel=panel, show_default=False if default is None else shown)


def _type(hint: Any) -> Any:
    """As typer can read it: the one type beside None, and text where there are more."""
    if get_origin(hint) in (None, tuple, Literal):
        return hint
    types = [argument for argument in get_args(hint) if argument is not type(None)]
    return types[0] if len(types) == 1 else str


def _differs_by_preset(name: str) -> bool:
    return name == "run_name" or any(name in preset for preset in PRESETS.values())
