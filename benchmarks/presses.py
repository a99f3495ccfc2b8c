"""kvpress's methods on the rows of ``make real``: KL to full attention over the end, in an environment of its own.

They read most of a row with full attention, cut the cache once and go on with one that grows. ``make presses`` makes
the environment; nothing of Retrofit is imported here.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = ("StreamingLLM", "TOVA", "SnapKV", "ExpectedAttention", "Knorm", "KeyDiff")
READ = 896  # tokens read with full attention before the cache is cut; what follows is scored


@torch.no_grad()
def main(output: Path, rows: int, kept: list[int]) -> None:
    """Score, and write ``output``/presses.json and presses.md; what is in the former already is not scored again."""
    scores = output / "real.json"
    if not scores.is_file():
        sys.exit(f"error: there is no {scores}: run `make real` first")
    dtype = json.loads(scores.read_text())["settings"]["dtype"]
    model = AutoModelForCausalLM.from_pretrained(output / "base", dtype=getattr(torch, dtype)).eval()
    texts = {kind: torch.tensor(ids[:rows]) for kind, ids in json.loads((output / "rows.json").read_text()).items()}
    file = output / "presses.json"
    found: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text()) if file.is_file() else {}
    labels: dict[str, list[str]] = {}
    for kind, ids in texts.items():
        for at, row in enumerate(ids):
            full, label = None, f"{dtype} {crc32(row.numpy().tobytes()):08x}"
            labels.setdefault(kind, []).append(label)
            for name in PRESSES:
                for size in kept:
                    own = found.setdefault(f"{name}, {size} rows", {}).setdefault(kind, {})
                    if label in own:
                        continue
                    full = log_probs(model, row[None], None) if full is None else full
                    cut = log_probs(model, row[None], getattr(kvpress, f"{name}Press")(1 - (size + 0.5) / READ))
                    own[label] = (full.exp() * (full - cut)).sum(-1).mean().item()
            file.write_text(json.dumps(found))
            print(f"{kind}, row {at + 1} of {len(ids)}", flush=True)
    lines = [f"| | mean | {' | '.join(texts)} |", f"|---|{'---:|' * (len(texts) + 1)}"]
    for name in (f"{name}, {size} rows" for name in PRESSES for size in kept):
        shown = [mean(found[name][kind][label] for label in own) for kind, own in labels.items()]
        lines.append(f"| {name} | {' | '.join(f'{one:.4f}' for one in (mean(shown), *shown))} |")
    (output / "presses.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def log_probs(model: Any, ids: torch.Tensor, press: Any) -> torch.Tensor:
    """Of the tokens after the first ``READ`` that have a next one, ``(n, V)``; ``press`` cuts what was read before."""
    cache = DynamicCache()
    if press is None:
        model(ids[:, :READ], past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            model(ids[:, :READ], past_key_values=cache, logits_to_keep=1)
    positions = torch.arange(READ, ids.shape[1])[None]
    logits = model(ids[:, READ:], past_key_values=cache, position_ids=positions).logits[0, :-1]
    return torch.as_tensor(logits.float().log_softmax(-1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/real"), help="what `make real` has written")
    parser.add_argument("--rows", type=int, default=6, help="of each kind of text")
    parser.add_argument("--kept", type=int, nargs="+", default=[164, 227], help="tokens that stay of what was read")
    given = parser.parse_args()
    main(given.output, given.rows, given.kept)
