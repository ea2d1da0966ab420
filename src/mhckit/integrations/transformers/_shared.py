"""What the replacements of all families share.

A replacement is a subclass with the name of the class it replaces. `apply` changes the class of modules that exist:
parameters, buffers, hooks and names stay as they are, and state dicts with them. `register` lets transformers
construct the replacement itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mhckit.modules import Streams
from mhckit.modules.streams import as_streams, read_streams
from mhckit.ops import head
from mhckit.recipe import Recipe


class _ReplacementType(type):
    """While a class mapping is registered, transformers records hidden states of whatever is an instance of the
    replacement, in models with the original class too: so those are counted as instances.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        replaced = cls.__dict__.get("replaced")
        return super().__instancecheck__(instance) or (replaced is not None and isinstance(instance, replaced))


class Replacement(nn.Module, metaclass=_ReplacementType):
    """A class that stands for `replaced`, with a few attributes more."""

    replaced: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vars(self).update(self.added_attributes(self))

    @classmethod
    def added_attributes(cls, module: Any) -> dict[str, Any]:
        """What a module of the replaced class lacks, from the attributes that it has."""
        return {}


class _WithRecipe(Replacement):
    mhckit_recipe: Recipe

    @classmethod
    def added_attributes(cls, module: Any) -> dict[str, Any]:
        try:
            return {"mhckit_recipe": cls.make_recipe(module)}
        except ValueError as error:
            names = "eps and pre_eps are hc_eps, norm_eps is rms_norm_eps, iterations is hc_sinkhorn_iters"
            raise ValueError(f"{cls.__name__}: {error} (of a mhckit.Recipe, where {names} of the config)") from None

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        raise NotImplementedError


class Connection(_WithRecipe):
    """A hyper-connection. Streams give what the sublayer reads and Streams; a tensor gives what the original gives."""

    fn: Tensor
    scale: Tensor
    base: Tensor

    def returned(self, h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, hidden_streams: Any) -> Any:
        streams = as_streams(hidden_streams)
        h, read = read_streams(streams, self.fn, self.scale, self.base, recipe=self.mhckit_recipe)
        return (h, read) if streams is hidden_streams else self.returned(h, read)


class Layer(Replacement):
    """A decoder layer: its own sublayers, between reads and writes of Streams.

    The output of its last sublayer is written at the end, so that layers hand tensors to each other; with
    `mhckit_across_layers` it waits in the Streams for the next layer, or for the head.
    """

    mhckit_across_layers: bool

    @classmethod
    def added_attributes(cls, module: Any) -> dict[str, Any]:
        return {"mhckit_across_layers": False}

    def handed_on(self, streams: Streams) -> Any:
        if not self.mhckit_across_layers:
            return streams.tensor
        if self.training and getattr(self, "gradient_checkpointing", False):
            checkpoint: Any = getattr(self, "_gradient_checkpointing_func", None)
            if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "reentrant gradient checkpointing loses the gradients of Streams, which layers hand to each other "
                    "after apply(across_layers=True): use gradient_checkpointing_kwargs={'use_reentrant': False}"
                )
        return streams


class LearnedHead(_WithRecipe):
    """A head with weights per token."""

    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor

    def forward(self, x: Any) -> Tensor:
        return head(
            as_streams(x).tensor, recipe=self.mhckit_recipe, fn=self.hc_fn, scale=self.hc_scale, base=self.hc_base
        )
