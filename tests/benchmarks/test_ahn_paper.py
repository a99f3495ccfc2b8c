"""The AHN paper's efficiency table, to the printed digit."""

from typing import Any

import pytest

from benchmarks.ahn_paper import paper_rows

# base, mixer: extra parameters (M), mixing PFLOPs, ratio, model PFLOPs, ratio, cache GB, ratio, as printed
PRINTED = {
    ("3B", "full"): "0.0 2.50 100.0 3.29 100.0 9.44 100.0",
    ("3B", "SWA"): "0.0 1.17 46.6 1.95 59.3 2.42 25.6",
    ("3B", "ahn-mamba2"): "11.9 1.17 46.7 1.95 59.4 2.45 26.0",
    ("3B", "ahn-dn"): "11.8 1.17 46.7 1.95 59.4 2.45 26.0",
    ("3B", "ahn-gdn"): "13.0 1.17 46.7 1.95 59.4 2.45 26.0",
    ("7B", "full"): "0.0 - - - - 14.68 100.0",  # 14.7 in the paper
    ("7B", "SWA"): "0.0 - 48.0 - - 3.76 25.6",
    ("7B", "ahn-mamba2"): "18.6 - - - - 3.81 26.0",
    ("7B", "ahn-dn"): "18.5 - - - - 3.81 26.0",
    ("7B", "ahn-gdn"): "21.3 - - - - 3.81 26.0",
    ("14B", "full"): "0.0 8.83 100.0 11.83 100.0 50.33 100.0",
    ("14B", "SWA"): "0.0 4.37 49.5 7.38 62.3 12.88 25.6",
    ("14B", "ahn-mamba2"): "51.4 4.38 49.7 7.39 62.4 13.01 25.9",
    ("14B", "ahn-dn"): "51.1 4.38 49.7 7.39 62.4 13.01 25.9",
    ("14B", "ahn-gdn"): "61.0 4.38 49.7 7.39 62.5 13.01 25.9",
}
FIGURES = ("extra_parameters_m", "mixing", "mixing_ratio", "model", "model_ratio", "cache_gb", "cache_ratio")


@pytest.fixture(scope="module")
def paper() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["base"], row["mixer"]): row for row in paper_rows()}


@pytest.mark.parametrize("key", PRINTED, ids="-".join)
def test_the_paper_s_digits(key: tuple[str, str], paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    for figure, printed in zip(FIGURES, PRINTED[key].split(), strict=True):
        value = paper[key][figure] * (100 if figure.endswith("ratio") else 1)
        digits = len(printed.partition(".")[2])
        assert printed == "-" or f"{value:.{digits}f}" == printed, figure


def test_the_paper_s_7b_is_shown_as_printed_and_as_computed(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert f"{paper['7B', 'full']['mixing']:.2f} {paper['7B', 'full']['model']:.2f}" == "3.50 5.24"
    assert (paper["7B*", "full"]["mixing"], paper["7B*", "full"]["model"]) == (3.23, 4.87)
    assert len(paper) == 20
