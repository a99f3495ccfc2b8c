"""Invariant 9: what is saved comes back equal in a process that starts from nothing.

All exports are loaded by one process that cannot import this package, and once more, with the adapters, by one that
can but has no peft.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

import retrofit
from patches.errors import RetrofitError
from patches.kinds import KINDS
from tests.conftest import OTHERS, tiny_base
from tests.helpers import ROOT, VARIANTS, awake, fresh_process, logits, tokens

IDS = tokens(2, 25)
PACKAGES = ("retrofit", "patches", "distill", "recipes", "cli")
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def models(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> model and how it is saved: every kind, every family, and what else decides how weights are written."""
    families = ("Qwen2", "Qwen3", "Llama", "Mistral")
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for i, kind in enumerate(KINDS):
        found[kind] = awake(tiny_base(families[i % 4]), kind), {}
    for family in OTHERS:
        found[family] = awake(tiny_base(family, experts_implementation=None), "joint"), {}
    for family in families:
        found[f"bfloat16 {family}"] = awake(tiny_base(family).to(torch.bfloat16), "ahn-gdn"), {}
    for variant, (family, settings) in VARIANTS.items():
        found[variant] = awake(tiny_base(family, **settings), "ahn-gdn"), {}
    tied = tiny_base("Qwen2", tie_word_embeddings=True)
    found["sharded"] = awake(tied.to(torch.bfloat16), "ahn-gdn"), {"max_shard_size": "30KB"}
    tied.float().save_pretrained(folder / "tied")  # a cast when loading leaves the rotary table alone
    found["loaded in bfloat16"] = awake(str(folder / "tied"), "ahn-gdn", model_kwargs={"dtype": torch.bfloat16}), {}
    found["some layers"] = awake(tiny_base("Llama"), "ahn-dn", layers=[1], others="window"), {}
    by_layer = {"0": {"window": 4}, "1": {"window": 11, "rows": 3}}
    found["by layer"] = awake(tiny_base("Mistral", sliding_window=64), "expected", by_layer=by_layer), {}
    found["native window"] = awake(tiny_base("Mistral", sliding_window=64), "ahn-gdn"), {}
    return found


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exports, adapters and bases, and the logits and tokens that their models gave."""
    folder = tmp_path_factory.mktemp("reload")
    expected = {"ids": IDS}
    facts = {}
    for name, (model, how) in models(folder).items():
        model.save_pretrained(folder / "exports" / name, **how)
        expected[f"{name}/logits"] = logits(model, IDS)
        expected[f"{name}/tokens"] = model.generate(IDS, **GREEDY)
        expected[f"{name}/hidden"] = model.get_decoder()(IDS, use_cache=False).last_hidden_state.detach()
        with model.memory_off():
            expected[f"{name}/teacher"] = logits(model, IDS)
        facts[name] = {"class": type(model).__name__, "dtypes": sorted({str(p.dtype) for p in model.parameters()})}
    for kind in KINDS:
        base = tiny_base("Qwen2")
        base.save_pretrained(folder / "base")
        model = awake(base, kind)
        retrofit.save_adapter(model, folder / "adapters" / kind)
        expected[f"adapter {kind}"] = logits(model, IDS)
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))
    assert len(list((folder / "exports" / "sharded").glob("*.safetensors"))) > 3
    return folder


SETTING = """
import json
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
expected, facts = load_file("expected.safetensors"), json.loads(Path("facts.json").read_text())
ids = expected["ids"]
greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

def check(name, model):
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, expected[name + "/logits"]), name
        with model.memory_off():
            assert torch.equal(model(ids, use_cache=False).logits, expected[name + "/teacher"]), name
    assert torch.equal(model.generate(ids, **greedy), expected[name + "/tokens"]), name
    assert type(model).__name__ == facts[name]["class"]
    assert sorted({str(p.dtype) for p in model.parameters()}) == facts[name]["dtypes"], name
"""

WITHOUT_THE_PACKAGE = (
    SETTING
    + """
for name in facts:
    path = "exports/" + name
    model, report = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, report)
    assert type(model).__module__.startswith("transformers_modules.")
    assert not any(p.is_meta for p in model.parameters())
    check(name, model)

    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    assert config.memory == model.config.memory and type(config).__name__ == type(model.config).__name__
    body = AutoModel.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(body(ids, use_cache=False).last_hidden_state, expected[name + "/hidden"]), name

placed = AutoModelForCausalLM.from_pretrained("exports/sharded", trust_remote_code=True, device_map="auto")
check("sharded", placed)
half = AutoModelForCausalLM.from_pretrained("exports/ahn-gdn", trust_remote_code=True, dtype=torch.bfloat16)
assert {p.dtype for _, p in half.memory_parameters()} == {torch.float32}
assert half.model.embed_tokens.weight.dtype == torch.bfloat16

# saved again by a process that has only the export, it is still an export
model = AutoModelForCausalLM.from_pretrained("exports/ahn-gdn", trust_remote_code=True)
model.set_window(window=5, sinks=3)
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert (again.config.memory["window"], again.config.memory["sinks"]) == (5, 3)
assert torch.equal(again(ids).logits, model(ids).logits)

try:
    AutoModelForCausalLM.from_pretrained("exports/ahn-gdn", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error)
else:
    raise AssertionError("loaded without trust")
for name in ("retrofit", "patches"):
    assert sys.modules[name] is None
print("all equal")
"""
)

WITH_THE_PACKAGE = (
    SETTING
    + """
trusted = AutoModelForCausalLM.from_pretrained("exports/ahn-gdn", trust_remote_code=True)
assert type(trusted).__module__.startswith("transformers_modules.")

import retrofit
from patches import qwen2

out = trusted(ids, use_cache=True)
assert retrofit.cache_bytes(out.past_key_values) > 0 and retrofit.kept_bytes(trusted) > 0
retrofit.save_adapter(trusted, "from-trusted", overwrite=True)
base = AutoModelForCausalLM.from_pretrained("base")
family = AutoModelForCausalLM.from_pretrained("exports/ahn-gdn")
check("ahn-gdn", retrofit.load_adapter(family, "from-trusted"))
window = retrofit.patch(trusted, "none", 8, 2)
assert window.model.embed_tokens.weight.data_ptr() == trusted.model.embed_tokens.weight.data_ptr()
check("ahn-gdn", trusted)

for name in facts:
    model = AutoModelForCausalLM.from_pretrained("exports/" + name)
    assert type(model).__module__.startswith("patches."), type(model).__module__
    check(name, model)
assert type(AutoModel.from_pretrained("exports/ahn-gdn")).__module__.startswith("patches.")

for folder in sorted(Path("adapters").iterdir()):
    for start in (base, "base"):
        model = retrofit.load_adapter(start, folder)
        with torch.no_grad():
            assert torch.equal(model(ids, use_cache=False).logits, expected["adapter " + folder.name]), folder
assert sys.modules["peft"] is None
print("all equal")
"""
)


def test_exports_where_this_package_is_not(exports: Path) -> None:
    assert "all equal" in fresh_process(WITHOUT_THE_PACKAGE, exports, hide=PACKAGES)


def test_exports_and_adapters_where_it_is_and_peft_is_not(exports: Path) -> None:
    assert "all equal" in fresh_process(WITH_THE_PACKAGE, exports, hide=["peft"], path=ROOT)


def test_an_export_carries_all_it_needs_and_no_pickle(exports: Path) -> None:
    for folder in (exports / "exports").iterdir():
        names = {file.name for file in folder.iterdir()}
        assert {"config.json", "generation_config.json", "modeling.py", "cache.py", "errors.py"} <= names
        assert {Path(name).suffix for name in names} == {".py", ".json", ".safetensors"}
        config = json.loads((folder / "config.json").read_text())
        # older transformers copy only the files that the first one names itself
        family = config["auto_map"]["AutoModel"].partition(".")[0]
        code = {Path(name).stem for name in names if name.endswith(".py")}
        assert set(get_relative_imports(folder / f"{family}.py")) == code - {family}
        assert config["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


def test_saving_leaves_the_model_as_it_was(make_base: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn")
    before = logits(model, IDS)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model, IDS), before)
    assert type(model).__module__ == "patches.qwen2"


def test_training_windows_do_not_leak(make_base: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """W and S are run-time settings: the last ones set are saved, in the config and in each layer alike."""
    model = awake(make_base("Qwen2"), "ahn-gdn")
    model.set_window(window=5, sinks=1)
    model.set_window(window=9)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.memory["window"] == 9
    assert {(m.window, m.sinks) for m in again.model.memories().values()} == {(9, 1)}
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_saving_as_accelerate_has_every_process_do_it(
    make_base: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """``save_pretrained(folder, is_main_process, state_dict)``: only the main one writes, by name or by place."""
    model = awake(make_base("Qwen2"), "ahn-gdn")
    model.save_pretrained(tmp_path / "named", is_main_process=False)
    model.save_pretrained(tmp_path / "placed", False)
    assert not (tmp_path / "named" / "qwen2.py").exists()
    assert not (tmp_path / "placed" / "qwen2.py").exists()
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "main", True, changed)
    assert (tmp_path / "main" / "qwen2.py").is_file()
    saved = load_file(tmp_path / "main" / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], model.model.norm.weight + 1)
    with pytest.raises(RetrofitError, match="save first"):
        model.save_pretrained(tmp_path / "pushed", True, None, True)


def test_accelerates_documented_call_saves_the_whole_model(
    make_base: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = awake(make_base("Qwen2"), "joint")
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        prepared = accelerator.prepare(model)
        for folder, main in (("main", accelerator.is_main_process), ("other", False)):
            accelerator.unwrap_model(prepared).save_pretrained(
                tmp_path / folder,
                is_main_process=main,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(prepared),
            )
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "main", trust_remote_code=True)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert not list((tmp_path / "other").iterdir())
