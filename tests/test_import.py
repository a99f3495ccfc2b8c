"""``import retrofit``: what it waits for, what it offers, and what stands in its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import distill
import retrofit
from tests.helpers import ROOT


def python(code: str, folder: Path, *, first: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a script in ``folder``, which Python looks through before the checkout."""
    (folder / "script_of_mine.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(first), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "script_of_mine.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", ["patches.kinds", "patches.cache", "distill.parallel.launch"])
def test_any_module_of_ours_can_be_the_first(module: str, tmp_path: Path) -> None:
    done = python(f"import retrofit, {module}; retrofit.patch", tmp_path)
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_imported_before_it_is_used(tmp_path: Path) -> None:
    code = (
        "import retrofit, retrofit.files, retrofit.import_guard, sys\n"
        "assert issubclass(retrofit.RetrofitError, ValueError)\n"
        "print(*(name for name in ('torch', 'transformers', 'peft', 'datasets') if name in sys.modules))"
    )
    done = python(code, tmp_path)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_everything_it_offers_is_there() -> None:
    for name in retrofit.__all__:
        assert getattr(retrofit, name).__name__ == name
    assert retrofit.DistillTrainer is distill.DistillTrainer
    assert retrofit.DistillConfig is distill.DistillConfig
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        _ = retrofit.pach


@pytest.mark.parametrize("order", ["retrofit first", "transformers first"])
def test_an_export_needs_no_trust(order: str, byte_checkpoint: Path, tmp_path: Path) -> None:
    """Nothing of the package is used by name: importing it must be enough."""
    retrofit.patch(str(byte_checkpoint), "ahn-gdn", window=8, sinks=2).save_pretrained(tmp_path / "export")
    imports = ["import retrofit", "from transformers import AutoModelForCausalLM, AutoConfig, AutoModel"]
    code = "\n".join(imports if order == "retrofit first" else imports[::-1])
    code += (
        "\nmodel = AutoModelForCausalLM.from_pretrained('export', trust_remote_code=False)"
        "\nassert type(model).__module__ == 'patches.qwen2' == type(AutoModel.from_pretrained('export')).__module__"
        "\nassert AutoConfig.from_pretrained('export').memory['kind'] == 'ahn-gdn'"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("patches/__init__.py", "import retrofit"),
        ("patches.py", "import retrofit"),
        ("patches.py", "import retrofit.files"),
        ("distill.py", "from retrofit import DistillTrainer"),
        ("distill/__init__.py", "from retrofit import DistillConfig"),
        ("distill.py", "import distill, retrofit; retrofit.DistillTrainer"),
        ("distill.py", "import sys, cli; sys.argv[1:] = ['recipes', 'ls']; cli.main()"),
        ("patches/__init__.py", "import sys, cli; sys.argv[1:] = ['patch', 'base', '-o', 'out']; cli.main()"),
    ],
)
def test_what_stands_in_the_way_is_named(file: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine = True\n")
    done = python(code, tmp_path)
    here = path.parent if path.name == "__init__.py" else path
    package = file.partition("/")[0].removesuffix(".py")
    sentence = f"{here} stands in the way of retrofit's own package {package!r}: rename it"
    assert sentence in done.stderr.splitlines()[-1], done.stderr
    assert done.returncode == (2 if "cli" in code else 1)


@pytest.mark.parametrize("file", ["distill.py", "recipes/__init__.py", "recipes/mine.yaml", "distill/notes.txt"])
def test_what_does_not_matter_is_left_alone(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine: True\n" if file.endswith("yaml") else "")
    code = (
        "import retrofit; retrofit.patch, retrofit.files"
        if "distill.py" in file
        else ("import sys, cli; sys.argv[1:] = ['recipes', 'show', 'small-text-kvm']; cli.main()")
    )
    done = python(code.replace(", retrofit.files", ""), tmp_path)
    assert done.returncode == 0, done.stderr
