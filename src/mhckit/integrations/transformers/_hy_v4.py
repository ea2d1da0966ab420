"""Hy-V4: streams that are not mixed, a learned head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.hy_v4 import modeling_hy_v4 as original

from mhckit.modules import Streams
from mhckit.modules.streams import as_streams
from mhckit.recipe import Recipe

from ._shared import Connection, Layer, LearnedHead


class HYV4HyperConnection(Connection, original.HYV4HyperConnection):
    replaced = original.HYV4HyperConnection

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        return Recipe.preset(
            "hy_v4",
            streams=module.hc_mult,
            pre_eps=module.hc_eps,
            post_eps=module.hc_eps,
            post_scale=module.hc_post_magnitude,
            norm_eps=module.input_norm.eps,
        )

    def returned(self, h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        assert streams.mix is not None
        return streams.mix.post, h


class HYV4DecoderLayer(Layer, original.HYV4DecoderLayer):
    replaced = original.HYV4DecoderLayer

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
        attended, _, topk_indices = self.self_attn(
            hidden_states=self.input_layernorm(h),
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


class HYV4HyperHead(LearnedHead, original.HYV4HyperHead):
    replaced = original.HYV4HyperHead

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        return Recipe.preset("hy_v4", streams=module.hc_mult, norm_eps=module.input_norm.eps, pre_eps=module.eps)


REPLACEMENTS = (HYV4HyperConnection, HYV4DecoderLayer, HYV4HyperHead)
