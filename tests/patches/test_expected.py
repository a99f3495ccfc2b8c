"""Expected attention: who stays against a heap, how it is read against one plain softmax, what calibration measures."""

import heapq
import math

import pytest
import torch
from torch import Tensor

import retrofit
from patches.errors import RetrofitError
from patches.expected import EMPTY, ExpectedAttention, choose
from patches.kinds import KINDS
from patches.rotary import rotate
from patches.sequence import Starts
from retrofit.calibration import calibrate
from tests.conftest import tiny_base
from tests.helpers import feed, left_mask, logits, tokens
from tests.patches.steps import make_step, rotary

W, S, R, DIM = 6, 2, 4, 8


def kept_of(ranks: list[int], rows: int, latest: int = 0) -> list[set[int]]:
    """Who is there after each arrival: the latest, and of those before them the highest ranks."""
    heap: list[tuple[int, int]] = []
    after = []
    for index in range(len(ranks)):
        left = index - latest
        if left >= 0:
            heapq.heappush(heap, (ranks[left], left))
        if len(heap) > rows - latest:
            heapq.heappop(heap)
        after.append({i for _, i in heap} | set(range(max(left + 1, 0), index + 1)))
    return after


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 1, 25, 7]])
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_who_stays_is_what_a_heap_keeps(rows: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(2, 3, 40, generator=generator).argsort(-1)  # no two are equal
    held = torch.full((2, 3, rows), EMPTY)
    who = torch.full((2, 3, rows), -1)  # the token in each place
    expected = [[kept_of(ranks[b, h].tolist(), rows) for h in range(3)] for b in range(2)]
    at = 0
    for size in sizes:
        new = ranks[:, :, at : at + size]
        choice = choose(held, new)
        candidates = torch.cat([who, torch.arange(at, at + size).expand(2, 3, -1)], 2)
        for t in range(size):
            for b in range(2):
                for h in range(3):
                    seen = candidates[b, h][choice.alive[b, h, t]].tolist()
                    assert sorted(seen) == sorted(expected[b][h][at + t])
        held = torch.cat([held, new], 2).gather(2, choice.kept)
        who = candidates.gather(2, choice.kept)
        at += size


def memory_and_heads(n: int = 40, **options: object) -> tuple[ExpectedAttention, Tensor, Tensor, Tensor]:
    """A memory that has measured something, and unrotated q (2, 4, n, 8), k, v (2, 2, n, 8), float64."""
    config = tiny_base("Llama", head_dim=DIM).config
    memory = ExpectedAttention(config, W, S, ExpectedAttention.read_options({"rows": R, "horizon": 16, **options}))
    generator = torch.Generator().manual_seed(1)
    memory.reset_parameters()
    memory.double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).abs())
    q, k, v = (torch.randn(2, heads, n, DIM, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    return memory, q, k, v


def readable(memory: ExpectedAttention, q: Tensor, k: Tensor, v: Tensor, pads: list[int]) -> Tensor:
    """The definition, token by token: scores by explicit matrices, a heap, one softmax. ``(B, H, n, D)``."""
    B, H, n, _ = q.shape
    cos, sin = rotary(torch.arange(n)[None] - torch.tensor(pads)[:, None])
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    # the average rotation as a matrix: what it does to each unit vector
    ahead = [x.mean(1, keepdim=True) for x in rotary(torch.arange(W, W + 16)[None])]
    average = rotate(torch.eye(DIM, dtype=torch.float64)[None, None], *ahead)[0, 0].T  # q ahead = average @ q
    out = torch.zeros(B, H, n, DIM, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            key_head = h // 2
            scores = []
            for j in range(n):
                total = 0.0
                for other in (2 * key_head, 2 * key_head + 1):
                    m = average @ memory.query_mean[other].detach()
                    spread = memory.query_spread[other].detach()
                    covariance = average @ spread @ spread.T @ average.T
                    key = k[b, key_head, j]
                    weight = key @ m / math.sqrt(DIM) + key @ covariance @ key / (2 * DIM)
                    total += math.exp(weight - memory.level[other].item())
                scores.append(round((math.log(total) + math.log(v[b, key_head, j].norm().item())) * 256))
            first, rows = pads[b] + S, memory.rows[key_head]  # the first that is neither padding nor sink
            ranks = [
                (score + (i + S) * round(256 * memory.options.recency) // (W + rows)) * 2**32 + i
                for i, score in enumerate(scores[first:])
            ]
            latest = min(max(round(memory.options.latest * (W + rows)) - W, 0), rows)
            after = kept_of(ranks, rows, latest)
            for t in range(pads[b], n):
                seen = [j for j in range(pads[b], t + 1) if t - j < W or j < first]
                gone = t - W - first  # index of the newest token that has left the window
                if gone >= 0:
                    seen += [first + i for i in after[gone]]
                weights = (turned_k[b, key_head, seen] @ turned_q[b, h, t] / math.sqrt(DIM)).softmax(0)
                out[b, h, t] = weights @ v[b, key_head, seen]
    return out


@pytest.mark.parametrize("latest", [0, 0.8, 1])
@pytest.mark.parametrize("rows", [R, [7, 2], [0, 5]])
@pytest.mark.parametrize("pads", [[0, 0], [5, 0]])
def test_attention_is_one_softmax_over_sinks_window_and_the_chosen(
    pads: list[int], rows: int | list[int], latest: float
) -> None:
    memory, q, k, v = memory_and_heads(rows=rows, latest=latest)
    cos, sin = rotary(torch.arange(40)[None] - torch.tensor(pads)[:, None])
    starts = Starts(tuple(pads)) if any(pads) else Starts()
    step = make_step(memory, rotate(q, cos, sin), rotate(k, cos, sin), v, starts=starts)
    heads, added = memory(step)
    assert added is None
    expected = readable(memory, q, k, v, pads)
    for b, pad in enumerate(pads):
        torch.testing.assert_close(heads[b, :, pad:], expected[b, :, pad:], atol=1e-9, rtol=0)


CONSTANT = {"one word": torch.full((1, 30), 7), "two words": torch.tensor([[7, 9]]).repeat(1, 15)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", CONSTANT)
@pytest.mark.parametrize("kind", [kind for kind, memory in KINDS.items() if memory.calibrates])
def test_texts_that_say_nothing_leave_numbers(kind: str, text: str, dtype: torch.dtype, family: str) -> None:
    model = retrofit.patch(tiny_base(family).to(dtype), memory=kind, window=8, sinks=2)
    calibrate(model, [CONSTANT[text]])
    assert all(x.isfinite().all() for x in model.state_dict().values())
    assert logits(model, tokens(2, 60)).isfinite().all()


def test_entries_in_few_bits_change_little_and_take_what_they_say(family: str) -> None:
    base, ids = tiny_base(family), tokens(2, 60)
    whole = logits(base, ids)
    distances = []
    for bits in (16, 8, 6, [5, 4.5], 4):
        model = retrofit.patch(base, memory="expected", window=8, sinks=2, rows=100, bits=bits)
        calibrate(model, [tokens(2, 50, seed=3)])
        out, cache = feed(model, ids, [30, 30])
        distances.append((out - whole).abs().max().item())
        layers = [cache.layers[index] for index in model.model.memories()]
        held = sum(x.numel() * x.element_size() for layer in layers for x in layer.state.values())
        assert held == 2 * len(layers) * retrofit.kept_bytes(model)  # two texts
    assert distances[0] < 1e-5  # as many rows as tokens: full attention
    assert distances[0] < distances[1] < distances[-1] < 1


def test_calibration_measures_queries_before_their_rotation() -> None:
    base, texts = tiny_base("Qwen3"), [tokens(2, 30, seed=1), tokens(1, 45, seed=2)]
    model = retrofit.patch(base, memory="expected", window=8, sinks=2, bits=8, layers=[0])
    calibrate(model, texts)
    attention, seen = base.model.layers[0].self_attn, []
    for text in texts:
        x = base.model.layers[0].input_layernorm(base.model.embed_tokens(text))
        seen.append(attention.q_norm(attention.q_proj(x).unflatten(-1, (4, 16)))[:, 2:].flatten(0, 1))  # but for sinks
    q = torch.cat(seen).detach().double()  # (tokens, 4, 16)
    memory = model.model.memories()[0]
    for head in range(4):
        torch.testing.assert_close(memory.query_mean[head].double(), q[:, head].mean(0), atol=1e-5, rtol=0)
        spread = memory.query_spread[head].double()
        torch.testing.assert_close(spread @ spread.T, q[:, head].T.cov(correction=0), atol=1e-4, rtol=1e-4)
    assert (memory.level != 0).all()
    assert (memory.key_spread != 1).all()


def test_calibration_is_saved_and_repeatable(tmp_path) -> None:
    base, ids, texts = tiny_base("Qwen2"), tokens(1, 60), [tokens(1, 50, seed=3)]
    model = retrofit.patch(base, memory="expected", window=8, sinks=2, rows=5)
    before = logits(model, ids)
    calibrate(model, texts)
    after = logits(model, ids)
    assert not torch.equal(before, after)
    calibrate(model, texts)
    assert torch.equal(logits(model, ids), after)
    retrofit.save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(retrofit.load_adapter(base, tmp_path / "adapter"), ids), after)
    assert not any(parameter.requires_grad for _, parameter in model.memory_parameters())


@pytest.mark.parametrize("options", [{"latest": 1}, {"latest": 0, "recency": 1000}])
def test_entries_for_the_latest_alone_are_a_longer_window(options: dict[str, float]) -> None:
    base, ids = tiny_base("Qwen3"), tokens(2, 60)
    model = retrofit.patch(base, memory="expected", window=8, sinks=2, rows=5, **options)
    wider = retrofit.patch(base, memory="none", window=13, sinks=2)
    torch.testing.assert_close(logits(model, ids), logits(wider, ids), atol=1e-5, rtol=0)


def test_a_padded_row_chooses_as_it_does_alone() -> None:
    model = retrofit.patch(tiny_base("Llama"), memory="expected", window=8, sinks=2, rows=5, bits=4)
    calibrate(model, [tokens(1, 50, seed=3)])
    ids, mask = tokens(2, 50), left_mask([31, 50], 50)
    torch.testing.assert_close(logits(model, ids, mask)[0, 19:], logits(model, ids[:1, 19:])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 9}, "use 16"),
        ({"bits": [16, 4]}, "use 16"),
        ({"bits": []}, "use 16"),
        ({"rows": 0}, "rows=0"),
        ({"horizon": 0}, "horizon=0"),
        ({"latest": 1.5}, "latest=1.5"),
        ({"recency": -1}, "recency=-1"),
    ],
)
def test_options_out_of_range(options: dict[str, object], said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        retrofit.patch(tiny_base("Llama"), memory="expected", window=8, **options)


def test_nothing_to_calibrate() -> None:
    with pytest.raises(RetrofitError, match="nothing to calibrate"):
        calibrate(retrofit.patch(tiny_base("Llama"), memory="ahn-gdn", window=8), [tokens(1, 20)])
    with pytest.raises(RetrofitError, match="needs texts"):
        calibrate(retrofit.patch(tiny_base("Llama"), memory="expected", window=8), [])
