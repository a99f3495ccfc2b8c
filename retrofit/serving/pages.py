"""Many sequences in one step, each with a page of fixed size: what an engine that batches keeps of a bounded memory.

An engine hands out pages; a page holds all that one layer keeps of one sequence: keys and values of sinks and window,
write gates, the memory's state. The equations are the memory's own: sequences that decode are given to it as a
left-padded batch, all others one by one, on a cache layer whose tensors lie in the page. Knows no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from patches.cache import MemoryCacheLayer
from patches.compressive import Compressive
from patches.errors import RetrofitError
from patches.memory import Joined, Kept, Memory
from patches.padding import Starts
from patches.precision import wide
from patches.rotary import Rotary
from patches.step import Pass, Step
from patches.window_only import WindowOnly

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
        now: the pass that they are to a memory: shorter ones are padded on the left.
    """

    def __init__(self, shares: list[Share], rotary: Rotary, device: torch.device):
        columns = zip(*((share.first, share.seen, share.page) for share in shares), strict=True)
        self.at, self.seen, self.pages = (torch.tensor(column, device=device) for column in columns)
        self.most = max(share.seen for share in shares)
        pads = tuple(self.most - share.seen for share in shares)
        starts = Starts(pads, tuple(-pad for pad in pads)) if any(pads) else Starts()
        self.now = Pass(self.most, 1, starts, True, rotary, device, device, full=True)


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
        """Args: ``capacity`` is S + W; with ``together`` off nothing that evicts is batched (:func:`can_batch`)."""
        filling = [share for share in shares if share.count == 1 and 0 < share.seen < capacity]
        evicting = [share for share in shares if share.count == 1 and share.seen > capacity and together]
        rest = [share for share in shares if share.count and share not in {*filling, *evicting}]
        self.filling = Together(filling, rotary, device) if filling else None
        self.evicting = Together(evicting, rotary, device) if evicting else None
        self.rest = []
        for share in rest:
            leaves = share.seen + share.count > capacity
            full = share.count == 1 and share.seen > capacity
            now = Pass(share.seen, share.count, Starts(), leaves, rotary, device, device, full=full)
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
            work.put(group.at, heads[:, 0], None if added is None else added[:, 0])
        for share, now in batch.rest:
            tokens = slice(share.first, share.first + share.count)
            if not now.evicting:
                work.put(tokens, self._exact(pages, work, share, tokens))
                continue
            layer = self._layer(pages, share)
            heads, added = self._attend(work, tokens, 1, layer, now, key_bias)
            self._keep(pages, layer, share.page)
            work.put(tokens, heads[0], None if added is None else added[0])
        return work.heads, work.added

    def _fill(self, pages: Pages, work: _Work, group: Together) -> None:
        """One token of each sequence, none evicted: plain attention over the rows that are there."""
        keys, values = pages["keys"], pages["values"]
        keys[group.pages, :, group.seen], values[group.pages, :, group.seen] = work.k[group.at], work.v[group.at]
        self._note_gates(pages, work.x[group.at], (group.pages, group.seen))
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
        self._note_gates(pages, work.x[tokens], (share.page, there))
        mask = torch.ones(share.count, there.stop, dtype=torch.bool, device=keys.device).tril(share.seen)
        q, k, v = work.q[tokens].transpose(0, 1)[None], keys[None, :, : there.stop], values[None, :, : there.stop]
        return _attention(q, k, v, mask, self.scale)[0].transpose(0, 1)

    def _note_gates(self, pages: Pages, x: Tensor, where: tuple[Tensor | int, Tensor | slice]) -> None:
        gates = self.memory.write_gates(x.unsqueeze(0))
        if gates is not None:
            pages["gates"][where] = gates[0]

    def _attend(
        self, work: _Work, at: Tensor | slice, rows: int, layer: MemoryCacheLayer, now: Pass, key_bias: Tensor | None
    ) -> Joined:
        """The memory's equations on ``rows`` sequences of as many tokens each; returns as ``Memory.attend``."""
        x, q, k, v = (tensor[at].unflatten(0, (rows, -1)) for tensor in (work.x, work.q, work.k, work.v))
        bias = key_bias if self.memory.needs_key_bias else None
        q, k, v = (h.transpose(1, 2) for h in (q, k, v))
        now = now if self.rotates else now.still()
        joined = self.memory(Step(now, x, q, k, v, layer, self.scale, key_bias=bias))
        assert joined is not None  # something is evicted
        return joined

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
            for name, kept in memory.state_tensors(pages["keys"].dtype, share.seen).items():
                # rows of a memory that founds them one after the other come in front
                layer.state[name] = pages[STATE + name][here][_corner((1, *kept.shape))]
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
                there[_corner(tensor.shape[1:])] = tensor[0]


class _Decoding(MemoryCacheLayer):
    """The pages of sequences that all evict one token, as one cache layer: each row's ring stands at its own place."""

    def __init__(self, memory: Memory, pages: Pages, group: Together):
        super().__init__(memory.kind, memory.window, memory.sinks)
        self.pages, self.group = pages, group
        self.seen, self.evicting, self.is_initialized = group.most, True, True
        self.state = {name: pages[STATE + name][group.pages] for name in memory.state_tensors(torch.float32)}

    def push(
        self, k: Tensor, v: Tensor, gates: Tensor | None, places: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        page, place = self.group.pages, self.group.seen % self.window
        keys, values, row = self.pages["keys"], self.pages["values"], self.sinks + place
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
    return isinstance(memory, WindowOnly) and not isinstance(memory, Compressive)  # which hides parts of the ring


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
    rows = memory.capacity
    shape = (memory.kv_heads, rows, memory.head_dim)
    fields = {"keys": Kept(shape, dtype), "values": Kept(shape, dtype)}
    first = next(memory.parameters(), None)
    with torch.no_grad():
        gates = memory.write_gates(
            torch.zeros(1, 1, memory.hidden_size, device=first.device if first is not None else None)
        )
    if gates is not None:
        fields["gates"] = Kept((rows, gates.shape[-1]), wide(dtype))
    return fields | {STATE + name: kept for name, kept in state.items()}


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
