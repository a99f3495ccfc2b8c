"""docs/add-a-memory.md does what it says: its file, its entry and its example, run in order."""

import importlib.util
import re
import sys

import pytest
import torch

import patches.kinds
import retrofit
from patches.errors import RetrofitError
from tests.pages import NAMED, blocks

PAGE = NAMED["docs/add-a-memory.md"]
FILE, ENTRY, EXAMPLE = blocks("docs/add-a-memory.md", "python")


@pytest.fixture
def fading(tmp_path, monkeypatch):
    """The page's file as a module of ``patches``, and its entry."""
    path = tmp_path / "fading.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("patches.fading", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "patches.fading", module)
    spec.loader.exec_module(module)
    names = {"__package__": "patches"}
    exec(ENTRY, names)  # as a line of patches/kinds.py
    kind = names["FadingMemory"]
    monkeypatch.setitem(patches.kinds.KINDS, kind.kind, kind)
    return kind


def test_the_example_runs(fading, capsys):
    exec(compile(EXAMPLE, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.startswith(f"{4 * (4 * 16 * 16 + 4 * 8)} bytes")


def test_the_example_learns_pads_and_refuses(fading, make_base):
    base = make_base("Llama")
    model = retrofit.patch(base, memory="fading", window=6, sinks=1)
    ids = torch.randint(3, 101, (2, 30))
    model(ids).logits.square().mean().backward()
    gradients = {name.rsplit(".", 1)[1]: parameter.grad for name, parameter in model.memory_parameters()}
    assert gradients["gain"].abs().sum() > 0
    for _, parameter in model.memory_parameters():
        parameter.data += 0.1
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.no_grad():
        padded, alone = model(ids, attention_mask=mask).logits[1, 9:], model(ids[1:, 9:]).logits[0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    with pytest.raises(RetrofitError, match="half_life=0"):
        retrofit.patch(base, memory="fading", window=6, half_life=0)
    with pytest.raises(RetrofitError, match="did you mean 'fading'"):
        retrofit.patch(base, memory="fadin", window=6)


def test_the_page_names_what_there_is():
    """Every file of the repository that the page names is there, but for those of its example."""
    named = set(re.findall(r"`((?:patches|tests|docs)/[\w/.-]+\.\w+)`", PAGE.read_text(encoding="utf-8")))
    missing = {name for name in named if not (PAGE.parents[1] / name).is_file()}
    assert missing == {"patches/fading.py", "tests/patches/test_fading.py", "docs/memories/fading.md"}
