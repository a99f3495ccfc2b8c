"""The doctor: each pair of versions known to be bad is found and comes with its remedy; what runs is seen running."""

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

from patches import scan
from patches.kinds import KINDS
from retrofit import doctor
from retrofit.doctor import ABSENT, BAD, GOOD, NOTE, Finding, examine

HERE = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "huggingface_hub": "2.4.0", "safetensors": "0.8.0"}
WITH_FLA = {"flash-linear-attention": "0.6.0", "triton": "3.9.0"}


@pytest.fixture(autouse=True)
def a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(doctor, "gpu", lambda: None)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: False)


def simulate(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these versions installed, and of what we depend on good ones."""
    installed = {**HERE, **{name.replace("_", "-"): version for name, version in versions.items()}}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)


def with_kernels(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(doctor, "_kernels", lambda: iter([Finding("memory ahn-gdn", found)]))


def with_fla(monkeypatch: pytest.MonkeyPatch, operation: Any) -> None:
    """An installed fla whose operation is ``operation``; an exception stands for a failing import."""
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")}
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = operation  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def look(name: str) -> Finding:
    return next(finding for finding in examine() if finding.name == name)


def test_a_sound_machine() -> None:
    findings = examine()
    assert {finding.verdict for finding in findings} == {GOOD}
    assert not any(finding.advice for finding in findings)
    assert look("device").found == "CPU"
    assert look("triton").found == ABSENT


def test_the_kernels_are_those_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {finding.name.removeprefix("memory "): finding for finding in examine() if "memory" in finding.name}
    assert kernels.keys() == KINDS.keys()
    assert kernels["ahn-gdn"].found == "torch: gated_delta_rule_chunks"
    assert kernels["joint"].found == "torch: linear_attention_chunks"
    assert kernels["kvm"].found == "torch: kvm"
    # another form is seen without being told
    monkeypatch.setattr(scan, "STEPWISE", 10**6)
    assert look("memory ahn-gdn").found == "torch: gated_delta_rule_steps"
    code = "def chunk_gated_delta_rule(f, *arguments, **how): return f(*arguments, **how)"
    names: dict[str, Any] = {"__name__": "fla.ops.gated_delta_rule.chunk"}
    exec(code, names)
    slow = scan.gated_delta_rule_steps
    monkeypatch.setattr(scan, "gated_delta_rule_steps", lambda *a, **k: names["chunk_gated_delta_rule"](slow, *a, **k))
    assert look("memory ahn-gdn").found == "fla: chunk_gated_delta_rule"


def test_a_memory_that_does_not_run_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(scan, "gated_delta_rule_chunks", broken)
    finding = look("memory ahn-gdn")
    assert (finding.verdict, finding.advice) == (BAD, "it does not run on cpu: no such kernel")
    assert look("memory kvm").verdict == GOOD


@pytest.mark.parametrize(
    ("package", "version", "verdict", "remedy"),
    [
        ("torch", "2.5.1", BAD, "pip install -U 'torch>=2.6'"),
        ("torch", "2.6.0a0+git", GOOD, ""),
        ("transformers", "4.57.6", BAD, "pip install -U 'transformers>=5.0'"),
        ("transformers", "5.0.0rc1", GOOD, ""),
        ("safetensors", "0.4.2", BAD, "'safetensors>=0.4.3'"),
        ("deepspeed", "0.19.7", BAD, "pip install -U 'deepspeed>=0.19.8', or use zero2"),
        ("deepspeed", "0.19.8+cu130", GOOD, ""),
        ("peft", "0.20.0", NOTE, "pip install -U 'peft>=0.21', or use retrofit.load_adapter"),
        ("peft", "0.21.0", GOOD, ""),
    ],
)
def test_versions(package: str, version: str, verdict: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, "torch: x")
    simulate(monkeypatch, **{package: version})
    finding = look(package)
    assert (finding.found, finding.verdict) == (version, verdict)
    assert remedy in finding.advice
    assert bool(remedy) == bool(finding.advice)


@pytest.mark.parametrize(
    ("triton", "major", "kernel", "verdict"),
    [
        ("3.4.0", 9, "fla: chunk_gated_delta_rule", BAD),
        ("3.7.0", 9, "fla: chunk_gated_delta_rule", BAD),
        ("3.7.0", 9, "torch: gated_delta_rule_chunks", NOTE),  # known bad, but nobody calls it
        ("3.3.1", 9, "fla: chunk_gated_delta_rule", GOOD),
        ("3.7.1", 9, "fla: chunk_gated_delta_rule", GOOD),
        ("3.4.0", 8, "fla: chunk_gated_delta_rule", GOOD),
    ],
)
def test_triton_on_hopper(triton: str, major: int, kernel: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, kernel)
    with_fla(monkeypatch, print)
    simulate(monkeypatch, **{**WITH_FLA, "triton": triton})
    monkeypatch.setattr(doctor, "gpu", lambda: ("a GPU", major))
    monkeypatch.setattr(doctor, "_run_fla", lambda operation: None)
    finding = look("fla's gated delta rule")
    assert finding.verdict == verdict
    assert ("pip install -U 'torch>=2.12.1'" in finding.advice) == (verdict != GOOD)


@pytest.mark.parametrize(("kernel", "verdict"), [("fla: chunk_gated_delta_rule", BAD), ("torch: x", NOTE)])
def test_fla_that_does_not_import_or_run(kernel: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(operation: Any) -> None:
        raise RuntimeError("0 active drivers")

    with_kernels(monkeypatch, kernel)
    simulate(monkeypatch, **WITH_FLA)
    monkeypatch.setitem(sys.modules, "fla", None)
    finding = look("fla's gated delta rule")
    assert (finding.found, finding.verdict) == ("does not import", verdict)
    with_fla(monkeypatch, print)
    assert look("fla's gated delta rule").found == "imports; needs a GPU to run"
    monkeypatch.setattr(doctor, "gpu", lambda: ("a GPU", 8))
    monkeypatch.setattr(doctor, "_run_fla", broken)
    finding = look("fla's gated delta rule")
    assert (finding.found, finding.verdict) == ("fails", verdict)
    assert "0 active drivers" in finding.advice
    monkeypatch.setattr(doctor, "gpu", lambda: ("a GPU", 12))
    assert "Blackwell" in look("fla's gated delta rule").advice


def test_flash_attention_built_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, "torch: x")
    simulate(monkeypatch, flash_attn="2.8.0")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    finding = look("FlashAttention")
    assert finding.verdict == NOTE
    assert "pip uninstall flash-attn" in finding.advice
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert look("FlashAttention").verdict == GOOD


@pytest.mark.parametrize(
    ("build", "verdict", "advice"),
    [(None, NOTE, "a CPU build beside an NVIDIA GPU"), ("13.0", BAD, "update the driver")],
)
def test_a_gpu_that_torch_does_not_see(
    build: str | None, verdict: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels(monkeypatch, "torch: x")
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", build)
    finding = look("device")
    assert finding.verdict == verdict
    assert advice in finding.advice
