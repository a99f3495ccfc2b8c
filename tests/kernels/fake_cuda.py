"""What a forward pass does on CUDA, kernel by kernel, without a GPU: torch's fake tensors on ``cuda:0``.

To be run as a program, with the device guard of tests/conftest.py, so that nothing of it stays in the process that
tests: see :func:`main`.
"""

import ctypes
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Qwen2Config

import patches.kvm_merge
import patches.window_cuda

# what only says how to look at memory, or takes some: no kernel
NO_KERNEL = {
    *(
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "alias",
    ),
    *("unbind", "split", "split_with_sizes", "detach", "unfold", "as_strided", "reshape", "movedim", "_reshape_alias"),
    *("lift_fresh", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
}


def run(guard: Path, *arguments: object) -> Any:
    """What the program prints for these arguments, in a process of its own."""
    command = [sys.executable, "-m", "tests.kernels.fake_cuda", str(guard), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Kernels(TorchDispatchMode):
    """Counts what is launched on CUDA inside the block, and what is copied there."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.copied = self.waited = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op.__name__.partition(".")[0]
        first = out[0] if isinstance(out, list | tuple) and out else out
        on_cuda = isinstance(first, Tensor) and first.is_cuda
        if on_cuda and name not in NO_KERNEL:
            self.launched[name] += 1
        if on_cuda and name in ("_to_copy", "copy_"):
            sources = [x for x in args if isinstance(x, Tensor)]
            self.copied += any(not x.is_cuda for x in sources)
        self.waited += name in ("_local_scalar_dense", "item", "nonzero")
        return out


def stand_in_for_triton(kernels: Kernels) -> None:
    """Modules that import as fla's do, FlexAttention and our merge: ops that return tensors of the right shapes.

    An op of fla's and a compiled FlexAttention count as one kernel each.
    """

    def operation(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        kernels.launched["fla"] += 1
        return torch.empty_like(v), v.new_empty(
            *v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1], dtype=torch.float32
        )

    for name, op in (("gated_delta_rule", "gated_delta_rule"), ("simple_gla", "simple_gla")):
        module = ModuleType(f"fla.ops.{name}")
        for form in ("chunk", "fused_recurrent"):
            setattr(module, f"{form}_{op}", operation)
        sys.modules[module.__name__] = module

    def merge(rows: Tensor, *others: Tensor) -> Tensor:
        kernels.launched["triton"] += 2  # it launches two
        return torch.empty_like(rows)

    def flex(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        kernels.launched["flex"] += 1
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    patches.kvm_merge.triton, patches.kvm_merge.merge_by_triton = object(), merge
    patches.window_cuda.attend = lambda: flex
    sys.modules["fla"], sys.modules["fla.ops"] = ModuleType("fla"), ModuleType("fla.ops")


def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Stands for ``scaled_dot_product_attention``, which asks a CUDA build of torch for its kernel."""
    return torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)


def count(kinds: str, tokens: str, window: str) -> dict[str, Any]:
    """Kernels, copies from the host and waits for the device of one layer that reads a prompt, then of one more token.

    The layer is one of a Qwen2.5-7B in bfloat16; what the model does once for all layers is counted with it.

    Args:
        kinds: of memories, with commas between them.
    """
    import patches.window
    from patches.kinds import new_memory
    from retrofit.patching import skeleton

    patches.window.scaled_dot_product_attention = attention
    torch.nn.functional.scaled_dot_product_attention = attention
    config = Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=1,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=1024,
        max_position_embeddings=262144,
        dtype="bfloat16",
    )
    found: dict[str, Any] = {}
    counted = Kernels()
    stand_in_for_triton(counted)
    for kind in kinds.split(","):
        model = skeleton(config, new_memory(kind, int(window), 4)).eval()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            place(model)
            ids, cache = torch.zeros(1, int(tokens), dtype=torch.long, device="cuda"), DynamicCache()
            model.model(ids)  # makes FlexAttention's mask, which all layers and later prompts of this length share
            for name, new in (("prefill", ids), ("decode", ids[:, :1])):
                counted.launched.clear()
                counted.copied = counted.waited = 0
                with counted:
                    model.model(new, past_key_values=cache)
                found.setdefault(kind, {})[name] = {
                    "kernels": counted.launched.total(),
                    "copied": counted.copied,
                    "waited": counted.waited,
                    "most": dict(counted.launched.most_common(12)),
                }
    return found


def place(model: Any) -> None:
    """Make every weight fake, on CUDA: the memories' in float32, the others in bfloat16."""
    for path, module in model.named_modules():
        dtype = torch.float32 if ".memory" in path else torch.bfloat16
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = torch.empty(parameter.shape, dtype=dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=torch.float32, device="cuda")


def decode() -> list[str | None]:
    """Shapes and dtypes that the flash kernel returns for one token, by aten's own checks."""
    from patches import kernels

    with FakeTensorMode():
        shapes = (2, 4, 1, 64), (2, 2, 64, 64), (2, 2, 64, 64)
        rows = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        return [described(x) for x in kernels.decode_attention(*rows, scale=0.4, lse=True)]


def described(x: Tensor | None) -> str | None:
    return None if x is None else f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {x.device.type}"


def main(guard: str, what: str, *arguments: str) -> None:
    """Print what :func:`decode` or :func:`count` finds, as JSON in the last line."""
    ctypes.CDLL(guard)
    print(json.dumps({"decode": decode, "count": count}[what](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
