"""Many sequences in one step, each with a page of fixed size: what an engine that batches keeps of a bounded memory.

An engine hands out pages; a page holds all that one layer keeps of one sequence: keys and values of sinks and window,
write gates, the memory's state. The equations are the memory's own: sequences that decode are given to it as a
left-padded batch, all others one by one, on a cache layer whose tensors lie in the page. Knows no engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from patches.cache import MemoryCacheLayer
from patches.errors import RetrofitError
from patches.memory import Memory, Step, WindowOnly
from patches.rotary import Rotary

STATE = "state."  # in front of a state tensor's name in a page


class Share(NamedTuple):
    """One sequence's share of a step.

    Attributes:
        first, count: its tokens are ``first .. first + count - 1`` of the step's.
        seen: tokens of the sequence before this step.
        page: number of its page.
    """

    first: int
    count: int
    seen: int
    page: int


class Together:
    """Sequences that bring one token each: their places in the step, tokens seen and pages, each ``(B,)``."""

    def __init__(self, shares: list[Share], device: torch.device):
        columns = zip(*((share.first, share.seen, share.page) for share in shares), strict=True)
        self.at, self.seen, self.pages = (torch.tensor(column, device=device) for column in columns)
        self.least, self.most = min(share.seen for share in shares), max(share.seen for share in shares)


class Batch:
    """All sequences of one step, sorted once for all layers.

    Attributes:
        fresh: pages of the sequences that begin.
        filling: those that bring one token while there is room for it.
        evicting: those that bring one token and have evicted others before.
        rest: all others: prompts, whole or in part, and the token that evicts the first one.
        tokens: in the step.
    """

    def __init__(self, shares: Sequence[Share], capacity: int, device: torch.device, *, together: bool = True):
        """Args: ``capacity`` is S + W; with ``together`` off nothing that evicts is batched."""
        filling = [share for share in shares if share.count == 1 and 0 < share.seen < capacity]
        evicting = [share for share in shares if share.count == 1 and share.seen > capacity and together]
        done = {*filling, *evicting}
        self.rest = [share for share in shares if share.count and share not in done]
        self.fresh = torch.tensor(
            [share.page for share in self.rest if not share.seen], dtype=torch.long, device=device
        )
        self.filling = Together(filling, device) if filling else None
        self.evicting = Together(evicting, device) if evicting else None
        self.tokens = sum(share.count for share in shares)


@dataclass(frozen=True)
class Field:
    """One tensor of a page, for a single sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Pages = Mapping[str, Tensor]  # by name: (pages, *shape)


@dataclass
class _Work:
    """The step's tokens, and what comes of them."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    heads: Tensor
    added: Tensor | None = None

    def put(self, at: Tensor | slice, heads: Tensor, added: Tensor | None) -> None:
        """The result ``heads`` (n, H, D), ``added`` (n, E) of the tokens ``at``."""
        self.heads[at] = heads
        if added is not None:
            if self.added is None:
                self.added = torch.zeros_like(self.x)
            self.added[at] = added


class PagedMemory:
    """A layer's memory over pages.

    Attributes:
        fields: what a page holds, by name.
    """

    def __init__(self, memory: Memory, dtype: torch.dtype, scale: float, rotary: Rotary, key_bias: Tensor | None):
        """
        Args:
            memory: of the layer.
            dtype: of keys and values.
            scale: factor of the attention logits.
            rotary: the model's tables at any positions.
            key_bias: what the key projection adds to every key before its rotation ``(H_kv * D,)``, or None.

        Raises:
            RetrofitError: this memory has no page of fixed size.
        """
        self.memory, self.scale, self.rotary, self.key_bias = memory, scale, rotary, key_bias
        self.fields = page_fields(memory, dtype)

    def __call__(
        self, pages: Pages, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """One step of all sequences.

        Args:
            pages: by name as in ``fields``, each ``(pages, *shape)``; written to.
            x: the attention's input ``(N, E)``.
            q: queries ``(N, H, D)``, rotated.
            k, v: keys, rotated, and values ``(N, H_kv, D)``.
            batch: whose tokens these are.

        Returns:
            The heads before the output projection ``(N, H, D)``, and what to add after it ``(N, E)`` or None.
        """
        gates = self.memory.write_gates(x.unsqueeze(0))
        work = _Work(x, q, k, v, None if gates is None else gates[0], torch.empty_like(q))
        if len(batch.fresh):
            for tensor in pages.values():
                tensor[batch.fresh] = 0  # of the sequence that had the page before nothing is left to be read
        if batch.filling is not None:
            self._fill(pages, work, batch.filling)
        if batch.evicting is not None:
            self._evict(pages, work, batch.evicting)
        for share in batch.rest:
            tokens = slice(share.first, share.first + share.count)
            if share.seen + share.count <= self.memory.capacity:
                work.put(tokens, self._exact(pages, work, share, tokens), None)
            else:
                layer = self._layer(pages, share)
                heads, added = self._attend(work, tokens, 1, layer, share.seen, [share.seen])
                self._keep(pages, layer, share.page)
                work.put(tokens, heads[0], None if added is None else added[0])
        return work.heads, work.added

    def _fill(self, pages: Pages, work: _Work, group: Together) -> None:
        """One token of each sequence, none evicted: plain attention over the rows that are there."""
        keys, values = pages["keys"], pages["values"]
        keys[group.pages, :, group.seen], values[group.pages, :, group.seen] = work.k[group.at], work.v[group.at]
        if work.gates is not None:
            pages["gates"][group.pages, group.seen] = work.gates[group.at]
        rows = group.most + 1
        there = torch.arange(rows, device=keys.device) <= group.seen[:, None]
        heads = _attention(
            work.q[group.at].unsqueeze(2),
            keys[group.pages, :, :rows],
            values[group.pages, :, :rows],
            there[:, None, None],
            self.scale,
        )
        work.put(group.at, heads[:, :, 0], None)

    def _exact(self, pages: Pages, work: _Work, share: Share, tokens: slice) -> Tensor:
        """Some tokens of one sequence, none evicted: plain attention."""
        there = slice(share.seen, share.seen + share.count)
        keys, values = pages["keys"][share.page], pages["values"][share.page]
        keys[:, there], values[:, there] = work.k[tokens].transpose(0, 1), work.v[tokens].transpose(0, 1)
        if work.gates is not None:
            pages["gates"][share.page, there] = work.gates[tokens]
        mask = torch.ones(share.count, there.stop, dtype=torch.bool, device=keys.device).tril(share.seen)
        q = work.q[tokens].transpose(0, 1).unsqueeze(0)
        return _attention(q, keys[None, :, : there.stop], values[None, :, : there.stop], mask, self.scale)[0].transpose(
            0, 1
        )

    def _evict(self, pages: Pages, work: _Work, group: Together) -> None:
        """One token of each sequence, each evicting another: the memory's own decoding, rows of a padded batch."""
        layer = _Decoding(self.memory, pages, group)
        heads, added = self._attend(work, group.at, len(group.at), layer, group.most, group.seen.tolist())
        for name, tensor in layer.state.items():
            pages[STATE + name][group.pages] = tensor
        work.put(group.at, heads[:, 0], None if added is None else added[:, 0])

    def _attend(
        self, work: _Work, at: Tensor | slice, rows: int, layer: MemoryCacheLayer, seen: int, each: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The memory's equations on ``rows`` sequences of as many tokens each: as ``Memory.attend``."""
        x, q, k, v = (tensor[at].unflatten(0, (rows, -1)) for tensor in (work.x, work.q, work.k, work.v))
        pads = [seen - length for length in each]
        pad = torch.tensor(pads, device=x.device)
        return self.memory.attend(
            Step(
                x=x,
                q=q.transpose(1, 2),
                k=k.transpose(1, 2),
                v=v.transpose(1, 2),
                gates=None if work.gates is None else work.gates[at].unflatten(0, (rows, -1)),
                layer=layer,
                seen=seen,
                pad=pad if any(pads) else None,
                min_pad=min(pads),
                max_pad=max(pads),
                offset=-pad,
                rotary=self.rotary,
                scale=self.scale,
                dropout=0.0,
                key_bias=self.key_bias,
            )
        )

    def _layer(self, pages: Pages, share: Share) -> MemoryCacheLayer:
        """One sequence's page as the cache layer that the memory knows; its tensors are the page's own."""
        memory, here = self.memory, slice(share.page, share.page + 1)
        layer = MemoryCacheLayer(memory.kind, memory.window, memory.sinks)
        if not share.seen:
            return layer
        layer.evicting = share.seen > memory.capacity
        rows = min(share.seen, memory.capacity)
        layer.keys, layer.values = pages["keys"][here, :, :rows], pages["values"][here, :, :rows]
        if "gates" in pages:
            layer.gates = pages["gates"][here, : memory.window if layer.evicting else rows]
        if layer.evicting:
            for name, (shape, _) in state_shapes(memory, layer.keys.dtype, share.seen).items():
                held = pages[STATE + name][here]  # rows of a memory that founds them one after the other come in front
                layer.state[name] = held[(slice(None), *(slice(size) for size in shape))]
        layer.seen, layer.is_initialized = share.seen, True
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        return layer

    def _keep(self, pages: Pages, layer: MemoryCacheLayer, page: int) -> None:
        """Put back what the memory has replaced."""
        held = {"keys": layer.keys, "values": layer.values}
        if layer.gates is not None:
            held["gates"] = layer.gates
        held |= {STATE + name: tensor for name, tensor in layer.state.items()}
        for name, tensor in held.items():
            there = pages[name][page]
            if tensor.data_ptr() != there.data_ptr():
                there[tuple(slice(size) for size in tensor.shape[1:])] = tensor[0]


class _Decoding(MemoryCacheLayer):
    """The pages of sequences that all evict one token, as one cache layer: each row's ring stands at its own place."""

    def __init__(self, memory: Memory, pages: Pages, group: Together):
        super().__init__(memory.kind, memory.window, memory.sinks)
        self.pages, self.group = pages, group
        self.seen, self.evicting, self.is_initialized = group.most, True, True
        self.keys, self.values = pages["keys"], pages["values"]  # of all pages, until the new token is among them
        self.state = {
            name.removeprefix(STATE): tensor[group.pages] for name, tensor in pages.items() if name.startswith(STATE)
        }

    def push(self, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        page, place = self.group.pages, self.group.seen % self.window
        keys, values = self.pages["keys"], self.pages["values"]
        row = self.sinks + place
        evicted = keys[page, :, row].unsqueeze(2), values[page, :, row].unsqueeze(2)
        keys[page, :, row], values[page, :, row] = k[:, :, 0], v[:, :, 0]
        old = None
        if gates is not None:
            old = self.pages["gates"][page, place].unsqueeze(1)
            self.pages["gates"][page, place] = gates[:, 0]
        self.keys, self.values = keys[page], values[page]
        self.seen += 1
        return *evicted, old


def can_batch(memory: Memory) -> bool:
    """Whether decoding does not depend on where in the ring a token lies, so that each row may have its own place."""
    return isinstance(memory, WindowOnly)


def page_fields(memory: Memory, dtype: torch.dtype) -> dict[str, Field]:
    """What a page holds of one sequence.

    Raises:
        RetrofitError: the memory keeps more the longer a text is, or rows that this form has no place for.
    """
    rows = memory.capacity
    shape = (memory.kv_heads, rows, memory.head_dim)
    fields = {"keys": Field(shape, dtype), "values": Field(shape, dtype)}
    first = next(memory.parameters(), None)
    with torch.no_grad():
        gates = memory.write_gates(
            torch.zeros(1, 1, memory.hidden_size, device=None if first is None else first.device)
        )
    if gates is not None:
        fields["gates"] = Field((rows, gates.shape[-1]), torch.promote_types(dtype, torch.float32))
    for name, (size, kept) in state_shapes(memory, dtype).items():
        fields[STATE + name] = Field(size, kept)
    return fields


def page_bytes(fields: Mapping[str, Field]) -> int:
    """Bytes of one page."""
    return sum(math.prod(field.shape) * field.dtype.itemsize for field in fields.values())


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def state_shapes(memory, dtype, tokens=None):  # stand-in
    H, K, D = memory.heads, memory.kv_heads, memory.head_dim
    f = torch.promote_types(dtype, torch.float32)
    kind = memory.kind
    if kind == "none":
        return {}
    if kind.startswith("ahn"):
        return {"matrix": ((H, D, D), f)}
    if kind == "joint":
        names = ("linear", "delta") if memory.both else ("linear",)
        return dict.fromkeys(names, ((H, memory.features, D + 1), f))
    if kind == "infini":
        return {"matrix": ((K, D, D), f), "mass": ((K, D), f)}
    if kind == "tensor-cache":
        o = memory.options
        out = {}
        for n in ("fast", "slow")[: 1 + o.two_timescale]:
            out[n + ".matrix"] = ((K * o.slots, D, D), f)
            if o.z_norm:
                out[n + ".mass"] = ((K * o.slots, D, 1), f)
        return out
    if kind == "kvm" and memory.options.budget == "fixed":
        rows = memory.state_bytes(dtype, tokens) // (K * (2 * D + 4) * f.itemsize)
        return {"rows": ((K, rows, 2 * D + 4), f)}
    if kind == "compressive":
        shape = (K, memory.rows + memory.tail, D)
        return {"keys": (shape, dtype), "values": (shape, dtype)}
    raise RetrofitError(f"memory {kind!r} keeps rows that have no page of fixed size")
