"""DeepSpeed's configuration: which file, and what is said when it cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from distill.parallel import zero
from distill.parallel.processes import LAUNCHED, join
from distill.parallel.zero import find_config, keep_base_out
from patches.errors import RetrofitError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed, new enough."""
    monkeypatch.setattr(zero, "installed_version", lambda _: "0.20.0")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_shipped_configurations_are_found(stage: int) -> None:
    config = find_config(f"zero{stage}")
    assert config["zero_optimization"]["stage"] == stage
    assert config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save", stage == 3) == (stage == 3)
    assert "bf16" not in config  # DeepSpeed would cast the memory too
    assert find_config(None) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "stage to None, not to 1, 2 or 3"),
        ('{"zero_optimization": 3}', "stage to None, not to 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 4}}', "stage to 4, not to 1, 2 or 3"),
    ],
)
def test_a_bad_configuration_is_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "my.json"
    file.write_text(content)
    with pytest.raises(RetrofitError, match=said):
        find_config(str(file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}},
            "reduce_bucket_size cannot be 'many' .*: correct or",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "moon"}}},
            "offload_optimizer.device cannot be 'moon'",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme is not supported"),
        ({"zero_optimization": {"stage": 2}, "elasticity": {"enabled": True}}, "elasticity is not supported"),
        (
            {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
            "tensor_parallel is not supported",
        ),
        ({"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}, "sequence_parallel_size is not supported"),
    ],
)
def test_values_that_deepspeed_would_fail_at_are_one_sentence(
    tmp_path: Path, content: dict[str, object], said: str
) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    file = tmp_path / "my.json"
    file.write_text(json.dumps(content))
    with pytest.raises(RetrofitError, match=said):
        find_config(str(file))


@pytest.mark.usefixtures("installed")
def test_a_configuration_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(RetrofitError, match=r"there is no file zero4 \(did you mean 'zero.'\?\): give zero2, zero3 or"):
        find_config("zero4")


def test_deepspeed_that_is_missing_or_too_old_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "installed_version", lambda _: None)
    with pytest.raises(RetrofitError, match=r"deepspeed is not installed: pip install 'retrofit-lm\[deepspeed\]'"):
        find_config("zero2")
    monkeypatch.setattr(zero, "installed_version", lambda _: "0.18.9")
    with pytest.raises(RetrofitError, match=r"deepspeed 0\.18\.9 is too old, 0\.19\.8 or newer is needed"):
        find_config("zero2")


@pytest.mark.parametrize(
    ("variable", "said"), [("ACCELERATE_USE_FSDP", "asks for FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_what_a_launcher_asks_for_and_the_recipe_does_not(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    for name, value in zip(LAUNCHED, ("0", "1", "0", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(variable, "true")
    with pytest.raises(RetrofitError, match=said):
        join(deepspeed=False)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set in the environment"),
        ({"LOCAL_RANK": "0"}, "set all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or none"),
        (dict(zip(LAUNCHED, ("x", "2", "0", "localhost", "29500"), strict=True)), "could not meet .* 'x'"),
    ],
)
def test_half_of_what_a_launcher_sets_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RetrofitError, match=said):
        join(deepspeed=False)
    PartialState._reset_state()


@pytest.mark.parametrize(
    "error", [AssertionError("zero stage 2 requires an optimizer"), TypeError("no 'surprise'"), KeyError("lr")]
)
def test_whatever_deepspeed_raises_as_it_starts_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Accelerator:
        def prepare(self, *_: Any) -> None:
            raise error

    accelerator: Any = Accelerator()
    keep_base_out(accelerator)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RetrofitError, match="start the script with torchrun"):
        accelerator.prepare("model")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        RetrofitError, match=rf"^deepspeed: DeepSpeed does not start .*{type(error).__name__}.*: correct or"
    ):
        accelerator.prepare("model")
