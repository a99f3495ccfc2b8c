"""Loading checkpoints and tokenizers: what transformers says when it cannot, in one sentence."""

import os
import sys
import tempfile
import timeit
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from patches.errors import RetrofitError, first_line
from patches.pretrained import refuse_tensor_parallel

from .card import is_hub_id
from .families import FAMILIES, find_family
from .gguf import locate, name_source, unquantised
from .hub_errors import transient
from .untrusted import refuse_nan

SAFELY = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False}
MOST_LAYERS = 1000  # several times those of any published model
WEIGHTS_PER_BYTE = 4  # of the densest quantisation
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # their tokenizer.json says all
SAMPLE = "\n Once  upon\ta time, 1,234 Straßen \u00a0漢字 don't 🙂."  # what tokenizers differ about
SLOW = "note: this CPU computes faster in float32 than in bfloat16: choose dtype float32"


def load_config(path: str, **kwargs: Any) -> Any:
    """The configuration of a checkpoint (path or Hub id; in GGUF, as :func:`retrofit.gguf.locate` takes it).

    Raises:
        RetrofitError: there is no such path or id, its ``config.json`` cannot be read, or the family is not supported.
    """
    where, gguf = locate(path)
    if os.path.lexists(where) and not Path(where).exists():
        raise RetrofitError(f"{path} is a link that leads nowhere: give the checkpoint's folder")
    if Path(where).exists() and not Path(where).is_dir():
        raise RetrofitError(f"{path} is a file: give the checkpoint's folder, a GGUF file, or a Hub id")
    if Path(where).is_dir() and not gguf and not (Path(where) / "config.json").is_file():
        raise RetrofitError(f"{str(path)!r} has no config.json and no GGUF file: give a checkpoint folder")
    if not Path(where).exists():
        _ask_once(where, kwargs)
    try:
        config = AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **gguf, **kwargs})
    except Exception as error:  # a damaged configuration can fail anywhere in transformers
        raise RetrofitError(_explain(path, error)) from error
    if gguf:
        name_source(config, path)
    find_family(config)
    if config.num_hidden_layers > MOST_LAYERS:
        raise RetrofitError(
            f"{path}: config.json asks for {config.num_hidden_layers} layers, which no model has: fetch it again"
        )
    return config


def _ask_once(path: str, kwargs: dict[str, Any]) -> None:
    """Refuse what neither the cache nor the Hub has: where nobody answers, transformers asks for half a minute."""
    if not is_hub_id(path):
        raise RetrofitError(f"there is no folder {path!r}, and it is not a Hub id (user/name) either")
    revision, token = kwargs.get("revision"), kwargs.get("token")
    if isinstance(try_to_load_from_cache(path, "config.json", kwargs.get("cache_dir"), revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json", revision=revision), token=token)
    except OfflineModeIsEnabled:
        return  # transformers says so
    except (HTTPError, OSError, ValueError) as error:
        if transient(error):
            raise RetrofitError(f"there is no folder {path!r}, and the Hub cannot be reached to look for it") from error


def load_base(path: str, **kwargs: Any) -> PreTrainedModel:
    """A causal LM of a supported family, base or exported retrofit, from a path or Hub id. Weights come in safetensors,
    or in GGUF, whose quantised tensors become ordinary ones.

    Args:
        path: a checkpoint folder, a Hub id, or a GGUF file as :func:`retrofit.gguf.locate` takes it.
        **kwargs: for ``from_pretrained`` (``dtype`` defaults to the checkpoint's own; whoever gives one, if only
            "auto", is told where bfloat16 is slow).

    Raises:
        RetrofitError: as :func:`load_config`, or weights that are missing, damaged or in another format.
    """
    refuse_tensor_parallel(kwargs)
    where, gguf = locate(path)
    config = load_config(path, **{key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs})
    try:
        if not gguf:
            _refuse_larger(where, config)
        how = {**SAFELY, **gguf, **kwargs, "output_loading_info": True}
        model, report = AutoModelForCausalLM.from_pretrained(where, **how)
    except RetrofitError:
        raise
    except Exception as error:  # so can damaged weights, or a keyword that from_pretrained does not know
        raise RetrofitError(_explain(path, error)) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise RetrofitError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them: fetch the checkpoint again"
        )
    refuse_nan(path, model.named_parameters())
    chosen = "dtype" in kwargs and model.dtype == torch.bfloat16 and not torch.accelerator.is_available()
    if chosen and os.environ.get("LOCAL_RANK", "0") == "0" and bfloat16_is_slow():
        print(SLOW, file=sys.stderr)
    return unquantised(model, path) if gguf else model


@cache
def bfloat16_is_slow() -> bool:
    """Whether a product takes this CPU longer in bfloat16 than in float32, as it does without instructions for it.

    With AVX2 alone it took 36 times as long (1,024 x 576 by 576 x 1,536, torch 2.13).
    """
    return _seconds(torch.bfloat16) > _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The least time of five for a product that takes a CPU a millisecond in float32."""
    left = right = torch.ones(256, 256, dtype=dtype)
    return min(timeit.repeat(lambda: left @ right, number=1, repeat=5))


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint, of the class that was saved.

    Raises:
        RetrofitError: it has none, or it cannot be read.
    """
    where, gguf = locate(path)
    try:
        how = {"trust_remote_code": False, **gguf}
        tokenizer = AutoTokenizer.from_pretrained(where, **how)
        # beside a model of some types (qwen2), AutoTokenizer takes the type's own class whatever was saved there
        saved = {} if gguf else get_tokenizer_config(where)
        if saved.get("tokenizer_class") in GENERIC_TOKENIZERS and type(tokenizer) is not PreTrainedTokenizerFast:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(where, **how)
        special = set(tokenizer.all_special_ids)  # never ends where the unknown token is itself unknown
    except Exception as error:  # tokenizers raise bare Exception on a damaged file
        raise RetrofitError(
            f"{path} has no usable tokenizer ({first_line(error)}): save one beside the checkpoint"
        ) from None
    # without a file of its own, transformers makes up a tokenizer that knows nothing but its special tokens
    if tokenizer.vocab_size <= len(special):
        raise RetrofitError(f"{path} has no tokenizer: save one beside the checkpoint")
    return tokenizer


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer with ids that the base has no embedding for.

    Raises:
        RetrofitError: that is the case.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= config.vocab_size:
        raise RetrofitError(
            f"the tokenizer has ids up to {largest}, the base has embeddings for {config.vocab_size} tokens: use the "
            "tokenizer that belongs to the base, or enlarge the base with resize_token_embeddings and save both"
        )


def check_tokenizer(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer that would not be itself in a folder with this configuration.

    transformers chooses a class by both: what it loads from there may be another one, with other ids.

    Raises:
        RetrofitError: that is the case, or :func:`check_vocabulary` refuses it.
    """
    check_vocabulary(tokenizer, config)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        loaded = AutoTokenizer.from_pretrained(scratch, config=config, trust_remote_code=False)
    text = " ".join(list(tokenizer.get_vocab())[:1000]) + SAMPLE
    if loaded.get_vocab() != tokenizer.get_vocab() or loaded(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise RetrofitError(
            f"this {type(tokenizer).__name__}, saved beside a {config.model_type!r} model, loads as a "
            f"{type(loaded).__name__} with other ids: give the tokenizer that AutoTokenizer loads with the base"
        )


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
    if "Unknown gguf model_type" in text:
        return f"transformers cannot read a GGUF of this family from {path}: give the original checkpoint's folder"
    unknown = ("does not recognize this architecture", "Unrecognized model", "custom code", "GGUF model with arch")
    if any(words in text for words in unknown):
        return f"{path} is of a family that cannot be retrofitted: the families supported are {', '.join(FAMILIES)}"
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{path} cannot be loaded: {name}{text[:240]}"
