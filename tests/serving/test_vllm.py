"""vLLM on a CPU says token for token what generate says: every family and kind, in chunks, in any order of arrival.

Run by `make test-vllm`, in an environment of its own; skipped where vLLM is not installed.
"""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ |= {  # read when vLLM is imported
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch  # noqa: E402

from tests.helpers import awake  # noqa: E402
from tests.serving.conftest import Export, continued  # noqa: E402

FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "ahn-gdn": {},
    "ahn-dn": {},
    "ahn-mamba2": {},
    "shared-gdn": {},
    "shared-mamba2": {},
    "joint": {},
    "tensor-cache": {},
    "infini": {},
    "kvm": {"rows": 5, "chunk": 4},
    "compressive": {"rows": 3, "ratio": 3},
    "expected": {"rows": 5, "bits": 8},
    "joint-rows": {"rows": 5},
}
NEW = 24
LENGTHS = (1, 5, 9, 10, 11, 12, 18, 19, 30, 47, 64, 65, 100, 128, 150, 200)  # W + S is 10


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random ids, none of them special."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 259) for _ in range(length)] for length in lengths]


def likeliest(**how: Any) -> Any:
    return vllm.SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False, **how})


class Served:
    """One engine, closed at the end of the test."""

    def __init__(self, folder: Path, **settings: Any):
        defaults = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 16}
        self.llm = vllm.LLM(str(folder), **{**defaults, "disable_log_stats": True, **settings})
        self.engine = self.llm.llm_engine

    def tokens(self, texts: list[list[int]], how: Any) -> list[list[int]]:
        """All prompts at once."""
        given = [{"prompt_token_ids": text} for text in texts]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(given, how, use_tqdm=False)]

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[Served] = []

    def start(folder: Path, **settings: Any) -> Served:
        running.append(Served(folder, **settings))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_at_once_in_chunks(export: Export, serve: Any, family: str, kind: str) -> None:
    folder = export(family, kind, **KINDS[kind])
    served = serve(folder, max_num_batched_tokens=48)  # prompts are cut, and share steps with those that decode
    assert served.tokens(prompts(), likeliest()) == continued(folder, prompts(), NEW)


@pytest.mark.parametrize("kind", ["none", "joint", "kvm"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "SmolLM3"])
def test_families_that_are_unlike_the_four(export: Export, serve: Any, family: str, kind: str) -> None:
    test_sixteen_at_once_in_chunks(export, serve, family, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_prompts_one_at_a_time(export: Export, serve: Any, kind: str) -> None:
    folder = export("Qwen2", kind, **KINDS[kind])
    served = serve(folder, max_num_batched_tokens=512, max_num_seqs=1)
    some = prompts((1, 10, 11, 65, 200))
    assert served.tokens(some, likeliest()) == continued(folder, some, NEW)


@pytest.mark.parametrize("kind", ["ahn-gdn", "joint", "kvm"])
def test_any_order_of_arrival_with_aborts_and_preemption(export: Export, serve: Any, kind: str) -> None:
    folder, draw = export("Llama", kind, **KINDS[kind]), random.Random(1)
    texts = prompts(LENGTHS * 3, seed=2)
    expected = continued(folder, texts, NEW)
    engine = serve(folder, max_num_batched_tokens=40, max_num_seqs=5).engine
    waiting, given_up, found = list(range(len(texts))), set(), {}
    draw.shuffle(waiting)
    while waiting or engine.has_unfinished_requests():
        while waiting and draw.random() < 0.3:
            index = waiting.pop()
            engine.add_request(str(index), {"prompt_token_ids": texts[index]}, likeliest())
        for out in engine.step():
            if out.finished:
                found[int(out.request_id)] = list(out.outputs[0].token_ids)
            elif draw.random() < 0.01:
                given_up.add(int(out.request_id))
                engine.abort_request([out.request_id])
        if draw.random() < 0.02:  # all that run lose their pages, and begin again on others
            engine.reset_prefix_cache(reset_running_requests=True)
    assert len(given_up) > 2
    assert found.keys() | given_up == set(range(len(texts)))
    for index in found.keys() - given_up:
        assert found[index] == expected[index], f"prompt {index} of {len(texts[index])} tokens"


def test_sampling_with_a_seed_does_not_hang_on_the_company(export: Export, serve: Any) -> None:
    # whole prompts: on a CPU vLLM 0.32 cannot put back what it drew from a seed in the middle of one, of any model
    served = serve(export("Mistral", "ahn-gdn"), max_num_batched_tokens=2048)
    texts = prompts()
    drawn = [likeliest(temperature=1.0, top_p=0.9, seed=index) for index in range(len(texts))]
    together = served.tokens(texts, drawn)
    assert together == [served.tokens([text], how)[0] for text, how in zip(texts, drawn, strict=True)]
    assert together != served.tokens(
        texts, [likeliest(temperature=1.0, top_p=0.9, seed=index + 99) for index in range(16)]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_up_to_the_lossless_budget_it_is_the_base(export: Export, serve: Any, family: str) -> None:
    some, how = prompts((1, 2, 4, 5), seed=3), likeliest(max_tokens=5, logprobs=3)
    both = []
    for kind in (None, "joint"):
        outs = serve(export(family, kind)).llm.generate([{"prompt_token_ids": p} for p in some], how, use_tqdm=False)
        both.append([[{t: p.logprob for t, p in step.items()} for step in out.outputs[0].logprobs] for out in outs])
    for base, retrofit in zip(*both, strict=True):
        for a, b in zip(base, retrofit, strict=True):
            assert a.keys() == b.keys()
            assert max(abs(a[token] - b[token]) for token in a) < 1e-4


def test_compiled(export: Export, serve: Any) -> None:
    folder = export("Qwen3", "joint")
    served = serve(folder, enforce_eager=False, max_num_batched_tokens=48)
    assert served.tokens(prompts(), likeliest()) == continued(folder, prompts(), NEW)


def test_layers_without_the_memory_keep_a_window(export: Export, serve: Any) -> None:
    folder = export("Qwen2", "ahn-gdn", layers=[1], others="window")
    served = serve(folder, max_num_batched_tokens=48)
    assert served.tokens(prompts(), likeliest()) == continued(folder, prompts(), NEW)


def test_a_base_that_was_cast_as_a_whole(exports: Path, byte_tokenizer: Any, make_base: Any, serve: Any) -> None:
    folder = exports / "cast"
    base = make_base("Llama", vocab_size=len(byte_tokenizer)).to(torch.bfloat16)  # its rotary frequencies, too
    awake(base, "joint").save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    assert serve(folder).tokens(prompts(), likeliest()) == continued(folder, prompts(), NEW)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative",
        ),
        ({"enable_lora": True}, "LoRA"),
        ({"kv_cache_dtype": "fp8"}, "own dtype"),
    ],
)
def test_what_a_memory_cannot_follow_is_refused(export: Export, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        configured(export("Llama", "ahn-gdn"), **settings)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tova", {}),
        ("kvm", {"budget": "saturating"}),
        ("ahn-gdn", {"layers": [0]}),
        ("joint", {"by_layer": {"1": {"window": 5}}}),
    ],
)
def test_memories_without_a_page_are_refused(export: Export, kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pages of fixed size|keep the base's own attention|of their own"):
        configured(export("Llama", kind, **options))


def test_layers_that_keep_their_own_window_are_refused(export: Export) -> None:
    with pytest.raises(ValueError, match=r"only layers \[1\] of this model"):
        configured(export("Ministral", "none"))


def test_heads_that_vllm_sizes_otherwise_are_refused(exports: Path, byte_tokenizer: Any, make_base: Any) -> None:
    folder = exports / "wide-heads"
    awake(make_base("Qwen2", vocab_size=len(byte_tokenizer), head_dim=32), "none").save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="knows no heads of 32"):
        Served(folder)


def test_prefix_caching_is_switched_off(export: Export) -> None:
    assert not configured(export("Llama", "ahn-gdn"), enable_prefix_caching=True).cache_config.enable_prefix_caching


def configured(folder: Path, **settings: Any) -> Any:
    """vLLM's configuration for a model, as the engine makes it before it loads any weight."""
    return vllm.EngineArgs(str(folder), dtype="float32", max_model_len=512, **settings).create_engine_config()
