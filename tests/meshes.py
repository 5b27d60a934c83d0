"""The meshes of tests: of the first devices, as the library makes them or as a user of JAX does."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import axonml_jax as ax


def mesh_of(degrees=None, /, **named):
    """A mesh of the library's axes, in its order; degrees as one dict or by name."""
    degrees = {**(degrees or {}), **named}
    return ax.make_mesh(devices=jax.devices()[: math.prod(degrees.values())], **degrees)


def plain_mesh_of(degrees=None, /, **named):
    """A mesh of these axes alone, in this order, of one's own names too."""
    degrees = {**(degrees or {}), **named}
    devices = np.array(jax.devices()[: math.prod(degrees.values())]).reshape(tuple(degrees.values()))
    return Mesh(devices, tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))
