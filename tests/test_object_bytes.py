"""Objects between ranks: JSON where it holds all of them, a pickle otherwise, and none where pickles are forbidden."""

import math
import pickle

import numpy as np
import pytest

import axonml_jax as ax
from axonml_jax.collectives.eager import NO_PICKLE, OnlyPickled, decoded, encoded

FORBIDDEN = {NO_PICKLE: "1"}
PLAIN = [
    *(None, True, 0, -(2**70), 1.5, -0.0, float("inf"), 5e-324, "", "né\u2028\0", [], {}),
    {"a": [1, {"b": [None, "x"]}], "": 0},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_json_values_travel_as_json_and_come_back_as_they_were(value):
    found = decoded(encoded(value, FORBIDDEN), FORBIDDEN)
    assert found == value and type(found) is type(value)
    assert not isinstance(value, float) or math.copysign(1, found) == math.copysign(1, value)


class Text(str):
    """Text with a meaning of its own."""


HELD = [[]]
HELD[0].append(HELD)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
STRANGE = {
    "a tuple": ([1, (2, 3)], "[1] is a tuple"),
    "a key that is no text": ({"a": {1: 2}}, "['a'] has the key 1"),
    "a subclass": ({"a": [Text("x")]}, "['a'][0] is a Text"),
    "an array": (np.arange(3), "it is a ndarray"),
    "a number of NumPy's": (np.float64(1), "it is a float64"),
    "half a character": (["\ud83d", "\ude00"], "[0] is text with half a character"),
    "halves that JSON would join": ({"\ud83d\ude00": 1}, "it has the key"),
    "one that holds itself": (HELD, "nested too deep"),
    "one that is nested without end": (DEEP, "nested too deep"),
    "a number of many digits": (10**5000, "too long a number"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_json_would_change_is_pickled_or_refused_by_its_place(case):
    value, why = STRANGE[case]
    with pytest.raises(OnlyPickled) as caught:
        encoded(value, FORBIDDEN)
    assert why in str(caught.value)
    if case != "one that is nested without end":  # which pickle cannot carry either
        assert encoded(value, {})[:1] == b"P"


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_a_pickle_that_comes_where_they_are_forbidden_is_not_read():
    with pytest.raises(OnlyPickled, match="a pickle came"):
        decoded(encoded(Bomb(), {}), FORBIDDEN)
    with pytest.raises(OnlyPickled):
        decoded(b"", FORBIDDEN)
    with pytest.raises(ValueError, match=rf"{NO_PICKLE}='yes': must be 1"):
        encoded((), {NO_PICKLE: "yes"})


def each_rank(work, n=2):
    """What every rank's call gave: a result or an error."""

    def call(world):
        try:
            return work(world)
        except ValueError as error:
            return str(error)

    return ax.spawn(call, world_size=n)


def test_all_ranks_refuse_what_one_of_them_can_only_pickle(monkeypatch):
    monkeypatch.setenv(NO_PICKLE, "1")
    values = [{"a": 1}, {"a": (1,)}]
    group = lambda world: world.default_group()
    for said in each_rank(lambda world: ax.all_gather_object(values[world.rank], group(world))):
        assert "all_gather_object: what position(s) [1] of the group give cannot be sent" in said
    assert "(['a'] is a tuple)" in said and "give arrays to ax.all_gather or ax.broadcast" in said
    own, other = each_rank(lambda world: ax.broadcast_object(values[1], group(world)))
    assert "(['a'] is a tuple)" in own and "position(s) [0] of the group give cannot be sent" in other
    assert each_rank(lambda world: ax.all_gather_object(values[0], group(world))) == [[values[0]] * 2] * 2
    monkeypatch.setenv(NO_PICKLE, "0")
    assert each_rank(lambda world: ax.all_gather_object(values[world.rank], group(world))) == [values] * 2


def test_a_rank_that_forbids_pickles_reads_none_of_the_others(monkeypatch):
    from axonml_jax.collectives import eager as objects

    monkeypatch.setattr(objects, "encoded", lambda obj: b"P" + pickle.dumps(obj))  # of a process without the switch
    monkeypatch.setenv(NO_PICKLE, "1")
    for said in each_rank(lambda world: ax.all_gather_object(Bomb(), world.default_group())):
        assert "position 0 of the group. Set AXONML_JAX_NO_PICKLE=1 in all processes" in said


def test_all_ranks_hear_of_what_nothing_can_pickle():
    values = [1, lambda: 0]
    other, own = each_rank(lambda world: ax.all_gather_object(values[world.rank], world.default_group()))
    assert "what position(s) [1] of the group give cannot be sent" in other and "lambda" in own
