"""Joint rows: the tokens that future queries are expected to look at stay as they are, and a state has read all.

``expected`` and ``joint`` in one: kept tokens enter the window's softmax first, and the log-sum-exp that this gives
meets the masses of the state's branches. A kept token is written to the state as well; see docs/memories/joint-rows.md.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .errors import RetrofitError
from .expected import ExpectedAttention, ExpectedOptions
from .joint import JointMemory, JointOptions
from .memory import Evicted, Joined, Kept, Memory, Step


@dataclass(frozen=True)
class JointRowsOptions(JointOptions, ExpectedOptions):
    """Options of ``joint-rows``: those of ``expected`` and of ``joint``."""

    before: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        JointOptions.__post_init__(self)
        ExpectedOptions.__post_init__(self)
        if self.shares != "even":
            raise RetrofitError(
                f"shares={self.shares!r}: a resumed run would not know them: leave it out, or use 'expected'"
            )


class JointRows(JointMemory, ExpectedAttention):
    """Sinks, window and kept tokens in one softmax, whose log-sum-exp then meets the masses of ``joint``'s branches."""

    kind = "joint-rows"
    writes_back = compiles = False
    Options: ClassVar[type[Any]] = JointRowsOptions

    def reset_parameters(self) -> None:
        ExpectedAttention.reset_parameters(self)  # sets every parameter, those of the branches too
        JointMemory.reset_parameters(self)

    def observe(self, step: Step, again: bool) -> None:
        ExpectedAttention.observe(self, step, again)
        JointMemory.observe(self, step, again)

    def settle(self, costs: Tensor) -> None:
        """What entries and state take over; the state stays closed: what it reads was not held against the entries."""
        ExpectedAttention.settle(self, costs)
        JointMemory.settle(self, costs)
        torch.nn.init.zeros_(self.opening)

    def usual_features(self) -> int:
        return max(1, super().usual_features() // 2)

    def usual_rows(self) -> int:
        """By default both halves together take no more than D^2 float32 of each key/value head."""
        state = sum(kept.bytes for kept in JointMemory.state_tensors(self, torch.float32).values())
        left = self.kv_heads * self.head_dim**2 * torch.float32.itemsize - state
        return max(1, left // (self.kv_heads * self.entry_bytes(torch.float32)))

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        return ExpectedAttention.state_tensors(self, dtype) | JointMemory.state_tensors(self, dtype)

    def flops(self, tokens: int) -> int:
        measured = sum(x.numel() for x in self.parameters() if x.dim() > 1 and not x.requires_grad)
        return Memory.flops(self, tokens) - 2 * measured * tokens + ExpectedAttention.flops(self, tokens)

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        return JointMemory.recall(self, step, *self.join_entries(step, near, lse, gone), gone)
