"""``make real`` without its downloads: what competes costs the bytes it says, and the table says what was scored."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import retrofit
from distill.demo import real
from retrofit.evaluation.scores import evaluate
from retrofit.packages import Package
from tests.conftest import tiny_base
from tests.helpers import tokens


def test_everybody_has_the_same_bytes() -> None:
    base = tiny_base("Llama", num_key_value_heads=2, head_dim=64, num_attention_heads=2)
    ways = real.contenders(base.config)
    models = {name: retrofit.patch(base, **{"window": real.WINDOW, "sinks": 4, **how}) for name, how in ways.items()}
    bytes_of = {name: real._beside_the_window(model) for name, model in models.items()}
    assert bytes_of.pop("window-only") == 0
    most = max(2 * 2 * 64 * 4, 2 * (64 + 2) + 8)  # less than one more token would have taken
    assert all(real.BYTES - most < size <= real.BYTES for size in bytes_of.values()), bytes_of


def test_the_table_is_of_what_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "LAST", 5)
    base = tiny_base("Qwen2")
    models = {
        "window-only": retrofit.patch(base, "none", 8, 2),
        "expected": retrofit.patch(base, "expected", 8, 2, rows=6),
    }
    rows = []
    for seed, kind in enumerate(("speeches", "novel")):
        rows += real.figures(kind, evaluate(models, tokens(2, 40, seed=seed), start=10), models)
    bare, chosen = real.table(rows)
    assert bare["mean"] == bare["speeches"] == bare["nll"] == 0
    assert chosen["mean"] == pytest.approx((chosen["speeches"] + chosen["novel"]) / 2)
    # the mean of the last positions that predict something
    last = evaluate(models, tokens(2, 40, seed=0), start=10)["expected"].kl[:, -5:].mean().item()
    assert rows[1]["kl_last"] == pytest.approx(last)
    assert f"| expected | {chosen['bytes']:,} | {chosen['mean']:.3f} |" in real.markdown(rows)


def test_rows_begin_texts_that_lie_evenly(byte_tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    monkeypatch.setattr(real, "LENGTH", 8)
    texts = [str(i) * (20 if i % 2 else 3) for i in range(10)]  # every other one is too short
    rows = real._rows(texts, byte_tokenizer, 2)
    assert rows.shape == (2, 8)
    assert [byte_tokenizer.decode(row)[0] for row in rows] == ["3", "7"]


def test_conversations_are_read_though_their_file_is_cut(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a" * 4000}, {"from": "gpt", "value": "b" * 400}]
    whole = json.dumps([{"conversations": turns}, {"conversations": turns[1:]}, {"conversations": turns}])
    (tmp_path / "ShareGPT_x.json").write_text(whole[:-30])
    (talk,) = real._talks(tmp_path)  # the second is too short, the third is cut
    assert talk.startswith("<|im_start|>user\naaa")
    assert talk.endswith("bbb<|im_end|>\n")


def test_packages_are_pinned() -> None:
    packages = [value for value in vars(real).values() if isinstance(value, Package)]
    assert len(packages) == 7
    assert all(len(bytes.fromhex(package.sha256)) == 32 and package.version for package in packages)
