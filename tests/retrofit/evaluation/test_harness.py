"""lm-evaluation-harness on our models: exported, as its users call it, and on rows of one base, as we do."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.evaluation.baselines import window_only
from retrofit.evaluation.harness import _wants_chat, run_harness
from retrofit.export import export_model
from tests.conftest import tiny_base
from tests.helpers import awake

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

# of different lengths, most of them longer than the window; bytes are tokens here
QUESTIONS = [
    {"question": "the capital of France, a country of wine and cheese, is", "choices": ["Paris", "a cow"], "answer": 0},
    {"question": "two and two make", "choices": ["five", "four hundred and four", "4"], "answer": 2},
    {"question": "a", "choices": ["b", "c"], "answer": 0},
]
CHOOSE = """
task: local_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
SAY = """
task: local_say
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{max_gen_toks: 8, do_sample: false, until: []}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, text in (("choose", CHOOSE), ("say", SAY)):
        (folder / f"{name}.yaml").write_text(text.format(file=data))
    return folder


@pytest.fixture(scope="module")
def model():
    base = tiny_base("Qwen2", vocab_size=259)
    return awake(base, "ahn-gdn", push=0.5)


@pytest.fixture
def local_only(monkeypatch):
    """Look for tasks in ``include_path`` alone: the harness's own thousands take seconds to index."""
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))


@torch.no_grad()
def log_likelihood(model, tokenizer, context: str, choice: str) -> float:
    """Of ``choice`` after ``context``, one sequence at a time."""
    asked = tokenizer(context)["input_ids"]
    ids = torch.tensor([asked + tokenizer(choice)["input_ids"]])
    log_probs: Tensor = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[len(asked) - 1 :].sum().item()


def said(model, tokenizer, context: str) -> str:
    ids = torch.tensor([tokenizer(context)["input_ids"]])
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_an_export_runs_as_the_harness_users_call_it(tmp_path, tasks, model, byte_tokenizer):
    export_model(model, tmp_path / "model", byte_tokenizer)
    arguments = ["--model", "hf", "--model_args", "pretrained=model,trust_remote_code=True,dtype=float32"]
    arguments += ["--tasks", "local_choose,local_say", "--include_path", str(tasks), "--batch_size", "2"]
    arguments += ["--device", "cpu", "--output_path", "out", "--log_samples"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "lm_eval", "run", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (file,) = (tmp_path / "out").rglob("samples_local_choose*.jsonl")
    for line in map(json.loads, file.read_text().splitlines()):
        for choice, response in zip(line["doc"]["choices"], line["filtered_resps"], strict=True):
            ours = log_likelihood(model, byte_tokenizer, line["doc"]["question"], f" {choice}")
            assert float(response[0]) == pytest.approx(ours, abs=1e-3)
    (file,) = (tmp_path / "out").rglob("samples_local_say*.jsonl")
    for line in map(json.loads, file.read_text().splitlines()):
        assert line["filtered_resps"] == [said(model, byte_tokenizer, line["doc"]["question"])]


@pytest.mark.usefixtures("local_only")
def test_all_rows_get_the_same_tasks(tmp_path, tasks, model, byte_tokenizer):
    teacher, bare = window_only(model), window_only(model)
    output = tmp_path / "harness.json"
    with teacher.memory_off():
        rows = {"teacher": teacher, "window-only": bare, "ahn-gdn": model}
        found = run_harness(
            rows, byte_tokenizer, ["local_choose", "local_say"], include_path=tasks, batch_size=2, output=output
        )
        expected = {name: accuracy(one, byte_tokenizer) for name, one in rows.items()}
    assert json.loads(output.read_text()) == found
    (choose,) = [line for line in found["scores"] if (line["task"], line["metric"]) == ("local_choose", "acc")]
    assert {name: choose[name] for name in rows} == pytest.approx(expected)
    assert {line["task"] for line in found["scores"]} == {"local_choose", "local_say"}
    assert found["settings"]["max_length"] is None


def accuracy(model, tokenizer) -> float:
    right = 0
    for row in QUESTIONS:
        scores = [log_likelihood(model, tokenizer, row["question"], f" {choice}") for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    return right / len(QUESTIONS)


@pytest.mark.usefixtures("local_only")
def test_likelihoods_of_a_bfloat16_model_are_not_rounded(tasks, byte_tokenizer, monkeypatch):
    """The harness takes log-softmax in the dtype of the logits: in bfloat16, all of three digits."""
    model = awake(tiny_base("Qwen2", vocab_size=259), "ahn-gdn", push=0.5).bfloat16()
    states, found = [], []
    model.get_decoder().register_forward_hook(lambda _module, _args, out: states.append(out.last_hidden_state))
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    theirs = huggingface.HFLM._loglikelihood_tokens
    monkeypatch.setattr(
        huggingface.HFLM,
        "_loglikelihood_tokens",
        lambda self, asked, **given: found.extend(zip(asked, out := theirs(self, asked, **given), strict=True)) or out,
    )
    run_harness({"m": model}, byte_tokenizer, ["local_choose"], include_path=tasks)
    assert len(found) == 7
    head = model.get_output_embeddings().weight.double()
    exact = {}
    for read in states:  # one text at a time, in the harness's own order
        log_probs = (read[0].double() @ head.T).log_softmax(-1)
        exact[read.shape[1]] = [*exact.get(read.shape[1], []), log_probs]
    for ((_, _), asked, choice), (likelihood, _) in found:
        candidates = exact[len(asked) + len(choice) - 1]
        sums = [x[-len(choice) :].gather(1, torch.tensor(choice)[:, None]).sum().item() for x in candidates]
        assert likelihood in [pytest.approx(one, abs=1e-4) for one in sums]


@pytest.mark.usefixtures("local_only")
def test_a_chat_template_is_used_where_it_is_asked_for(tasks, model, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}")
    read, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **given: read.append(given["input_ids"][0]) or generate(**given))
    asked = {"include_path": tasks, "limit": 1}
    found = run_harness({"m": model}, byte_tokenizer, ["local_say"], apply_chat_template=True, **asked)
    run_harness({"m": model}, byte_tokenizer, ["local_say"], **asked)
    question = QUESTIONS[0]["question"]
    assert [byte_tokenizer.decode(ids) for ids in read] == [f"<u>{question}</u>", question]
    assert [line["chat"] for line in found["scores"]] == [True]


@pytest.mark.usefixtures("local_only")
def test_what_cannot_be_run_is_said(model, byte_tokenizer, tasks):
    with pytest.raises(RetrofitError, match=r"no task 'local_chose' \(did you mean 'local_choose'\?\)"):
        run_harness({"m": model}, byte_tokenizer, ["local_chose"], include_path=tasks)
    with pytest.raises(RetrofitError, match="no chat template"):
        run_harness({"m": model}, byte_tokenizer, ["local_say"], include_path=tasks, apply_chat_template=True)


class Templated:
    chat_template = "yes"


@pytest.mark.parametrize(
    ("task", "wanted", "gets"),
    [
        ("longbench_hotpotqa", None, True),
        ("longbench_triviaqa", None, False),
        ("longbench_triviaqa", True, False),
        ("longbench_repobench-p", True, False),
        ("niah_single_2", None, True),
        ("ruler_vt", False, False),
        ("hellaswag", None, False),
        ("hellaswag", True, True),
    ],
)
def test_who_gets_the_chat_template(task, wanted, gets):
    assert _wants_chat(task, Templated, wanted) is gets


def test_without_the_harness_it_says_what_to_install(monkeypatch, model, byte_tokenizer):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RetrofitError, match=r"retrofit-lm\[eval\]"):
        run_harness({"m": model}, byte_tokenizer, ["arc_easy"])
