"""The main job through the real command, each step in a process of its own: distil, merge, generate, load elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
PROMPT = "the quick brown"

# somebody else's program: it has never heard of this package
STRANGER = """
import sys
sys.modules.update(dict.fromkeys(["cli", "distill", "patches", "recipes", "retrofit"]))  # importing any of them fails
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, answer = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = torch.arange(100)[None] + 3
with torch.no_grad():
    save_file({"logits": model(ids).logits}, answer)
inputs = tokenizer(prompt, return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""


def retrofit(*arguments: object, folder: Path) -> str:
    """Run the command as a user does, from another folder than the checkout."""
    command = [sys.executable, "-m", "cli", *map(str, arguments)]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_distil_merge_generate_and_load_elsewhere(byte_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    flags = [
        "--memory",
        "ahn-gdn",
        "--window",
        8,
        "--sinks",
        2,
        "--max-length",
        48,
        "--max-steps",
        3,
        "--learning-rate",
        0.03,
    ]
    shown = retrofit(
        "distill", byte_checkpoint, "--data", "text.txt", *flags, "-o", "run", "--json", "rows.json", folder=tmp_path
    )
    run = tmp_path / "run"
    assert {"adapter", "model", "metrics.json"} <= {path.name for path in run.iterdir()}
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == json.loads((run / "metrics.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["teacher", "window-only", "window-only, equal memory", "ahn-gdn"]
    assert all(row["name"] in shown for row in rows)

    retrofit("merge", byte_checkpoint, "run/adapter", "-o", "merged", folder=tmp_path)
    exported, merged = load_file(run / "model" / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in exported)

    text = retrofit("generate", "merged", "--prompt", PROMPT, "--max-new-tokens", 24, folder=tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, str(tmp_path / "merged"), PROMPT, str(tmp_path / "logits.safetensors")],
        cwd=tmp_path,
        env={**environment, **SETTINGS, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert stranger.returncode == 0, stranger.stderr
    assert stranger.stdout == text

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()  # ours: retrofit is imported by conftest
    with torch.no_grad():
        logits = ours(torch.arange(100)[None] + 3).logits
        with ours.memory_off():
            teacher = ours(torch.arange(100)[None] + 3).logits
    assert torch.equal(logits, load_file(tmp_path / "logits.safetensors")["logits"])
    assert not torch.equal(logits, teacher)
