"""Tokens in blocks counted from behind the sinks: the same blocks however a text is cut."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import softmax

from patches.merged_softmax import Frame
from tests.helpers import close


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seen=st.integers(0, 30), n=st.integers(1, 20), sinks=st.integers(0, 6), unit=st.integers(1, 7), data=st.data())
def test_a_frame_is_whole_blocks_around_the_new_tokens(
    seen: int, n: int, sinks: int, unit: int, data: st.DataObject
) -> None:
    frame = Frame(seen, n, sinks, unit)
    first = data.draw(st.integers(0, seen), "first token that is given")
    tokens = torch.arange(first, seen + n, dtype=torch.float64) + 1  # 0 stands for none
    assert frame.base % unit == frame.size % unit == 0
    assert frame.base <= max(seen - sinks, 0) < frame.base + unit, "no block more than is needed before"
    assert frame.base + frame.size - unit <= max(frame.last, 0) < frame.base + frame.size, "nor behind"
    for skip in (0, -unit):
        laid = frame.lay(tokens.view(1, 1, -1, 1), first, skip).flatten().tolist()
        wanted = range(sinks + frame.base + skip, sinks + frame.base + frame.size)
        assert laid == [token + 1 if first <= token < seen + n else 0 for token in wanted]
    gates = frame.lay(tokens.view(1, 1, -1), first)  # without a last dimension
    assert gates.flatten().tolist() == frame.lay(tokens.view(1, 1, -1, 1), first).flatten().tolist()
    # what is laid out is collected again, the sinks in front
    new, left = tokens[-n:].view(1, 1, n, 1), max(min(sinks - seen, n), 0)
    of_sinks = new[:, :, :left] if left else None
    assert torch.equal(frame.collect(frame.lay(new, seen), of_sinks), new)


def test_sinks_among_the_new_tokens_see_the_sinks_before_them() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    for seen, n in ((0, 9), (0, 3), (2, 4), (2, 1), (5, 2)):
        frame, q = Frame(seen, n, 5, 4), torch.randn(1, 4, n, 8, dtype=torch.float64)
        found = frame.sink_attention(q, k, v, 0.3, 0.0)
        count = min(5 - seen, n)
        assert (found is None) == (count <= 0)
        for i in range(count):
            sinks = slice(seen + i + 1)
            rows = (x[:, :, sinks].repeat_interleave(2, 1) for x in (k, v))
            keys, values = rows
            expected = softmax(0.3 * q[:, :, i : i + 1] @ keys.mT, -1) @ values
            close(found[:, :, i : i + 1], expected)
