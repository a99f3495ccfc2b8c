"""KVM (Key-Value Means, arXiv 2605.09877) for a pretrained base: rows of merged keys and values beside the window.

The window loses a whole chunk at a time; each token of it either founds a row or joins the row whose key is likest.
Rows are read by the same softmax as the window. How the paper's form of the keys is replaced, so that a row of a single
token is that token's own key, is :class:`RotaryKeys`; nobody has published KVM on a pretrained model, this is ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from transformers import initialization as init

from .cache import MemoryCacheLayer, plain_stream
from .errors import RetrofitError, one_of
from .frames import Frame, sink_attention
from .kvm_blocks import Rule, attend_blocks, no_rows
from .kvm_budget import Budget, Schedule, schedule
from .kvm_rows import RotaryKeys, absorb, prepare, read_rows
from .memory import Joined, Kept, Memory
from .merged_softmax import join, look
from .modules import WideLinear
from .options import Options, above_zero, true_or_false, whole_number
from .precision import cast, wide
from .step import Pass, Step

CHUNK = 256  # the paper's, and the most that is chosen unasked


@dataclass(frozen=True)
class KVMOptions(Options):
    """Options of ``kvm``.

    Attributes:
        chunk: tokens that leave the window together; divides it. None: half of the window, or the largest divisor
            below that is at most 256 and, under a fixed budget, at most ``rows``.
        budget: ``"fixed"``, ``"power_law"`` (``factor * e ** exponent`` rows after e tokens) or ``"saturating"``
            (``N e / (N + e)``, N being ``saturation``).
        rows: rows per key/value head under a fixed budget, the least under the others. None: as many as fill the bytes
            of an AHN state, ``H D^2`` elements, if fixed; otherwise no least number.
        factor, exponent, saturation: of the growing budgets.
        multiple: growing budgets are rounded down to a multiple of this.
        positions: where a row's key stands when it is read: ``"row"``, the mean position of its tokens; ``"edge"``,
            just before the window (for contexts beyond the base's trained length); ``"nope"``, at the query itself.
        gate_appends: whether the merge gate also weakens tokens that found rows, as one of the two public codes has it.
    """

    chunk: int | None = None
    budget: str = "fixed"
    rows: int | None = None
    factor: float = 16.0
    exponent: float = 0.5
    saturation: int = 1024
    multiple: int = 1
    positions: str = "row"
    gate_appends: bool = False

    def __post_init__(self) -> None:
        one_of("budget", self.budget, "fixed", "power_law", "saturating")
        one_of("positions", self.positions, "row", "edge", "nope")
        for name in ("chunk", "rows", "saturation", "multiple"):
            if getattr(self, name) is not None or name in ("saturation", "multiple"):
                whole_number(name, getattr(self, name))
        for name in ("factor", "exponent"):
            above_zero(name, getattr(self, name))
        if self.exponent > 1:
            raise RetrofitError(f"exponent={self.exponent}: rows cannot be more than tokens: choose 1 or less")
        true_or_false("gate_appends", self.gate_appends)


class KVM(Memory):
    """Rows of merged tokens, seen by the window's softmax; the exact sinks stand apart from them.

    Trained: a merge gate per key/value head, zero at first (every token then weighs 1 in a row's mean), and a
    temperature of the rows' logits per query head, 1 at first. The window has no temperature: below it the model stays
    its base.
    """

    kind = "kvm"
    needs_key_bias = True
    Options = KVMOptions

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.longest = config.max_position_embeddings
        self.merge_gate = WideLinear(self.hidden_size, self.kv_heads, bias=False)
        self.temperature = nn.Parameter(torch.empty(self.heads))

    def reset_parameters(self) -> None:
        init.zeros_(self.merge_gate.weight)
        init.ones_(self.temperature)

    def check_window(self, window: int, sinks: int) -> None:
        chunk = self.options.chunk
        if chunk is None:
            return
        if window % chunk:
            raise RetrofitError(
                f"window={window} is not a multiple of chunk={chunk}: choose a window of whole chunks, or no chunk"
            )
        if self.options.budget == "fixed" and chunk > self.rows:
            raise RetrofitError(
                f"chunk={chunk} is more than rows={self.rows}, and the first chunk founds a row per token: choose more "
                "rows or a smaller chunk"
            )

    @property
    def rows(self) -> int:
        """Rows per head: the fixed budget, or the least of a growing one."""
        if self.options.rows is not None:
            return self.options.rows
        if self.options.budget != "fixed":
            return 1
        return max(1, self.heads * self.head_dim**2 // (self.kv_heads * self._row_elements))

    @property
    def chunk(self) -> int:
        """Tokens that leave the window together."""
        if self.options.chunk is not None:
            return self.options.chunk
        most = max(1, min(self.window // 2, CHUNK, self.rows if self.options.budget == "fixed" else CHUNK))
        return next(size for size in range(most, 0, -1) if self.window % size == 0)

    @property
    def schedule(self) -> Schedule:
        """How many rows there are when."""
        chosen = self.options
        budget = Budget(chosen.budget, self.rows, chosen.factor, chosen.exponent, chosen.saturation, chosen.multiple)
        return schedule(budget, self.chunk, self.window)

    @property
    def _row_elements(self) -> int:
        return 2 * self.head_dim + 4

    @property
    def state_grows(self) -> bool:
        return self.options.budget != "fixed"

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        """A long sequence is, under a growing budget, the longest input the base is made for."""
        rows = self.rows
        if tokens is not None:
            rows = self.schedule.rows((tokens - self.sinks - 1) // self.chunk + 1 - self.window // self.chunk)
        elif self.state_grows:
            rows = self.schedule.rows(max(1, (self.longest - self.sinks - self.window) // self.chunk))
        return {"rows": Kept((self.kv_heads, rows, self._row_elements), wide(dtype))}

    def seen_beyond(self, t: Tensor) -> Tensor:
        index = t - self.sinks  # blocks are counted from behind the sinks
        begin = (index // self.chunk + 1) * self.chunk - self.window
        blocks = [self.schedule.rows(n) for n in range(max(1, (len(t) - self.sinks - 1) // self.chunk + 2))]
        left = (begin // self.chunk).clamp(0, len(blocks) - 1)
        return self.sinks + index - begin.clamp_min(0) + 1 + torch.tensor(blocks)[left]

    def state_flops(self, evicted: int) -> int:
        # every evicted token is compared with all rows: to be appended, then to be merged
        rows = self.schedule.rows(max(0, evicted // self.chunk))
        return 2 * 2 * rows * self.kv_heads * self.head_dim * evicted

    def write_gates(self, x: Tensor) -> Tensor:
        """``1 + ELU(W_g x)`` of each key/value head, ``(B, n, H_kv)``, float32 or wider."""
        return 1 + elu(self.merge_gate(x))

    def attend(self, step: Step) -> Joined:
        assert step.gates is not None
        layer, now = step.layer, step.now
        rule = Rule(self.schedule, self.temperature, step.scale, 0, self.options.gate_appends, step.dropout)
        frame = now.frame(self.sinks, self.chunk, now.seen, now.new)
        bias = None
        if step.key_bias is not None:
            bias = cast(step.key_bias, wide(step.k.dtype)).view(self.kv_heads, 1, -1)
        keys = RotaryKeys(now, now.offset[:, None] + frame.column(frame.skip), bias, self.options.positions)
        if layer is not None and self._one_more(step, layer, frame):
            return self._decode(step, layer, frame, keys, rule), None
        new = step.k, step.v, step.gates, now.pad
        if layer is None:
            stream = plain_stream(*new, seen=0, window=self.window, sinks=self.sinks)
        else:
            stream = layer.stream(*new)
        assert stream.gates is not None
        rows = no_rows(step.k) if layer is None else layer.state.get("rows", no_rows(step.k))
        before = now.seen - self.window, -self.window
        k, v, gates = (frame.lay(x, *before) for x in (stream.k, stream.v, _per_head(stream.gates)))
        q, sinks = frame.lay(step.q, now.seen), (stream.sink_k, stream.sink_v)
        out, rows = attend_blocks(q, k, v, gates, *sinks, rows, keys, rule, frame)
        of_sinks = sink_attention(frame, step.q, *sinks, step.scale, step.dropout)
        if layer is not None:
            layer.state["rows"] = rows
            layer.commit(stream, now.new)
        return frame.collect(out, of_sinks), None

    def _one_more(self, step: Step, layer: MemoryCacheLayer, frame: Frame) -> bool:
        """Whether this is plain decoding: one token, all sinks there, no graph for in-place writes to break."""
        return layer.evicting and step.now.new == 1 and min(frame.start) >= 0 and not step.differentiates(layer)

    def _decode(self, step: Step, layer: MemoryCacheLayer, frame: Frame, keys: RotaryKeys, rule: Rule) -> Tensor:
        """One token: if it begins a chunk, the oldest chunk becomes rows first; then it attends. ``(B, 1, H, D)``."""
        schedule, device = rule.schedule, step.q.device
        old = [rule.evicted(index - 1) for index in frame.start]
        new = [rule.evicted(index) for index in frame.start]
        rows = layer.state["rows"]
        if old != new:
            ring = (torch.arange(self.chunk, device=device) + step.now.seen) % self.window  # the chunk W slots ago
            index = frame.column(frame.start) - self.window + torch.arange(self.chunk, device=device)
            k, v = (x[:, :, self.sinks + ring] for x in (layer.keys, layer.values))
            blocks = prepare(k, v, _per_head(layer.gates[:, ring]), index, keys, self.chunk, rule.gate_appends)
            before, after = ([schedule.rows(n) for n in numbers] for numbers in (old, new))
            active = [x != y for x, y in zip(old, new, strict=True)]
            rows = absorb(rows, blocks, 0, keys, before, after, active)
            layer.state["rows"] = rows
        layer.push(step.k, step.v, step.gates, step.now.places(self.window, self.sinks))

        begin = [max(0, (index // self.chunk + 1) * self.chunk - self.window) for index in frame.start]
        now = step.now
        near = now.once(("kvm's window", self.window, self.sinks, self.chunk), lambda: self._near(now, frame, begin))
        parts = [look(step.q, layer.keys, layer.values, near, step.scale, step.dropout)]
        counts, most = [schedule.rows(n) for n in new], rows.shape[2]
        if max(counts):
            moved = keys.queries(step.q, frame.column(frame.start))
            q = (step.q if moved is None else moved) * cast(rule.temperature, step.q.dtype)[:, None, None]
            edge = frame.column(begin) - 1
            row_k, row_v = (cast(x[:, 0], step.k.dtype) for x in read_rows(rows.unsqueeze(1), keys, edge))
            held = None
            if min(counts) < most:
                held = (torch.arange(most, device=device) < frame.column(counts)).unsqueeze(1)
            parts.append(look(q, row_k, row_v, held, step.scale, step.dropout))
        return join(*parts)

    def _near(self, now: Pass, frame: Frame, begin: list[int]) -> Tensor:
        """Which of sinks and ring one query sees ``(1 or B, 1, S + W)``: the ring from index ``begin`` on."""
        slot = now.seen - (now.seen - torch.arange(self.window, device=now.device)) % self.window
        seen = slot >= frame.column([b + skip for b, skip in zip(begin, frame.skip, strict=True)])
        return torch.cat([seen.new_ones(len(seen), self.sinks), seen], 1).unsqueeze(1)


def _per_head(gates: Tensor) -> Tensor:
    """``(B, n, H_kv) -> (B, H_kv, n, 1)``."""
    return gates.transpose(1, 2).unsqueeze(-1)
