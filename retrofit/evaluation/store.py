"""Results on disk while they come, a JSON line each; a later run with the same settings goes on after the last."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from patches.errors import RetrofitError
from retrofit.files import write_text

RESULTS = "results.jsonl"


class ResultStore:
    """Everything measured so far, in a JSONL file whose first line says with what settings.

    Raises:
        RetrofitError: the file holds results of other settings, or a line that is none of ours; if it is overwritten,
            its first line is looked at alone.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        """``settings``: what the results depend on; anything JSON holds."""
        self.path, self.settings, self.begun = folder / RESULTS, settings, False
        self.done: dict[str, dict[str, Any]] = {}
        lines = self._whole_lines(only_first=overwrite) if self.path.is_file() else []
        if lines and not overwrite:
            before = lines[0].get("settings")
            if before != json.loads(json.dumps(settings)):
                changed = sorted(key for key in settings if (before or {}).get(key) != settings[key])
                what = f" ({', '.join(changed)})" if before and changed else ""
                raise RetrofitError(
                    f"{self.path} holds results of other settings{what}: choose another folder, or pass --overwrite"
                )
            self.done = {line["key"]: line for line in lines[1:]}

    def begin(self) -> None:
        """Write the file anew, once: the last line of an interrupted run may be cut short."""
        if not self.begun:
            kept = [{"settings": self.settings}, *self.done.values()]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.begun = True

    def add(self, key: str, **values: Any) -> None:
        """Keep one result under ``key``; it is on disk when this returns. Before the first one nothing is written."""
        self.begin()
        line = {"key": key, **values}
        self.done[key] = line
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def __contains__(self, key: str) -> bool:
        return key in self.done

    def results(self, **wanted: Any) -> list[dict[str, Any]]:
        """The results that have these values, in the order in which they came."""
        return [line for line in self.done.values() if all(line.get(key) == value for key, value in wanted.items())]

    def means(self, kind: str, by: str) -> list[dict[str, Any]]:
        """Mean ``scores`` of the results of a kind, per length and value of ``by``.

        Returns:
            A dictionary each: ``length``, ``by``'s value, ``samples``, and the mean of every row under its name.
        """
        groups: dict[tuple[Any, Any], list[dict[str, float]]] = {}
        for line in self.results(kind=kind):
            groups.setdefault((line["length"], line[by]), []).append(line["scores"])
        return [
            {"length": length, by: value, "samples": len(scores), **{row: _mean(scores, row) for row in scores[0]}}
            for (length, value), scores in groups.items()
        ]

    def _whole_lines(self, only_first: bool) -> list[dict[str, Any]]:
        texts = self.path.read_bytes().splitlines()[: 1 if only_first else None]
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
                key, sort = ("settings", dict) if number == 1 else ("key", str)
                if not isinstance(line, dict) or not isinstance(line.get(key), sort):
                    raise ValueError
            except (ValueError, RecursionError):
                if number == len(texts) > 1:
                    break  # the run was cut off while it wrote this line
                raise RetrofitError(f"{self.path}, line {number} is not a result: choose another folder") from None
            lines.append(line)
        return lines


def _mean(scores: list[dict[str, float]], row: str) -> float:
    return fmean(one[row] for one in scores)
