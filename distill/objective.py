"""What a run minimises: teacher and student on the same rows, and a loss at every position past the window.

The MSE loss compares each layer's attention output before the output projection. It is AHN's ablation "distill" (arXiv
2510.07318; its code adds it to the KL): teacher and student run side by side, each on its own hidden states, and every
layer with a memory is to give what full attention gives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from distill.full_attention import without_mask
from distill.lora import lora_off
from distill.loss import chunked_ce, chunked_kl, scored_positions
from distill.segments import Read, Reader, in_segments, pieces
from patches.errors import RetrofitError
from retrofit.evaluation.scores import evaluating, hidden_states
from retrofit.lm_head import gathered
from retrofit.observer import watch_layers

Batch = dict[str, Tensor]


class Taught(NamedTuple):
    """What the teacher shows of some tokens, as far as a loss looks: hidden states (B, n, E), the heads' outputs."""

    states: Tensor | None
    outputs: list[Tensor]

    def to(self, device: torch.device | str) -> "Taught":
        """The same on ``device``."""
        states = None if self.states is None else self.states.to(device)
        return Taught(states, [output.to(device) for output in self.outputs])


@dataclass(frozen=True)
class Objective:
    """One loss; the attributes are keys of a recipe (:class:`distill.config.DistillConfig`)."""

    loss: str = "kl"
    mse_weight: float = 0.0
    temperature: float = 1.0
    label_shift: str = "next"
    segment: int | None = None
    segments_back: int | None = None
    offload_teacher: bool = False

    @classmethod
    def of(cls, settings: Any) -> "Objective":
        """The one that a recipe or the trainer's arguments describe."""
        return cls(**{attribute.name: getattr(settings, attribute.name) for attribute in fields(cls)})

    @property
    def mse(self) -> float:
        """What the attention outputs' MSE counts."""
        return 1.0 if self.loss == "mse" else self.mse_weight

    def check(self, model: Any) -> None:
        """Refuse a model whose memory the loss would not see.

        Raises:
            RetrofitError: the memory joins behind the output projection, where the MSE does not look.
        """
        if self.mse and model.config.memory["kind"] == "tensor-cache":
            raise RetrofitError(
                "loss 'mse' compares what goes into each layer's output projection, and memory 'tensor-cache' joins "
                "behind it: set loss to 'kl' or 'ce'"
            )

    def check_rows(self, rows: Any, reach: int) -> None:
        """Refuse rows from which a layer that keeps the last tokens up to ``reach`` would learn nothing.

        Streams are let in: nobody knows what will come.

        Raises:
            RetrofitError: none has a position past ``reach`` that counts.
        """
        if not hasattr(rows, "__len__"):
            return
        labels = (torch.as_tensor(labels_of(rows[index])) for index in range(len(rows)))
        if not any(self.scored(one[None], reach).any() for one in labels):
            raise RetrofitError(
                f"none of the {len(rows)} training rows has anything to learn beyond {reach} tokens (the widest window "
                "of a trained layer, and the sinks): give longer texts, or set a smaller window"
            )

    def scored(self, labels: Tensor, lossless: int) -> Tensor:
        """(B, T) bool: the positions that count among ``labels`` (B, T), past the lossless budget S + W."""
        scored = scored_positions(labels, lossless, self.label_shift)
        if self.loss == "ce":  # it needs the next label itself, whatever the shift
            scored &= scored_positions(labels, lossless)
        return scored

    def losses(self, student: Any, model: Any, batch: Batch, scored: Tensor) -> Tensor:
        """(P,) the loss at each position of ``scored`` (B, T), with a gradient at the memory.

        Args:
            student: the model as it is trained, wrapped or not.
            model: the same, unwrapped.
            batch: ``input_ids``, ``labels`` and, for padded rows, ``attention_mask``.
        """
        tokens = tokens_of(batch)
        targets = batch["labels"].roll(-1, 1)  # what each position predicts
        if self.segment is not None and self.segment < scored.shape[1]:
            return self._in_segments(student, model, tokens, targets, scored)
        taught = self._teach(model, lambda: hidden_states(model, tokens))
        read = lambda: hidden_states(student, tokens, model.get_decoder())  # noqa: E731
        return self._learn(model, read, taught, targets, scored)

    def _in_segments(self, student: Any, model: Any, tokens: Batch, targets: Tensor, scored: Tensor) -> Tensor:
        """:meth:`losses`, with the activations of one segment at a time."""
        losses: list[Tensor] = []  # (B, n) of each segment
        decoder = model.get_decoder()

        def read_all(read: Read) -> Tensor:
            offloads = self.offload_teacher and scored.is_cuda  # elsewhere it is in main memory anyway
            teacher = Reader(read, decoder, tokens, DynamicCache(config=model.config, offloading=offloads))
            own = Reader(read, decoder, tokens, DynamicCache(config=model.config))
            for number, piece in enumerate(pieces(scored.shape[1], self.segment or 1)):
                with without_mask(model, padded="attention_mask" in tokens):
                    taught = self._teach(model, partial(teacher.states, piece)).to("cpu")
                if self.segments_back and number % self.segments_back == 0:
                    own.cut()

                def learn(read: Callable[[], Tensor], taught: Taught = taught, piece: slice = piece) -> Tensor:
                    where = scored[:, piece]
                    found = self._learn(model, read, taught.to(where.device), targets[:, piece], where)
                    return found.new_zeros(where.shape).masked_scatter(where, found)

                losses.append(own.twice(piece, learn))
            head = model.get_output_embeddings().weight
            return head.new_zeros(len(scored), 1, model.config.hidden_size)

        with in_segments(decoder, read_all):
            student(**tokens, use_cache=False, logits_to_keep=1)
        return torch.cat(losses, 1)[scored]

    def _teach(self, model: Any, read: Callable[[], Tensor]) -> Taught:
        """What the base shows of the tokens that ``read`` reads."""
        if self.loss == "ce" and not self.mse:
            return Taught(None, [])
        with attention_outputs(model, self.mse > 0) as outputs, teaching(model):
            return Taught(read(), outputs)

    def _learn(self, model: Any, read: Callable[[], Tensor], taught: Taught, targets: Tensor, scored: Tensor) -> Tensor:
        """(P,) the student's losses at ``scored`` (B, n); ``read`` gives its hidden states (B, n, E)."""
        with attention_outputs(model, self.mse > 0) as outputs:
            states = read()[scored]  # (P, E)
        head = model.get_output_embeddings()
        with gathered([head]):
            if self.loss == "ce":
                losses = chunked_ce(states, targets[scored], head.weight, head.bias, temperature=self.temperature)
            elif self.loss == "kl":
                assert taught.states is not None
                teacher = taught.states[scored]
                losses = chunked_kl(states, teacher, head.weight, head.bias, temperature=self.temperature)
            else:
                losses = states.new_zeros(())
        return losses + self.mse * squared_errors(outputs, taught.outputs, scored) if self.mse else losses


def labels_of(row: Any) -> Any:
    """The labels of a row or a batch.

    Raises:
        RetrofitError: it has none.
    """
    if "labels" not in row:
        raise RetrofitError(
            "rows need 'labels' beside 'input_ids': the same ids, with -100 where there is nothing to learn"
        )
    return row["labels"]


def tokens_of(batch: Batch) -> Batch:
    """What of a batch the model is given."""
    tokens = {"input_ids": batch["input_ids"]}
    if "attention_mask" in batch and not padded_right(batch["attention_mask"]):
        tokens["attention_mask"] = batch["attention_mask"]
    return tokens


def padded_right(mask: Tensor) -> bool:
    """Whether padding (B, T; 0 where it is) comes after all tokens, where a causal model needs no mask for it.

    The teacher's attention would build a T x T mask from it: 600 MB a row at AHN's 24,576 tokens.
    """
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@contextmanager
def teaching(model: Any) -> Iterator[None]:
    """Inside the block the unwrapped model is the base with full attention, without gradients: nothing to reduce."""
    with torch.no_grad(), evaluating(model), model.memory_off(), lora_off(model):
        yield


@contextmanager
def attention_outputs(model: Any, wanted: bool = True) -> Iterator[list[Tensor]]:
    """A list that fills with the heads' outputs ``(B, T, H * D)`` of each layer that is fitted, as forward passes run.

    Args:
        model: a retrofitted model, unwrapped.
        wanted: False leaves the list empty, and the model alone.
    """
    outputs: list[Tensor] = []
    # others="window" gives the other layers a memory that has nothing to train
    layers = [index for index, memory in model.model.memories().items() if wanted and memory.trainable]
    with watch_layers(model.model, layers, lambda call: outputs.append(call.heads)):
        yield outputs


def squared_errors(student: list[Tensor], teacher: list[Tensor], scored: Tensor) -> Tensor:
    """Squared differences, averaged over layers and width.

    Args:
        student, teacher: one ``(B, T, H * D)`` per layer.
        scored: (B, T) bool, where to look.

    Returns:
        (P,) in fp32 (fp64).

    Raises:
        RetrofitError: the student's outputs carry no gradient though one is wanted: checkpointing is reentrant.
    """
    pairs = [(ours[scored], theirs[scored]) for ours, theirs in zip(student, teacher, strict=True)]
    cut = not any(output.requires_grad for output in student)
    if torch.is_grad_enabled() and cut and len(pairs[0][0]):  # a segment within S + W has none, and nothing scored
        raise RetrofitError(
            "loss 'mse' needs gradients through the attention's outputs, which reentrant checkpointing cuts off: "
            "set use_reentrant to false"
        )
    wide = torch.promote_types(student[0].dtype, torch.float32)
    return torch.stack([(ours.to(wide) - theirs.to(wide)).square().mean(-1) for ours, theirs in pairs]).mean(0)
