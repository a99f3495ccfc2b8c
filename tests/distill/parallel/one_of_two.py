"""One process of a distributed run, started by test_processes.py: trains, resumes, and leaves what it found as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

import retrofit
from distill.config import DistillConfig
from distill.data.rows import Rows, pack_tokens
from distill.parallel.processes import join
from distill.parallel.zero import find_config
from distill.trainer import DistillTrainer
from retrofit.adapter import PREFIX, WEIGHTS
from retrofit.lm_head import gathered, is_shared
from tests.conftest import tiny_base

STEPS, STOP, GLOBAL_BATCH = 4, 2, 4  # where ZeRO-3 does not forbid it, the first stage ends where the run is resumed


class Uneven(Rows):
    """Rows with very different numbers of labels, so that the mean of the processes' means is another number."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {**row, "labels": row["labels"].masked_fill((7 * torch.arange(70) + index) % 24 > index, -100)}


def rows() -> Uneven:
    """24 rows of 70 tokens."""
    tokens = torch.randint(3, 101, (24 * 70,), generator=torch.Generator().manual_seed(1))
    packed = pack_tokens(tokens, 70)
    return Uneven(packed.parts[0], packed.places[:, 1:])


def local_steps(mode: str) -> int:
    """How many of the steps fit each layer by itself."""
    return 0 if mode in ("zero3", "fsdp") else STOP


def trainer_of(folder: Path, batch: int, dtype: torch.dtype = torch.float32, **more: Any) -> DistillTrainer:
    """A trainer for the same tiny model and run in every test; ``batch`` rows per process."""
    base = tiny_base("Qwen2").to(dtype)
    torch.manual_seed(3)
    model = retrofit.patch(base, memory="ahn-gdn", window=6, sinks=2)
    arguments = DistillConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        adam_epsilon=1e-4,  # a gradient of rounding errors moves a weight as far as any other, without
        window_sampling="ahn",
        logging_steps=1,
        save_steps=STOP,
        eval_strategy="steps",
        eval_steps=STOP,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to="none",
        **more,
    )
    data = rows()
    return DistillTrainer(model, arguments, data, data.select(slice(5)))


def curve(trainer: DistillTrainer, key: str) -> list[float]:
    """Everything logged under ``key``."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(trainer: DistillTrainer) -> dict[str, Tensor]:
    """The memory's, whole."""
    with gathered(trainer.model.model.memories().values()):
        return {name: parameter.detach().clone() for name, parameter in trainer.model.memory_parameters()}


def main(folder: Path, mode: str, dtype: str) -> None:
    config = find_config(mode if mode.startswith("zero") else None)
    processes = join(deepspeed=config is not None)
    batch = GLOBAL_BATCH // processes.count
    drawn = []
    settings: dict[str, Any] = {"local_steps": local_steps(mode), "fsdp": mode == "fsdp"}
    settings |= {"deepspeed": mode} if config else {}
    settings |= {"segment": 16} if mode == "segments" else {}
    straight = trainer_of(folder / "straight", batch, getattr(torch, dtype), **settings)
    set_window = straight.model.set_window
    straight.model.set_window = lambda window, sinks: (drawn.append((window, sinks)), set_window(window, sinks))
    straight.train()
    wrapper = straight.model_wrapped
    facts = {
        "wrapper": type(wrapper).__name__,
        "stage": 0 if config is None else wrapper.zero_optimization_stage(),
        "world": torch.distributed.get_world_size(),
        "partitioned": is_shared(straight.model),
        "shared_memories": sum(hasattr(memory, "unshard") for memory in straight.model.model.memories().values()),
        "losses": curve(straight, "loss"),
        "local_losses": curve(straight, "local_loss"),
        "layer_errors": curve(straight, "eval_layer_error_1"),
        "eval": curve(straight, "eval_kl"),
        "window_only": curve(straight, "eval_kl_window_only"),
        "dtypes": sorted({str(value.dtype) for value in weights(straight).values()}),
        "base_dtypes": sorted({str(p.dtype) for n, p in straight.model.named_parameters() if ".memory." not in n}),
    }
    facts["windows"] = processes.all_of(drawn)
    # saved at the end of a run, from all processes
    straight.save_model(str(folder / "adapter"))
    trained = weights(straight)
    checkpoint = folder / "straight" / f"checkpoint-{STOP}"
    if config is None:  # as the best one is taken at the end of a run, right after an evaluation
        straight.evaluate()
        straight._load_from_checkpoint(str(checkpoint))
        saved = load_file(checkpoint / WEIGHTS)
        facts["loaded_equal"] = all(
            torch.equal(value, saved[PREFIX + name]) for name, value in weights(straight).items()
        )
    AcceleratorState._reset_state()  # a second run in this process would find the first one's engine
    again = trainer_of(folder / "again", batch, getattr(torch, dtype), **settings)
    torch.manual_seed(99)  # whatever state the new process is in
    again.train(resume_from_checkpoint=str(checkpoint))
    resumed = weights(again)
    facts["resumed_equal"] = all(torch.equal(value, resumed[name]) for name, value in trained.items())
    facts["resumed_losses"] = curve(again, "loss")
    facts["resumed_local_losses"] = curve(again, "local_loss")
    if processes.main:
        torch.save(trained, folder / "trained.pt")
        (folder / "facts.json").write_text(json.dumps(facts))
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
