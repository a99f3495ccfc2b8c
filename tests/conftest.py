"""Fixtures every test may ask for: tiny random bases of all families, NaN in fresh tensors, reference data."""

import copy
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tests.hub_server import HubServer

# tokenised data goes into a cache of our own, in the processes that tests start too; datasets reads it when imported
_CACHE = tempfile.TemporaryDirectory(prefix="retrofit-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

# one thread: the tensors are tiny and pytest runs one process per core
torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")
# thin files beside those four, and what makes them different; a test of all families meets one of these, in turn
EXPERTS: dict[str, object] = {
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # the others know no float64
}
OTHERS: dict[str, dict[str, object]] = {
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48},
    "Ministral": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}


def tiny_base(family: str, *, seed: int = 0, attn_implementation: str = "sdpa", **config: object) -> PreTrainedModel:
    """A random base in eval mode: 2 layers, 4 query heads on 2 key/value heads of 16, vocabulary 101.

    ``config`` overrides these. Biases are random too: transformers starts them at zero, which would hide a lost one.
    """
    defaults: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "Mistral":
        defaults["sliding_window"] = None
    settings = getattr(transformers, f"{family}Config")(**{**defaults, **OTHERS.get(family, {}), **config})
    settings._attn_implementation = attn_implementation
    torch.manual_seed(seed)
    base = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return base


@pytest.fixture(params=(*FAMILIES, "other"))
def family(request: pytest.FixtureRequest) -> str:
    """Each of the four families, and one of the others: which, hangs on the test's name."""
    if request.param != "other":
        return request.param
    return list(OTHERS)[zlib.crc32(request.node.name.encode()) % len(OTHERS)]


@pytest.fixture
def make_base() -> Callable[..., PreTrainedModel]:
    """:func:`tiny_base`, for tests that choose the family or the config themselves."""
    return tiny_base


@pytest.fixture
def base(family: str) -> PreTrainedModel:
    """A tiny random base of each family in turn."""
    return tiny_base(family)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: ids 3 to 258; 0 pads, 1 begins, 2 ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of ``datasets``, in a folder of this test's own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def chat_tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A token per byte, two that begin and end a turn, and a template that writes them."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a tiny random Qwen2 and the byte tokenizer, as a user has one. Not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-qwen2"
    tiny_base("Qwen2", vocab_size=len(byte_tokenizer)).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A small Hub that huggingface_hub, its cache empty and without a token, takes for the real one."""
    server = HubServer()
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        "HF_HUB_DISABLE_XET": True,  # large files go over LFS, which the server speaks
        "HF_HUB_OFFLINE": False,
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.endpoint)  # of the functions without an HfApi
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its own tries
    yield server
    server.stop()


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return with NaN, so that reading it before writing it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference numbers and a small checkpoint in a folder beside the checkout; not part of the product."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the reference folder ../shared is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device guard of CUDA, compiled: with it, fake tensors can stand on GPUs that are not there."""
    from torch.utils.cpp_extension import include_paths

    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to build a device guard for CUDA with")
    if torch.version.cuda:
        pytest.skip("this torch has a device guard for CUDA of its own")
    built = tmp_path_factory.mktemp("guard") / "guard.so"
    includes = [f"-I{path}" for path in include_paths()]
    library = f"-L{Path(torch.__file__).parent / 'lib'}"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    source = str(Path(__file__).with_name("fake_cuda.cpp"))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c++20", abi, *includes, source, "-o", str(built), library, "-lc10"],
        check=True,
    )
    return built
