"""The demo's base model: a tiny one that learns to recall within a minute, in three stages.

Trained on such documents alone, a small transformer stays at guessing among the surnames seen so far. What breaks that
plateau is an induction head (find where this token stood before, give what followed it), and repeated random tokens
teach it soonest, because there every position asks for it:

1. *copy*: random words that repeat with a random period, until the repeats are predicted;
2. *short*: documents of 64 tokens, nearly every sentence with a name, every fourth batch still copies;
3. *full*: documents of 256 tokens, answers weighing more than other tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from distill.demo.text import PAD, UNKNOWN, WORDS, documents, generator, recall_distance
from patches.errors import RetrofitError

LENGTH, BATCH = 256, 8  # tokens per document and documents per batch in the last stage
SHORT, SHORT_BATCH = 64, 16  # the same in the stages before it
COPIED, RECALLED = 0.8, 0.97  # accuracies that end the first and the second stage
COPY_STEPS, SHORT_STEPS, FULL_STEPS = 2500, 300, 400  # at most, at most, exactly
CHECK_EVERY = 50  # steps between two looks at the accuracy, which is taken over the last 10
ANSWER_WEIGHT = 5.0
LEARNING_RATE, WARMUP_STEPS, FINAL_SHARE = 3e-3, 50, 0.02
ATTEMPTS = 3  # initial weights tried before giving up

OnStep = Callable[[str, int, int, float, float], None]
"""Called after a step with: stage, steps done, most steps of this stage, loss, accuracy on what can be recalled."""


def train_teacher(seed: int, on_step: OnStep) -> LlamaForCausalLM:
    """Train the demo's base model from nothing.

    The copying stage ends in a jump that comes after about a thousand steps. Should it not come within COPY_STEPS,
    training starts again from other initial weights, so a seed may cost more time but always means the same model.

    Raises:
        RetrofitError: none of the ATTEMPTS learned to copy.
    """
    for attempt in range(ATTEMPTS):
        lessons = _Lessons(seed * ATTEMPTS + attempt, on_step)
        if lessons.copy():
            lessons.short()
            lessons.full()
            return as_llama(lessons.model).eval()
    raise RetrofitError(f"the demo's teacher did not learn to copy with seed {seed}: choose another --seed")


def new_model(seed: int) -> Qwen2ForCausalLM:
    """An untrained base: 2 layers, 2 heads of 32, tied embeddings, about 88,000 parameters."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4 * LENGTH,
        # as Qwen2's own; 1e4 copies later and recalls less
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=WORDS.index(PAD),
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def as_llama(model: Qwen2ForCausalLM) -> LlamaForCausalLM:
    """The same model as a LLaMA, bit for bit: the bias that only a LLaMA's attention has is zero.

    transformers loads whatever tokenizer lies beside a Qwen2 as Qwen2's own, which cannot hold whole words.
    """
    known, given = LlamaConfig().to_dict().keys() - {"model_type", "head_dim"}, model.config.to_dict()
    with torch.random.fork_rng(devices=[]):
        llama = LlamaForCausalLM(
            LlamaConfig(**{name: given[name] for name in known & given.keys()}, attention_bias=True)
        )
    for layer in llama.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    llama.load_state_dict(llama.state_dict() | model.state_dict())
    return llama


def copies(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random words that repeat with a period of 8 to 32 tokens.

    Returns:
        ids, and where they can be known (from the second token of the first repeat on), both (count, SHORT).
    """
    first = WORDS.index(UNKNOWN) + 1
    words = torch.randint(first, len(WORDS), (count, SHORT), generator=source)
    period = torch.randint(8, 33, (count, 1), generator=source)
    position = torch.arange(SHORT).expand(count, -1)
    return words.gather(1, position % period), position > period


class _Lessons:
    """One model, its optimizer and the three stages."""

    def __init__(self, seed: int, on_step: OnStep) -> None:
        self.seed, self.on_step = seed, on_step
        self.model = new_model(seed)
        self.copy_source = generator(seed, "copy")
        self.steps = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)

    def copy(self) -> bool:
        """Stage 1. Returns whether the accuracy was reached."""
        right: list[float] = []
        for step in range(1, COPY_STEPS + 1):
            ids, known = copies(SHORT_BATCH, self.copy_source)
            loss, accuracy = self._step(ids, known.float(), known)
            right.append(accuracy)
            self.on_step("copy", step, COPY_STEPS, loss, accuracy)
            if step % CHECK_EVERY == 0 and _mean(right[-10:]) > COPIED:
                return True
        return False

    def short(self) -> None:
        """Stage 2."""
        ids = documents(SHORT_STEPS * SHORT_BATCH, SHORT, generator(self.seed, "short"), people=0.9)
        right: list[float] = []
        for step, batch in enumerate(ids.split(SHORT_BATCH), start=1):
            if step % 4 == 0:
                copied, known = copies(SHORT_BATCH, self.copy_source)
                self._step(copied, known.float(), known)
            else:
                loss, accuracy = self._read(batch)
                right.append(accuracy)
                self.on_step("short", step, SHORT_STEPS, loss, accuracy)
            if step % CHECK_EVERY == 0 and _mean(right[-10:]) > RECALLED:
                return

    def full(self) -> None:
        """Stage 3, the learning rate falling along a cosine."""
        ids = documents(FULL_STEPS * BATCH, LENGTH, generator(self.seed, "full"))
        for step, batch in enumerate(ids.split(BATCH), start=1):
            cosine = (1 + math.cos(math.pi * step / FULL_STEPS)) / 2
            loss, accuracy = self._read(batch, FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
            self.on_step("full", step, FULL_STEPS, loss, accuracy)

    def _read(self, ids: Tensor, share: float = 1.0) -> tuple[float, float]:
        answers = recall_distance(ids) > 0
        return self._step(ids, torch.where(answers, ANSWER_WEIGHT, 1.0), answers, share)

    def _step(self, ids: Tensor, weight: Tensor, scored: Tensor, share: float = 1.0) -> tuple[float, float]:
        """One update.

        Args:
            ids, weight, scored: (B, T): tokens, their weight in the loss, which of them count for the accuracy.
            share: of the learning rate.

        Returns:
            weighted cross-entropy in nats, accuracy on the scored tokens.
        """
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share * min(1.0, self.steps / WARMUP_STEPS)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]  # (B, T - 1, V)
        target, weight, scored = ids[:, 1:], weight[:, 1:], scored[:, 1:]
        nll = cross_entropy(logits.transpose(1, 2), target, reduction="none")  # (B, T - 1)
        loss = (nll * weight).sum() / weight.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), (logits.argmax(-1) == target)[scored].float().mean().item()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
