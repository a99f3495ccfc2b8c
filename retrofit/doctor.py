"""What is installed here, whether it goes together, and which kernel each memory runs on."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from packaging.version import Version

from patches.errors import RetrofitError, first_line
from patches.kernels import OPS, VARIABLE, find, forced_backends
from patches.kinds import KINDS

from .bench.models import random_base
from .import_guard import installed_version
from .patching import patch

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flash-linear-attention",
    "flash-attn",
    "deepspeed",
    "accelerate",
    "peft",
    "datasets",
    "huggingface_hub",
    "safetensors",
)
FLOORS = {"torch": "2.6", "transformers": "5.0", "huggingface_hub": "1.0", "safetensors": "0.4.3"}
FLA_OP = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
HOPPER, BLACKWELL = (9,), (10, 12)  # major compute capabilities
COLUMNS = {"name": ("", ""), "found": ("found", ""), "verdict": ("", "")}
GOOD, NOTE, BAD = "ok", "note", "breaks"
ABSENT = "not installed"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        found: a version, a device, a kernel.
        verdict: ``ok``, ``note`` (works, but worth knowing) or ``breaks``.
        advice: what is wrong and what to do about it; empty if nothing is.
    """

    name: str
    found: str
    verdict: str = GOOD
    advice: str = ""


def examine() -> list[Finding]:
    """Versions, the device, the optional kernels, and every memory run once on a tiny model."""
    versions = {name: installed_version(name) for name in PACKAGES}
    kernels = list(_kernels())
    uses_fla = any(finding.found.startswith("fla:") for finding in kernels)
    found = [_package(name, version) for name, version in versions.items()]
    return [*found, _device(versions), _fla(versions, uses_fla), _flash_attention(versions), *_table(), *kernels]


def rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """The findings as rows of a table or of JSON."""
    return [asdict(finding) for finding in findings]


def gpu() -> tuple[str, int] | None:
    """Name and major compute capability of the first GPU that torch sees, if it sees one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)[0]


def _package(name: str, version: str | None) -> Finding:
    if name in FLOORS and (version is None or _older(version, FLOORS[name])):
        advice = f"{name} {FLOORS[name]} is needed: pip install -U '{name}>={FLOORS[name]}'"
        return Finding(name, version or ABSENT, BAD, advice)
    if name == "deepspeed" and version is not None and _older(version, "0.19.8"):
        # DeepSpeed #8148, transformers #47254
        advice = (
            "ZeRO-3 crashes on frozen weights with gradient checkpointing: pip install -U 'deepspeed>=0.19.8', "
            "or use zero2"
        )
        return Finding(name, version, BAD, advice)
    if name == "peft" and version is not None and _older(version, "0.21"):
        advice = "PeftModel cannot load a Retrofit adapter: pip install -U 'peft>=0.21', or use retrofit.load_adapter"
        return Finding(name, version, NOTE, advice)
    return Finding(name, version or ABSENT)


def _device(versions: dict[str, str | None]) -> Finding:
    found, build = gpu(), torch.version.cuda
    if found is not None:
        return Finding("device", f"{found[0]} (CUDA {build})")
    if not _has_nvidia():
        return Finding("device", "CPU")
    if build is None:
        advice = "this torch is a CPU build beside an NVIDIA GPU: install the CUDA build of the same version"
        return Finding("device", "CPU", NOTE, advice)
    advice = f"torch was built for CUDA {build} but sees no GPU: update the driver, or install a build for its CUDA"
    return Finding("device", "CPU", BAD, advice)


def _fla(versions: dict[str, str | None], uses_fla: bool) -> Finding:
    """Whether flash-linear-attention's operation imports and runs; how bad it is if not depends on who calls it."""
    serious, beside = (BAD, "") if uses_fla else (NOTE, " (no memory uses it here)")
    name, triton, found = "fla's gated delta rule", versions["triton"], gpu()
    if versions["flash-linear-attention"] is None:
        return Finding(name, ABSENT)
    if found and found[1] in HOPPER and triton and not _older(triton, "3.4") and _older(triton, "3.7.1"):
        # fla #640, #826: the backward is miscompiled, and fla 0.6 refuses to run it
        advice = f"Triton {triton} miscompiles its backward on {found[0]}: pip install -U 'torch>=2.12.1'{beside}"
        return Finding(name, "refused", serious, advice)
    try:
        operation = getattr(importlib.import_module(FLA_OP[0]), FLA_OP[1])
    except Exception as error:  # without triton a ModuleNotFoundError, with a broken one anything
        advice = (
            f"it does not import ({first_line(error)}): pip install triton, or uninstall flash-linear-attention{beside}"
        )
        return Finding(name, "does not import", serious, advice)
    if found is None:
        return Finding(name, "imports; needs a GPU to run")
    if found[1] in BLACKWELL:
        # fla #607, #913: gradients of NaN without an error
        advice = (
            f"on Blackwell its gradients may be NaN without an error: read issue 913 of flash-linear-attention{beside}"
        )
        return Finding(name, "imports", NOTE, advice)
    try:
        _run_fla(operation)
    except Exception as error:
        return Finding(name, "fails", serious, f"it does not run ({first_line(error)}): update triton and fla{beside}")
    return Finding(name, "runs")


def _run_fla(operation: Callable[..., Any]) -> None:
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gates = torch.full((1, 64, 2), 0.5, device="cuda")
    out, _ = operation(q, k / k.norm(dim=-1, keepdim=True), v, g=-gates, beta=gates, output_final_state=True)
    out.float().sum().backward()
    torch.cuda.synchronize()


def _flash_attention(versions: dict[str, str | None]) -> Finding:
    name = "FlashAttention"
    if versions["flash-attn"] is None:
        return Finding(name, f"{ABSENT}; PyTorch's own attention is used")
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # another torch than it was built for: undefined symbols, missing libraries
        advice = (
            f"flash-attn does not import ({first_line(error)}): build it for this torch, or pip uninstall flash-attn"
        )
        return Finding(name, "does not import", NOTE, advice)
    return Finding(name, "imports; PyTorch's own attention is used beyond the window")


def _table() -> Iterator[Finding]:
    """What serves each op of the memories here, training and not; ``RETROFIT_KERNELS`` forces it."""
    device = "cuda" if gpu() else "cpu"
    # of a model in bfloat16, whose rows of kvm are float32
    for op, dtype in (*((op, torch.bfloat16) for op in OPS), ("merge", torch.float32)):
        try:
            rows = [find(op, device, dtype, gradient) for gradient in (True, False)]
        except RetrofitError as error:
            yield Finding(op, "fails", BAD, str(error))
            continue
        names = [row.backend for row, _, _ in rows]
        found = names[0] if names[0] == names[1] else f"{names[0]} in training, {names[1]} otherwise"
        missing = list(dict.fromkeys(reason for *_, reasons in rows for reason in reasons))
        found += f" (forced: {VARIABLE})" if forced_backends() else ""
        yield Finding(op, found, NOTE if missing else GOOD, "; ".join(missing))


def _kernels() -> Iterator[Finding]:
    """Each memory run beyond its window on a tiny model, on the GPU if there is one: what did the work?"""
    device = "cuda" if gpu() else "cpu"
    base = random_base(32, 2, 1, 32).to(device)
    tokens = torch.arange(96, device=device)[None] % 32
    for kind in KINDS:
        name = f"memory {kind}"
        try:
            model = patch(base, kind, 16, 2)
            with torch.no_grad(), _Calls() as calls:
                model(tokens)
        except Exception as error:
            yield Finding(name, "fails", BAD, f"it does not run on {device}: {first_line(error)}")
        else:
            yield Finding(name, calls.kernel(KINDS[kind].__module__))


class _Calls:
    """The functions called inside the block, by module: the one witness of what really runs."""

    def __enter__(self) -> "_Calls":
        self.names: dict[str, list[str]] = {}
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("fla.ops", "patches.")):
            self.names.setdefault(module, []).append(frame.f_code.co_name)

    def kernel(self, own: str) -> str:
        """In words: fla's operation, ours in Triton, the scan's form, or torch's in the memory's ``own`` module."""
        for module, names in self.names.items():
            if module.startswith("fla.ops"):
                return f"fla: {names[0]}"
        if "merge_by_triton" in self.names.get("patches.kvm_merge", []):
            return "triton: merge"
        forms = [name for name in self.names.get("patches.scan", []) if name.endswith(("_chunks", "_steps"))]
        return f"torch: {forms[0] if forms else own.rpartition('.')[2]}"


def _older(version: str, than: str) -> bool:
    """Whether ``version`` comes before ``than``; suffixes such as +cpu and rc1 are left aside."""
    return Version(Version(version).base_version) < Version(than)


def _has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
