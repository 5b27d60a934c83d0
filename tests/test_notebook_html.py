"""What notebooks show of plans, ledgers and schedules: whole, escaped, and legible on any page."""

import dataclasses
import re
from html import escape
from html.parser import HTMLParser

import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.base import lines, section, table
from axonml_jax.models.config import preset
from axonml_jax.parallel.plan import in_words
from axonml_jax.pipeline.schedules import make_schedule, make_timetable

VOID = {"br", "rect", "path"}


class Balanced(HTMLParser):
    """Every element is closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def plain_model():
    return ax.DDP(nnx.Linear(6, 2, rngs=nnx.Rngs(0)), ax.make_mesh(data=8))


def a_report():
    trainer = plain_model().trainer(optax.sgd(0.1), lambda model, batch: model(batch["x"]).mean())
    return ax.explain(trainer, {"x": np.ones((8, 6), np.float32)})


def a_prediction(plan, **mesh):
    model = dataclasses.replace(preset("llama3-8b"), scan_layers=False)
    return ax.explain(plan, model=model, mesh=mesh, global_batch=64)


PIPE = ax.Plan(mesh=ax.MeshShape(data=2, pipe=4), pipe=ax.Pipelined(num_microbatches=8))
SHOWN = {
    "plan": lambda: ax.Plan(precision="bf16", data=ax.Replicate(sync_strategy="synchronous")),
    "plan with a pipeline": lambda: PIPE,
    "model": plain_model,
    "report": a_report,
    "prediction": lambda: a_prediction(PIPE, data=2, pipe=4),
    "schedule": lambda: make_schedule("interleaved", 2, 4, 2),
    "timetable": lambda: make_timetable(make_schedule("zero-bubble", 4, 8)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_whole_small_and_takes_the_colours_of_the_page(name):
    html = SHOWN[name]()._repr_html_()
    read = Balanced(html)
    assert len(html) < 60_000
    assert not read.tags & {"script", "style", "link", "img", "iframe", "foreignobject"}
    assert not [key for key, _ in read.attributes if key.startswith("on") or key in ("class", "id", "href", "src")]
    boxes = re.sub(r"<g><title>.*?</g>", "", html)  # a box has its own colour behind its words
    assert not re.search(r"(?<!-)\bcolor:", boxes) and 'fill="#222"' not in boxes and 'fill="#fff"' not in boxes


@pytest.mark.parametrize("name", ["report", "prediction"])
def test_a_ledger_shows_every_cell_of_its_text(name):
    shown = SHOWN[name]()
    words = " ".join(" ".join(Balanced(shown._repr_html_()).words).split())
    cells = [cell for line in str(shown).splitlines() if "---" not in line for cell in line.split("  ") if cell]
    assert len(cells) > 20 and not [cell for cell in cells if " ".join(cell.split()) not in words]


def test_a_plan_shows_what_is_chosen_before_what_is_not():
    html = SHOWN["plan"]()._repr_html_()
    rows = re.findall(r"<tr( style=\"opacity:0.55\")?><td[^>]*>(\w+)</td><td[^>]*>(.*?)</td>", html)
    chosen = {name: value for quiet, name, value in rows if not quiet}
    assert list(chosen) == ["data", "precision"] and [quiet for quiet, *_ in rows].index(rows[-1][0]) == 2
    assert chosen["data"] == escape("Replicate(sync_strategy='synchronous')")
    assert "any mesh" in html and "on data 8" in plain_model()._repr_html_()


def test_a_pipeline_is_drawn_where_its_length_is_known():
    drawn = lambda shown: shown._repr_html_().count("<g><title>")
    assert drawn(PIPE) == drawn(SHOWN["prediction"]()) == 4 * 8 * len("FB")
    assert drawn(ax.Plan(pipe=PIPE.pipe)) == drawn(a_prediction(ax.Plan(), data=2)) == 0


def test_a_picture_of_too_many_boxes_is_words():
    html = make_schedule("gpipe", 32, 128)._repr_html_()
    assert "8,192 actions in" in html and "<svg" not in html and len(html) < 500


def test_what_is_shown_is_escaped():
    evil = "<b onclick='x'>&"
    for html in (section(evil), lines(evil), table([evil], [[evil]], 1), make_schedule("1f1b", 1, 1)._repr_html_()):
        assert evil not in html and Balanced(html)
    assert Balanced(table([evil], [[evil]], 1)).words == [evil, evil]


def test_values_are_written_without_their_defaults():
    assert in_words(ax.Shard(stage=2, flat=True)) == "Shard(stage=2, flat=True)"
    assert in_words(PIPE.pipe) == "Pipelined()" and in_words(ax.CPUOffload.NONE) == "'none'"
