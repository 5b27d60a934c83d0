"""`axonml-jax schedule` draws what the simulator says, as text and as a picture, and refuses in the words of its flags."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from axonml_jax.__main__ import main
from axonml_jax.cli.schedule import draw_events
from axonml_jax.pipeline.schedules import make_schedule
from axonml_jax.pipeline.timetable import Action, Event, StageCosts, parse_orders, trace_orders

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = Path(__file__).resolve().parents[1] / "docs" / "guides" / "pictures"
INTERLEAVED = ("--schedule", "interleaved", "--stages", "4", "--microbatches", "8", "--chunks", "2")


@pytest.fixture
def draw(capsys):
    """Run the command; returns its status, output and error output."""

    def draw(*flags):
        return main(["schedule", *flags]), *capsys.readouterr()

    return draw


def test_the_timetable_is_drawn_with_its_time_bubble_and_memory(draw):
    status, out, err = draw(*INTERLEAVED)
    assert status == 0 and err == ""
    assert out.startswith("INTERLEAVED_ONE_F_ONE_B, fused rows: 4 ranks x 2 chunks, 8 microbatches\n")
    assert "rank 3 B    .   .   .   .   .   .   . 7B0 7B1 7B2 7B3 3B0" in out
    for line in (
        "time      57 (published, with free sending, 57)",
        "bubble    18.8%",
        "11, 9, 7, 5",
        "rank: 11",
        "ticks     26",
    ):
        assert line in out, line


def test_the_classic_order_is_drawn_on_a_line_of_time(draw):
    status, out, _ = draw("--stages", "2", "--microbatches", "3", "--order", "classic")
    assert status == 0
    assert out.splitlines()[2:5] == [
        "time      0   1   2   3   4   5   6   7   8   9  10  11",
        "rank 0  0F0 0F1   .   . 0B0 === 0F2 0B1 ===   . 0B2 ===",
        "rank 1    . 1F0 1B0 === 1F1 1B1 === 1F2 1B2 ===   .   .",
    ]
    assert "2, 1 (one: one microbatch in one stage)" in out


def test_zero_bubbles_variants_and_uneven_times(draw):
    small = ("--schedule", "zero-bubble", "--stages", "4", "--microbatches", "8", "--order", "classic")
    assert "time      27 (published, with free sending, 27)" in draw(*small)[1]
    second = draw(*small, "--variant", "H2")[1]
    assert "ZERO_BUBBLE H2" in second and "time      24 " in second and "the last at 27" in second and "0.0%" in second
    halves = draw(*small, "--times", "1,1.5,0.5", "--communication", "0.25")[1]
    assert "time x 0.25" in halves
    assert "no published formula" in draw(*small, "--times", "1,1,2")[1]


def test_the_fastest_says_why(draw):
    status, out, _ = draw("--schedule", "fastest", "--stages", "4", "--microbatches", "8", "--chunks", "2")
    assert status == 0 and out.startswith("INTERLEAVED_ONE_F_ONE_B, fused rows: 4 ranks x 2 chunks")
    assert "ONE_F_ONE_B in fused rows: 15.8% slower, time 66" in out


@pytest.mark.parametrize("order", ["fused", "alternating", "classic"])
def test_the_picture_holds_every_action_once_and_overlaps_nothing(draw, tmp_path, order):
    path = tmp_path / "timetable.svg"
    status, out, _ = draw(*INTERLEAVED, "--order", order, "--svg", str(path))
    assert status == 0 and f"picture   {path}" in out
    root = ElementTree.parse(path).getroot()
    rows: dict[str, list[tuple[float, float]]] = {}
    names = []
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        names.append(group.findtext(f"{SVG}title"))
        assert group.findtext(f"{SVG}text") == names[-1].split("microbatch ")[1].split(",")[0]
        rows.setdefault(box.get("y"), []).append((float(box.get("x")), float(box.get("width"))))
        assert float(box.get("x")) + float(box.get("width")) < float(root.get("width"))
    assert len(names) == len(set(names)) == 4 * 2 * 8 * 2 and len(rows) == 4
    for boxes in rows.values():
        boxes.sort()
        assert all(x + wide <= other + 0.2 for (x, wide), (other, _) in pairwise(boxes))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert any("bubble" in text for text in texts) and any("4 ranks x 2 chunks" in text for text in texts)
    assert bool(list(root.iter(f"{SVG}path"))) == (order != "classic")


@pytest.mark.parametrize("order", ["fused", "alternating", "classic"])
@pytest.mark.parametrize("name", ["zero-bubble", "1f1b", "gpipe"])
def test_terminal_and_picture_show_ranks_and_actions_in_one_order(draw, tmp_path, name, order):
    path = tmp_path / "timetable.svg"
    flags = ["--schedule", name, "--stages", "3", "--microbatches", "4", "--order", order, "--width", "999"]
    lines = [line.split() for line in draw(*flags, "--svg", str(path))[1].splitlines() if line.startswith("rank ")]
    rows: dict[str, list[list[str]]] = {}
    for _, rank, *cells in lines:
        rows.setdefault(rank, []).append(cells[order != "classic" :])
    in_words = {
        rank: [cell for column in zip(*own, strict=True) for cell in column if cell.strip(".=")]
        for rank, own in rows.items()
    }
    assert all(any(cell != "." for cell in row) for own in rows.values() for row in own)
    boxes = []
    for group in ElementTree.parse(path).getroot().iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        boxes.append((float(box.get("y")), float(box.get("x")), group.findtext(f"{SVG}title").split(":")[0]))
    in_picture: dict[float, list[str]] = {}
    for y, _, action in sorted(boxes):
        in_picture.setdefault(y, []).append(action)
    assert list(in_words) == ["0", "1", "2"] and list(in_words.values()) == list(in_picture.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedule", "interleaved", "--stages", "4", "--microbatches", "6", "--chunks", "2", "--order", "classic"),
         "--microbatches=6 must be a multiple of --stages=4 in the classic order, because chunks change every 4"),
        (("--stages", "0", "--microbatches", "6"), "--stages=0 must be a positive whole number"),
        (("--stages", "4", "--microbatches", "6", "--chunks", "2"), "--chunks=2 must be 1"),
        (("--schedule", "foo", "--stages", "4", "--microbatches", "6"), "schedule='foo' is none of GPIPE ('gpipe')"),
        (("--stages", "4", "--microbatches", "6", "--times=-1,1,1"), "forward=-1.0: a time is a finite number, 0 or more"),
        (("--stages", "4", "--microbatches", "6", "--times", "1,1"), "'1,1' must be three numbers"),
        (("--stages", "4", "--microbatches", "6", "--times", "1,1,x"), "'1,1,x' must be three numbers"),
        (("--stages", "4", "--microbatches", "6", "--variant", "H2"), "fused rows have none"),
        (("--stages", "4", "--microbatches", "6", "--variant", "H2", "--order", "classic"), "ONE_F_ONE_B has none"),
        (("--schedule", "fastest", "--stages", "4", "--microbatches", "6", "--order", "classic"), "leave out --order"),
        (("--stages", "4", "--microbatches", "6", "--svg", "missing/folder.svg"), "there is no folder missing"),
        (("--stages", "4"), "--microbatches"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_one_message(draw, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    status, _, err = draw(*flags)
    assert status == 2 and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("classic-1f1b", ("--schedule", "1f1b", "--order", "classic")),
        ("fused-1f1b", ("--schedule", "1f1b")),
        ("interleaved", ("--schedule", "interleaved", "--chunks", "2")),
    ],
)
def test_the_pictures_of_the_guide_are_what_the_command_draws(draw, tmp_path, name, flags):
    """Made anew by `axonml-jax schedule --stages 4 --microbatches 8 FLAGS --svg docs/guides/pictures/NAME.svg`."""
    path = tmp_path / "now.svg"
    assert draw("--stages", "4", "--microbatches", "8", *flags, "--svg", str(path))[0] == 0
    assert path.read_text("utf-8") == (PICTURES / f"{name}.svg").read_text("utf-8")


def test_orders_without_a_readable_line_of_time_are_listed():
    odd = trace_orders(make_schedule("1f1b", 2, 40).orders, StageCosts(1, 0.997, 0.013))
    assert parse_orders(draw_events(odd, 120)) == make_schedule("1f1b", 2, 40).orders
    assert draw_events([[Event(Action(0, "F", 0), 0, 0.0, 0.0)]], 120) == "0F0"  # work that takes no time


def test_lines_are_as_wide_as_asked(draw):
    _, out, _ = draw(*INTERLEAVED, "--width", "60")
    grid = out.split("\n\ntime ")[0]
    assert max(map(len, grid.splitlines()[1:])) <= 60 and grid.count("tick ") == 3
