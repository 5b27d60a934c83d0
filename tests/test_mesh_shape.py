"""Mesh shapes: filled in, refused with a remedy, printed and compared (no devices needed but for `make_mesh`)."""

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.shape import MeshShape, make_mesh, nearest_degrees, split_over_slices

RESOLVED = [
    ({"data": -1}, 8, {"data": 8}),
    ({"tensor": 2, "data": -1}, 8, {"data": 4, "tensor": 2}),
    ({"data": 1, "fsdp": -1}, 3, {"data": 1, "fsdp": 3}),
    ({"data": 2, "pipe": 2, "tensor": 2}, 8, {"data": 2, "pipe": 2, "tensor": 2}),
    (dict.fromkeys(AXES, 1), 1, dict.fromkeys(AXES, 1)),
    ({"depth": 2, "row": 2, "col": -1}, 2048, {"depth": 2, "row": 2, "col": 512}),
    ({}, 1, {}),
]

REFUSED = [
    ({"data": 3}, 8, ["data=3", "8 devices", "data=8", "jax.devices()[:3]"]),
    ({"data": 3, "tensor": 2}, 8, ["data=3, tensor=2", "data=4, tensor=2"]),
    ({"data": -1, "tensor": 3}, 8, ["3, must divide", "jax.devices()[:6]"]),
    ({"data": 16}, 8, ["16", "8 devices"]),
    ({}, 8, ["MeshShape()", "8 devices"]),
]

ILLEGAL = [
    ({"data": 0}, ["data=0"]),
    ({"data": -2, "pipe": 2.0, "row": True, "tensor": "2"}, ["data=-2", "pipe=2.0", "row=True", "tensor='2'"]),
    ({"data": -1, "tensor": -1}, ["data=-1, tensor=-1", "one axis"]),
    ({"data": np.ones(3), "tensor": -1}, ["data=array([1., 1., 1.])", "a degree is an int"]),
]


@pytest.mark.parametrize(("degrees", "num_devices", "expected"), RESOLVED)
def test_a_shape_fills_in_what_the_devices_leave(degrees, num_devices, expected):
    shape = MeshShape(**degrees).resolve(num_devices)
    assert shape.degrees == expected
    assert shape.size == num_devices


@pytest.mark.parametrize(("degrees", "num_devices", "words"), REFUSED)
def test_a_product_that_does_not_match_the_devices_is_refused_with_the_nearest_legal_degrees(
    degrees, num_devices, words
):
    with pytest.raises(ValueError) as error:
        MeshShape(**degrees).resolve(num_devices)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("degrees", "words"), ILLEGAL)
def test_illegal_degrees_are_refused_all_at_once(degrees, words):
    with pytest.raises(ValueError) as error:
        MeshShape(**degrees)
    assert all(word in str(error.value) for word in words)


def test_a_shape_with_an_open_degree_has_no_size():
    with pytest.raises(ValueError, match="resolve"):
        _ = MeshShape(data=-1).size


@pytest.mark.parametrize("degrees", [case[0] for case in RESOLVED])
def test_a_shape_prints_compares_copies_and_round_trips(degrees):
    shape = MeshShape(**degrees)
    for twin in (
        eval(repr(shape)),
        pickle.loads(pickle.dumps(shape)),
        copy.deepcopy(shape),
        dataclasses.replace(shape),
    ):
        assert twin == shape
        assert hash(twin) == hash(shape)
        assert repr(twin) == repr(shape)


def test_an_axis_given_as_one_differs_from_an_axis_left_out():
    assert MeshShape(data=2, tensor=1) != MeshShape(data=2)
    assert MeshShape(data=2).tensor == 1
    assert MeshShape(data=2) != "MeshShape(data=2)"


def test_degrees_may_be_numpy_integers_and_print_plainly():
    assert repr(MeshShape(data=np.int64(2))) == "MeshShape(data=2)"


def test_the_nearest_degrees_are_legal_and_close():
    assert nearest_degrees({"data": 3, "tensor": 2}, 8) == {"data": 4, "tensor": 2}
    assert nearest_degrees({"data": 8}, 7) == {"data": 7}


def test_a_mesh_has_the_named_axes_in_canonical_order_and_is_auto():
    mesh = make_mesh(tensor=2, data=-1, pipe=1)
    assert mesh.axis_names == ("data", "pipe", "tensor")
    assert dict(mesh.shape) == {"data": jax.device_count() // 2, "pipe": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert MeshShape.of(mesh) == MeshShape(data=jax.device_count() // 2, pipe=1, tensor=2)


def test_a_mesh_always_has_a_data_axis():
    count = jax.device_count()
    assert dict(make_mesh(tensor=count).shape) == {"data": 1, "tensor": count}
    assert dict(make_mesh().shape) == {"data": count}


def test_a_mesh_keeps_the_order_of_the_devices_it_is_given():
    devices = jax.devices()[:2][::-1]
    assert make_mesh(data=2, devices=devices).devices.tolist() == devices


def test_an_unknown_axis_is_refused_with_the_nearest_known_one():
    with pytest.raises(ValueError, match=r"'dataa' \(did you mean 'data'\?\).*'zz'"):
        make_mesh(dataa=2, zz=1)


@pytest.mark.parametrize(
    ("sizes", "num_slices", "expected"), [((2, 4, 8), 4, (2, 2, 1)), ((4, 2), 2, (2, 1)), ((1, 6), 3, (1, 3))]
)
def test_slices_are_split_over_the_outermost_axes(sizes, num_slices, expected):
    assert split_over_slices(sizes, num_slices) == expected


def test_slices_without_room_are_refused():
    with pytest.raises(ValueError, match="multiple of 3"):
        split_over_slices((4, 2), 3)
