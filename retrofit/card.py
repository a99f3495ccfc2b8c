"""Model cards: what a stranger needs to load and judge what we write."""

from pathlib import Path
from typing import Any


def adapter_card(config: Any, details: str = "") -> str:
    """Markdown with the Hub's metadata for an adapter folder; ``details`` tells of the run that made it."""
    return _card(config, "adapter", _LOAD_ADAPTER, details)


def model_card(config: Any, details: str = "") -> str:
    """Markdown with the Hub's metadata for an exported model; ``details`` tells of the run that made it."""
    return _card(config, "finetune", _LOAD_MODEL, details)


_LOAD_ADAPTER = """```python
import retrofit                                   # pip install retrofit-lm
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = retrofit.load_adapter(base, "path/or/repo-of-this-adapter")
```"""

_LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/or/repo-of-this-model", trust_remote_code=True)
```
The code that runs it lies beside the weights; with `import retrofit` first, no trust is needed."""


def _card(config: Any, relation: str, load: str, details: str) -> str:
    memory = config.memory
    base = memory.get("base") or "the-base-model"
    tags = ["retrofit", "long-context", f"memory-{memory['kind']}"]
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    # a Hub id; a path would be a dead link
    if base.count("/") == 1 and base[0] not in "./~" and not Path(base).exists():
        metadata += [f"base_model: {base}", f"base_model_relation: {relation}"]
    metadata += ["tags:", *(f"- {tag}" for tag in tags), "---"]
    revision = f" at revision `{memory['base_revision']}`" if memory.get("base_revision") else ""
    layers = "all layers" if memory.get("layers") is None else f"layers {memory['layers']} (others: {memory['others']})"
    lines = [
        *metadata,
        "",
        f"# {base.rstrip('/').split('/')[-1]} with a bounded memory ({memory['kind']})",
        "",
        f"- base: `{base}`{revision}, frozen",
        f"- memory: `{memory['kind']}` on {layers}, options {memory.get('options') or 'default'}",
        f"- kept exactly: {memory['sinks']} sinks and a window of {memory['window']} tokens; up to that length the "
        "model is its base",
        "",
        "## How to load it",
        "",
        load.format(base=base),
        "",
        "## What does not work",
        "",
        "Assisted decoding, continuous batching, packed sequences, tensor parallelism, static caches, and continuing a "
        "right-padded cache are refused with a message.",
        "",
    ]
    if details:
        lines += [details.strip(), ""]
    return "\n".join(lines)
