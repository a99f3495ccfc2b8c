"""What a memory is: the interface that every kind fills in.

The attention calls it with a :class:`Step`; once something must be evicted, it gives what goes into the output
projection. Everything a kind does differently (what it keeps, how it is read, where it joins, what it costs) is inside.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .options import Options
from .precision import cast, exact_products, wide
from .step import Step


class Kept(NamedTuple):
    """A tensor that is kept of one sequence in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# the heads before the output projection (B, n, H, D), and what to add after it (B, n, E) or None
Joined = tuple[Tensor, Tensor | None]


class Memory(nn.Module):
    """Interface of one layer's memory.

    Attributes:
        window, sinks: W and S; run-time settings, changed by ``set_window``.
        Options: dataclass of the kind's own options.
        tf32: whether products of float32 numbers may be taken in TF32 on a GPU, as torch's global switch says.
        trainable: whether there is anything to distil.
        calibrates: whether it learns from texts that it is shown, by ``observe`` and ``settle``, without gradients.
        needs_texts: whether it is of little use before that.
        needs_key_bias: whether it must know what the base adds to every key.
        needs_plain_queries: whether it must know queries as they were before their rotation.
        writes_back: whether each step changes the whole state, or only reads it.
        size: the option that says how many rows it keeps, if it has one.
        compiles: whether a step of plain decoding depends on no number but those on the device.
    """

    is_retrofit_memory = True
    tf32 = False
    kind: ClassVar[str]
    trainable: ClassVar[bool] = True
    calibrates: ClassVar[bool] = False
    needs_texts: ClassVar[bool] = False
    needs_key_bias: ClassVar[bool] = False
    needs_plain_queries: ClassVar[bool] = False
    writes_back: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    size: ClassVar[str | None] = None
    Options: ClassVar[type[Options]] = Options

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        """Args: ``config`` is the base's transformers configuration, ``options`` an instance of ``Options``."""
        super().__init__()
        self.window, self.sinks, self.options = window, sinks, options
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.hidden_size = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.check_window(window, sinks)

    def check_window(self, window: int, sinks: int) -> None:
        """Refuse a window that this kind cannot work with, when patching and before ``set_window`` changes anything.

        Raises:
            RetrofitError: with what to choose instead.
        """

    @classmethod
    def read_options(cls, options: dict[str, Any]) -> Any:
        """``Options`` of a new memory from a mapping; raises as :meth:`patches.options.Options.read`."""
        return cls.Options.read(cls.kind, options)

    @classmethod
    def saved_options(cls, options: dict[str, Any]) -> Any:
        """:meth:`read_options` of a memory that was saved, perhaps before it had all of them."""
        return cls.read_options({**cls.Options.before, **options})

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that are kept without loss; up to this many the base's own attention runs."""
        return self.window + self.sinks

    def reset_parameters(self) -> None:
        """Initialise every parameter by functions of ``transformers.initialization``, which leave loaded ones alone."""

    # ---- a forward pass ----

    def forward(self, step: Step) -> Joined | None:
        """One layer's share of a pass; also updates ``step.layer``.

        Returns:
            What :meth:`attend` gives, or None while nothing is evicted: the base's own attention then runs.
        """
        if step.layer is None and not step.now.evicting:
            return None
        # states, gates and decays stay in float32 under mixed precision too
        with torch.autocast(step.x.device.type, enabled=False), exact_products(self.tf32):
            if step.now.full and self.trainable:
                step.x = cast(step.x, wide(step.x.dtype))  # once for all projections
            step.gates = self.write_gates(step.x)
            if step.now.evicting:
                return self.attend(step)
            self.wait(step)
        return None

    def write_gates(self, x: Tensor) -> Tensor | None:
        """Gates ``(B, n, G)`` with which tokens of input ``x`` (B, n, E) will be written; computed when they arrive."""
        return None

    def wait(self, step: Step) -> None:
        """Keep what will be needed of tokens that arrive while nothing is evicted, in ``step.layer``.

        The base's attention puts their keys and values there afterwards.
        """
        assert step.layer is not None
        step.layer.append_gates(step.gates)

    def attend(self, step: Step) -> Joined:
        """The attention's output over sinks, window and memory; also updates ``step.layer``."""
        raise NotImplementedError

    # ---- what it costs, for one sequence in one layer ----

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        """The state's tensors in a ``dtype`` model, by name, as ``step.layer.state`` holds them for a row of the batch.

        Args:
            tokens: of the sequence so far, more than ``capacity``; None means a long one.
        """
        raise NotImplementedError

    @property
    def state_grows(self) -> bool:
        """Whether it has no bound of its own."""
        return False

    def state_elements(self) -> int:
        """Elements of the state of a long sequence, besides sinks and window."""
        return sum(math.prod(kept.shape) for kept in self.state_tensors(torch.float32).values())

    def state_bytes(self, dtype: torch.dtype, tokens: int | None = None) -> int:
        """Bytes of the state in a ``dtype`` model, besides sinks and window.

        Args:
            tokens: of the sequence so far; None means a long one. Up to ``capacity`` there is nothing yet.
        """
        if tokens is not None and tokens <= self.capacity:
            return 0
        return sum(kept.bytes for kept in self.state_tensors(dtype, tokens).values())

    def seen_keys(self, tokens: int) -> Tensor:
        """Keys that each query attends to by a softmax, sinks and rows of the memory included: ``(tokens,)`` int64."""
        t = torch.arange(tokens)
        return torch.where(t < self.capacity, t + 1, self.seen_beyond(t))

    def seen_beyond(self, t: Tensor) -> Tensor:
        """:meth:`seen_keys` of the queries at ``t`` (n,), where that is beyond ``capacity``; elsewhere anything."""
        return torch.full_like(t, self.sinks + self.window)

    def flops(self, tokens: int) -> int:
        """Operations to write and read the memory over ``tokens`` tokens, its own matrices included.

        A product of matrices counts 2 per multiplication; rows seen by the softmax are in :meth:`seen_keys`.
        """
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)
        return 2 * weights * tokens + self.state_flops(max(0, tokens - self.capacity))

    def state_flops(self, evicted: int) -> int:
        """Operations on the state while ``evicted`` tokens leave the window."""
        return 0
