"""The windows and the sinks a training step uses: the model's own, or drawn as AHN's recipe draws them."""

import random
from itertools import product
from typing import Any

from patches.errors import RetrofitError

# AHN's candidates for the lossless budget S + W and for S (its training code; paper section 3.3 names the idea only)
AHN_BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
AHN_SINKS = (0, 32, 64, 128, 512, 2048, 4096)


def reach(model: Any) -> int:
    """S + W of the trained layer that forgets last: only a longer row gives every layer something to learn."""
    return max(memory.capacity for memory in model.model.memories().values() if memory.trainable)


def check_draws(model: Any) -> None:
    """Refuse a memory that cannot work with every window :func:`draw_window` may give on more than 32 tokens.

    Raises:
        RetrofitError: the memory refuses such a window (its own message is included), or layers have their own.
    """
    if any("window" in other for other in model.config.memory.get("by_layer", {}).values()):
        raise RetrofitError("window_sampling='ahn' draws one window for all layers: leave the windows out of by_layer")
    for budget, sinks in product(AHN_BUDGETS, AHN_SINKS):
        if sinks > budget / 2:
            continue
        for memory in model.model.memories().values():
            try:
                memory.check_window(budget - sinks, sinks)
            except RetrofitError as error:
                raise RetrofitError(
                    f"window_sampling='ahn' trains at other windows too; one is refused: {error}"
                ) from None


def draw_window(seed: int, step: int, length: int) -> tuple[int, int]:
    """Draw (window, sinks) for one optimizer step on sequences of ``length`` tokens, the way AHN was trained.

    The budget T = S + W is uniform over the candidates with length / 8 < T < length, the sinks uniform over those with
    S <= T / 2, and W = T - S. Where AHN's list has no candidate (its code fails there) the budget is half the
    sequence if the sequence is short, and the largest candidate if it is long.

    A function of its arguments alone: equal on all ranks, and a resumed run needs no stored state.
    """
    generator = random.Random(f"{seed}/{step}")
    budgets = [budget for budget in AHN_BUDGETS if length / 8 < budget < length]
    budget = generator.choice(budgets) if budgets else min(max(AHN_BUDGETS), max(1, length // 2))
    sinks = generator.choice([sinks for sinks in AHN_SINKS if sinks <= budget / 2])
    return budget - sinks, sinks
