"""What a bounded memory saves in vLLM: the same engine and bytes for the cache, a base beside its retrofit.

    python -m benchmarks.serving BASE RETROFIT --cache-mib 400 --json rows.json

Time is that of one core, as the process has used it, so that a busy machine gives the same figures.
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

LENGTHS = (1024, 2048, 4096, 8192)
NEW = 64
REQUESTS = 8
TOKENS = 16384  # of all requests, if there are more than LEAST
LEAST = 3


def measure(model: str, length: int, requests: int, cache_bytes: int) -> dict[str, Any]:
    """Answer ``requests`` of ``length`` tokens, the last ``NEW`` of them the answer, all there from the start.

    Returns:
        ``at_once``: sequences that ran together at most; ``room_for``: those that the cache has room for;
        ``mib``: of the cache for one sequence; ``per_minute``: requests per minute of one core.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=length,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=cache_bytes,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=False,
    )
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core  # in this process
    cache = core.vllm_config.cache_config
    blocks = cache.num_gpu_blocks - 1  # one is never handed out
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    page = sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    each = sum(-(-length // group.kv_cache_spec.block_size) for group in groups)
    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    for index in range(requests):
        ids = [(7 * index + 13 * place + place * place % 97) % (vocabulary - 10) + 5 for place in range(length - NEW)]
        engine.add_request(str(index), {"prompt_token_ids": ids}, how)
    together, began = 0, time.process_time()
    while engine.has_unfinished_requests():
        engine.step()
        together = max(together, len(core.scheduler.running))
    seconds = time.process_time() - began
    engine.engine_core.shutdown()
    gc.collect()
    return {
        "model": Path(model).name,
        "length": length,
        "requests": requests,
        "mib": each * page / len(groups) / 2**20,
        "room_for": blocks // each,
        "at_once": together,
        "per_minute": 60 * requests / seconds,
    }


def main() -> None:
    """Measure and print a row for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", help="folders: a base, and a retrofit of it")
    parser.add_argument("--cache-mib", type=int, default=400, help="bytes for keys, values and states, in MiB")
    parser.add_argument("--length", type=int, nargs="*", default=LENGTHS, help="tokens of prompt and answer")
    parser.add_argument("--json", type=Path, help="file for the rows")
    chosen = parser.parse_args()
    rows = []
    for length in chosen.length:
        for model in chosen.models:
            requests = max(LEAST, min(REQUESTS, TOKENS // length))
            rows.append(measure(model, length, requests, chosen.cache_mib * 2**20))
            print(json.dumps(rows[-1]), flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    main()
