"""Many sequences in one step, each with a page of fixed size: what an engine that batches keeps of a bounded memory.

An engine hands out pages; a page holds all that one layer keeps of one sequence: keys and values of sinks and window,
write gates, the memory's state. The equations are the memory's own: sequences that decode are given to it as a batch of
texts of different length, all others one by one, on a cache layer whose tensors lie in the page. Knows no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from patches.cache import MemoryCacheLayer
from patches.errors import RetrofitError
from patches.memory import Joined, Kept, Memory, Step
from patches.precision import wide
from patches.rotary import Rotary
from patches.sequence import Pass, Starts

STATE = "state."  # in front of a state tensor's name in a page
Pages = Mapping[str, Tensor]  # by name: (pages, *shape)


@dataclass(frozen=True)
class Share:
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
    """Sequences that bring one token each.

    Attributes:
        at, seen, pages: their places in the step, tokens seen and pages, each ``(B,)``.
        most: the largest of ``seen``.
        now: the pass that they are to a memory.
    """

    def __init__(self, shares: list[Share], rotary: Rotary, device: torch.device):
        columns = zip(*((share.first, share.seen, share.page) for share in shares), strict=True)
        self.at, self.seen, self.pages = (torch.tensor(column, device=device) for column in columns)
        self.most = max(share.seen for share in shares)
        self.now = Pass(self.most, 1, Starts(), True, rotary, device, device, decoding=True, index=self.seen)


class Batch:
    """All sequences of one step, sorted once for all layers.

    Attributes:
        fresh: pages of the sequences that begin.
        filling: those that bring one token while there is room for it.
        evicting: those that bring one token and have evicted others before.
        rest: all others: prompts, whole or in part, and the token that evicts the first one; each with its pass.
        tokens: in the step.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        capacity: int,
        rotary: Rotary,
        device: torch.device,
        *,
        together: bool = True,
    ):
        """Args: ``capacity`` is S + W; with ``together`` off nothing that evicts is batched (``decodes_ragged``)."""
        filling = [share for share in shares if share.count == 1 and 0 < share.seen < capacity]
        evicting = [share for share in shares if share.count == 1 and share.seen > capacity and together]
        rest = [share for share in shares if share.count and share not in {*filling, *evicting}]
        self.filling = Together(filling, rotary, device) if filling else None
        self.evicting = Together(evicting, rotary, device) if evicting else None
        self.rest = []
        for share in rest:
            leaves = share.seen + share.count > capacity
            decodes = share.count == 1 and share.seen > capacity
            now = Pass(share.seen, share.count, Starts(), leaves, rotary, device, device, decoding=decodes)
            self.rest.append((share, now))
        self.fresh = torch.tensor([share.page for share in rest if not share.seen], dtype=torch.long, device=device)
        self.tokens = sum(share.count for share in shares)


@dataclass
class _Work:
    """The step's tokens, and what comes of them."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    added: Tensor | None = None

    def put(self, at: Tensor | slice, heads: Tensor, added: Tensor | None = None) -> None:
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

    def __init__(self, memory: Memory, dtype: torch.dtype, scale: float, *, rotates: bool = True):
        """
        Args:
            memory: of the layer.
            dtype: of keys and values.
            scale: factor of the attention logits.
            rotates: whether the layer turns queries and keys by their positions.

        Raises:
            RetrofitError: this memory has no page of fixed size.
        """
        self.memory, self.scale, self.rotates = memory, scale, rotates
        self.fields = page_fields(memory, dtype)

    def __call__(
        self, pages: Pages, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch, key_bias: Tensor | None = None
    ) -> Joined:
        """One step of all sequences.

        Args:
            pages: by name as in ``fields``, each ``(pages, *shape)``; written to.
            x: the attention's input ``(N, E)``.
            q: queries ``(N, H, D)``, rotated.
            k, v: keys, rotated, and values ``(N, H_kv, D)``.
            batch: whose tokens these are.
            key_bias: what the key projection adds to every key before its rotation ``(H_kv * D,)``, or None.

        Returns:
            The heads before the output projection ``(N, H, D)``, and what to add after it ``(N, E)`` or None.
        """
        work = _Work(x, q, k, v, torch.empty_like(q))
        if len(batch.fresh):
            for tensor in pages.values():
                tensor[batch.fresh] = 0  # of the sequence that had the page before nothing is left to be read
        if batch.filling is not None:
            self._fill(pages, work, batch.filling)
        if batch.evicting is not None:
            group = batch.evicting
            layer = _Decoding(self.memory, pages, group)
            heads, added = self._attend(work, group.at, len(group.at), layer, group.now, key_bias)
            for name, tensor in layer.state.items():
                pages[STATE + name][group.pages] = tensor
            work.put(group.at, heads[:, :, 0], None if added is None else added[:, 0])
        for share, now in batch.rest:
            tokens = slice(share.first, share.first + share.count)
            if not now.evicting:
                work.put(tokens, self._exact(pages, work, share, tokens))
                continue
            layer = self._layer(pages, share)
            heads, added = self._attend(work, tokens, 1, layer, now, key_bias)
            self._keep(pages, layer, share.page)
            work.put(tokens, heads[0].transpose(0, 1), None if added is None else added[0])
        return work.heads, work.added

    def _fill(self, pages: Pages, work: _Work, group: Together) -> None:
        """One token of each sequence, none evicted: plain attention over the rows that are there."""
        keys, values = pages["keys"], pages["values"]
        keys[group.pages, :, group.seen], values[group.pages, :, group.seen] = work.k[group.at], work.v[group.at]
        gates = self.memory.write_gates(work.x[group.at].unsqueeze(1))
        if gates is not None:
            pages["gates"][group.pages, :, self._ring_place(group.seen)] = gates[:, 0]
        rows = group.most + 1
        there = torch.arange(rows, device=keys.device) <= group.seen[:, None]
        k, v = keys[group.pages, :, :rows], values[group.pages, :, :rows]
        heads = _attention(work.q[group.at].unsqueeze(2), k, v, there[:, None, None], self.scale)
        work.put(group.at, heads[:, :, 0])

    def _exact(self, pages: Pages, work: _Work, share: Share, tokens: slice) -> Tensor:
        """Some tokens of one sequence, none evicted: plain attention, ``(n, H, D)``."""
        there = slice(share.seen, share.seen + share.count)
        keys, values = pages["keys"][share.page], pages["values"][share.page]
        keys[:, there], values[:, there] = work.k[tokens].transpose(0, 1), work.v[tokens].transpose(0, 1)
        gates = self.memory.write_gates(work.x[tokens].unsqueeze(0))
        if gates is not None:
            newest = torch.arange(max(there.start, there.stop - self.memory.window), there.stop, device=keys.device)
            pages["gates"][share.page, :, self._ring_place(newest)] = gates[0, newest - there.start].mT
        mask = torch.ones(share.count, there.stop, dtype=torch.bool, device=keys.device).tril(share.seen)
        q, k, v = work.q[tokens].transpose(0, 1)[None], keys[None, :, : there.stop], values[None, :, : there.stop]
        return _attention(q, k, v, mask, self.scale)[0].transpose(0, 1)

    def _ring_place(self, token: Any) -> Any:
        """Where gates of a token are kept; those of a sink are never read."""
        return (token - self.memory.sinks) % self.memory.window

    def _attend(
        self, work: _Work, at: Tensor | slice, rows: int, layer: MemoryCacheLayer, now: Pass, key_bias: Tensor | None
    ) -> Joined:
        """The memory's equations on ``rows`` sequences of as many tokens each; returns as ``Memory.attend``."""
        x, q, k, v = (tensor[at].unflatten(0, (rows, -1)) for tensor in (work.x, work.q, work.k, work.v))
        bias = key_bias if self.memory.needs_key_bias else None
        q, k, v = (h.transpose(1, 2) for h in (q, k, v))
        now = now if self.rotates else now.unrotated()
        joined = self.memory(Step(now, x, q, k, v, layer, self.scale, key_bias=bias))
        assert joined is not None  # something is evicted
        return joined

    def _layer(self, pages: Pages, share: Share) -> MemoryCacheLayer:
        """One sequence's page as the cache layer that the memory knows; its tensors are the page's own."""
        memory, here = self.memory, slice(share.page, share.page + 1)
        layer = MemoryCacheLayer(memory.kind, memory.window, memory.sinks)
        layer.aligned = True
        if not share.seen:
            return layer
        kept = min(share.seen, memory.capacity)
        gates = pages["gates"][here, :, : max(kept - memory.sinks, 0)] if "gates" in pages else None
        layer.hold(pages["keys"][here, :, :kept], pages["values"][here, :, :kept], gates)
        for name, shape in memory.state_shapes(share.seen).items():
            # rows of a memory that founds them one after the other come in front
            layer.state[name] = pages[STATE + name][here][_corner((1, *shape))]
        return layer

    def _keep(self, pages: Pages, layer: MemoryCacheLayer, page: int) -> None:
        """Put back what the memory has replaced."""
        for name, tensor in layer.named_tensors().items():
            there = pages[name][page]
            if tensor.data_ptr() != there.data_ptr():
                there[_corner(tensor.shape[1:])] = tensor[0]


class _Decoding(MemoryCacheLayer):
    """The pages of sequences that all evict one token, as one cache layer."""

    def __init__(self, memory: Memory, pages: Pages, group: Together):
        super().__init__(memory.kind, memory.window, memory.sinks)
        self.pages, self.group, self.aligned, self.is_initialized = pages, group, True, True
        self.state = {name: pages[STATE + name][group.pages] for name in memory.state_tensors(torch.float32)}

    def take_tensors(self) -> None:
        """Nothing to do: pages are there to be written to, and the state is a copy of theirs."""

    def replace(self, now: Pass, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        (in_ring, place), pages = now.places(self.window, self.sinks), self.pages
        evicted = self._exchange(pages["keys"], place, k), self._exchange(pages["values"], place, v)
        old = None if gates is None else self._exchange(pages["gates"], in_ring, gates)
        self.keys, self.values = pages["keys"][self.group.pages], pages["values"][self.group.pages]
        return *evicted, old

    def _exchange(self, held: Tensor, place: Tensor, new: Tensor) -> Tensor:
        """Write ``new`` (B, H, 1, ...) at each sequence's place in its page, and return what was there."""
        at = self.group.pages, slice(None), place.expand(len(new))
        old = held[at].unsqueeze(2)
        held[at] = new.squeeze(2)
        return old


def page_fields(memory: Memory, dtype: torch.dtype) -> dict[str, Kept]:
    """What a page holds of one sequence.

    Raises:
        RetrofitError: the memory has no bound, or keeps tokens of its own choice, for which there is no place.
    """
    try:
        state = memory.state_tensors(dtype)
    except NotImplementedError:
        state = None
    if state is None or memory.state_grows:
        why = "grows with the text" if memory.state_grows else "keeps tokens of its own choice"
        raise RetrofitError(
            f"memory {memory.kind!r} {why}, and an engine that batches has pages of fixed size: serve it one request "
            "at a time, retrofit serve --engine transformers"
        )
    shape = (memory.kv_heads, memory.capacity, memory.head_dim)
    fields = {"keys": Kept(shape, dtype), "values": Kept(shape, dtype)}
    first = next(memory.parameters(), None)
    with torch.no_grad():
        gates = memory.write_gates(
            torch.zeros(1, 1, memory.hidden_size, device=first.device if first is not None else None)
        )
    if gates is not None:
        fields["gates"] = Kept((gates.shape[-1], memory.window), wide(dtype))
    return fields | {STATE + name: kept for name, kept in state.items()}


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
