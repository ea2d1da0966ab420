"""GLM-5-next: the connections of DeepSeek-V4, a mean head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as original

from mhckit.modules import Streams
from mhckit.modules.streams import as_streams
from mhckit.ops import head
from mhckit.recipe import Recipe

from ._deepseek_v4 import as_post_comb_collapsed, sinkhorn_recipe
from ._shared import Connection, Layer, Replacement

# The original head has no attributes at all, so that it cannot know N before it is called.
_MEAN = {streams: Recipe.preset("glm5_next", streams=streams) for streams in range(1, 17)}


class Glm5NextTextHyperConnection(Connection, original.Glm5NextTextHyperConnection):
    replaced = original.Glm5NextTextHyperConnection

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        return sinkhorn_recipe(module, "glm5_next")

    def returned(self, h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        return as_post_comb_collapsed(h, streams)


class Glm5NextTextDecoderLayer(Layer, original.Glm5NextTextDecoderLayer):
    replaced = original.Glm5NextTextDecoderLayer

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Tensor | None]:
        h, streams = self.attn_hc(as_streams(hidden_states))
        h, topk_indices = self.input_layernorm(h), None
        if self.block_type == "linear_attention":
            attended = self.self_attn(
                hidden_states=h, cache_params=past_key_values, attention_mask=attention_mask, **kwargs
            )
        else:
            attended, _, topk_indices = self.self_attn(
                hidden_states=h,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
        h, streams = self.ffn_hc(streams.write(attended))
        return self.handed_on(streams.write(self.mlp(self.post_attention_layernorm(h)))), topk_indices


class Glm5NextTextHyperHead(Replacement, original.Glm5NextTextHyperHead):
    replaced = original.Glm5NextTextHyperHead

    def forward(self, hidden_streams: Any) -> Tensor:
        x = as_streams(hidden_streams).tensor
        recipe = _MEAN.get(x.shape[-2])
        return x.mean(-2) if recipe is None else head(x, recipe=recipe)


REPLACEMENTS = (Glm5NextTextHyperConnection, Glm5NextTextDecoderLayer, Glm5NextTextHyperHead)
