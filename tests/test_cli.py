"""The command line: its help, and that every mistake ends in one sentence, status 2 and nothing written."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner, Result

import retrofit
from cli import ROOMS, app

VERBS = [
    *([verb] for verb in ROOMS if verb not in ("bench", "recipes")),
    ["bench", "run"],
    *(["recipes", verb] for verb in ("ls", "show", "cp", "check")),
]
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def run(*arguments: object) -> Result:
    line = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, line)
    result.line = line
    return result


def flags_of(line: list[str]) -> set[str]:
    """The flags of the command that a line begins with; of ``bench window`` those of ``window``."""
    command = get_command(app)
    for word in line:
        inner = command.get_command(None, word) if hasattr(command, "get_command") else None
        if inner is None:
            break
        command = inner
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def refused(result: Result, *said: str) -> None:
    """The contract for bad input. Flags that the sentence names are the verb's, or those that were given to it."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    progress, error, sentence = result.stderr.partition("error: ")
    assert error, result.stderr
    assert not progress or progress.startswith(("loading ", "reading ")), result.stderr
    assert sentence.count("\n") == 1, result.stderr
    assert sentence.endswith("\n")
    for words in said:
        assert words in sentence
    of_others = re.sub(r"(`[^`]*`|retrofit \w+( -\S+( \w+)?)+|--engine transformers)", "", sentence)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", of_others))
    foreign = named - flags_of(result.line) - {word.partition("=")[0] for word in result.line}
    assert not foreign, sentence


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, byte_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    retrofit.save_adapter(retrofit.patch(str(byte_checkpoint), "ahn-gdn", window=8, sinks=2), folder)
    return folder


def damaged_copy(folder: Path, target: Path, damage: Callable[[bytes], bytes]) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        content = path.read_bytes()
        (target / path.name).write_bytes(damage(content) if path.suffix == ".safetensors" else content)
    return target


@pytest.mark.parametrize("verb", [[], ["bench"], ["recipes"], *VERBS], ids=" ".join)
def test_help_of_every_verb_has_an_example(verb: list[str]) -> None:
    result = run(*verb, "--help")
    assert result.exit_code == 0
    assert verb in (["bench"], ["recipes"]) or f"retrofit {' '.join(verb)}" in result.output.split("Example:")[1]


def test_help_waits_for_no_heavy_import() -> None:
    """Of no verb, all in one process."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom cli import app\n"
        f"for verb in {VERBS!r}:\n"
        "    assert CliRunner().invoke(app, [*verb, '--help']).exit_code == 0\n"
        "    assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys(), verb\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_imported_or_printed_that_a_verb_has_no_use_for(
    byte_checkpoint: Path, adapter: Path, text: Path, tmp_path: Path
) -> None:
    """In one process, which writes a line to both streams after each verb; only ``eval`` reads texts."""
    lines = [
        ["patch", str(byte_checkpoint), "-o", "patched", "--window", "8"],
        ["merge", str(byte_checkpoint), str(adapter), "-o", "merged"],
        ["generate", "merged", "--prompt", "x", "--max-new-tokens", "2", "--temperature", "1"],
        ["estimate", "patched", "--length", "64"],
        ["eval", "merged", "--data", str(text), "--rows", "1"],
    ]
    code = (
        "import sys\nfrom contextlib import suppress\nfrom cli import main\n"
        f"for line in {lines!r}:\n"
        "    with suppress(SystemExit):\n        main(line)\n"
        "    for stream in (sys.stdout, sys.stderr):\n        print('--', file=stream, flush=True)\n"
        "    found = {'peft', 'bitsandbytes', 'deepspeed', 'lm_eval', 'vllm'} & sys.modules.keys()\n"
        "    found |= set() if line[0] == 'eval' else {'datasets'} & sys.modules.keys()\n"
        "    assert not found, (line, found)\n"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=where)
    assert done.returncode == 0, done.stderr
    patched, merged, _, _, evaluated, rest = done.stdout.split("--\n")
    assert patched.startswith("patched: RetrofitQwen2ForCausalLM, memory none")
    assert merged.startswith("merged: RetrofitQwen2ForCausalLM, memory ahn-gdn")
    assert patched.count("\n") == merged.count("\n") == 1
    assert evaluated.startswith("what is compared")
    assert not rest
    *said, evaluated, rest = done.stderr.split("--\n")
    assert said == [f"loading {what}\n" for what in (byte_checkpoint, byte_checkpoint, "merged", "patched")]
    assert [line.split()[0] for line in evaluated.splitlines()] == ["loading", "only"]
    assert not rest


def test_no_verb_shows_the_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "distill" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["distil"], "Did you mean 'distill'?"),
        (["distill"], "Missing argument"),
        (["distill", "base", "--windw", "3"], "--windw"),
        (["distill", "base", "--window", "many"], "--window"),
        (["distill", "base", "--option", "heads"], "--option KEY=VALUE"),
        (["distill", "base", "--lora", "["], "lora: not a YAML file"),
        (["distill", "base", "--max-stebs", "3"], "--max-steps"),
        (["distill", "base", "--lr", "3"], "'lr' is called 'learning_rate': rename it"),
        (["distill", "base", "--adam-beta1", "x"], "--adam-beta1"),
        (["distill", "base", "--window", "0"], "window: 0 is out of range"),
        (["distill", "base", "--sinks", "-1"], "sinks: -1 is out of range"),
        (["distill", "base", "--output", "o"], "has no 'data'"),
        (["distill", "no-such.yaml"], "no recipe file or shipped recipe no-such.yaml"),
        (["generate", "model"], "--prompt"),
        (["generate", "model", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "model", "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "model", "--prompt", "x", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "4294967296"], "--seed"),
        (["demo", "--json", "."], "--json"),
        (["demo", "--memory", "ahn-gnd"], "did you mean 'ahn-gdn'?"),
        (["estimate"], "BASE"),
        (["demo", "--memory", "all"], "'all' is not one of none"),
        (["estimate", "Qwen2.5-3B", "--bandwidth", "4800"], "go together"),
        (["estimate", "Qwen2.5-3B", "--memory", "ahn-gnd"], "did you mean 'ahn-gdn'?"),
        (["estimate", "Qwen2.5-3B", "--window", "0"], "window=0"),
        (["bench", "run", "--repeats", "0"], "repeats=0"),
        (["bench", "run", "--hidden", "100"], "hidden=100"),
        (["report", "nowhere"], "there is no folder nowhere"),
        (["report", "."], "it holds no run and no evaluation"),
        (["report", ".", "-o", "metrics.json"], "ends in .html"),
        (["recipes", "show", "small-text-ahn-gnd"], "did you mean 'small-text-ahn-gdn'?"),
        (["recipes", "check", "no-such.yaml"], "no-such.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*arguments), said)
    assert not list(tmp_path.iterdir())


def verbs_on(base: object, text: Path, out: Path, adapter: object = "adapter") -> dict[str, list[object]]:
    """Each verb that takes a base, on this one."""
    return {
        "distill": ["distill", base, "--data", text, "-o", out, "--window", 8, "--sinks", 2, "--max-length", 32],
        "patch": ["patch", base, "-o", out, "--window", 8],
        "merge": ["merge", base, adapter, "-o", out],
        "generate": ["generate", base, "--prompt", "the"],
    }


@pytest.mark.parametrize("verb", ["distill", "patch", "merge", "generate"])
def test_no_such_base(verb: str, text: Path, out: Path, adapter: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    refused(run(*verbs_on(missing, text, out, adapter)[verb]), f"there is no folder '{missing}'")
    assert not out.exists()


@pytest.mark.parametrize("verb", ["distill", "patch", "merge", "generate"])
def test_a_family_we_do_not_support(
    verb: str, text: Path, out: Path, adapter: Path, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    other = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1)).save_pretrained(other)
    byte_tokenizer.save_pretrained(other)
    refused(run(*verbs_on(other, text, out, adapter)[verb]), "gpt2", "qwen2, qwen3, llama, mistral")
    assert not out.exists()


@pytest.mark.parametrize("verb", ["distill", "generate"])
def test_a_checkpoint_without_a_tokenizer(
    verb: str, text: Path, out: Path, tmp_path: Path, make_base: Callable[..., PreTrainedModel]
) -> None:
    make_base("Qwen2").save_pretrained(tmp_path / "bare")
    refused(run(*verbs_on(tmp_path / "bare", text, out)[verb]), "tokenizer")
    assert not out.exists()


def test_patch_calibrates_on_text(byte_checkpoint: Path, out: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words that repeat, and some that do not: 0 1 2 3 4 5.\n" * 60, encoding="utf-8")
    arguments = ("patch", byte_checkpoint, "-o", out, "--window", 8, "--memory", "expected", "--option", "rows=4")
    refused(run(*arguments), "add --data FILE")
    result = run(*arguments, "--data", text)
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert all(memory.level.abs().min() > 0 for memory in model.model.memories().values())
    refused(run("patch", byte_checkpoint, "-o", tmp_path / "b", "--window", 8, "--data", text), "drop --data")
    for data in ((), ("--data", text)):  # of `joint` there is a start without texts, too
        result = run("patch", byte_checkpoint, "-o", out, "--window", 8, "--memory", "joint", "--overwrite", *data)
        assert result.exit_code == 0, result.output
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert all(memory.opening.any() == bool(data) for memory in model.model.memories().values())


def test_patch_needs_no_tokenizer(out: Path, tmp_path: Path, make_base: Callable[..., PreTrainedModel]) -> None:
    make_base("Qwen2").save_pretrained(tmp_path / "bare")
    result = run("patch", tmp_path / "bare", "-o", out, "--window", 8)
    assert result.exit_code == 0, result.output
    assert "\nnote: exported without a tokenizer" in result.stderr
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.memory["window"] == 8


@pytest.mark.parametrize("content", ["", "too short"])
def test_too_little_data(content: str, byte_checkpoint: Path, text: Path, out: Path) -> None:
    text.write_text(content)
    refused(run(*verbs_on(byte_checkpoint, text, out)["distill"]), str(text))
    assert not out.exists()


def test_no_such_data(byte_checkpoint: Path, tmp_path: Path, out: Path) -> None:
    missing = tmp_path / "nowhere.txt"
    refused(run(*verbs_on(byte_checkpoint, missing, out)["distill"]), str(missing))
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--window", "0"], "window=0"),
        (["--sinks", "-1"], "sinks=-1"),
        (["--memory", "ahn-gnd"], "did you mean 'ahn-gdn'?"),
        (["--memory", "ahn-gdn", "--option", "window=3"], "--option window"),
        (["--memory", "ahn-gdn", "--option", "no_such=3"], "no_such"),
        (["--option", "layers=[0,9]"], "9 is not a layer"),
        (["--option", "others=ful"], "'full'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_of_a_memory(flags: list[str], said: str, byte_checkpoint: Path, out: Path) -> None:
    refused(run("patch", byte_checkpoint, "-o", out, *flags), said)
    assert not out.exists()


@pytest.mark.parametrize("verb", ["distill", "patch", "merge", "generate"])
@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"not safetensors"], ids=["cut", "other"])
def test_a_damaged_base(
    verb: str, damage: Callable[[bytes], bytes], byte_checkpoint: Path, text: Path, out: Path, adapter: Path
) -> None:
    base = damaged_copy(byte_checkpoint, out.parent / "damaged", damage)
    refused(run(*verbs_on(base, text, out, adapter)[verb]), str(base))
    assert not out.exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b""], ids=["cut", "empty"])
def test_a_damaged_adapter(damage: Callable[[bytes], bytes], byte_checkpoint: Path, out: Path, adapter: Path) -> None:
    broken = damaged_copy(adapter, out.parent / "damaged", damage)
    refused(run("merge", byte_checkpoint, broken, "-o", out), str(broken))
    assert not out.exists()


def test_an_adapter_of_another_base(
    tmp_path: Path, out: Path, adapter: Path, byte_tokenizer: PreTrainedTokenizerFast, byte_checkpoint: Path
) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(byte_checkpoint)
    other.model.embed_tokens.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer.save_pretrained(tmp_path / "other")
    refused(run("merge", tmp_path / "other", adapter, "-o", out), "made for")
    refused(run("generate", tmp_path / "other", "--adapter", adapter, "--prompt", "x"), "made for")
    assert not out.exists()


@pytest.mark.parametrize("verb", ["distill", "patch", "merge", "demo"])
def test_an_output_folder_that_is_taken(verb: str, byte_checkpoint: Path, text: Path, out: Path, adapter: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    verbs = {"demo": ["demo", "-o", out], **verbs_on(byte_checkpoint, text, out, adapter)}
    refused(run(*verbs[verb]), str(out), "--overwrite")
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    if verb != "distill":  # which adds to a folder, and removes from it what a run wrote
        refused(run(*verbs[verb], "--overwrite"), "thesis.txt, which Retrofit did not write")
        assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("theirs", "in_a_run"),
    [("checkpoint-500/weights.bin", False), ("metrics.json", False), ("model/a", False), ("model/a", True)],
)
def test_a_run_removes_only_what_a_run_wrote(
    theirs: str, in_a_run: bool, byte_checkpoint: Path, text: Path, out: Path
) -> None:
    (out / theirs).parent.mkdir(parents=True)
    (out / theirs).write_text("mine")
    if in_a_run:
        (out / "run.json").write_text("{}")
    line = (*verbs_on(byte_checkpoint, text, out)["distill"], "--overwrite")
    refused(run(*line), "did not write" if theirs == "model/a" else "was not written by")
    assert (out / theirs).read_text() == "mine"


@pytest.mark.parametrize("verb", ["distill", "patch", "merge"])
@pytest.mark.parametrize("above", [False, True], ids=["itself", "above"])
def test_the_output_never_replaces_the_base(
    verb: str, above: bool, byte_checkpoint: Path, text: Path, tmp_path: Path, adapter: Path
) -> None:
    base = shutil.copytree(byte_checkpoint, tmp_path / "bases" / "base")
    before = sorted(path.name for path in base.iterdir())
    arguments = verbs_on(base, text, base.parent if above else base, adapter)[verb]
    refused(run(*arguments, "--overwrite"), "which is an input")
    assert sorted(path.name for path in base.iterdir()) == before


@pytest.mark.parametrize("verb", ["distill", "patch"])
def test_an_export_is_no_base(verb: str, byte_checkpoint: Path, text: Path, out: Path, tmp_path: Path) -> None:
    """Its memory would be left out. Who has loaded it can have its base patched anew."""
    export = tmp_path / "export"
    retrofit.patch(str(byte_checkpoint), "joint", window=8, sinks=2).save_pretrained(export)
    shutil.copy(byte_checkpoint / "tokenizer.json", export)
    shutil.copy(byte_checkpoint / "tokenizer_config.json", export)
    line = verbs_on(export, text, out)[verb]
    refused(run(*line), f"{export} has a memory already, which would be lost: give the base {byte_checkpoint}")
    assert not out.exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert retrofit.patch(model, "none", window=8).config.memory["kind"] == "none"


def test_the_output_never_replaces_the_adapter(byte_checkpoint: Path, adapter: Path) -> None:
    refused(run("merge", byte_checkpoint, adapter, "-o", adapter, "--overwrite"), "which is an input")
    assert (adapter / "adapter_config.json").is_file()


def test_a_folder_above_the_current_one_is_no_output(
    byte_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    refused(run("patch", byte_checkpoint, "-o", "..", "--overwrite"), "choose a folder inside it")


@pytest.mark.parametrize("missing", ["accelerate", "datasets"])
def test_an_extra_that_is_not_installed_is_named(missing: str, byte_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    line = ["distill", str(byte_checkpoint), "--data", "data", "-o", "out"]
    code = f"import sys; sys.modules[{missing!r}] = None; from cli import main; main({line!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f"error: this needs {missing}: pip install 'retrofit-lm[train]'\n")


def test_a_file_where_the_output_folder_should_be(byte_checkpoint: Path, out: Path) -> None:
    out.write_text("mine")
    refused(run("patch", byte_checkpoint, "-o", out), str(out))
    assert out.read_text() == "mine"


@pytest.mark.parametrize("verb", ["distill", "recipes check"])
def test_a_recipe_with_a_misspelt_key(verb: str, tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("windw: 8\n")
    refused(run(*verb.split(), recipe), str(recipe), "did you mean 'window'?")


def test_an_empty_prompt(byte_checkpoint: Path) -> None:
    refused(run("generate", byte_checkpoint, "--prompt", ""), "prompt")


def test_ctrl_c_ends_in_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distill.command.shipped_recipes", interrupt)
    result = run("recipes", "ls")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("distill.command.shipped_recipes", broken)
    assert repr(run("recipes", "ls").exception) == "ValueError('a bug')"
