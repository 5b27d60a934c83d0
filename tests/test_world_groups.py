"""Worlds, groups and backends: who is a member, what they are called, and meshes made from them."""

import jax
import jaxlib
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from axonml_jax.mesh.init import BACKENDS, init, shutdown
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.simulate import bound_run_ahead, fake_devices
from axonml_jax.mesh.world import Backend, GlooBackend, MockBackend, ProcessGroup, TPUBackend, World, as_mesh

MESH = {"data": 2, "fsdp": 2, "tensor": 2}

# axes, caller -> the ranks of its group (rank = 4 data + 2 fsdp + tensor)
ALONG = [
    (("data", "fsdp", "tensor"), 5, (0, 1, 2, 3, 4, 5, 6, 7)),
    (("data",), None, (0, 4)),
    (("tensor",), 5, (4, 5)),
    ("fsdp", 3, (1, 3)),
    (("fsdp", "data"), 1, (1, 5, 3, 7)),
]


def mesh8():
    return make_mesh(**MESH, devices=jax.devices()[:8])


@pytest.mark.parametrize(("axes", "caller", "ranks"), ALONG)
def test_a_group_along_axes_holds_the_ranks_at_its_callers_place(axes, caller, ranks):
    group = ProcessGroup(mesh8(), axes, caller=caller)
    assert group.ranks == ranks
    assert group.size == len(ranks)
    assert not group.members
    assert group.positions == tuple(range(len(ranks)))
    assert group.rank == (0 if caller is None else ranks.index(caller))
    assert group.sub_mesh.devices.tolist() == [jax.devices()[rank] for rank in ranks]
    assert group.sub_mesh.axis_names == ("data",)


def test_ranks_are_those_of_the_devices_whatever_order_the_mesh_has_them_in():
    group = ProcessGroup(make_mesh(data=3, devices=[jax.devices()[i] for i in (5, 2, 7)]))
    assert group.ranks == (5, 2, 7)
    assert group.rank == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"axes": ("heads",)}, "heads"),
        ({"axes": ("data", "data")}, "distinct"),
        ({"axes": ()}, "distinct"),
        ({"axes": ("tensor",), "ranks": (0, 2)}, r"\(0, 1\)"),
        ({"ranks": ()}, "distinct"),
    ],
)
def test_groups_that_do_not_fit_their_mesh_are_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        ProcessGroup(mesh8(), **arguments)


def test_a_subgroup_knows_its_members():
    group = World.mock(8).new_group([6, 0, 3])
    assert (group.ranks, group.size, group.members, group.positions) == ((0, 3, 6), 3, True, (0, 3, 6))
    assert [group.contains(rank) for rank in (0, 1, 3)] == [True, False, True]
    assert group == World.mock(8).new_group((0, 3, 6))
    assert hash(group) == hash(World.mock(8).new_group((0, 3, 6)))
    assert group != World.mock(8).new_group([0, 3])
    assert repr(group) == "ProcessGroup(ranks=(0, 3, 6), axes=('data',), mesh={'data': 8})"


def test_a_rank_outside_the_group_has_no_rank_in_it():
    with pytest.raises(ValueError, match="rank 0 is no member"):
        _ = World.mock(8).new_group([2, 3]).rank


@pytest.mark.parametrize("ranks", [[], [0, 0], [8], [-1, 2]])
def test_impossible_members_are_refused(ranks):
    with pytest.raises(ValueError, match="distinct ranks between 0 and 7"):
        World.mock(8).new_group(ranks)


def test_a_mock_world_is_held_by_this_process():
    world = World.mock(4)
    assert (world.rank, world.world_size, world.local_ranks, world.is_main_process) == (0, 4, (0, 1, 2, 3), True)
    assert (world.num_processes, world.process_index, world.local_rank) == (1, 0, 0)
    assert world.devices == tuple(jax.devices()[:4])
    assert world.default_group().ranks == (0, 1, 2, 3)
    assert World.mock(4) == world != World.mock(2)
    assert "rank=0, world_size=4" in repr(world)
    for none in (0, -1):
        with pytest.raises(ValueError, match=f"{none} mock ranks: give at least one"):
            World.mock(none)


def test_a_mock_world_per_rank():
    worlds = MockBackend.create_world(3)
    assert [world.rank for world in worlds] == [0, 1, 2]
    assert [world.default_group().rank for world in worlds] == [0, 1, 2]
    assert [world.is_main_process for world in worlds] == [True, False, False]
    assert all(world.world_size == 3 for world in worlds)


def test_more_mock_ranks_than_devices_are_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"fake_devices\(999\)"):
        World.mock(999)
    with pytest.raises(RuntimeError, match="already started with"):
        fake_devices(999)
    for number in (0, 8193):  # of more XLA ends the process, for want of threads
        with pytest.raises(ValueError, match=r"must be 1 to 8,192; a plan for more .*\(axonml-jax plan, ax\.plan\)"):
            fake_devices(number)


def test_fake_devices_is_content_with_what_it_would_make():
    fake_devices(jax.local_device_count())


def test_alone_init_is_a_world_of_this_processs_devices(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = init()
    assert world == init(num_processes=1)
    assert world.devices == tuple(jax.devices())
    assert world.backend.name == "mock"
    assert world.backend.version == jaxlib.__version__
    shutdown()


def test_backends_say_what_they_are_and_refuse_devices_that_are_not_theirs():
    assert sorted(BACKENDS) == ["gloo", "mock", "nccl", "tpu"]
    assert init(backend="gloo").backend.name == "gloo"
    assert GlooBackend() == GlooBackend() != MockBackend()
    with pytest.raises(ValueError, match="JAX_PLATFORMS=tpu"):
        _ = TPUBackend().devices
    with pytest.raises(ValueError, match="mock, gloo, nccl, tpu"):
        init(backend="mpi")


def test_a_backend_of_ones_own_decides_the_world():
    class Odd(Backend):
        name = "odd"
        version = "1"
        devices = tuple(jax.devices()[1::2])

    world = init(backend=Odd())
    assert world.backend.name == "odd"
    assert world.devices == tuple(jax.devices()[1::2])
    assert world.world_size == jax.device_count() // 2
    world.backend.synchronize()


def test_joining_after_jax_has_started_is_refused():
    with pytest.raises(RuntimeError, match="before the first JAX operation"):
        init(coordinator="127.0.0.1:1", num_processes=2, process_id=0)


def test_as_mesh_takes_what_users_call_a_mesh():
    ours = make_mesh(data=-1)
    assert as_mesh(ours) is ours
    assert as_mesh() == ours
    assert as_mesh(World.mock(4)) == World.mock(4).mesh
    assert as_mesh(World.mock(4).default_group()) == World.mock(4).mesh
    assert as_mesh(World.mock(4).new_group([1, 3])).devices.tolist() == [jax.devices()[1], jax.devices()[3]]
    with pytest.raises(TypeError, match="8"):
        as_mesh(8)


def test_as_mesh_renames_and_takes_explicit_axes_as_auto():
    theirs = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2), ("dp", "odd", "model"), axis_types=(AxisType.Explicit,) * 3
    )
    mesh = as_mesh(theirs, rename={"odd": "col"})
    assert mesh.axis_names == ("data", "col", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert (mesh.devices == theirs.devices).all()
    abstract = as_mesh(AbstractMesh((2, 4), ("dp", "tp")))
    assert dict(abstract.shape) == {"data": 2, "tensor": 4}


def test_as_mesh_refuses_every_axis_it_does_not_know():
    theirs = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2, 1), ("a", "b", "dp", "data"))
    with pytest.raises(ValueError, match=r"\['a', 'b'\] are unknown and axes \['dp', 'data'\] would share"):
        as_mesh(theirs)


def test_only_arrays_on_several_devices_of_this_process_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.append(tree) or tree)
    one = jax.device_put(np.ones(2), jax.devices()[0])
    many = jax.device_put(np.ones(8), jax.NamedSharding(make_mesh(), jax.P("data")))
    for tree in ([], [3.0], {"a": one}, {"a": "text", "b": many}):
        assert bound_run_ahead(tree) is tree
    jax.jit(bound_run_ahead)(many)
    assert waited == [{"a": "text", "b": many}]
