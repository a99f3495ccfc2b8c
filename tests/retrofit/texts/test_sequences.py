"""Texts as rows of one length: where they come from, and in which order."""

import datasets
import pytest

from patches.errors import RetrofitError
from retrofit.texts.tokens import read_sequences


def test_texts_come_from_a_folder_in_order(tmp_path, byte_tokenizer):
    (tmp_path / "2.txt").write_text("klmnopq")
    (tmp_path / "1.txt").write_text("abcdefghij")
    (tmp_path / "notes.md").write_text("zzzzzz")

    def read(**options):
        return [byte_tokenizer.decode(row) for row in read_sequences(str(tmp_path), byte_tokenizer, **options)]

    assert read(length=4) == ["abcd", "efgh", "klmn", "opq<eos>"]
    assert read(length=4, count=1) == ["abcd"]
    assert read_sequences(str(tmp_path / "2.txt"), byte_tokenizer, length=7).shape == (1, 7)
    with pytest.raises(RetrofitError, match="no text of 99 tokens"):
        read(length=99)


@pytest.mark.parametrize("split", ["test", "train"])
def test_a_datasets_test_split_is_read(monkeypatch, byte_tokenizer, split):
    asked = []
    splits = {split: datasets.Dataset.from_dict({"text": ["abcd", "efgh"]}).to_iterable_dataset()}
    splits = {"train": datasets.Dataset.from_dict({"text": ["xxxxxx"]}).to_iterable_dataset()} | splits
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or splits)
    rows = read_sequences("user/pg19", byte_tokenizer, length=4)
    assert [byte_tokenizer.decode(row) for row in rows] == ["abcd", "efgh"]
    assert asked == [(("user/pg19", None), {"revision": None, "streaming": True})]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(RetrofitError, match=r"no file or folder here, and the dataset .* on the Hub cannot be"):
        read_sequences("user/pg19", byte_tokenizer, length=4)


@pytest.mark.parametrize("source", ["nowhere.txt", "a/b/c"])
def test_a_path_that_is_not_there_is_no_dataset(byte_tokenizer, source):
    with pytest.raises(RetrofitError, match="no file or folder"):
        read_sequences(source, byte_tokenizer)


def test_an_empty_folder_is_said(tmp_path, byte_tokenizer):
    with pytest.raises(RetrofitError, match="cannot be read: EmptyDatasetError"):
        read_sequences(str(tmp_path), byte_tokenizer)
