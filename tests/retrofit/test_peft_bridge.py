"""Our adapters through PEFT: the invariants hold for its PeftModel, and what it saves is one of ours."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from tests.helpers import (
    ROOT,
    awake,
    capacity,
    checksum,
    close,
    feed,
    fresh_process,
    left_mask,
    logits,
    positions,
    tokens,
)
from tests.hub_server import HubServer

peft = pytest.importorskip("peft", minversion="0.21")

MakeBase = Callable[..., PreTrainedModel]
KINDS = ("ahn-gdn", "joint", "kvm", "tensor-cache")
IDS = tokens(2, 30)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def through_peft(base: PreTrainedModel, kind: str, folder: Path, **options: Any) -> Any:
    """``base`` with an awake memory, saved by us and loaded by PEFT."""
    retrofit.save_adapter(awake(base, kind), folder)
    return peft.PeftModel.from_pretrained(base, folder, **options)


def test_up_to_the_capacity_it_is_the_base(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base, kind, tmp_path / "a")
    ids = tokens(2, capacity(model.get_base_model()))
    assert torch.equal(logits(model, ids), logits(base, ids))
    ones = [1] * ids.shape[1]
    assert torch.equal(feed(model, ids, ones)[0], feed(base, ids, ones, cache=DynamicCache())[0])
    assert not torch.equal(logits(model, IDS), logits(base, IDS))


def test_disabled_it_is_the_base(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base, kind, tmp_path / "a")
    with model.disable_adapter():
        assert torch.equal(logits(model, IDS), logits(base, IDS))
        assert model.get_model_status().enabled is False
    assert not torch.equal(logits(model, IDS), logits(base, IDS))
    assert model.get_model_status().enabled is True
    model.disable_adapter_layers()
    with model.disable_adapter():
        pass
    assert torch.equal(logits(model, IDS), logits(base, IDS)), "what was off stays off"


def test_a_fresh_one_is_the_window(base: PreTrainedModel, tmp_path: Path) -> None:
    retrofit.save_adapter(retrofit.patch(base, "ahn-gdn", 8, 2), tmp_path / "a")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    assert torch.equal(logits(model, IDS), logits(retrofit.patch(base, "none", 8, 2), IDS))


def test_any_pieces(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base.double(), kind, tmp_path / "a")
    whole = logits(model, IDS)
    for sizes in ([30], [1] * 30, [5, 9, 1, 1, 14]):
        close(feed(model, IDS, sizes)[0], whole)


def test_a_padded_batch_is_its_rows(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base.double(), kind, tmp_path / "a")
    lengths = (30, 19, 10, 1)
    ids, mask = tokens(4, 30), left_mask(lengths, 30)
    batch = feed(model, ids, [26, 1, 1, 2], mask, DynamicCache(), positions(mask))[0]
    for row, length in enumerate(lengths):
        close(batch[row, -length:], logits(model, ids[row : row + 1, -length:])[0])


def test_gradients_only_where_they_are_wanted(kind: str, make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Qwen2")
    before = checksum(base)
    model = through_peft(base, kind, tmp_path / "a", is_trainable=True)
    model(IDS, labels=IDS).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {f"base_model.model.{name}" for name, _ in model.memory_parameters()}
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert checksum(base) == before
    frozen = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_it_generates_as_ours_does(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base, kind, tmp_path / "a")
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ours = retrofit.load_adapter(base, tmp_path / "a")
    assert torch.equal(model.generate(input_ids=IDS[:, :5], **how), ours.generate(input_ids=IDS[:, :5], **how))


def test_what_it_saves_is_one_of_ours(base: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    model = through_peft(base, kind, tmp_path / "a", is_trainable=True)
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            parameter.add_(0.01)
    model.set_window(16, 3)
    model.save_pretrained(tmp_path / "again")
    ours = retrofit.load_adapter(base, tmp_path / "again")
    assert torch.equal(logits(ours, IDS), logits(model, IDS))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "again", adapter_name="another")
    assert torch.equal(logits(theirs, IDS), logits(model, IDS))


def test_made_by_peft_alone(make_base: MakeBase, tmp_path: Path) -> None:
    from retrofit.peft_bridge import RetrofitConfig

    base = make_base("Qwen2")
    config = RetrofitConfig(task_type="CAUSAL_LM", memory={"kind": "ahn-gdn", "window": 8, "sinks": 2})
    model = peft.get_peft_model(base, config)
    assert any(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path / "a")
    assert torch.equal(logits(retrofit.load_adapter(base, tmp_path / "a"), IDS), logits(model, IDS))
    with pytest.raises(RetrofitError, match="needs memory="):
        peft.get_peft_model(base, RetrofitConfig(task_type="CAUSAL_LM"))


def test_from_the_hub_and_with_the_base_by_name(hub: HubServer, make_base: MakeBase, tmp_path: Path) -> None:
    token = "hf_" + "u" * 34
    hub.users[token] = "user"
    make_base("Qwen2").save_pretrained(tmp_path / "base")
    model = awake(str(tmp_path / "base"), "ahn-gdn")
    retrofit.push_adapter(model, "user/adapter", revision="v1", token=token)
    base = make_base("Qwen2")
    pushed = peft.PeftModel.from_pretrained(base, "user/adapter", revision="v1")
    assert torch.equal(logits(pushed, IDS), logits(model, IDS))
    retrofit.save_adapter(model, tmp_path / "a")
    whole = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(logits(whole, IDS), logits(model, IDS))


def damage(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))


def test_what_is_refused(make_base: MakeBase, tmp_path: Path) -> None:
    base, folder = make_base("Qwen2"), tmp_path / "a"
    model = through_peft(base, "ahn-gdn", folder)
    with pytest.raises(RetrofitError, match="a model has one memory"):
        model.load_adapter(folder, "second")
    with pytest.raises(RetrofitError, match="retrofit merge"):
        model.merge_and_unload()
    with pytest.raises(RetrofitError, match="low_cpu_mem_usage"):
        peft.PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True)
    with pytest.raises(RetrofitError, match="this base is a different one"):
        peft.PeftModel.from_pretrained(make_base("Qwen2", seed=1), folder)
    with pytest.raises(ValueError, match="does not support"):
        base.load_adapter(str(folder))  # transformers' own way, in place
    damage(folder, memory={"kind": "ahn-dn", "window": 8, "sinks": 2})
    with pytest.raises(RetrofitError, match=r"the adapter also has .*: these weights are not for"):
        peft.PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize("order", ["import retrofit, peft", "import peft, retrofit"])
def test_the_order_of_the_imports_is_free(order: str, tmp_path: Path) -> None:
    code = f"{order}; print(peft.PeftType('RETROFIT').value)"
    assert fresh_process(code, tmp_path, path=ROOT).split() == ["RETROFIT"]


def test_nobody_imports_peft_for_us(tmp_path: Path) -> None:
    code = (
        "import retrofit, sys\n"
        "from transformers.utils import is_peft_available\n"
        "print('peft' in sys.modules, is_peft_available())"
    )
    assert fresh_process(code, tmp_path, path=ROOT).split() == ["False", "True"]
    without = "import retrofit\ntry: import peft\nexcept ImportError as error: print(error.name)"
    assert fresh_process(without, tmp_path, hide=["peft"], path=ROOT).split() == ["peft"]


def test_a_release_of_peft_that_cannot_do_it_still_imports() -> None:
    code = (
        "import sys, warnings, retrofit\n"
        "sys.modules['retrofit.peft_bridge'] = None\n"
        "warnings.simplefilter('ignore')\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always', UserWarning)\n"
        "    import peft\n"
        "print(any('use retrofit.load_adapter' in str(warning.message) for warning in said), peft.PeftModel.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "PeftModel"], done.stderr
