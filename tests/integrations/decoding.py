"""Decoding with a patched DeepSeek-V4 in steps that a CUDA graph can hold; for tests with a GPU and without.

A graph repeats kernels on the same memory, and whatever the host decided stays as it was at the capture. Of the cache
layers of DeepSeek-V4 in transformers (5.17 and 5.22) those of sliding attention have a static form, which writes in
place, until the window is full. The compressed ones, of most layers of the released models, have none: they grow by
concatenation, and the host decides by their length when a window is complete. So here are two ways:

- `WholeStep`: layers of sliding attention alone, and one graph for all of the step;
- `PiecesOfAStep`: layers of every kind, and a graph for all that is between two attentions, which run as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from captured import captured
from tiny import WITHOUT_CHOICES, tiny, token_ids
from torch import Tensor
from transformers import DynamicCache, StaticCache

from mhckit import Streams

LAYERS, BATCH, PROMPT, TOKENS = 4, 2, 5, 17
WINDOW = 24
SLIDING = dict(layer_types=["sliding_attention"] * LAYERS, sliding_window=WINDOW)
# The third layer is of compressed sparse attention: windows of 4 tokens. The others, here, compress every 3.
COMPRESSED = dict(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 3})


def decoding_model(**options: Any) -> Any:
    """Its experts run as batched products: one after the other, the host would wait to know which there are."""
    model: Any = tiny("deepseek_v4", num_hidden_layers=LAYERS, **WITHOUT_CHOICES, **options)
    model.set_experts_implementation("batched_mm")
    return model


def prompt_and_tokens(device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, prompt] and, to be decoded one by one, [B, others]."""
    prompt, others = token_ids(BATCH, TOKENS).to(device).split((PROMPT, TOKENS - PROMPT), dim=1)
    return prompt, others


@torch.no_grad()
def decoded(model: Any, cache: Any = None) -> Tensor:
    """Logits [tokens, B, V] after the prompt and after each token, as transformers computes them."""
    prompt, tokens = prompt_and_tokens(model.device)
    cache = DynamicCache(config=model.config) if cache is None else cache
    calls = [prompt, *tokens.split(1, dim=1)]
    return torch.stack([model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1] for ids in calls])


class WholeStep:
    """A model, a static cache with the prompt in it, and the memory that a step reads its token and position from."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = StaticCache(model.config, max_cache_len=WINDOW)
        self.ids = torch.zeros(BATCH, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self.columns = torch.arange(WINDOW, device=model.device)

    @torch.no_grad()
    def decoded(self) -> Tensor:
        """As the function of that name; every token but those of the prompt by a replay."""
        prompt, tokens = prompt_and_tokens(self.model.device)
        found = [self.model(input_ids=prompt, past_key_values=self.cache, use_cache=True).logits[:, -1]]
        self.position.fill_(PROMPT)
        logits, replay = captured(self.step, self.rewind, self.model.device)
        for position, ids in enumerate(tokens.split(1, dim=1), PROMPT):
            self.ids.copy_(ids)
            self.position.fill_(position)
            replay()
            found.append(logits.clone())
        return torch.stack(found)

    def step(self) -> Tensor:
        """The mask, too, is made from the position in memory: transformers' own would be that of one position."""
        mask = torch.zeros(1, 1, 1, WINDOW, device=self.model.device).masked_fill(self.columns > self.position, -1e9)
        given = dict(input_ids=self.ids, position_ids=self.position, attention_mask={"sliding_attention": mask})
        return self.model(**given, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def rewind(self) -> None:
        """To the end of the prompt; what is written beyond is masked, and then overwritten."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)
            layer.cumulative_length_int = PROMPT


class PiecesOfAStep:
    """A graph per layer and one more; attention, between them, gets its input from one's memory and leaves its output
    in the next one's.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.inner = model, model.model
        self.cache = DynamicCache(config=model.config)
        self.ids = torch.zeros(BATCH, 1, dtype=torch.long, device=model.device)
        width = model.config.hidden_size
        self.attended = [torch.zeros(BATCH, 1, width, device=model.device) for _ in self.inner.layers]

    @torch.no_grad()
    def decoded(self) -> Tensor:
        prompt, tokens = prompt_and_tokens(self.model.device)
        found = [self.model(input_ids=prompt, past_key_values=self.cache, use_cache=True).logits[:, -1]]
        pieces = self._captured()
        for position, ids in enumerate(tokens.split(1, dim=1), PROMPT):
            self.ids.copy_(ids)
            for layer, attended, (h, replay) in zip(self.inner.layers, self.attended, pieces, strict=False):
                replay()
                attended.copy_(self._attend(layer, h, position))
            logits, replay = pieces[-1]
            replay()
            found.append(logits[:, -1].clone())
        return torch.stack(found)

    def _captured(self) -> list[tuple[Tensor, Any]]:
        """What each piece ends with, the input of an attention or the logits, and its replay."""
        pieces, streams = [], None
        for index in range(LAYERS + 1):
            (result, streams), replay = captured(
                lambda index=index, streams=streams: self._piece(index, streams), lambda: None, self.model.device
            )
            pieces.append((result, replay))
        return pieces

    def _piece(self, index: int, streams: Any) -> tuple[Tensor, Streams]:
        """From the attention of the layer before, or the embedding, to that of this one, or the logits."""
        inner, model = self.inner, self.model
        if streams is None:
            embedded = inner.embed_tokens(self.ids)[:, :, None].expand(-1, -1, model.config.hc_mult, -1)
            streams = Streams(embedded.contiguous())
        else:
            layer = inner.layers[index - 1]
            h, streams = layer.ffn_hc(streams.write(self.attended[index - 1]))
            streams = streams.write(layer.mlp(layer.post_attention_layernorm(h), input_ids=self.ids))
        if index == LAYERS:
            return model.lm_head(inner.norm(inner.hc_head(streams))), streams
        h, streams = inner.layers[index].attn_hc(streams)
        return inner.layers[index].input_layernorm(h), streams

    def _attend(self, layer: Any, h: Tensor, position: int) -> Tensor:
        position_ids = torch.full((1, 1), position, device=h.device)
        rotations = {kind: self.inner.rotary_emb(h, position_ids, layer_type=kind) for kind in ("main", "compress")}
        in_window = min(position, self.model.config.sliding_window - 1) + 1
        mask = torch.zeros(BATCH, 1, 1, in_window, device=h.device)
        return layer.self_attn(h, rotations, position_ids, mask, past_key_values=self.cache)[0]
