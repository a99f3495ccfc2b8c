"""Drawing the window of a step as AHN's recipe does."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.windows import AHN_BUDGETS, AHN_SINKS, draw_window


def test_a_draw_is_a_function_of_seed_and_step() -> None:
    draws = [draw_window(7, step, 24576) for step in range(50)]
    assert draws == [draw_window(7, step, 24576) for step in range(50)]
    assert draws != [draw_window(8, step, 24576) for step in range(50)]


@pytest.mark.parametrize(("length", "budgets"), [(24576, {4096, 8192}), (512, {128, 256}), (513, {128, 256, 512})])
def test_budgets_are_strictly_between_an_eighth_and_the_whole(length: int, budgets: set[int]) -> None:
    draws = [draw_window(0, step, length) for step in range(400)]
    assert {window + sinks for window, sinks in draws} == budgets


def test_sinks_are_uniform_up_to_half_the_budget() -> None:
    draws = [draw_window(0, step, 2048) for step in range(4000)]
    of_512 = Counter(sinks for window, sinks in draws if window + sinks == 512)
    assert set(of_512) == {0, 32, 64, 128}
    assert max(of_512.values()) < 1.5 * min(of_512.values())


@given(st.integers(2, 10**6), st.integers(0, 10**6))
def test_every_length_has_a_window(length: int, step: int) -> None:
    window, sinks = draw_window(0, step, length)
    assert window >= 1
    assert sinks in AHN_SINKS
    assert sinks <= window
    assert window + sinks < length
    assert window + sinks in AHN_BUDGETS or length <= 32
