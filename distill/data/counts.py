"""Counts of a source's records: how many were read, left out or cut."""

from dataclasses import dataclass, fields


@dataclass
class Counts:
    """Records of a source, and what was not trained on or held out of them."""

    read: int = 0
    empty: int = 0  # left out: no text
    short: int = 0  # left out: not longer than min_length tokens
    truncated: int = 0  # conversations cut to seq_len
    tokens_cut: int = 0  # tokens they lost
    tokens_left_over: int = 0  # at the end of the packed stream: they fill no row

    def add(self, length: int, kept: int, min_length: int) -> bool:
        """Count a record of ``length`` tokens cut to ``kept``; returns whether it is used."""
        self.read += 1
        if length <= min_length:
            self.empty += not length
            self.short += bool(length)
            return False
        self.truncated += kept < length
        self.tokens_cut += length - kept
        return True

    def clear(self) -> None:
        """Set all counts to 0."""
        for field in fields(self):
            setattr(self, field.name, 0)
