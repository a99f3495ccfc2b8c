"""AHN-Mamba2: the published implementation's numbers, its recurrence written out, the published models' sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen2Config

import retrofit
from patches.ahn import Mamba2
from patches.config import MemoryConfig
from patches.scan import gated_delta_rule_steps, linear_attention_chunks
from retrofit.convert import published_name
from retrofit.families import FAMILIES
from tests.helpers import close

# of Qwen2.5-Instruct, and the millions of parameters the authors give for Mamba2, DN and GDN
SIZES: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "3B": (
        {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2},
        (11.9, 11.8, 13.0),
    ),
    "7B": (
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        (18.6, 18.5, 21.3),
    ),
    "14B": (
        {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
        (51.4, 51.1, 61.0),
    ),
}


@pytest.fixture(scope="module")
def oracle(shared: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings that the published implementation gave for a tiny model."""
    path = shared / "oracles" / "ahn_mamba2"
    return load_file(path.with_suffix(".safetensors")), json.loads(path.with_suffix(".json").read_text())


@pytest.fixture
def model(oracle: Any) -> Any:
    tensors, settings = oracle
    base = transformers.Qwen2ForCausalLM(Qwen2Config(**settings["base"])).eval()
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    base.load_state_dict({name: t for name, t in weights.items() if ".ahn." not in name})
    model = retrofit.patch(base, "ahn-mamba2", settings["window"], settings["sinks"])
    with torch.no_grad():
        for name, parameter in model.memory_parameters():
            parameter.copy_(weights.pop(published_name("ahn-mamba2", name)))
    assert not [name for name in weights if ".ahn." in name]
    return model


def test_logits_and_states_are_the_published_ones(model: Any, oracle: Any) -> None:
    tensors, _ = oracle
    ids = tensors["input_ids"]
    with torch.no_grad():
        cache = DynamicCache()
        close(model(ids, past_key_values=cache).logits, tensors["prefill.logits"], 1e-5)
        for index, layer in enumerate(cache.layers):
            state = tensors[f"prefill.layer{index}.state"]  # values by keys
            close(layer.state["matrix"], state.transpose(-1, -2), 4e-6)
        cache = DynamicCache()
        pieces = [ids[:, :32], *ids[:, 32:].split(1, 1)]
        decoded = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)
        close(decoded, tensors["decode_p32.logits"], 1e-5)
        model.set_window(8, 0)
        close(model(ids).logits, tensors["prefill_nosink.logits"], 1e-5)
        model.set_window(64, 2)
        close(model(ids).logits, tensors["inactive.logits"], 1e-5)


def test_loss_and_gradients_are_the_published_ones(model: Any, oracle: Any) -> None:
    tensors, settings = oracle
    ids, scored = tensors["input_ids"], settings["settings"]["valid_positions"]
    student = model(ids).logits[0, scored]
    with torch.no_grad(), model.memory_off():
        teacher = model(ids).logits[0, scored]
    close(student, tensors["train.logits_mem"][0, scored], 1e-5)
    close(teacher, tensors["train.logits_ref"][0, scored], 1e-5)
    loss = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
    close(loss, tensors["train.kl_loss"][0], 3e-7)
    loss.backward()
    for name, parameter in model.memory_parameters():
        expected = tensors["train.grad." + published_name("ahn-mamba2", name)]
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name


def test_its_read_is_the_recurrence_written_out() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    memory = Mamba2(config, window=4, sinks=0, options=None).double()
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    D, m = 8, 75
    x, written = torch.randn(2, 2, m, 32, dtype=torch.float64)  # inputs of the reading and of the written tokens
    q, k, v = (torch.randn(2, heads, m, D, dtype=torch.float64) for heads in (4, 2, 2))
    S, expected = torch.zeros(2, 4, D, D, dtype=torch.float64), []
    for t in range(m):
        step = F.softplus(memory.dt_proj(written[:, t]) + memory.dt_bias)[..., None, None]  # (2, H, 1, 1)
        key = F.normalize(k[:, :, t], dim=-1).repeat_interleave(2, 1)
        value = v[:, :, t].repeat_interleave(2, 1)
        decay = torch.exp(-step * memory.A_log.exp()[:, None, None])
        S = decay * S + step * key.unsqueeze(-1) * value.unsqueeze(-2)
        read = (F.normalize(q[:, :, t], dim=-1).unsqueeze(-1) * S).sum(-2)
        read = read * F.silu(memory.g_proj(x[:, t])).unsqueeze(-1)
        y = F.rms_norm(read.flatten(1), (4 * D,), memory.read_norm.weight, eps=1e-5).view(2, 4, 1, D)
        expected.append((y @ memory.read_proj.weight).squeeze(2))
    read, state = memory.read(x, q, k, v, memory.write_gates(written).mT, None)
    close(read, torch.stack(expected, 2))
    close(state, S)


def test_weak_decays_after_strong_ones_keep_their_digits() -> None:
    """A head that forgets fast and then remembers: its log decays add up to hundreds within a chunk."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 200, 16)
    log_decay = -40 * torch.nn.functional.softplus(3 * torch.randn(1, 2, 200) - 3)
    exact, _ = gated_delta_rule_steps(q.double(), k.double(), v.double(), None, log_decay.double())
    read, _ = linear_attention_chunks(q, k, v, log_decay)
    assert (read - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("size", SIZES)
def test_published_models_have_these_sizes(size: str) -> None:
    settings, millions = SIZES[size]
    for kind, expected in zip(("ahn-mamba2", "ahn-dn", "ahn-gdn"), millions, strict=True):
        memory = MemoryConfig(kind, window=32640, sinks=128).to_dict()
        family = FAMILIES["qwen2"]
        config = family.config(vocab_size=151936, intermediate_size=11008, memory=memory, **settings)
        with torch.device("meta"):
            model: Any = family.causal_lm(config)
        count = sum(parameter.numel() for _, parameter in model.memory_parameters())
        assert round(count / 1e6, 1) == expected
