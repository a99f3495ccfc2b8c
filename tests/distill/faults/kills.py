"""A run of two processes that is killed many times, wherever it is, and each time started again as --max-restarts does.

python tests/distill/faults/kills.py FOLDER KILLS [SEED]     FOLDER has base/ and text.txt; prints what it found as JSON

One process imports everything once and forks the others, so that a start costs no imports. Each kill is a
SIGKILL to a process that trains, at a call drawn at random (before it, after it, or with half of it written), or at a
random moment. The other one follows at once or a little later, as torchrun's agent would see to.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401
import datasets  # noqa: F401
import safetensors.torch
import torch
import transformers  # noqa: F401

import distill.run
import distill.trainer
from distill.checkpoint import checkpoints, step_of
from distill.config import DistillConfig
from distill.parallel.processes import ATTEMPT, LAUNCH, LAUNCHED, Processes
from distill.trainer import DistillTrainer

TRAINING = 0.8  # share of the kills before the last step; the others come while results are scored and written
KEYS: dict[str, Any] = {
    "memory": "ahn-gdn",
    "window": 6,
    "sinks": 2,
    "max_length": 24,
    "per_device_train_batch_size": 1,
    "eval_rows": 2,
}
KEYS |= {"save_steps": 2, "eval_steps": 3, "local_steps": 20}
RANDOM = "a random moment"
# phase: where the function is, its name, up to which call, and whether only the first process ever calls it
START = {
    "read the base's configuration": (distill.run, "load_config", 1, False),
    "read the rows": (distill.run, "load_rows", 1, False),
    "build the model": (distill.run, "build_model", 1, False),
    "meet": (Processes, "wait", 2, False),
}
TRAIN = {
    "take rows": (DistillTrainer, "get_batch_samples", 4, False),
    "forward pass": (DistillTrainer, "compute_loss", 4, False),
    "step": (DistillTrainer, "training_step", 4, False),
    "evaluate": (DistillTrainer, "evaluate", 2, False),
    "save the memory": (DistillTrainer, "save_model", 2, False),
    "save random states": (DistillTrainer, "_save_rng_state", 2, False),
    "write checksums": (distill.trainer, "write_checksums", 2, True),
    "drop a checkpoint": (distill.trainer, "drop_oldest", 2, True),
    "rename": (os, "replace", 12, True),
    "half a file of torch": (torch, "save", 3, False),
    "half a file of weights": (safetensors.torch, "save_file", 3, True),
    "half a folder removed": (shutil, "rmtree", 6, True),
}
END = {
    "score": (distill.run, "compare", 1, False),
    "write the model": (distill.run, "export_model", 1, True),
    "write metrics": (distill.run, "write_json", 1, True),
    "rename": (os, "replace", 5, True),
    "half a folder removed": (shutil, "rmtree", 2, True),
}


def half(owner: Any, name: str, whole: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Leave what a process leaves that is killed within a call that writes or removes."""
    if name == "rmtree":
        files = [path for path in Path(args[0]).rglob("*") if path.is_file()]
        for path in files[: len(files) // 2]:
            path.unlink()
    elif owner in (torch, safetensors.torch):
        whole(*args)
        os.truncate(args[1], os.path.getsize(args[1]) // 2)


def arm(owner: Any, name: str, number: int, after: bool) -> None:
    """Have this process killed at its ``number``-th call of a function."""
    whole, calls = getattr(owner, name), Counter[str]()

    def doomed(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] != number:
            return whole(*args, **kwargs)
        if after:
            whole(*args, **kwargs)
        else:
            half(owner, name, whole, args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, doomed)
    for module in list(sys.modules.values()):  # where it was imported by its name
        if getattr(module, "__name__", "").split(".")[0] in ("distill", "retrofit") and vars(module).get(name) is whole:
            setattr(module, name, doomed)


def start(rank: int, port: int, attempt: int, recipe: DistillConfig, doom: tuple[Any, str, int, bool] | None) -> int:
    """Fork one process of the run."""
    process = os.fork()
    if process:
        return process
    values = (str(rank), "2", str(rank), "127.0.0.1", str(port))
    os.environ |= dict(zip(LAUNCHED, values, strict=True)) | {LAUNCH: "kills", ATTEMPT: str(attempt)}
    log = os.open(f"{recipe.output_dir}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if doom is not None:
            arm(*doom)
        distill.run.distill(recipe)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def attempt(recipe: DistillConfig, number: int, chance: random.Random, phases: dict[str, Any]) -> str | None:
    """Run both processes once, one of them doomed; the phase in which it was killed, or None if the run ended.

    Raises:
        RuntimeError: it failed by itself, or hangs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    victim, doom, moment = chance.randrange(2), None, None
    phase = chance.choice([*phases, RANDOM]) if phases else ""
    if phase in phases:
        owner, name, most, first = phases[phase]
        victim = 0 if first else victim
        doom = (owner, name, chance.randint(1, most), chance.random() < 0.5)
    if phases:  # a call that does not come must not take the run to its end
        moment = time.monotonic() + (chance.uniform(0, 3) if doom is None else 15)
    processes = [start(rank, port, number, recipe, doom if rank == victim else None) for rank in range(2)]
    end, status, limit = dict[int, int](), 0, time.monotonic() + (300 if phases else 3000)
    while len(end) < 2:
        if time.monotonic() > limit:
            raise RuntimeError(f"{phase}: the processes hang")
        if moment is not None and time.monotonic() > moment and processes[victim] not in end:
            os.kill(processes[victim], signal.SIGKILL)
            moment, phase = None, RANDOM
        for process in processes:
            if process in end:
                continue
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                end[process] = status
                other = processes[1 - processes.index(process)]
                if status and other not in end:
                    time.sleep(chance.choice([0, 0, 0.05, 0.5]))
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.002)
    if end[processes[victim]] == signal.SIGKILL and phase:
        return phase
    if any(end.values()):
        logs = "\n".join(Path(f"{recipe.output_dir}.{rank}.log").read_text(errors="replace") for rank in range(2))
        raise RuntimeError(f"{phase}: the run failed by itself: {list(end.values())}\n{logs[-6000:]}")
    return None


def found(run: Path) -> dict[str, Any]:
    """What a run left: hashes of its weights, its losses, and every name in its folder."""
    curve = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    timed = ("seconds", "memory_bytes")
    return {
        "weights": {
            name: sha256((run / name).read_bytes()).hexdigest()
            for name in ("adapter/adapter_model.safetensors", "model/model.safetensors")
        },
        "curve": [
            {key: value for key, value in entry.items() if key not in timed and "train_" not in key} for entry in curve
        ],
        "names": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
    }


def main(folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Run undisturbed and killed; what each left, and how often it was killed where."""
    chance, places = random.Random(seed), {"base": str(folder / "base"), "data": str(folder / "text.txt")}
    steps = max(24, 4 * kills)

    def recipe(name: str) -> DistillConfig:
        return DistillConfig(**places, **KEYS, max_steps=steps, output_dir=str(folder / name))

    attempt(recipe("undisturbed"), 0, chance, {})
    killed, done, run = Counter[str](), Counter[str](), folder / "killed"
    began = time.monotonic()
    number = 0
    while killed.total() < kills:
        saved = checkpoints(run) if run.exists() else []
        at_end = bool(saved) and step_of(saved[-1]) >= steps
        some = START | (END if at_end else TRAIN)
        if not at_end and killed.total() > TRAINING * kills:
            some = {"score": END["score"]}  # go to the last step now
        phase = attempt(recipe("killed"), number, chance, some)
        number += 1
        if phase is None:
            done["attempts that ended before their call"] += 1
            if done.total() > kills:
                break
        else:
            killed[phase] += 1
            at = step_of(saved[-1]) if saved else 0
            print(f"{killed.total()}: {phase} at step {at}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    attempt(recipe("killed"), number, chance, {})
    return {
        "kills": killed.total(),
        "by_phase": dict(killed),
        "ended": done.total(),
        "seconds": time.monotonic() - began,
        "undisturbed": found(folder / "undisturbed"),
        "killed": found(run),
    }


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:])), sys.stdout)
