"""Model cards: what a stranger needs to load and judge what we write."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from patches.errors import RetrofitError
from retrofit.plain_yaml import parse_yaml

ADAPTER_HERE, MODEL_HERE = "path/or/repo-of-this-adapter", "path/or/repo-of-this-model"  # until it is pushed
LICENCE_OPEN = "That of the base: see the base's card."
REFUSED = (
    "Assisted decoding, continuous batching, packed sequences, tensor parallelism, static caches, and continuing a "
    "right-padded cache are refused with a message. vLLM needs the plugin of retrofit-lm; llama.cpp cannot run it."
)


def adapter_card(memory: dict[str, Any], details: str = "") -> str:
    """Markdown with the Hub's metadata for an adapter folder.

    Args:
        memory: the memory's configuration, ``config.memory`` of a retrofitted model.
        details: Markdown on the run that made it: data, command, figures.
    """
    return _card(memory, "peft", "adapter", _LOAD_ADAPTER, details)


def model_card(memory: dict[str, Any], details: str = "") -> str:
    """Markdown with the Hub's metadata for an exported model; arguments as :func:`adapter_card`."""
    return _card(memory, "transformers", "finetune", _LOAD_MODEL, details)


def complete_card(text: str, repo_id: str, licence: dict[str, str]) -> str:
    """A card with what is known only when it is pushed: where it will lie, and the licence of the base.

    Args:
        text: the card.
        repo_id: ``user/name`` on the Hub.
        licence: ``license``, ``license_name`` and ``license_link`` of the base's card, as far as known.

    Raises:
        RetrofitError: what stands between its ``---`` is not plain YAML.
    """
    card_metadata(text, "README.md")
    card = ModelCard(text.replace(ADAPTER_HERE, repo_id).replace(MODEL_HERE, repo_id), ignore_metadata_errors=True)
    if licence and card.data.get("license") is None:
        for key, value in licence.items():
            card.data[key] = value
        name = licence.get("license_name") or licence.get("license")
        card.text = card.text.replace(LICENCE_OPEN, f"That of the base: {name}.")
    return str(card)


def card_metadata(text: str, where: str) -> dict[str, Any]:
    """What a card says between its ``---``, empty without them; checked since anybody may have written it.

    Raises:
        RetrofitError: it is not plain YAML; ``where`` begins the sentence.
    """
    block = REGEX_YAML_BLOCK.search(text)
    if block is None:
        return {}
    found = parse_yaml(block.group(2), f"{where}, between its --- lines")
    if not isinstance(found, dict):
        raise RetrofitError(f"{where}: write only keys and plain values between its --- lines")
    return found


def is_hub_id(base: str) -> bool:
    """Whether ``base`` names a repository on the Hub and not a folder."""
    return base.count("/") == 1 and base[0] not in "./~" and not Path(base).exists()


_LOAD_ADAPTER = f"""```python
import retrofit                                   # pip install retrofit-lm
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{{base}}")
model = retrofit.load_adapter(base, "{ADAPTER_HERE}")
```
or through PEFT, which knows this type of adapter only after `import retrofit` (without it: `KeyError: 'RETROFIT'`):

```python
import retrofit
from peft import PeftModel

model = PeftModel.from_pretrained(base, "{ADAPTER_HERE}")
```"""

_LOAD_MODEL = f"""```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{MODEL_HERE}", trust_remote_code=True)
```
The code that runs it lies beside the weights; with `import retrofit` first, no trust is needed."""


def _card(memory: dict[str, Any], library: str, relation: str, load: str, details: str) -> str:
    base = memory.get("base") or "the-base-model"
    details = f"{details.strip()}\n\n" if details else ""
    # a path would be a dead link
    of_base = f"base_model: {base}\nbase_model_relation: {relation}\n" if is_hub_id(base) else ""
    revision = f" at revision `{memory['base_revision']}`" if memory.get("base_revision") else ""
    layers = "all layers" if memory.get("layers") is None else f"layers {memory['layers']} (others: {memory['others']})"
    window = f"a window of {memory['window']} tokens; up to there the model is its base"
    other = memory.get("by_layer", {})
    if any("window" in one for one in other.values()):
        window = f"a window of {memory['window']} tokens, but in some layers otherwise: `{json.dumps(other)}`"
    elif other:
        window += f"; layers have options of their own: `{json.dumps(other)}`"
    return f"""---
library_name: {library}
pipeline_tag: text-generation
{of_base}tags:
- retrofit
- long-context
- memory-{memory["kind"]}
---

# {base.rstrip("/").split("/")[-1]} with a bounded memory ({memory["kind"]})

- base: `{base}`{revision}, frozen
- memory: `{memory["kind"]}` on {layers}, options {memory.get("options") or "default"}
- kept exactly: {memory["sinks"]} sinks and {window}

## How to load it

{load.format(base=base)}

{details}## What does not work

{REFUSED}

## Licence

{LICENCE_OPEN}
"""
