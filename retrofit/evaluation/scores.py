"""How far models are from their teacher: KL and NLL per position, several students against one teacher pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from patches.errors import RetrofitError
from retrofit.evaluation.settings import Settings
from retrofit.lm_head import chunks, gathered, kl, log_probs

CHUNK: int = Settings.chunk  # tokens per forward pass
# logits held at once per model, in elements: 64 MiB of fp32
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Scores:
    """One model's scores. Column ``i`` is position ``start + i``, which predicts token ``start + i + 1``.

    Attributes:
        nll: (N, P) negative log-likelihood of the next token, nats.
        kl: (N, P) KL(teacher || model), nats; zero for the teacher itself, NaN when there was no teacher.
        correct: (N, P) whether the most likely token is the next token.
        start: first position scored.
        scored: (N, P) whether the position counts; where not, nll and kl are NaN and correct is False.
    """

    nll: Tensor
    kl: Tensor
    correct: Tensor
    start: int
    scored: Tensor

    @property
    def mean_nll(self) -> float:
        return self.nll[self.scored].mean(dtype=torch.float64).item()

    @property
    def mean_kl(self) -> float:
        return self.kl[self.scored].mean(dtype=torch.float64).item()

    def figures(self, window_only: "Scores") -> dict[str, float]:
        """Means for a table: ``kl``, ``kl_gap_closed`` beside the scores of the window-only model, ``nll``."""
        share = gap_closed(self.mean_kl, window_only.mean_kl)
        return {"kl": self.mean_kl, "kl_gap_closed": share, "nll": self.mean_nll}


def gap_closed(kl: float, window_only: float) -> float:
    """Share of the KL between window-only model and teacher that ``kl`` has closed: 1 is the teacher, 0 window-only."""
    return 1.0 - kl / window_only if window_only else 0.0


def evaluate(
    model: Any,
    sequences: Tensor,
    *,
    start: int,
    labels: Tensor | None = None,
    teacher: bool = True,
    batch_size: int = 8,
    chunk: int | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, Scores]:
    """Score one model, or several that share a base, on the same positions of the same sequences.

    The teacher is the first model with its memory off. It is run once per batch however many models there are, and
    logits exist for a few positions at a time only.

    Args:
        model: a retrofitted model (scored under its memory's kind as name), or a mapping ``{name: model}``.
        sequences: (N, T) token ids; padding, if any, on the right and not labelled.
        start: first position to score. For comparable rows: sinks + window of the narrowest window.
        labels: (N, T), -100 at tokens that nobody has to predict; by default all are to be predicted.
        teacher: score the teacher too, as row ``"teacher"``, and give every model its KL to it.
        batch_size: sequences per forward pass.
        chunk: tokens per forward pass, for sequences that are too long for one; by default all.
        on_batch: called with (sequences done, N) after each batch, for progress bars.

    Returns:
        ``{name: Scores}``, ``"teacher"`` first.

    Raises:
        RetrofitError: no sequence, none longer than ``start + 1`` tokens, or no label from there on.
    """
    models: dict[str, Any] = dict(model) if isinstance(model, Mapping) else {model.config.memory["kind"]: model}
    if sequences.ndim != 2 or len(sequences) == 0 or not 0 <= start < sequences.shape[1] - 1:
        raise RetrofitError(
            f"cannot score positions from {start} on in sequences of shape {tuple(sequences.shape)}: "
            f"evaluation needs at least one sequence of {start + 2} tokens"
        )
    scored = torch.ones_like(sequences, dtype=torch.bool) if labels is None else labels != -100
    scored = scored[:, start + 1 :].cpu()  # (N, P): by the token that a position predicts
    if not scored.any():
        raise RetrofitError(f"no token after position {start} is labelled, so none can be scored: set a smaller window")
    first = next(iter(models.values()))
    head = first.get_output_embeddings()
    device = head.weight.device

    known = {"teacher": first, **models} if teacher else models
    rows: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in known}

    def readers() -> dict[str, Reader]:
        alone: dict[str, Reader] = {name: partial(_read_alone, one) for name, one in known.items()}
        made = cached_readers(known) if chunk else alone
        return made | ({"teacher": partial(_without_memory, first, made["teacher"])} if teacher else {})

    with torch.no_grad(), evaluating(*models.values()):
        for at in range(0, len(sequences), batch_size):
            where = scored[at : at + batch_size]
            last = int(where.any(0).nonzero().max()) if where.any() else 0
            # what comes after the last label changes nothing before it
            ids = sequences[at : at + batch_size, : start + last + 2].to(device)
            taken = where[:, : last + 1].to(device)
            found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in known}
            for piece, scores in scored_pieces(readers(), head, ids, start, chunk or ids.shape[1], taken):
                counted = where[:, piece.start - start : piece.stop - start]
                for name, parts in scores.items():
                    found[name].append(tuple(_spread(part.cpu(), counted) for part in parts))
            rest = torch.zeros_like(where[:, last + 1 :])
            nothing = tuple(_spread(torch.empty(0, dtype=dtype), rest) for dtype in (*[torch.float32] * 2, torch.bool))
            for name, pieced in found.items():
                rows[name].append(tuple(torch.cat(parts, 1) for parts in zip(*pieced, nothing, strict=True)))
            if on_batch is not None:
                on_batch(min(at + batch_size, len(sequences)), len(sequences))
    columns = {name: [torch.cat(parts) for parts in zip(*batches, strict=True)] for name, batches in rows.items()}
    return {name: Scores(nll, kl, correct, start, scored) for name, (nll, kl, correct) in columns.items()}


def hidden_states(model: Any, tokens: Mapping[str, Tensor], decoder: Any = None) -> Tensor:
    """(B, T, E) last hidden states of a causal LM, without its T x V logits.

    The whole model runs, since wrappers (DDP, DeepSpeed) only see its call: the states are taken on their way to the
    head, which sees one position.

    Args:
        model: the causal LM, wrapped or not.
        tokens: ``input_ids`` and, if there is padding, ``attention_mask``.
        decoder: the decoder of the model inside the wrapper; by default ``model``'s own.
    """
    taken: list[Tensor] = []
    decoder = model.get_decoder() if decoder is None else decoder
    handle = decoder.register_forward_hook(lambda _module, _args, output: taken.append(output.last_hidden_state))
    try:
        model(**tokens, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return taken[0]


def _without_memory(model: Any, read: "Reader", ids: Tensor) -> Tensor:
    with model.memory_off():
        return read(ids)


def _read_alone(model: Any, ids: Tensor) -> Tensor:
    return hidden_states(model, {"input_ids": ids})


def pieces(length: int, chunk: int = CHUNK) -> Iterator[slice]:
    """``[0, length)`` in slices of ``chunk``, the last one shorter."""
    for at in range(0, length, chunk):
        yield slice(at, min(at + chunk, length))


def prefill(model: Any, ids: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Any]:
    """Read ``ids`` (1, T) in pieces, so that a bounded memory stays bounded while it reads.

    Returns:
        The last position's logits ``(V,)`` and the cache.
    """
    cache = DynamicCache(config=model.config)
    logits = None
    for piece in pieces(ids.shape[1], chunk):
        logits = model(ids[:, piece], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    assert logits is not None, "there is no token to read"
    return logits, cache


# the next (B, n) ids of a text in, the hidden states (B, n, E) of their positions out
Reader = Callable[[Tensor], Tensor]


def cached_readers(models: Mapping[str, Any]) -> dict[str, Reader]:
    """A reader for each model that keeps what it read in a cache of its own, which is bounded where the model is."""
    caches = {name: DynamicCache(config=model.config) for name, model in models.items()}

    def reader(name: str, model: Any) -> Reader:
        return lambda ids: (
            model.get_decoder()(input_ids=ids, past_key_values=caches[name], use_cache=True).last_hidden_state
        )

    return {name: reader(name, model) for name, model in models.items()}


def scored_pieces(
    readers: Mapping[str, Reader], head: Any, ids: Tensor, start: int, chunk: int, where: Tensor | None = None
) -> Iterator[tuple[slice, dict[str, tuple[Tensor, ...]]]]:
    """Read texts chunk by chunk and score what each position from ``start`` on says of the next token.

    All models read a chunk before any reads the next, so that hidden states live for one chunk only.

    Args:
        readers: of the models; ``"teacher"``, if there, comes first.
        head: the linear module that they share.
        ids: (B, T); the last token is predicted, and read by nobody.
        chunk: tokens at a time.
        where: (B, T - 1 - start), True where a position counts; None means everywhere.

    Yields:
        The positions, and :func:`score_hidden` of those that count among them, row by row.
    """
    for piece in pieces(ids.shape[1] - 1, chunk):
        states = {name: read(ids[:, piece]) for name, read in readers.items()}
        first = max(piece.start, start)
        if first < piece.stop:
            counts = torch.ones_like(ids[:, first : piece.stop], dtype=torch.bool)
            counts = counts if where is None else where[:, first - start : piece.stop - start]
            hidden = {name: found[:, first - piece.start :][counts] for name, found in states.items()}
            yield slice(first, piece.stop), score_hidden(hidden, head, ids[:, first + 1 : piece.stop + 1][counts])


def score_hidden(hidden: dict[str, Tensor], head: Any, targets: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """(nll, kl, correct), each (n,), for every entry (n, E) of ``hidden``; ``teacher``, if there, comes first.

    ``head`` is a linear module; its products are those of :mod:`retrofit.lm_head`, in float32 for 16-bit models too.
    """
    parts: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in hidden}
    with gathered([head]):
        for rows in chunks(len(targets), len(head.weight), CHUNK_ELEMENTS):
            target = targets[rows, None]  # (C, 1)
            teacher = None
            for name, states in hidden.items():
                log_q = log_probs(states[rows], head.weight, head.bias)  # (C, V)
                if name == "teacher":
                    teacher = log_q, log_q.exp()
                divergence = log_q.new_full(target.shape[:1], torch.nan) if teacher is None else kl(*teacher, log_q)
                nll = -log_q.gather(-1, target).squeeze(-1)
                parts[name].append((nll, divergence, log_q.argmax(-1) == target.squeeze(-1)))
    return {name: tuple(torch.cat(part) for part in zip(*pieces, strict=True)) for name, pieces in parts.items()}


def _spread(values: Tensor, scored: Tensor) -> Tensor:
    """(n,) values of the scored positions -> (B, P), NaN or False at the others."""
    full = torch.zeros_like(scored) if values.dtype == torch.bool else torch.full(scored.shape, torch.nan)
    full[scored] = values
    return full


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Every model in eval mode inside the block, each of its modules as it was after it."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
