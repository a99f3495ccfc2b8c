"""What a base takes of the main memory of two processes that load it: python main_memory.py [DTYPE]

Prints MiB as JSON: the base, which lies on disk in bfloat16, and of each process what became its own, and what it maps
of the checkpoint's file, which the system holds once for all processes.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from distill.config import DistillConfig
from distill.model import build_model
from distill.parallel.launch import launch
from distill.parallel.processes import join

WIDTH = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}


def held() -> dict[str, float]:
    """MiB of this process: anonymous pages, and those of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("mapped", "RssFile"))}


def load(folder: Path, dtype: str) -> None:
    """In each process: load the base, patch it, and leave by how much its memory grew."""
    processes = join(deepspeed=False)
    before = held()
    model = build_model(
        DistillConfig(base=str(folder / "base"), data="-", output_dir="-", window=32, sinks=4, dtype=dtype)
    )
    every = processes.all_of({name: round(value - before[name]) for name, value in held().items()})
    size = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".memory." not in n) / 2**20
    if processes.main:
        (folder / "found.json").write_text(json.dumps({"base": round(size), "processes": every}))
    processes.leave()


def measure(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    """Save a base of random weights, and see what two processes hold of it."""
    Qwen2ForCausalLM(Qwen2Config(vocab_size=8192, num_hidden_layers=8, **WIDTH)).bfloat16().save_pretrained(
        folder / "base"
    )
    launch([__file__, str(folder), dtype], 2)
    return json.loads((folder / "found.json").read_text())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        load(Path(sys.argv[1]), sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(measure(Path(place), *sys.argv[1:])))
