"""Triton's interpreter for fla's kernels on CPU tensors, forward and backward: slow, exact, and no GPU.

The interpreter runs a kernel in numpy. Three things keep it from fla's: the autotuner wants to time configurations on a
driver, some kernels call ``.to`` on a loop counter, which the interpreter hands over as a plain int, and bfloat16 is
held as the 16-bit integer of its bits, on which arithmetic means nothing. :func:`mend` helps with all three, through
names that Triton keeps to itself; where these have moved, it says which.
"""

import builtins
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

# arithmetic of the interpreter's builder; loads, stores and selections move bits and need no help
ARITHMETIC = ("binary_op", "unary_op", "create_dot", "create_fma", "create_rsqrt", "create_fabs")
CASTS = ("create_fp_to_fp", "create_fp_ext", "create_fp_trunc", "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si")


def mend() -> str | None:
    """Make the interpreter fit for fla's kernels; to be called before fla is imported.

    Returns:
        Why it cannot be done here, or None.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":  # for all of this process, so not something a test may switch on
        return "Triton's interpreter is off: make test-kernels runs these"
    try:
        import numpy
        from triton import language
        from triton.runtime import autotuner, interpreter

        builder, handle, reduce = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.ReduceOps
        for name in (*ARITHMETIC, *CASTS):
            getattr(builder, name)
        begin, total = autotuner.Autotuner.__init__, reduce.sum
        to_tensor = interpreter.interpreter_semantic.to_tensor
    except ImportError as error:
        return f"triton is not installed ({error}): make test-kernels installs it"
    except AttributeError as error:
        return f"Triton's private names have moved ({error})"

    @wraps(begin)
    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.configs = self.configs[:1]  # with a single one nothing is timed

    class Counter(int):
        """A loop's counter that can be cast, as the compiler's can."""

        def to(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            return to_tensor(int(self), False).to(dtype)

    def counters(*bounds: Any) -> list[Counter]:
        return [Counter(i) for i in builtins.range(*(int(bound) for bound in bounds))]

    def wide(x: Any) -> Any:
        if not isinstance(x, handle) or x.dtype.scalar != language.bfloat16 or x.data.dtype != numpy.uint16:
            return x
        return handle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), language.float32)

    def narrow(x: Any) -> Any:
        if x.data.dtype == numpy.bool_:  # of a comparison
            return x
        bits = numpy.ascontiguousarray(x.data, dtype=numpy.float32).view(numpy.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
        return handle(rounded.astype(numpy.uint16), language.bfloat16)

    def by_float32(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any) -> Any:
            widened = [wide(x) for x in args]
            out = method(self, *widened)
            changed = any(a is not b for a, b in zip(args, widened, strict=True))
            return narrow(out) if changed and out.dtype == language.float32 and _result(args, language) else out

        return call

    def cast(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, source: Any, target: Any, *args: Any) -> Any:
            if target.scalar != language.bfloat16:
                return method(self, wide(source), target, *args)
            return source if source.dtype.scalar == language.bfloat16 else narrow(wide(source))

        return call

    def summed(self: Any, x: Any) -> Any:
        if x.dtype.scalar != language.bfloat16:
            return total(self, x)
        data = wide(x.handle).data.sum(axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrow(handle(numpy.asarray(data), language.float32)).data, x.dtype)

    autotuner.Autotuner.__init__ = first_configuration
    interpreter.range = counters  # every kernel finds what this module has and its own has not
    for name in ARITHMETIC:
        setattr(builder, name, by_float32(getattr(builder, name)))
    for name in CASTS:
        setattr(builder, name, cast(getattr(builder, name)))
    reduce.sum = summed
    return None


def _result(args: tuple[Any, ...], language: Any) -> bool:
    """Whether an operation's result is bfloat16: its accumulator, or else its operands, are."""
    handles = [x for x in args if hasattr(x, "data") and hasattr(x, "dtype")]
    return bool(handles[-1].dtype.scalar == language.bfloat16)
