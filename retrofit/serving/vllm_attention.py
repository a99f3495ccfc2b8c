"""A retrofit's attention inside vLLM: to the engine a layer with a state of fixed size, one page per sequence."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from patches.errors import RetrofitError
from patches.memory import Memory

from .pages import Batch, PagedMemory, Share
from .vllm_config import OPERATOR


class PagesBackend(AttentionBackend):
    """Names the builder of what our layers are told of a step."""

    @staticmethod
    def get_name() -> str:
        return "RETROFIT"

    @staticmethod
    def get_builder_cls() -> type["BatchBuilder"]:
        return BatchBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Makes the :class:`Batch` of a step, once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self.capacity, self.rotary = layers[0].memory.capacity, layers[0].tables
        self.together = all(layer.memory.decodes_ragged for layer in layers)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        step = common_attn_metadata
        starts = step.query_start_loc_cpu.tolist()
        # without speculation the bound on the host is the length itself: a GPU need not be waited for
        lengths = step.seq_lens_cpu_upper_bound
        lengths = (step.seq_lens if lengths is None else lengths).tolist()
        pages = step.block_table_tensor[:, 0].tolist()
        shares = []
        for index in range(step.num_reqs):
            count = starts[index + 1] - starts[index]
            shares.append(Share(starts[index], count, lengths[index] - count, pages[index]))
        return Batch(shares, self.capacity, self.rotary, self.device, together=self.together)


class MemoryAttention(nn.Module, MambaBase):
    """Takes over the projections of a family's attention; parameters keep their names, ``memory`` comes beside them."""

    def __init__(self, stock: Any, prefix: str, memory: Memory, rotary: nn.Module, rotates: bool):
        """
        Args:
            stock: vLLM's own attention of this layer.
            prefix: its name in the model.
            memory: of this layer.
            rotary: transformers' rotary embedding for this base.
            rotates: whether this layer turns queries and keys by it.

        Raises:
            RetrofitError: vLLM takes this base to have heads of another size.
        """
        super().__init__()
        config = get_current_vllm_config()
        self.prefix, self.memory = prefix, memory
        self.heads, self.kv_heads, self.head_dim = stock.num_heads, stock.num_kv_heads, stock.head_dim
        if self.head_dim != memory.head_dim:
            raise RetrofitError(
                f"vLLM's class for this family knows no heads of {memory.head_dim}, only of hidden_size / heads = "
                f"{self.head_dim}: use retrofit serve --engine transformers"
            )
        self.qkv_proj, self.o_proj, self.rotary_emb = stock.qkv_proj, stock.o_proj, stock.rotary_emb
        self.q_norm, self.k_norm = getattr(stock, "q_norm", None), getattr(stock, "k_norm", None)
        self.rotary, self.rotates = rotary, rotates
        self.paged = PagedMemory(memory, config.model_config.dtype, stock.scaling, rotates=rotates)
        # wide tensors first: each then begins where its dtype may
        self.fields = dict(sorted(self.paged.fields.items(), key=lambda item: -item[1].dtype.itemsize))
        self.kv_cache = tuple(torch.empty(0) for _ in self.fields)
        config.compilation_config.static_forward_context[prefix] = self

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The base's rotary tables at any positions."""
        return self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), positions)

    def key_bias(self) -> Tensor | None:
        """What every key ``(H_kv * D,)`` holds before its rotation; families that normalise keys have none."""
        bias = None if self.k_norm is not None else self.qkv_proj.bias
        return None if bias is None else bias[self.heads * self.head_dim :][: self.kv_heads * self.head_dim]

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(field.shape for field in self.fields.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(field.dtype for field in self.fields.values())

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagesBackend

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """As the family's: positions ``(N,)`` and the layer's input ``(N, E)``, padding behind it."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        if self.rotates:
            q, k = self.rotary_emb(positions, q, k)
        out = torch.empty_like(hidden_states)
        getattr(torch.ops.vllm, OPERATOR)(hidden_states, q, k, v, out, self.prefix)
        return out

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the attention's output into ``out``; zeros for padding and for a run that only measures."""
        step = get_forward_context().attn_metadata
        batch = step.get(self.prefix) if isinstance(step, dict) else step
        if batch is None:
            out.zero_()
            return
        n = batch.tokens
        pages = dict(zip(self.fields, self.kv_cache, strict=True))
        q, k, v = (head[:n].unflatten(-1, (-1, self.head_dim)) for head in (q, k, v))
        heads, added = self.paged(pages, x[:n], q, k, v, batch, self.key_bias())
        joined, _ = self.o_proj(heads.flatten(1))
        out[:n] = joined if added is None else joined + added
        out[n:] = 0


def _attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    get_forward_context().no_compile_layers[name].attend(x, q, k, v, out)


def _attend_nowhere(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    pass


direct_register_custom_op(OPERATOR, _attend, mutates_args=["out"], fake_impl=_attend_nowhere)
