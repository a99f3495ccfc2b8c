"""Malformed recipes, data, results, checkpoints of a run and benchmark files: each is refused in one sentence."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, TrainerState
from typer import BadParameter

import retrofit
from distill.checkpoint import DATA_FILE, check_same_data, damage, write_checksums
from distill.config import load_recipe
from distill.lora import add_lora, load_lora, save_lora
from distill.parallel.zero import find_config
from distill.recipe import DistillKeys
from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.evaluation.settings import Settings
from retrofit.evaluation.store import RESULTS, ResultStore
from retrofit.files import write_json
from retrofit.options import pairs
from retrofit.recipes import shipped_recipes
from retrofit.settings import settings
from retrofit.texts.chat import ChatTokenizer
from retrofit.texts.tokens import read_sequences, read_tokens
from tests.helpers import ROOT, load_rows
from tests.robustness.inputs import BYTES, JUNK, damaged, documents, put, refusal, safetensors, share

# what YAML can say and JSON cannot
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
)
MAPPING_BOMB = "a0: &a0 {k: x}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n  k{i}: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)
)
YAML = [
    BOMB,
    BOMB + "window: *a39\n",
    BOMB + "options: {rows: *a39}\n",
    MAPPING_BOMB,
    MAPPING_BOMB + "options: *a39\n",
    "options: &o {rows: *o}\n",
    "layers: &l [*l]\n",
    "options: &o\n  <<: *o\n",
    "&a a: *a\n",
    "? [1, 2]\n: 3\n",
    "? {a: 1}\n: 3\n",
    "{" * 90000,
    "[" * 90000,
    "- " * 45000,
    "a: " * 30000,
    "window: !!python/object/apply:os.system ['touch ran']\n",
    "window: !!python/name:os.system\n",
    "!!python/object/new:os.system ['touch ran']\n",
    "window: !!int x\n",
    "window: !!timestamp 0000-99-99\n",
    "window: !!binary '='\n",
    "window: !!set {a, b}\n",
    "window: !!omap [a]\n",
    "window: 2001-99-99\n",
    "seed: 0b" + "1" * 5000 + "\n",
    "memory: kvm\noptions: {rows: 0b" + "1" * 20000 + "}\n",
    "options: {a: &a [x, x, x], b: &b [*a, *a, *a]}\n",
    "{" + ", ".join(f"k{i}: {i}" for i in range(20000)) + "}\n",
    "seed: " + "9" * 5000 + "\n",
    "seed: 1:99999:99\n",
    "learning_rate: 1e999\n",
    "learning_rate: .nan\n",
    "%YAML 9.9\n---\na: 1\n",
    "a: 1\n---\nb: 2\n",
    "\x00",
    "learning_rate: *nothing\n",
    "memory: kvm\noptions: {rows: .inf}\n",
    "memory: kvm\noptions: {chunk: [1]}\n",
    "memory: [kvm]\n",
    "window: 0o9\n",
]


def recipe_of(path: Path) -> None:
    recipe = load_recipe(path)
    find_kind(recipe.memory).read_options(recipe.options)
    find_config(recipe.deepspeed)
    recipe.to_recipe()


@pytest.mark.parametrize("text", YAML, ids=[text[:24] for text in YAML])
def test_yaml_that_says_more_than_json(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert refusal("recipe", lambda: recipe_of(path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["small-text-ahn-gdn", "qwen2.5-7b-ahn-gdn"])
def test_a_recipe(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    original = shipped_recipes()[name].read_bytes()
    keys = yaml.safe_load(original) | {"options": {"rows": 4}, "lora": {"r": 8}, "layers": [0, 2]}

    @share(0.07)
    @given(st.one_of(documents(keys), damaged(original)))
    def check(content: Any) -> None:
        path.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
        refusal("recipe", lambda: recipe_of(path))

    check()


@share(0.04)
@given(st.sampled_from([DistillKeys, Settings]), st.data())
def test_values_of_flags(of: Any, data: st.DataObject) -> None:
    """Any text after the flag of any key, and after ``--set KEY=``."""
    key = data.draw(st.sampled_from(list(settings(of).values())))
    text = data.draw(
        st.one_of(st.text(max_size=20), st.sampled_from(YAML), st.sampled_from([str(one) for one in JUNK]))
    )

    def read() -> None:
        try:
            pairs("--set", [f"{key.name}={text}"])
        except BadParameter as error:
            raise RetrofitError(error.message) from None
        key.parse(text)

    refusal("flags", read)


def test_a_deepspeed_configuration(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = tmp_path / "ds.json"
    original = (ROOT / "recipes" / "deepspeed-zero3.json").read_bytes()
    least = {"zero_optimization": {"stage": 2}}
    offload = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }

    @share(0.04)
    @given(st.one_of(documents(json.loads(original)), documents(least), documents(offload), damaged(original)))
    def check(content: Any) -> None:
        put(path, content)
        refusal("DeepSpeed", lambda: find_config(str(path)))

    check()


CHAT = [
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]


def lines(rows: Any) -> bytes:
    """A JSON line for each of ``rows``, or one for what is no list."""
    return "".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])).encode()


def test_json_lines(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = _with_template(byte_tokenizer)
    path = tmp_path / "data.jsonl"
    texts = [{"text": "one two", "id": 1}, {"text": "three", "id": 2}]

    @share(0.1)
    @given(
        st.sampled_from([texts, CHAT[1:2] * 2, CHAT[2:]]).flatmap(lambda r: st.one_of(documents(r), damaged(lines(r))))
    )
    def check(content: Any) -> None:
        put(path, content if isinstance(content, bytes) else lines(content))
        refusal("JSONL", lambda: list(read_tokens(str(path), tokenizer, seq_len=16, streaming=True)))

    check()


def test_conversations(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatTokenizer(_with_template(byte_tokenizer))

    @share(0.06)
    @given(st.sampled_from(CHAT).flatmap(lambda row: documents(next(iter(row.values())))))
    def check(value: Any) -> None:
        refusal("conversation", lambda: list(chat.encode([("chats.jsonl, line 1", value)])))

    check()


def test_rows_from_json_lines(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """The whole way in, through the cache of ``datasets``."""
    tokenizer = _with_template(byte_tokenizer)
    path = tmp_path / "data.jsonl"
    texts = [{"text": "one two three four. " * 4}] * 3

    @share(0.01)
    @given(st.sampled_from([CHAT[1:2] * 3, texts]).flatmap(documents))
    def check(content: Any) -> None:
        put(path, lines(content))
        refusal("JSONL, tokenised", lambda: load_rows(str(path), tokenizer, max_length=16, holdout=0.4))

    check()


def test_parquet(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    original = path.read_bytes()

    @share(0.05)
    @given(damaged(original))
    def check(content: bytes) -> None:
        put(path, content)
        refusal("Parquet", lambda: list(read_tokens(str(path), byte_tokenizer, seq_len=16, streaming=True)))

    check()


def test_results_of_an_evaluation(tmp_path: Path) -> None:
    settings = {"model": "m", "window": 8}
    rows = [{"settings": settings}, {"key": "text/0", "kl": {"a": [1.0]}}, {"key": "text/1"}]
    path = tmp_path / RESULTS

    @share(0.06)
    @given(st.one_of(documents(rows), damaged(lines(rows))))
    def check(content: Any) -> None:
        put(path, content if isinstance(content, bytes) else lines(content))
        refusal("results.jsonl", lambda: ResultStore(tmp_path, settings))

    check()


def test_what_a_run_began_with(tmp_path: Path) -> None:
    found = {"processes": 1, "train": {"rows": 2, "sha256": "ab"}, "held_out": {"rows": 1, "sha256": "cd"}}
    (tmp_path / DATA_FILE).write_text(json.dumps(found))
    original = (tmp_path / DATA_FILE).read_bytes()

    @share(0.05)
    @given(st.one_of(documents(found), damaged(original)))
    def check(content: Any) -> None:
        put(tmp_path / DATA_FILE, content)
        refusal("run.json", lambda: check_same_data(tmp_path, found))

    check()


def test_a_checkpoint(tmp_path: Path) -> None:
    """Resuming passes over one in which any file is damaged; what is still whole, the Trainer can read."""
    folder = tmp_path / "checkpoint-4"
    (folder / "lora").mkdir(parents=True)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.ones(2)}, folder / name)
    for name in ("adapter_model.safetensors", "lora/adapter_model.safetensors"):
        save_file({"a": torch.ones(2)}, folder / name)
    write_json(folder / "adapter_config.json", {"peft_type": "RETROFIT", "memory": {"kind": "ahn-gdn"}})
    state = folder / "trainer_state.json"
    TrainerState(global_step=4, max_steps=8, log_history=[{"loss": 1.0, "step": 1}]).save_to_json(str(state))
    write_checksums(folder)
    assert not damage(folder)
    whole = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    as_json = st.sampled_from([name for name in whole if name.endswith(".json")])

    @share(0.1)
    @given(
        st.one_of(
            as_json.flatmap(lambda name: documents(json.loads(whole[name])).map(lambda content: (name, content))),
            st.sampled_from(sorted(whole)).flatmap(lambda n: damaged(whole[n]).map(lambda content: (n, content))),
        )
    )
    def check(one: tuple[str, Any]) -> None:
        name, content = one
        put(folder / name, content)

        def resume() -> None:
            if said := damage(folder):
                raise RetrofitError(said)
            found = TrainerState.load_from_json(str(state))
            assert found.global_step == 4
            assert all(isinstance(entry, dict) for entry in found.log_history)

        said = refusal("checkpoint", resume)
        assert said or name == "checksums.json" or (folder / name).read_bytes() == whole[name]
        put(folder / name, whole[name])

    check()


def test_lora_settings(make_base: Any) -> None:
    """Fields of ``peft.LoraConfig`` from a recipe."""
    peft = pytest.importorskip("peft")
    names = [*peft.LoraConfig.__dataclass_fields__, "surprise"]
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2)
    junk = st.sampled_from([*JUNK, "(["])

    @share(0.06)
    @given(st.dictionaries(st.sampled_from(names), junk, min_size=1, max_size=3))
    def check(settings: dict[str, Any]) -> None:
        refusal("LoRA settings", lambda: add_lora(copy.deepcopy(model), {"r": 2, **settings}))

    check()


def test_lora_weights(tmp_path: Path, make_base: Any) -> None:
    pytest.importorskip("peft")
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2)
    add_lora(model, {"r": 2})
    save_lora(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"

    @share(0.02)
    @given(safetensors(file.read_bytes()))
    def check(content: bytes) -> None:
        put(file, content)
        refusal("LoRA", lambda: load_lora(model, tmp_path))

    check()


@pytest.mark.parametrize("content", [*BYTES, b"\xff" * 40, "\ud800".encode(errors="surrogatepass")])
def test_texts(content: bytes, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "text.txt"
    put(path, content)
    refusal("text", lambda: read_sequences(str(path), byte_tokenizer, length=16))
    refusal("text", lambda: load_rows(str(path), byte_tokenizer, max_length=16))


def test_the_junk_is_not_left_to_json(tmp_path: Path) -> None:
    """NaN, which Python's JSON reads and writes, never gets into a file of ours."""
    assert any(value != value for value in JUNK)
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("nan")})


def _with_template(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}"
    )
    return tokenizer
