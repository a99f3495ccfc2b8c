"""An engine in 60 lines: the layers of a retrofit over pages, many sequences to a step, as vLLM would run them."""

from typing import Any

import torch
from torch import Tensor

from patches.attention import rotated
from patches.memory import Kept
from patches.rotary import for_heads
from retrofit.serving.pages import Batch, PagedMemory, Share


def garbage(pages: int, kept: Kept) -> Tensor:
    """A tensor of the pool, with what nobody may read."""
    bad = torch.nan if kept.dtype.is_floating_point else torch.iinfo(kept.dtype).max
    return torch.full((pages, *kept.shape), bad, dtype=kept.dtype)


class Engine:
    """Runs a patched model's own layers, its attention over a pool of pages that starts as garbage."""

    def __init__(self, model: Any, pages: int):
        self.model = model
        dtype = next(model.parameters()).dtype
        attentions = [layer.self_attn for layer in model.model.layers]
        self.layers = [
            PagedMemory(attention.memory, dtype, attention.scaling, rotates=attention.use_rope)
            for attention in attentions
        ]
        self.pools = [{name: garbage(pages, kept) for name, kept in layer.fields.items()} for layer in self.layers]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.model.rotary_emb(torch.empty(0, dtype=torch.float32), positions)

    @torch.no_grad()
    def step(self, work: list[tuple[Tensor, int, int]]) -> list[Tensor]:
        """Logits (n, V) of each sequence's new tokens; ``work`` has their ids (n,), tokens before, and page."""
        shares, first = [], 0
        for ids, seen, page in work:
            shares.append(Share(first, len(ids), seen, page))
            first += len(ids)
        body = self.model.model
        memory = self.layers[0].memory
        batch = Batch(shares, memory.capacity, self.rotary, torch.device("cpu"), together=memory.decodes_ragged)
        positions = torch.cat([torch.arange(s.seen, s.seen + s.count) for s in shares])[None]
        hidden = body.embed_tokens(torch.cat([ids for ids, _, _ in work])[None])
        tables = body.rotary_emb(hidden, positions)
        for layer, paged, pool in zip(body.layers, self.layers, self.pools, strict=True):
            x = layer.input_layernorm(hidden)
            turn = for_heads(*tables) if layer.self_attn.use_rope else None
            q, k, v = (h[0].transpose(0, 1) for h in rotated(*layer.self_attn.plain_heads(x), turn))
            heads, added = paged(pool, x[0], q, k, v, batch, layer.self_attn.key_bias(x))
            out = layer.self_attn.o_proj(heads.flatten(1))
            hidden = hidden + (out if added is None else out + added)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = self.model.lm_head(body.norm(hidden))[0]
        return [logits[s.first : s.first + s.count] for s in shares]
