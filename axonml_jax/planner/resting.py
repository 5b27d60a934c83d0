"""`Resting`: where a decoder's weights rest on many meshes, found once for all that split them alike."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from axonml_jax.cost.amounts import varies
from axonml_jax.cost.decoder.decoder_weights import decoder_weights
from axonml_jax.cost.placed import Placed, Setting, split_by_layers
from axonml_jax.cost.weight_groups import Weights, grouped
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.plan import Plan
from axonml_jax.planner.candidate import Candidate, Question
from axonml_jax.planner.legal import Way, candidate
from axonml_jax.sharding.layout import Layout


class Placing(NamedTuple):
    """The weights of a way on a mesh.

    Attributes:
      layouts: of all.
      form: a number that those share whose layouts are split over the same axes, and whose stacks are along dim 0 or not; along
        which dims else changes no size.
      model: its configuration, with its layers split so.
      plan: with every default decided; how often anything runs is not in it.
      strategies: a number that plans with the same strategies share.
    """

    layouts: Sequence[Layout]
    form: int
    model: Any
    plan: Plan
    strategies: int


class Resting:
    """Layouts of a model's weights, by the axes that split them; they rest alike in all of ZeRO's stages."""

    def __init__(self, asked: Question):
        self.asked, self.fabric = asked, Fabric(devices=asked.num_devices, torus=asked.hardware.torus)
        self._models: dict[Any, Any] = {}
        self._plans: dict[Any, tuple[Plan, int]] = {}
        self._split: dict[Any, list[tuple[Any, Layout]]] = {}
        self._layouts: dict[Any, tuple[list[Layout], int]] = {}
        self._numbers: dict[Any, int] = {}

    def placing(self, degrees: Mapping[str, int], way: Way) -> Placing:
        """Where weights rest on a mesh.

        Args:
          degrees: of the mesh, above 1.
          way: of which the stage, attention's method, sequence parallelism and whether there is a schedule decide.
        """
        model = self._model(degrees, way)
        plan, strategies = self._plan(degrees, way)
        there = candidate(degrees, way).mesh.items()
        own = tuple((axis, ranks) for axis, ranks in there if axis not in ("data", "pipe"))
        if (key := (own, model.scan_layers, way.shared)) not in self._layouts:
            self._layouts[key] = self._placed(model, plan, dict(own))
        return Placing(*self._layouts[key], model, plan, strategies)

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _model(self, degrees: Mapping[str, int], way: Way) -> Any:
        key = (any(axis in degrees for axis in ("row", "col", "depth")), way.sequence_parallel, way.schedule is None)
        key += (way.dispatch,)
        if key not in self._models:
            self._models[key] = Candidate(degrees=tuple(degrees.items()), **way._asdict()).model(self.asked.model)
        return self._models[key]

    def _plan(self, degrees: Mapping[str, int], way: Way) -> tuple[Plan, int]:
        ranks = {axis: degrees.get(axis, 1) for axis in ("fsdp", "context")}
        chosen = {"stage": way.stage, "method": way.method, "shared": way.shared}
        if (key := (*ranks.values(), *chosen.values())) not in self._plans:
            found = Candidate(degrees=tuple(ranks.items()), strategy=self.asked.strategy, **chosen)
            plan = found.plan(self.asked.precision).decided(self.fabric, ranks)
            # A strategy of the user's own may send in as many parts as there are ranks: those are a number for it.
            own = None if self.asked.strategy is None else ranks["fsdp"]
            self._plans[key] = plan, self._number((plan.fsdp, plan.context, own))
        return self._plans[key]

    def _placed(self, model: Any, plan: Plan, own: dict[str, int]) -> tuple[list[Layout], int]:
        """The layouts, and the number of their form."""
        layers = tuple((axis, ranks) for axis, ranks in own.items() if axis in LAYER_AXES)
        if (key := (layers, model.split, model.scan_layers)) not in self._split:
            param, weights = plan.precision.param, decoder_weights(model, own)
            split = [((each.shape, each.splits, each.layers), split_by_layers(each, param, own)) for each in weights]
            self._split[key] = split
        found: dict[Any, Layout] = {}
        setting = Setting.of(plan, own)
        for same, layout in self._split[key]:
            if same not in found:
                for axis, strategy in setting.strategies.items():
                    layout = strategy.spec(layout, axis, setting.ranks(axis))
                found[same] = layout
        forms = {
            same: (*sorted(layout.axes), same[2] > 1 and bool(layout.axes_of(0))) for same, layout in found.items()
        }
        order = [same for same, _ in self._split[key]]
        return [found[same] for same in order], self._number(tuple(forms[same] for same in order))


def weights_together(placings: Sequence[Placing], meshes: Sequence[Mapping[str, int]], repeats: np.ndarray) -> Weights:
    """The weights of placings of one form under the same strategies, with an entry for every candidate.

    Args:
      placings: by mesh.
      meshes: their degrees.
      repeats: candidates of every mesh.
    """
    first, once = placings[0], np.ones(len(meshes), int)
    degrees = {axis: spread([mesh[axis] for mesh in meshes], once, int) for axis in meshes[0]}
    setting = Setting.of(first.plan, degrees)
    layouts: dict[int, Layout] = {}  # weights of one shape that are split alike share theirs
    for same in zip(*(each.layouts for each in placings), strict=True):
        if id(same[0]) not in layouts:
            layouts[id(same[0])] = _together(same, once)
    weights = zip(decoder_weights(first.model, meshes[0]), first.layouts, strict=True)
    found = grouped([Placed(weight, layouts[id(layout)], setting) for weight, layout in weights])
    return found.sizes(lambda size: np.repeat(size.astype(float), repeats) if varies(size) else size)


def _together(layouts: Sequence[Layout], once: np.ndarray) -> Layout:
    """Layouts of one form as one, whose sizes are arrays."""
    own = layouts[0]
    stored, parts = (
        tuple(spread(sizes, once, int) for sizes in zip(*values, strict=True))
        for values in ([each.stored for each in layouts], [each.parts for each in layouts])
    )
    return Layout(own.shape, own.dtype, own.spec, stored, parts, own.stack_dims)


def spread(values: Sequence[Any], repeats: np.ndarray, kind: type = float) -> Any:
    """One value per mesh as one per candidate; where all are equal, the number."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.repeat(np.array(values, kind), repeats)
