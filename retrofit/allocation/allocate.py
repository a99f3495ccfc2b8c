"""Which layers need a longer window or more rows: measured by forward passes, with the base's own as reference.

For each layer, how far its attention's output is off at each size, given the base's own inputs; and once, what being
off by that much costs the model: the KL of a base in which this layer alone is bounded. The one weighs the other, and
bytes go where they lower the sum of the layers' KLs most. Layers are not independent, so that this is a guess: how far
it goes from equal sizes is decided by the KL of whole models on the rows it was made on, and the figures that are
printed come from rows that nothing was chosen on.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.calibration import calibrate
from retrofit.evaluation.scores import evaluate, evaluating
from retrofit.observer import LayerCall, watch_layers
from retrofit.patching import patch

from .recipe import KEYS
from .sizes import SHARES, Size, Sizer, spend

# how much a layer's own KL decides, beside how its error falls with bytes: 1 is the guess itself, 0 takes all layers
# to be alike
TRUST = (1.0, 0.5, 0.0)
EVERY = 4  # of the positions at which a single layer's KL is measured: the output head costs as much as some layers


@dataclass(frozen=True)
class Plan:
    """Sizes of all layers.

    Attributes:
        sizes: by layer.
        even: whether all are alike.
        kl: of the model to its base on rows that were, and were not, used to choose; nats.
    """

    sizes: dict[int, Size]
    even: bool
    kl: float
    kl_held_out: float = float("nan")


@dataclass(frozen=True)
class Allocation:
    """What was found.

    Attributes:
        share: of the sum of the layers' KLs, each bounded alone at the even window.
        window: ``even`` and ``need`` of sinks and window alone.
        memory: the same with the memory; None where it must be trained first.
        chosen: what the recipe says; of a memory that must be trained, its KL is that of its windows alone.
        recipe: the memory by need, as :mod:`.recipe` writes it.
    """

    share: dict[int, float]
    window: dict[str, Plan]
    memory: dict[str, Plan] | None
    chosen: Plan
    recipe: dict[str, Any]


def allocate(
    base: Any,
    kind: str,
    budget: int,
    texts: Tensor,
    held_out: Tensor,
    *,
    sinks: int = 4,
    options: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Allocation:
    """Spread ``budget`` bytes per layer over the layers of ``base``.

    Args:
        base: a loaded base, not patched.
        kind: of memory. One that must be trained is not measured: its windows are spread as those of sinks and window
            alone, and its state takes its bytes in every layer.
        budget: bytes per layer on average, for one sequence: window, gates and state, the sinks left out.
        texts: token ids (N, T) to choose on; a memory that calibrates does so on them.
        held_out: others (M, T) to report on.
        sinks: S.
        options: of the memory, but not its size.
        say: called with what is being done.

    Raises:
        RetrofitError: too few bytes, texts that no window is too short for, or as :func:`retrofit.patch`.
    """
    options = options or {}
    sizer = Sizer(base.config, kind, sinks, options, base.dtype)
    if sizer.option in options:
        raise RetrofitError(f"{sizer.option}: allocate chooses this number itself: leave it out")
    if "shares" in options:
        raise RetrofitError(
            "shares: sizes are measured with even shares: leave it out, and set it in the recipe afterwards"
        )
    work = _Work(base, sizer, budget, texts, held_out, say)
    window = work.plans(Sizer(base.config, "none", sinks, {}, sizer.dtype))
    own = window if kind == "none" else work.plans(sizer)
    measured = kind != "none" and not find_kind(kind).trainable
    settings = settings_of(sizer, own["need"].sizes)
    recipe: dict[str, Any] = {key: settings.pop(key) for key in KEYS if key in settings}
    recipe |= {"options": settings} if settings else {}
    return Allocation(work.share, window, own if measured else None, own["need"], recipe)


class _Work:
    """Measurements on one base."""

    def __init__(
        self, base: Any, sizer: Sizer, budget: int, texts: Tensor, held_out: Tensor, say: Callable[[str], None]
    ):
        self.base, self.budget, self.texts, self.held_out, self.say = base, budget, texts, held_out, say
        bare = Sizer(base.config, "none", sizer.sinks, {}, sizer.dtype)
        even, least = bare.fitting(budget), bare.fitting(int(budget * SHARES[0]))
        if least is None or even is None:
            raise RetrofitError(f"bytes: {budget} hold no window: give {bare.size(1).bytes / SHARES[0]:.0f} or more")
        self.sinks, self.start = sizer.sinks, sizer.sinks + least.window
        if even.window + self.sinks + 1 >= texts.shape[1]:
            raise RetrofitError(
                f"bytes: {budget} hold a window of {even.window} tokens, and rows of {texts.shape[1]} hardly leave it: "
                "give fewer bytes or a longer --length"
            )
        if not list(sizer.sizes(budget)):
            raise RetrofitError(f"bytes: {budget} hold no window beside memory {sizer.kind!r}: give more")
        self.calibrated: dict[int, Any] | None = None
        model = patch(base, "none", even.window, self.sinks)
        self.layers = list(model.model.memories())
        say(f"the KL of {len(self.layers)} models, each with one layer bounded")
        alone = {str(index): patch(base, "none", even.window, self.sinks, layers=[index]) for index in self.layers}
        found = self._kl(alone, texts, every=EVERY)
        self.kl = {index: max(found[str(index)], 0.0) for index in self.layers}
        total = sum(self.kl.values()) or 1.0
        self.share = {index: kl / total for index, kl in self.kl.items()}
        self.even_errors = self._errors([model])[0]

    def plans(self, sizer: Sizer) -> dict[str, Plan]:
        """The best even sizes for ``sizer``'s memory, and the best by need."""
        everywhere = list(sizer.sizes(self.budget))
        sizes = [size for share in SHARES for size in sizer.sizes(int(self.budget * share))]
        sizes = list(dict.fromkeys(sizes))
        self.say(f"{sizer.kind}: the layers' errors at {len(sizes)} sizes")
        models = [self._model(sizer, dict.fromkeys(self.layers, size)) for size in sizes]
        errors = self._errors(models)
        relative = [
            [error[index] / max(self.even_errors[index], torch.finfo().tiny) for error in errors]
            for index in self.layers
        ]
        tried = [Plan(dict.fromkeys(self.layers, size), True, 0.0) for size in everywhere]
        for trust in TRUST:
            weights = [self.share[index] ** trust for index in self.layers]
            losses = [[weight * error for error in row] for weight, row in zip(weights, relative, strict=True)]
            chosen = spend(sizes, losses, self.budget * len(self.layers))
            tried.append(Plan(dict(zip(self.layers, chosen, strict=True)), False, 0.0))
        self.say(f"{sizer.kind}: {len(tried)} ways to spend the bytes")
        names = [str(index) for index in range(len(tried))]
        models_of = {name: self._model(sizer, plan.sizes) for name, plan in zip(names, tried, strict=True)}
        found = self._kl(models_of, self.texts)
        even = min((name for name in names if tried[int(name)].even), key=lambda name: found[name])
        need = min(names, key=lambda name: found[name])
        apart = self._kl({name: models_of[name] for name in {even, need}}, self.held_out)
        plan = lambda name: Plan(tried[int(name)].sizes, tried[int(name)].even, found[name], apart[name])  # noqa: E731
        return {"even": plan(even), "need": plan(need)}

    def _model(self, sizer: Sizer, sizes: dict[int, Size]) -> Any:
        """The base with these sizes, its memories calibrated; without the memory where it would have to be trained."""
        if find_kind(sizer.kind).trainable:
            sizer = Sizer(sizer.config, "none", sizer.sinks, {}, sizer.dtype)
        model = patch(self.base, **settings_of(sizer, sizes))
        if any(memory.calibrates for memory in model.model.memories().values()):
            self._calibrate(sizer, model)
        return model

    def _calibrate(self, sizer: Sizer, model: Any) -> None:
        """What queries are like does not depend on how many rows there are: it is measured once."""
        if self.calibrated is None:
            self.say(f"{sizer.kind}: calibrating")
            window = next(iter(sizer.sizes(self.budget))).window
            whole = patch(self.base, sizer.kind, window, self.sinks, **sizer.options)
            calibrate(whole, self.texts.split(1))
            self.calibrated = {index: memory.state_dict() for index, memory in whole.model.memories().items()}
        for index, memory in model.model.memories().items():
            if memory.calibrates:
                memory.load_state_dict(self.calibrated[index], assign=True)  # shared, not copied

    def _kl(self, models: dict[str, Any], texts: Tensor, every: int = 1) -> dict[str, float]:
        """The mean KL of each model to the base, over the positions past the smallest window, or ``every`` n-th one."""
        labels = torch.full_like(texts, -100)
        labels[:, self.start + 1 :: every] = 0  # what the next token is does not matter to a KL
        tell = lambda done, rows: self.say(f"  row {done} of {rows}")  # noqa: E731
        found = evaluate(models, texts, start=self.start, labels=labels, batch_size=1, on_batch=tell)
        return {name: found[name].mean_kl for name in models}

    @torch.no_grad()
    def _errors(self, models: Sequence[Any]) -> list[dict[int, float]]:
        """Of each model, by layer: the squared error of the attention's output on the base's own input to the layer."""
        found = [dict.fromkeys(self.layers, 0.0) for _ in models]
        first = models[0]
        texts = [ids.to(first.device) for ids in self.texts.split(1)]
        plans = [model.model.plan(texts[0]) for model in models]

        def look(call: LayerCall) -> None:
            for model, plan, errors in zip(models, plans, found, strict=True):
                if plan.evicting:
                    own = call.repeat(model.model.layers[call.index].self_attn, plan)
                    errors[call.index] += float((own - call.output)[:, self.start :].float().square().sum())

        with evaluating(*models), first.memory_off(), watch_layers(first.model, self.layers, look):
            for ids in texts:
                first.model(input_ids=ids, use_cache=False)
        return found


def settings_of(sizer: Sizer, sizes: dict[int, Size]) -> dict[str, Any]:
    """The arguments of :func:`retrofit.patch` that give each layer its size."""
    option, first = sizer.option, next(iter(sizes.values()))
    with_rows = [index for index, size in sizes.items() if size.rows is not None]
    kind = "none" if option is not None and not with_rows else sizer.kind
    common: dict[str, Any] = {"memory": kind, "window": first.window, "sinks": sizer.sinks}
    if kind == sizer.kind:
        common |= sizer.options
    if kind == sizer.kind and option is not None:
        common[option] = sizes[with_rows[0]].rows
        if len(with_rows) < len(sizes):
            common |= {"layers": with_rows, "others": "window"}

    def otherwise(index: int) -> dict[str, Any]:
        size, found = sizes[index], {}
        if size.window != first.window:
            found["window"] = size.window
        if size.rows is not None and size.rows != common[str(option)]:
            found[str(option)] = size.rows
        return found

    by_layer = {}
    for other, group in groupby(sizes, otherwise):
        indices = list(group)
        for ends in _runs(indices) if other else ():
            by_layer[ends] = other
    return common | ({"by_layer": by_layer} if by_layer else {})


def _runs(indices: Iterable[int]) -> list[str]:
    """``[0, 2, 3, 4]`` as ``["0", "2-4"]``."""
    runs = [[at for _, at in group] for _, group in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
