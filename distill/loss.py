"""The distillation loss: KL(teacher || student) from two hidden states and one frozen head, in chunks of positions.

The readable form is :func:`naive_kl`, the one the trainer uses is :func:`chunked_kl`. Both return a sum, so that the
caller can divide by the number of positions of a whole accumulated, distributed batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the label of positions that do not count, in transformers and everywhere else
CHUNK_ELEMENTS = 2**25  # logits of one chunk: 128 MiB each in fp32


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
    counts = labels.ne(IGNORE)
    if label_shift == "next":
        counts = F.pad(counts[:, 1:], (0, 1))
    elif label_shift != "ahn":
        raise ValueError(f"label_shift is {label_shift!r}, not 'next' or 'ahn'")
    positions = torch.arange(labels.shape[1], device=labels.device)
    return counts & (positions >= start)


def naive_kl(
    student: Tensor,
    teacher: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """KL(teacher || student) summed over positions, as one writes it down. Arguments as :func:`chunked_kl`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    log_p = (F.linear(teacher.detach().to(weight.dtype), weight, bias).to(wide) / temperature).log_softmax(-1)
    log_q = (F.linear(student.to(weight.dtype), weight, bias).to(wide) / temperature).log_softmax(-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


def chunked_kl(
    student: Tensor,
    teacher: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """KL(teacher || student) summed over positions, without ever holding P x V logits.

    The gradient of a softmax under KL is closed-form, q - p, so the one backward GEMM runs in the same pass and only
    dX (P, E) is kept. The head is frozen: there is no dW. Three GEMMs per chunk, softmax in fp32 (fp64 for fp64).

    Args:
        student: (P, E) hidden states after the final norm; the gradient goes here.
        teacher: (P, E) hidden states of the teacher; no gradient.
        weight: (V, E) the head both share.
        bias: (V,) or None.
        temperature: both logits are divided by it, and the sum is multiplied by its square so that gradients keep
            their size (Hinton et al. 2015, section 2).
        chunk: positions per chunk; by default as many as give 2^25 logits.

    Returns:
        A scalar, in fp32 (fp64). Zero, with zero gradient, when P is 0.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    return _ChunkedKL.apply(student, teacher, weight, bias, temperature, chunk)


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=student.device)
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(student) if wanted else None

        def log_softmax(hidden: Tensor) -> Tensor:
            logits = F.linear(hidden.to(weight.dtype), weight, bias).to(wide)  # (C, V)
            return (logits.div_(temperature) if temperature != 1.0 else logits).log_softmax(-1)

        for at in range(0, len(student), chunk):
            log_p = log_softmax(teacher[at : at + chunk])
            log_q = log_softmax(student[at : at + chunk])
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum()
            if grad is not None:
                dlogits = log_q.exp_().sub_(p).to(weight.dtype)  # q - p
                grad[at : at + chunk] = dlogits @ weight
        if grad is not None:
            # d/dlogits of temperature^2 KL is temperature (q - p)
            ctx.save_for_backward(grad.mul_(temperature) if temperature != 1.0 else grad)
        return total * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_output).to(grad.dtype), None, None, None, None, None
