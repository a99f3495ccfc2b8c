"""The identity check: up to S + W tokens a retrofitted model is its base, bit for bit."""

from collections.abc import Sequence

import torch

from retrofit.evaluation.contenders import Contender, ready
from retrofit.evaluation.recall import plain_tokens


def identity(rows: Sequence[Contender], tokenizer: object, seed: int = 0, longest: int = 8192) -> dict[str, bool]:
    """Whether each row's logits equal the teacher's on as many random tokens as it keeps exactly (``longest`` at most).

    Returns:
        ``{row: True or False}``, the teacher left out. LoRA beside a memory makes it False, as it should.
    """
    teacher, others = rows[0], rows[1:]
    found = {}
    with ready(rows):
        for row in others:
            budget = min(memory.capacity for memory in row.model.model.memories().values())
            vocabulary = plain_tokens(tokenizer, row.model.config.vocab_size)
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(len(vocabulary), (1, min(budget, longest)), generator=generator)
            ids = vocabulary[drawn].to(row.model.device)
            expected, got = (one.get_decoder()(ids, use_cache=False)[0] for one in (teacher.model, row.model))
            found[row.name] = torch.equal(expected, got)
    return found
