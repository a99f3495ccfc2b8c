"""A calibrated memory as users meet it: pipeline, lm-evaluation-harness, PEFT and the Hub give what the model gives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import retrofit
from retrofit.export import export_model
from tests.conftest import tiny_base
from tests.helpers import logits, tokens
from tests.hub_server import HubServer
from tests.retrofit.test_hub import hub as hub  # the fixture

IDS = tokens(2, 60)
PROMPT = "a prompt that is longer than the window and the sinks together"
ASK = """
import sys, json
from transformers import pipeline
pipe = pipeline("text-generation", model="model", trust_remote_code=True, dtype="float32")
print(json.dumps(pipe(sys.argv[1], max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]))
"""
TASK = {
    "task": "local_choose",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(scope="module")
def model() -> Any:
    base = tiny_base("Llama", vocab_size=259, head_dim=16, num_key_value_heads=2)
    model = retrofit.patch(base, "expected", 8, 2, rows=12, bits=[3, 3.5], shares="need").eval()
    retrofit.calibrate(model, [tokens(1, 100)])
    assert not torch.equal(logits(model, IDS), logits(retrofit.patch(base, "none", 8, 2), IDS))
    return model


def run(folder: Path, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pipeline(model: Any, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    export_model(model, tmp_path / "model", byte_tokenizer)
    said = json.loads(run(tmp_path, "-c", ASK, PROMPT).splitlines()[-1])
    ids = byte_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert said == byte_tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_harness(model: Any, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("lm_eval")
    export_model(model, tmp_path / "model", byte_tokenizer)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choose.yaml").write_text(json.dumps(TASK))
    row = {"question": PROMPT, "choices": ["one", "other"], "answer": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    how = "pretrained=model,trust_remote_code=True,dtype=float32"
    run(tmp_path, "-m", "lm_eval", "run", "--model", "hf", "--model_args", how, "--tasks", "local_choose",
        "--include_path", "tasks", "--device", "cpu", "--output_path", "out", "--log_samples")  # fmt: skip
    (file,) = (tmp_path / "out").rglob("samples_local_choose*.jsonl")
    for choice, response in zip(row["choices"], json.loads(file.read_text())["filtered_resps"], strict=True):
        asked, said = (byte_tokenizer(text, return_tensors="pt")["input_ids"] for text in (PROMPT, f" {choice}"))
        log_probs = logits(model, torch.cat([asked, said], 1))[0, asked.shape[1] - 1 : -1].log_softmax(-1)
        assert float(response[0]) == pytest.approx(log_probs.gather(1, said.T).sum().item(), abs=1e-3)


def test_peft(model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    retrofit.save_adapter(model, tmp_path / "adapter")
    base = tiny_base("Llama", vocab_size=259, head_dim=16, num_key_value_heads=2)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def test_the_hub(hub: HubServer, model: Any) -> None:
    retrofit.push_adapter(model, "user/chosen")
    base = tiny_base("Llama", vocab_size=259, head_dim=16, num_key_value_heads=2)
    assert torch.equal(logits(retrofit.load_adapter(base, "user/chosen"), IDS), logits(model, IDS))
