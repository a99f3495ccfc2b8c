"""README and docs: every command is run or says why not, every block is code that works, every link leads somewhere."""

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner

import retrofit
from benchmarks.speed.__main__ import app as speed
from cli import app
from distill.config import DistillConfig
from distill.data.rows import pack_tokens
from distill.lora import add_lora, save_lora
from patches.kinds import KINDS
from retrofit.convert import published_name
from retrofit.evaluation.run import run_evaluation
from retrofit.evaluation.settings import Settings
from retrofit.export import export_model
from retrofit.families import FAMILIES
from retrofit.recipes import read_memory
from retrofit.texts.tokens import read_tokens
from tests.hub_server import HubServer
from tests.pages import FENCE, NAMED, PAGES, ROOT, Command, anchors, blocks, commands, links, mentioned, text_of

TOP_LEVEL = {"benchmarks", "cli", "cli.py", "distill", "docs", "patches", "recipes", "retrofit", "tests"}
# other tests run these pages' blocks, from the pages themselves
ELSEWHERE = {
    "docs/add-a-family.md": "tests/test_docs_add_a_family.py",
    "docs/add-a-memory.md": "tests/test_docs_add_a_memory.py",
    "docs/evaluation-benchmarks.md": "tests/test_docs_evaluation_benchmarks.py",
    "docs/hub.md": "tests/retrofit/test_hub.py",
}
# commands that are not run here, by a word of theirs, and why; their verbs and flags are checked all the same
NOT_RUN = {
    "make": "sets up an environment and takes minutes; its targets are looked up",
    "--nproc": "several processes; tests/distill/parallel/test_launch.py and test_processes.py run them",
    "torchrun": "several processes; tests/distill/parallel/test_processes.py runs it",
    "accelerate": "several processes; tests/distill/parallel/test_processes.py runs it",
    "lm_eval": "tests/retrofit/evaluation/test_harness.py runs this very command",
    "hf": "asks for a token",
    "python": "a script beside the command: tests/serving measures what an engine saves",
    "--dry-run": "half a minute; tests/test_recipes.py does it with every recipe",
    "serve": "becomes an engine that goes on for ever; tests/serving runs it",
    "bench": "starts processes of its own; tests/retrofit/bench runs it",
}
# after the page's own words, so that a tiny model on one core has done soon: the last value of a flag counts
SHORTER = {
    "distill": "--window 8 --sinks 2 --max-length 48 --max-steps 2 --eval-rows 2 --overwrite",
    "generate": "--max-new-tokens 2",
    "eval": "--length 320 --samples 1 --rows 1 --seq-len 64 --window 8 --sinks 2 --overwrite",
    "patch": "--overwrite",
    "merge": "--overwrite",
    "convert": "--overwrite",
}
COMMANDS = {  # the same one on two pages is run once
    " ".join(command.words): command
    for name in NAMED
    if name not in ELSEWHERE
    for command in commands(name)
    if not NOT_RUN.keys() & set(command.words)
}


@pytest.fixture(scope="module")
def home(
    byte_checkpoint: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder where everything lies that the pages name: bases under their Hub ids, texts, a recipe, runs."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B-Instruct", "BASE", "CHECKPOINT"):
        shutil.copytree(byte_checkpoint, folder / name)
    for name in ("corpus.txt", "held-out.txt", "TEXT", "HELD_OUT"):
        (folder / name).write_text("the quick brown fox jumps over the lazy dog. " * 60)
    model = retrofit.patch(str(byte_checkpoint), "ahn-gdn", window=8, sinks=2)
    for run in ("first", "second"):
        retrofit.save_adapter(model, folder / "runs" / run / "adapter")
        export_model(model, folder / "runs" / run / "model", byte_tokenizer)
    weights = {published_name("ahn-gdn", name): p.clone() for name, p in model.memory_parameters()}
    weights |= {f"model.layers.{i}.ahn.fn.D": torch.ones(4) for i in range(2)}
    for name in ("AHN_FOLDER", "ByteDance-Seed/AHN-GDN-for-Qwen-2.5-Instruct-3B"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"_ahn_implementation": "GatedDeltaNet"}')
        save_file(weights, folder / name / "model.safetensors")
    recipe = {
        "base": "BASE",
        "data": "corpus.txt",
        "window": 8,
        "sinks": 2,
        "max_length": 48,
        "max_steps": 2,
        "eval_rows": 2,
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    # what earlier commands write, for later ones that another process runs first
    retrofit.save_adapter(model, folder / "ahn-gdn-3b")
    (folder / "costs.json").write_text(json.dumps([{"name": "none", "length": 1024, "prefill_seconds": 0.5}]))
    for name in ("runs/eval", "runs/first/eval"):
        settings = Settings(
            str(folder / "runs/first/model"), probes=("recall",), lengths=(64,), bindings=(2,), samples=1
        )
        run_evaluation(settings, folder / name)
    return folder


@pytest.fixture
def at_home(home: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In that folder, logged in to a small Hub."""
    hub.users["hf_" + "d" * 34] = "user"
    monkeypatch.setenv("HF_TOKEN", "hf_" + "d" * 34)
    monkeypatch.chdir(home)
    return home


# ---- commands ----


@pytest.mark.xdist_group("commands")  # a page's later commands read what its earlier ones wrote
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_does_what_the_page_says(command: Command, at_home: Path) -> None:
    program, verb, *rest = command.words
    assert program == "retrofit", command.line
    done = CliRunner().invoke(app, [verb, *rest, *SHORTER.get(verb, "").split()])
    assert done.exit_code == 0 or (verb, done.exit_code) == ("doctor", 1), done.output
    for flag in ("-o", "--output"):
        if flag in rest:
            written = at_home / rest[rest.index(flag) + 1]
            assert written.is_file() or any(written.iterdir())


@pytest.mark.parametrize("page", NAMED)
def test_verbs_and_flags_are_known(page: str) -> None:
    for command in commands(page):
        words = command.words
        if words[0] == "make":
            assert words[1] in re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE), command.line
        elif words[0] in ("retrofit", "torchrun", "accelerate"):
            verb, rest = _verb(words[1:] if words[0] == "retrofit" else words[words.index("distill") :])
            verb.make_context("retrofit", list(rest))  # parses, and complains of what is unknown or missing
        else:
            assert words[0] in NOT_RUN, command.line
    for words in mentioned(page):
        verb, rest = _verb(words[1:])
        known = {flag for parameter in verb.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.split("=")[0] for word in rest if word.startswith("-")} <= known | {"--help"}, words


@pytest.mark.parametrize("page", NAMED)
def test_the_programs_beside_the_command_are_there(page: str) -> None:
    """Each ``python -m module``; of the speed benchmarks verb and flags, too."""
    for module, rest in re.findall(r"python -m (benchmarks[\w.]*)([^`\n]*)", re.sub(r"\s+", " ", text_of(page))):
        assert importlib.util.find_spec(module), module
        verb, *words = shlex.split(rest.partition("#")[0]) or [""]
        if module == "benchmarks.speed" and verb != "VERB":
            command = get_command(speed).commands[verb]
            known = {flag for parameter in command.params for flag in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, (verb, words)


def test_every_reason_for_not_running_is_needed() -> None:
    words = {word for name in NAMED for command in commands(name) for word in command.words}
    assert words >= NOT_RUN.keys()
    for page, test in ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / test).read_text(encoding="utf-8")


def _verb(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and what comes after the name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        found = command.get_command(None, words[0])
        assert found, words
        command, words = found, words[1:]
    return command, words


# ---- blocks ----


def test_the_readmes_python(at_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").symlink_to(at_home / "Qwen")
    (code,) = blocks("README.md", "python")
    names: dict[str, Any] = {"ids": torch.randint(3, 101, (2, 40))}
    exec(code, names)
    assert torch.equal(names["teacher"], names["base"](names["ids"]).logits)
    assert (tmp_path / "my-model" / "config.json").is_file()


def test_a_script_of_ones_own(make_base: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    code = blocks("docs/distillation.md", "python")[2]
    assert 'output_dir="out", max_steps=600' in code
    code = code.replace('output_dir="out", max_steps=600', f'output_dir="{tmp_path}", max_steps=2')
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", window=8, sinks=2)
    exec(code, {"model": model, "rows": pack_tokens(torch.randint(3, 101, (16 * 40,)), 40)})


def test_a_base_is_quantised_as_the_page_says(at_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CHECKPOINT").symlink_to(at_home / "CHECKPOINT")
    exec(blocks("docs/distillation.md", "python")[1], {})
    model = retrofit.patch("int8", "ahn-gdn", window=8, sinks=2)
    assert {parameter.dtype for _, parameter in model.memory_parameters()} == {torch.float32}


def test_chosen_tokens_are_calibrated(make_base: Callable[..., PreTrainedModel]) -> None:
    by_budget, by_rows = blocks("docs/memories/expected.md", "python")
    ids = torch.randint(3, 101, (2, 70))
    names: dict[str, Any] = {"retrofit": retrofit, "base": make_base("Llama"), "ids": ids}
    names["rows_of_1024_tokens"] = [ids[:1], ids[1:]]
    for code, sizes, smaller in (
        (by_budget, '"64KiB"', '"6KiB"'),
        (by_rows, "window=512, sinks=4, rows=636", "window=8, sinks=2, rows=6"),
    ):
        assert sizes in code
        exec(code.replace(sizes, smaller), names)
        assert names["model"](ids).logits.isfinite().all()
    assert sum(sum(memory.rows) for memory in names["model"].model.memories().values()) == 24


def test_a_recipe_of_layers_is_taken(tmp_path: Path, make_base: Callable[..., PreTrainedModel]) -> None:
    (recipe,) = blocks("docs/memories/expected.md", "yaml")
    (tmp_path / "by-layer.yaml").write_text(recipe)
    base = make_base("Llama", num_hidden_layers=8)
    model = retrofit.patch(base, **read_memory(tmp_path / "by-layer.yaml"))
    sizes = [(memory.window, *memory.rows) for memory in model.model.memories().values()]
    assert sizes == [(40, 62, 62), *[(128, 62, 62)] * 3, *[(300, 90, 90)] * 4]


def test_lora_beside_a_memory_loads_as_the_page_says(
    tmp_path: Path, make_base: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    recipes = [DistillConfig(**yaml.safe_load(block)) for block in blocks("docs/distillation.md", "yaml")]
    (recipe,) = (recipe for recipe in recipes if recipe.lora)
    base = make_base("Qwen2")
    model = retrofit.patch(base, "ahn-gdn", 8, 2)
    retrofit.save_adapter(model, "DIR/adapter")
    add_lora(model, recipe.lora)
    (tmp_path / "DIR" / "lora").mkdir()
    save_lora(model, tmp_path / "DIR" / "lora")
    names = {"retrofit": retrofit, "PeftModel": peft.PeftModel, "base": base}
    exec(blocks("docs/distillation.md", "python")[0], names)
    assert [name for name, _ in names["model"].named_parameters() if "lora_" in name]


def test_the_recipes_of_the_data_page_are_some() -> None:
    recipes = [DistillConfig.from_dict(yaml.safe_load(block)) for block in blocks("docs/data.md", "yaml")]
    assert "chat" in [recipe.data_format for recipe in recipes]


def test_the_records_of_the_data_page_are_read(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    byte_tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    texts, chats = blocks("docs/data.md", "json")
    for i, text in enumerate((texts, *chats.splitlines())):
        path = tmp_path / f"{i}.jsonl"
        path.write_text(text)
        rows = list(read_tokens(str(path), byte_tokenizer, seq_len=512))
        assert len(rows) == len(text.strip().splitlines())
    byte_tokenizer.chat_template = None


def test_the_generation_of_the_gpu_page_runs(make_base: Callable[..., PreTrainedModel]) -> None:
    (code,) = blocks("docs/gpu.md", "python")  # on a CPU transformers takes the configuration and compiles nothing
    names: dict[str, Any] = {
        "model": retrofit.patch(make_base("Llama"), "ahn-gdn", 8, 2),
        "ids": torch.arange(3, 33)[None],
    }
    exec(code.replace("max_new_tokens=500", "max_new_tokens=3"), names)


def test_no_block_is_left_out() -> None:
    """A new block of Python, YAML or JSON has to be run somewhere: here, or by the test of its page."""
    here = {("README.md", "python"), ("docs/distillation.md", "python"), ("docs/distillation.md", "yaml")}
    here |= {
        ("docs/gpu.md", "python"),
        ("docs/data.md", "yaml"),
        ("docs/data.md", "json"),
        ("docs/memories/expected.md", "python"),
        ("docs/memories/expected.md", "yaml"),
    }
    for page in NAMED:
        for language in ("python", "yaml", "json"):
            if blocks(page, language):
                assert page in ELSEWHERE or (page, language) in here, f"{page}: nobody runs its {language}"


# ---- links, and files that are named ----


@pytest.mark.parametrize("page", [*PAGES, ROOT / "AGENTS.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_a_page_names_are_there(page: Path) -> None:
    """And what ``file.py: name`` says is in that file."""
    if page.name == "add-a-memory.md":
        return  # it also names those of its example: its own test knows them
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for file, name in re.findall(r"`((?:cli|[a-z_]+/[\w/.-]+)\.(?:py|yaml|json|md))(?:: ([\w.]+))?`", prose):
        if file.split("/")[0] in (
            "benchmarks",
            "cli",
            "cli.py",
            "distill",
            "docs",
            "patches",
            "recipes",
            "retrofit",
            "tests",
        ):
            assert (ROOT / file).is_file(), file
            assert not name or _written(ROOT / file, name.split(".")[-1]), f"{file}: {name}"


def _written(file: Path, name: str) -> bool:
    """Whether a file defines ``name``: a function, a class, a constant or an attribute."""
    written = rf"^\s*(def|class) {re.escape(name)}\b|^\s*(self\.)?{re.escape(name)}\b *[:=]"
    return bool(re.search(written, file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=list(NAMED))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            open_pages += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert not set(PAGES) - reached


def test_the_plot_is_of_the_figures_beside_it() -> None:
    folder = ROOT / "docs" / "pictures"
    names = runpy.run_path(str(folder / "quality.py"))
    figures = json.loads((folder / "quality.json").read_text())
    assert all(names["draw"](figures, theme).axes[0].lines for theme in names["THEMES"])
    table = text_of("docs/real-model.md")
    for points in figures["series"].values():
        assert all(f"| {kl:.4f} |" in table for _, kl in points)


def test_the_plot_of_serving_is_of_its_table() -> None:
    rows, table = json.loads((ROOT / "docs/pictures/serving.json").read_text()), text_of("docs/serving.md")
    for full, ours in zip(rows[::2], rows[1::2], strict=True):
        figures = ((f"{row['mib']:.1f}", str(row["room_for"]), f"{row['per_minute']:.1f}") for row in (full, ours))
        (mib, mib_2), (room, room_2), (speed, speed_2) = zip(*figures, strict=True)
        at_once = " | ".join(f"{row['at_once']} of {row['requests']}" for row in (full, ours))
        line = f"| {full['length']:,} | {mib} | {mib_2} | {room} | {room_2} | {at_once} | {speed} | {speed_2} |"
        assert line in table


# ---- memories ----


def page_of(kind: str) -> str:
    """The page that the README's table links for a kind."""
    (link,) = re.findall(rf"^\| \[`{re.escape(kind)}`\]\(([\w/.-]+)\)", text_of("README.md"), re.MULTILINE)
    return link


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_a_memorys_page_says_it_all(kind: str) -> None:
    text = text_of(page_of(kind))
    assert f"`{kind}`" in text.splitlines()[0]
    for option in (field.name for field in fields(KINDS[kind].Options)):
        assert f"`{option}`" in text or f"`{option}=" in text or f"{option}=" in text, f"{kind}: {option} is not named"
    assert re.search(r"^    \S.*\n    \S", text, re.MULTILINE), "no equation"
    assert "arxiv.org/abs/" in text or text.split("\n\n")[1].startswith("This memory is our own."), "no paper"
    assert "When to use it" in text
    assert re.search(r"^(## Figures|\*\*Figures here)", text, re.MULTILINE)
    assert re.search(rf"^\| .*\b{re.escape(kind)}\b", text.split("Figures")[-1], re.MULTILINE), "not in the figures"
    for form in ("readable form", "fast form"):
        row = re.search(rf"^\| {form} \| (.+) \|$", text, re.MULTILINE)
        assert row, form
        assert _places(row[1]), form


def _places(text: str) -> bool:
    """Whether every ``file: name`` in ``text`` is there; a name alone may be in any of the files named."""
    places = re.findall(r"`([^`]+)`", text)
    files = [ROOT / place.partition(":")[0] for place in places if "/" in place]
    assert all(file.is_file() for file in files), files
    names = [name for place in places if "=" not in (name := place.rpartition(": ")[2]) and "/" not in name]
    for name in (name.split(".")[-1] for name in names):
        assert any(_written(file, name) for file in files), name
    return bool(names)


def test_the_json_of_a_page_is_json() -> None:
    for page in NAMED:
        for block in blocks(page, "json"):
            for line in block.splitlines():
                json.loads(line)


# ---- what two pages say ----


def test_what_the_readme_says_of_bytes_is_what_was_measured() -> None:
    measured = text_of("docs/real-model.md")
    rows = re.findall(r"\| ([\d,]{6,}) \| \**(0\.\d{4})\b", text_of("README.md"))
    assert len(rows) > 5
    for kept, kl in rows:
        assert f"| {kept} | {kl} |" in measured, (kept, kl)


def test_the_memories_pages_have_the_figures_of_the_page_of_figures() -> None:
    figures = text_of("docs/figures.md")
    row = re.compile(r"^\| ([\w-]+) \| (\d\.\d+ \[.+?\]) \| (\S+ \[.+?\]) \| ([\d.]+) \|$", re.MULTILINE)
    rows = {found for kind in KINDS if kind != "none" for found in row.findall(text_of(page_of(kind)))}
    assert len(rows) > 8
    for kind, recall, closed, prefill in rows:
        assert re.search(rf"\| {kind} \| {re.escape(recall)} \| [\d.]+ \| {re.escape(closed)} \|", figures), kind
        assert re.search(rf"\b{kind} {prefill}\b", figures), kind


def test_the_figures_of_decoding_are_those_of_the_benchmarks() -> None:
    header, _, ratios, *_ = text_of("docs/benchmarks.md").split("| full attention | none |")[1].splitlines()
    names, values = ("full attention | none |" + header).strip("| ").split(" | "), ratios.strip("| ").split(" | ")
    measured = dict(zip(names, values, strict=True))
    (row,) = re.findall(
        r"^\| `python -m benchmarks.speed decode.*\| (full attention .+) \|$", text_of("docs/figures.md"), re.MULTILINE
    )
    told = dict(re.findall(r"(full attention|[\w-]+) (\d\.\d+)", row))
    assert len(told) > 3
    assert told.items() <= measured.items()


@pytest.mark.parametrize("page", ["README.md", "docs/what-does-not-work.md"])
def test_a_page_that_lists_families_lists_all(page: str) -> None:
    named = text_of(page).lower().replace("-", "_")
    assert [family for family in FAMILIES if not re.search(rf"\b{family}\b", named.replace("qwen2/2.5", "qwen2"))] == []


def test_the_system_is_the_one_that_the_readme_asks_for() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert "You need Linux" in text_of("README.md")
    assert [one for one in classifiers if one.startswith("Operating")] == ["Operating System :: POSIX :: Linux"]
