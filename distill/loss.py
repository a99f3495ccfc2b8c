"""Losses from hidden states and one frozen head, in chunks of positions: KL(teacher || student) and cross-entropy.

Readable forms are :func:`naive_kl` and :func:`naive_ce`, the ones in use :func:`chunked_kl` and :func:`chunked_ce`.
All return one number per position: whoever sums them knows how many positions the whole accumulated, distributed batch
has, and at what distance from the window each of them lies.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrofit.lm_head import chunks, kl, log_probs, through_head
from retrofit.texts.chat import IGNORED

# logits of one chunk: 256 MiB in fp32; with half as many the products read the head so often that it costs 15 %
CHUNK_ELEMENTS = 2**26


def scored_positions(labels: Tensor, start: int, label_shift: str = "next") -> Tensor:
    """Where the loss is taken: positions past the lossless budget whose label counts.

    Args:
        labels: (B, T) token ids, -100 where nothing is to be learned.
        start: the lossless budget S + W. Before it the student is its teacher.
        label_shift: ``"next"``: position t counts if the token it predicts, t + 1, is labelled. ``"ahn"``: if token t
            itself is, which leaves out the position that predicts an answer's first token (AHN's code; its recipes).

    Returns:
        (B, T) bool.
    """
    counts = labels.ne(IGNORED)
    if label_shift == "next":
        counts = F.pad(counts[:, 1:], (0, 1))
    elif label_shift != "ahn":
        raise ValueError(f"label_shift is {label_shift!r}, not 'next' or 'ahn'")
    positions = torch.arange(labels.shape[1], device=labels.device)
    return counts & (positions >= start)


def naive_kl(
    student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """KL(teacher || student) of each position, as one writes it down. Arguments as :func:`chunked_kl`."""
    log_p = _naive_log_probs(teacher.detach(), weight, bias, temperature)
    log_q = _naive_log_probs(student, weight, bias, temperature)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def chunked_kl(
    student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """KL(teacher || student) of each position, without ever holding P x V logits.

    The gradient of a softmax under KL is closed-form, q - p, so the one backward GEMM runs in the same pass and only
    dX (P, E) is kept. The head is frozen: there is no dW. Three GEMMs per chunk; logits, softmax and the gradient
    at the logits are fp32 whatever the states are in (fp64 for fp64), at most three matrices of one chunk at a time.

    Args:
        student: (P, E) hidden states after the final norm; the gradient goes here.
        teacher: (P, E) hidden states of the teacher; no gradient.
        weight: (V, E) the head both share.
        bias: (V,) or None.
        temperature: both logits are divided by it, and the loss is multiplied by its square so that gradients keep
            their size (Hinton et al. 2015, section 2).

    Returns:
        (P,) nats, in fp32 (fp64).
    """

    def score(log_q: Tensor, rows: slice, wanted: bool) -> Tensor:
        log_p = log_probs(teacher[rows], weight, bias, temperature)
        p = log_p.exp()
        losses = kl(log_p, p, log_q, out=log_p)
        if wanted:
            # d/dlogits of temperature^2 KL is temperature (q - p)
            log_q.exp_().sub_(p)
        return losses * temperature**2

    return _ThroughHead.apply(student, weight, bias, temperature, score)


def naive_ce(
    student: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Cross-entropy of each position, as one writes it down. Arguments as :func:`chunked_ce`."""
    log_q = _naive_log_probs(student, weight, bias, temperature)
    return -(temperature**2) * log_q.gather(-1, targets[:, None]).squeeze(-1)


def chunked_ce(
    student: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Cross-entropy of each position with the text itself: two GEMMs per chunk, otherwise as :func:`chunked_kl`.

    Args:
        targets: (P,) the token each position should predict.

    Returns:
        (P,) nats, in fp32 (fp64).
    """

    def score(log_q: Tensor, rows: slice, wanted: bool) -> Tensor:
        target = targets[rows, None]
        losses = -log_q.gather(-1, target).squeeze(-1)
        if wanted:
            log_q.exp_().scatter_add_(-1, target, torch.full_like(target, -1, dtype=log_q.dtype))
        return losses * temperature**2

    return _ThroughHead.apply(student, weight, bias, temperature, score)


def _naive_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return (logits / temperature).log_softmax(-1)


# losses (C,) of a chunk's log-probabilities (C, V); if a gradient is wanted, turns these in place into the gradient at
# the logits, less one factor of the temperature
Score = Callable[[Tensor, slice, bool], Tensor]


class _ThroughHead(torch.autograd.Function):
    """Losses of ``student`` (P, E) behind a frozen head, with their gradient taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, score: Score
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        losses = torch.empty(len(student), dtype=wide, device=student.device)
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(student) if wanted else None
        for rows in chunks(len(student), weight.shape[0], CHUNK_ELEMENTS):
            log_q = log_probs(student[rows], weight, bias, temperature)
            losses[rows] = score(log_q, rows, wanted)
            if grad is not None:
                grad[rows] = through_head(log_q.mul_(temperature), weight)
        if grad is not None:
            ctx.save_for_backward(grad)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_output[:, None]).to(grad.dtype), None, None, None, None
