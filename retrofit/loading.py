"""Loading checkpoints and tokenizers: what transformers says when it cannot, in one sentence."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from patches.errors import RetrofitError
from patches.modeling import refuse_tensor_parallel

from .families import find_family

SAFELY = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False}
MOST_LAYERS = 1000  # several times those of any published model
WEIGHTS_PER_BYTE = 4  # of the densest quantisation


def load_config(path: str, **kwargs: Any) -> Any:
    """The configuration of a checkpoint (path or Hub id).

    Raises:
        RetrofitError: there is no such path or id, its ``config.json`` cannot be read, or the family is not supported.
    """
    if Path(path).is_file():
        raise RetrofitError(f"{path} is a file: give the checkpoint's folder, or a Hub id")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise RetrofitError(f"{str(path)!r} has no config.json: it is not a checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(path, **{"trust_remote_code": False, **kwargs})
    except Exception as error:  # a damaged configuration can fail anywhere in transformers
        raise RetrofitError(_explain(path, error)) from error
    find_family(config)
    if config.num_hidden_layers > MOST_LAYERS:
        raise RetrofitError(
            f"{path}: config.json asks for {config.num_hidden_layers} layers, which no model has: fetch it again"
        )
    return config


def load_base(path: str, **kwargs: Any) -> PreTrainedModel:
    """A causal LM of a supported family, base or exported retrofit, from a path or Hub id. Weights come in safetensors
    only.

    Args:
        path: a checkpoint folder or a Hub id.
        **kwargs: for ``from_pretrained`` (``dtype`` defaults to the checkpoint's own).

    Raises:
        RetrofitError: as :func:`load_config`, or weights that are missing, damaged or not in safetensors.
    """
    refuse_tensor_parallel(kwargs)
    config = load_config(path, **{key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs})
    try:
        _refuse_larger(path, config)
        model, report = AutoModelForCausalLM.from_pretrained(path, **{**SAFELY, **kwargs, "output_loading_info": True})
    except RetrofitError:
        raise
    except Exception as error:  # so can damaged weights, or a keyword that from_pretrained does not know
        raise RetrofitError(_explain(path, error)) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise RetrofitError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them: it is not a whole checkpoint"
        )
    return model


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        RetrofitError: it has none, or it cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **{"trust_remote_code": False, **kwargs})
    except Exception as error:  # tokenizers raise bare Exception on a damaged file
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise RetrofitError(f"{path} has no usable tokenizer ({reason}): save one beside the checkpoint") from None
    # without a file of its own, transformers makes up a tokenizer that knows nothing but its special tokens
    if tokenizer.vocab_size <= len(set(tokenizer.all_special_ids)):
        raise RetrofitError(f"{path} has no tokenizer: save one beside the checkpoint")
    return tokenizer


def _refuse_larger(path: str, config: Any) -> None:
    """Refuse a configuration that cannot be that of the weights beside it, because they are too small by far.

    transformers makes room for all that a configuration asks for before it compares a single shape.
    """
    there = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if not there:  # a Hub id, or no weights at all
        return
    with torch.device("meta"):
        asked = AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
    if asked > WEIGHTS_PER_BYTE * there:
        raise RetrofitError(
            f"{path}: config.json asks for {asked:,} weights and its files have {there:,} bytes: damaged or cut short, "
            "fetch the checkpoint again"
        )


def _explain(path: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError) or ("safetensor" in text.lower() and "header" in text.lower()):
        return f"{path}: a safetensors file is damaged or cut short ({text[:120]}): fetch the checkpoint again"
    if "does not appear to have a file named" in text or "no file named" in text.lower():
        return f"{path} holds no weights in safetensors format: convert them with save_pretrained first"
    if "Repo id must" in text:
        return f"there is no folder {path!r}, and it is not a Hub id (user/name) either"
    if (
        "is not a local folder and is not a valid model identifier" in text
        or "Repository Not Found" in text
        or "404" in text
    ):
        return f"there is no folder {path!r}, and the Hub has no such model (or it is private: set HF_TOKEN)"
    if "couldn't connect" in text or "offline" in text.lower() or "Cannot send a request" in text:
        return f"there is no folder {path!r}, and the Hub cannot be reached to look for it"
    if "ignore_mismatched_sizes" in text:
        return f"{path}: config.json and weights differ in their shapes: fetch the checkpoint again"
    if "does not recognize this architecture" in text or "Unrecognized model" in text or "custom code" in text:
        return (
            f"{path} is of a family that cannot be retrofitted: the families supported are qwen2, qwen3, llama, mistral"
        )
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{path} cannot be loaded: {name}{text[:240]}"
