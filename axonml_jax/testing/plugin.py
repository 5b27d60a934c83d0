"""The pytest plugin: `--fake-devices 8`, and fixtures for meshes and groups on simulated devices."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fake-devices` and the ini option `fake_devices`."""
    group = parser.getgroup("axonml_jax")
    group.addoption("--fake-devices", type=int, default=None, metavar="N", help="run on N simulated CPU devices")
    parser.addini("fake_devices", "number of simulated CPU devices when --fake-devices is not given", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Start the simulated devices before any test module can start JAX."""
    given = config.getoption("--fake-devices")
    count = given if given is not None else int(config.getini("fake_devices") or 0)
    if count:
        from axonml_jax.mesh.simulate import fake_devices

        fake_devices(count)


@pytest.fixture
def fake_mesh(request: pytest.FixtureRequest):
    """A mesh of the simulated devices: all on `data`, or the degrees given by `@pytest.mark.parametrize(..., indirect=True)`.

    Example::

        @pytest.mark.parametrize("fake_mesh", [{"data": 2}, {"data": 8}], indirect=True)
        def test_something(fake_mesh): ...
    """
    import math

    import jax

    from axonml_jax.mesh.shape import make_mesh

    degrees = getattr(request, "param", None) or {"data": len(jax.devices())}
    return make_mesh(devices=jax.devices()[: math.prod(degrees.values())], **degrees)


@pytest.fixture
def fake_group(fake_mesh):
    """The group of all ranks of `fake_mesh` that split the batch."""
    from axonml_jax.mesh.axes import batch_axes
    from axonml_jax.mesh.world import ProcessGroup

    return ProcessGroup(fake_mesh, axes=batch_axes(fake_mesh.axis_names))
