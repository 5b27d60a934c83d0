"""Sources of samples that are numbers, of every kind, for tests of what is read and what is read again."""

import itertools

import numpy as np

import axonml_jax as ax


class Numbers:
    """A dataset with random access."""

    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.first + range(self.size)[index]


class Counted:
    """An iterable, whose place is found by counting."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Stateful(Counted):
    """An iterable that knows its place itself, and so is never read before it."""

    def __init__(self, size):
        super().__init__(size)
        self.at, self.read = 0, []

    def __iter__(self):
        for number in range(self.at, self.size):
            self.at = number + 1
            self.read.append(number)
            yield number
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class FailsAt(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("the disk is gone")
        return index


class StreamFailsAt(Counted):
    def __iter__(self):
        yield from range(5)
        raise OSError("the disk is gone")


def documents(count=40):
    """Texts of many lengths."""
    return [{"text": chr(97 + i % 26) * (1 + i * 7 % 23)} for i in range(count)]


def numbers():
    """A generator function."""
    yield from range(48)


def packed_stream():
    """Rows of an iterable source of texts."""
    return ax.pack(documents().__iter__, 16)


def mixed_stream():
    """A mixture with an iterable in it."""
    return ax.mix({"a": Counted(20), "b": Numbers(30, 100)}, {"a": 1, "b": 2}, seed=3)


def mixture():
    """A mixture of datasets."""
    return ax.mix({"a": Numbers(12), "b": Numbers(36, 100)}, {"a": 1, "b": 2}, seed=3)


def value_of(sample):
    """What tells a sample from others."""
    return tuple(sample["tokens"].tolist()) if isinstance(sample, dict) else int(np.asarray(sample))


def collected(samples):
    """A collate that keeps what tells samples apart."""
    return [value_of(sample) for sample in samples]


def first(loader, count):
    """So many batches, as lists."""
    return [np.asarray(batch).tolist() for batch in itertools.islice(loader, count)]
