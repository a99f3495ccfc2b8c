"""Two gloo processes on the CPU: what one does, under DDP, ZeRO-2, ZeRO-3 and FSDP2; resumed, stopped, failing."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import retrofit
from distill.checkpoint import checkpoints, damage
from distill.parallel.launch import launch
from patches.errors import RetrofitError
from tests.conftest import tiny_base
from tests.distill.parallel import main_memory, one_of_two
from tests.helpers import ROOT

HERE = Path(__file__).parent
DDP = ("DistributedDataParallel", 0)
FSDP = ("FSDPRetrofitQwen2ForCausalLM", 0)
MODES = {"ddp": DDP, "segments": DDP, "fsdp": FSDP, "zero2": ("DeepSpeedEngine", 2), "zero3": ("DeepSpeedEngine", 3)}
SHARED = ("zero3", "fsdp")
NEEDS = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
TWO = 2
pytestmark = pytest.mark.xdist_group("processes")  # what one fixture finds serves many tests


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Processes that find this checkout, and a folder for what they leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def one(here: Path, two: dict[str, Any]) -> dict[str, Any]:
    """The run of ``two`` in this process alone."""
    local = one_of_two.local_steps(two["mode"])
    trainer = one_of_two.trainer_of(here / "one", one_of_two.GLOBAL_BATCH, use_cpu=True, local_steps=local)
    trainer.train()
    return {
        "losses": one_of_two.curve(trainer, "loss"),
        "local_losses": one_of_two.curve(trainer, "local_loss"),
        "layer_errors": one_of_two.curve(trainer, "eval_layer_error_1"),
        "eval": one_of_two.curve(trainer, "eval_kl"),
        "window_only": one_of_two.curve(trainer, "eval_kl_window_only"),
        "weights": one_of_two.weights(trainer),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=NEEDS if "zero" in mode else ()) for mode in MODES],
)
def two(request: pytest.FixtureRequest, here: Path) -> dict[str, Any]:
    """What two processes found in each mode."""
    folder = here / request.param
    folder.mkdir()
    launch([str(HERE / "one_of_two.py"), str(folder), request.param, "float32"], TWO)
    facts = json.loads((folder / "facts.json").read_text())
    return facts | {"mode": request.param, "folder": folder, "weights": torch.load(folder / "trained.pt")}


def test_it_really_ran_in_two_processes_in_that_mode(two: dict[str, Any]) -> None:
    assert (two["wrapper"], two["stage"]) == MODES[two["mode"]]
    assert two["world"] == 2
    assert two["partitioned"] == (two["mode"] in SHARED)
    assert two["shared_memories"] == (2 if two["mode"] == "fsdp" else 0)
    assert two["dtypes"] == ["torch.float32"]


def test_two_processes_learn_what_one_does(one: dict[str, Any], two: dict[str, Any]) -> None:
    local = one_of_two.local_steps(two["mode"])
    assert (len(one["local_losses"]), len(one["losses"])) == (local, one_of_two.STEPS - local)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6)
    assert two["local_losses"] == pytest.approx(one["local_losses"], abs=1e-6)
    assert min(one["losses"]) > 1e-3
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=0, atol=1e-4, msg=name)


def test_held_out_rows_count_once(one: dict[str, Any], two: dict[str, Any]) -> None:
    # five rows for two processes, and the window-only model on modules that may be partitioned
    assert two["eval"] == pytest.approx(one["eval"], abs=1e-6)
    assert two["window_only"] == pytest.approx(one["window_only"], abs=1e-6)
    assert two["layer_errors"] == pytest.approx(one["layer_errors"], abs=1e-6)
    assert bool(two["layer_errors"]) == (two["mode"] not in SHARED)


def test_windows_are_equal_on_all_processes(two: dict[str, Any]) -> None:
    first, second = two["windows"]
    assert first == second
    assert len({tuple(window) for window in first}) > 2


def test_resuming_gives_the_same_weights(two: dict[str, Any]) -> None:
    assert two["resumed_equal"]
    assert two["resumed_losses"] == two["losses"]
    assert two["resumed_local_losses"] == two["local_losses"]


def test_a_checkpoint_can_be_taken_at_the_end(two: dict[str, Any]) -> None:
    assert two.get("loaded_equal", two["mode"].startswith("zero"))


def test_the_adapter_is_whole(two: dict[str, Any]) -> None:
    adapted = retrofit.load_adapter(tiny_base("Qwen2"), two["folder"] / "adapter")
    for name, parameter in adapted.memory_parameters():
        assert torch.equal(parameter, two["weights"][name]), name


def test_checkpoints_hold_the_memory_and_not_the_base(two: dict[str, Any]) -> None:
    last = checkpoints(two["folder"] / "straight")[-1]
    assert set(load_file(last / "adapter_model.safetensors")) == {f"base_model.model.{n}" for n in two["weights"]}
    for file in last.glob("global_step*/*model_states.pt"):
        module = torch.load(file, weights_only=False)["module"]
        assert all(".memory." in name for name in module)
    assert sum(file.stat().st_size for file in last.rglob("*.pt")) < 200_000  # the base alone takes 700,000


def test_a_damaged_checkpoint_of_two_processes_is_seen(two: dict[str, Any], tmp_path: Path) -> None:
    last = checkpoints(two["folder"] / "straight")[-1]
    deepspeed = two["mode"].startswith("zero")
    assert damage(last) == ""
    needed = [*last.glob("rng_state_*.pth"), *(last.rglob("*_optim_states.pt") if deepspeed else [])]
    needed += [last / {"zero": "latest", "fsdp": "optimizer.bin"}.get(two["mode"][:4], "optimizer.pt")]
    assert len(needed) == (5 if deepspeed else 3)
    for file in needed:
        content = file.read_bytes()
        try:
            file.write_bytes(content[: len(content) // 2])
            assert "damaged" in damage(last) or "missing" in damage(last)
            file.unlink()
            assert "missing" in damage(last)
        finally:
            file.write_bytes(content)


@pytest.fixture(scope="module")
def recipe(here: Path, tokenizer: Any) -> Path:
    """A recipe of eight steps on a tiny checkpoint."""
    base = here / "base"
    tiny_base("Llama").save_pretrained(base)
    tokenizer.save_pretrained(base)
    ids = torch.randint(3, 101, (3000,), generator=torch.Generator().manual_seed(0))
    (here / "text.txt").write_text(" ".join(f"w{i}" for i in ids.tolist()))
    keys = {
        "base": str(base),
        "data": str(here / "text.txt"),
        "window": 6,
        "sinks": 2,
        "max_length": 40,
        "max_steps": 5,
    }
    file = here / "recipe.yaml"
    file.write_text(
        json.dumps(keys | {"eval_rows": 5, "eval_steps": 4, "save_steps": 4, "per_device_train_batch_size": 2})
    )
    return file


@pytest.mark.parametrize("mode", [pytest.param(["--deepspeed", "zero3"], marks=NEEDS), ["--fsdp"]], ids="".join)
def test_a_signal_stops_all_processes_at_one_step_and_the_run_goes_on(
    recipe: Path, here: Path, capfd: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    run = here / f"stopped{mode[0]}"
    flags = ["--nproc", "2", *mode]
    # to the second process only, in its third step
    with pytest.raises(SystemExit) as stopped:
        launch([str(HERE / "ill_fated.py"), "signal", "distill", str(recipe), *flags, "-o", str(run)], TWO)
    assert stopped.value.code == 130
    said = capfd.readouterr().err
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3"]
    assert damage(run / "checkpoint-3") == ""
    assert not (run / "adapter").exists()
    assert "stopped at step 3 of 5; continue with:" in said
    assert "--resume --nproc 2" in said

    launch([str(ROOT / "cli.py"), "distill", str(run / "recipe.yaml"), "--nproc", "2", "--resume"], TWO)
    printed = capfd.readouterr()
    assert printed.out.count("window-only, equal memory") == 1
    assert printed.err.count("distilling") >= 1
    names = {"adapter", "model", "metrics.json", "log.jsonl", "recipe.yaml", "run.json", "checkpoint-4", "checkpoint-5"}
    assert {path.name for path in run.iterdir()} == names
    curve = json.loads((run / "metrics.json").read_text())["curve"]
    assert [entry["step"] for entry in curve if "loss" in entry] == [1, 2, 3, 4, 5]
    assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] == curve
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    adapted = retrofit.load_adapter(tiny_base("Llama"), run / "adapter")
    ids = torch.randint(3, 101, (1, 30), generator=torch.Generator().manual_seed(2))
    assert torch.equal(exported(ids).logits, adapted(ids).logits)


@NEEDS
def test_a_configuration_of_other_values_is_one_sentence(recipe: Path, here: Path) -> None:
    file, sizes = here / "other.json", ("train_batch_size", "gradient_accumulation_steps")
    values = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
    file.write_text(json.dumps(values | dict.fromkeys(sizes, "auto")))
    command = [str(ROOT / "cli.py"), "distill", str(recipe), "--deepspeed", str(file), "-o", str(here / "other")]
    with pytest.raises(RetrofitError, match=r"other.json does not agree with the recipe \(.*micro.*; bf16.*\): write"):
        launch(command, TWO)


def test_an_error_in_one_process_is_one_sentence(recipe: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = here / "failed"
    command = [str(HERE / "ill_fated.py"), "nan", "distill", str(recipe), "--nproc", "2", "-o", str(run)]
    with pytest.raises(RetrofitError, match="at step 3: the run stopped"):
        launch(command, TWO)
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert {path.name for path in run.iterdir()} == {"log.jsonl", "recipe.yaml", "run.json"}


def test_a_killed_process_is_started_again_with_the_others(recipe: Path, here: Path) -> None:
    run = here / "restarted"
    flags = ["--nproc", "2", "--save-steps", "2", "--eval-steps", "2"]
    launch([str(HERE / "ill_fated.py"), "kill-once", "distill", str(recipe), *flags, "-o", str(run)], TWO, 1)
    curve = json.loads((run / "metrics.json").read_text())["curve"]
    assert [entry["step"] for entry in curve if "loss" in entry] == [1, 2, 3, 4, 5]
    launch([str(ROOT / "cli.py"), "distill", str(recipe), *flags, "-o", str(here / "unharmed")], TWO)
    found, unharmed = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (run, here / "unharmed"))
    for name, value in unharmed.items():
        assert torch.equal(found[name], value), name


LAUNCHERS = {  # and how many processes they start on a CPU
    "torchrun": (["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cli"], 2),
    "accelerate launch": (["accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "cli"], 1),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_launchers_start_a_run(recipe: Path, here: Path, launcher: str) -> None:
    command, count = LAUNCHERS[launcher]
    flags = ["distill", str(recipe), "--save-steps", "2", "--eval-steps", "2", "-o", str(here / launcher)]
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("window-only, equal memory") == 1
    assert json.loads((here / launcher / "run.json").read_text())["processes"] == count


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process maps")
def test_processes_share_one_copy_of_the_base_in_main_memory(here: Path, tmp_path: Path) -> None:
    found = main_memory.measure(tmp_path)
    for process in found["processes"]:
        assert process["own"] < 0.25 * found["base"] < found["base"] <= process["mapped"] + 1
