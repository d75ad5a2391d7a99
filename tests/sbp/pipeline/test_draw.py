"""The drawings: right tasks in right places, in the terminal and in the picture."""

import re
import xml.etree.ElementTree

import pytest

from sbp.pipeline import appearance, builders, draw, picture, report
from sbp.pipeline.schedule import Kind, Task

PNG_HEADER = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lanes_of(plain):
    """Cells by (stage, lane), read back from the drawing, blocks joined."""
    cells, stage = {}, None
    for line in plain.splitlines():
        match = re.match(r"(?:stage +(\d+))? +([FBW])  (.*)", line)
        if match and not line.startswith(" F"):
            stage = int(match[1]) if match[1] else stage
            cells.setdefault((stage, match[2]), []).extend(match[3].split())
    return cells


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", builders.SCHEDULES)
def test_text_shows_every_task_in_its_stage_and_tick(name, width):
    num_chunks = 2 if name == "interleaved_1f1b" else 1
    plan = builders.build(name, 4, 12, num_chunks)
    plain = draw.to_text(plan, width=width).plain
    drawing = plain[: plain.index("\n F ")]
    cells = lanes_of(drawing)
    lane_of = {Kind.FORWARD: "F", Kind.BACKWARD_WEIGHT: "W"}
    drawn = 0
    for tick, task in plan.tasks():
        lane = cells[task.stage, lane_of.get(task.kind, "B")]
        assert lane[tick] == appearance.label(plan, task)
        drawn += 1
    assert sum(cell != "·" for lane in cells.values() for cell in lane) == drawn
    assert max(map(len, drawing.splitlines()[1:])) <= width


def test_text_ends_with_time_idle_share_and_memory():
    plain = draw.to_text(builders.build("zero_bubble", 4, 8)).plain
    assert plain.splitlines()[-3:] == [
        "17 ticks, time 27, idle 11.1%",
        "inputs kept per stage: 7, 5, 3, 1",
        "weight gradients waiting: 3, 4, 5, 6",
    ]


def test_colors_tell_kinds_apart_and_later_chunks_are_lighter():
    plan = builders.build("interleaved_1f1b", 2, 2, 2)
    colors = {
        (kind, chunk): appearance.color(plan, Task(kind, 0, 0, chunk))
        for kind in Kind
        for chunk in range(2)
    }
    assert len(set(colors.values())) == 8
    for kind in Kind:
        assert colors[kind, 0] == appearance.KINDS[kind][0]
        assert sum(bytes.fromhex(colors[kind, 1][1:])) > sum(
            bytes.fromhex(colors[kind, 0][1:])
        )


def test_picture_has_a_labelled_box_per_task_over_the_lockstep_time():
    plan = builders.build("1f1b", 2, 4)
    costs = report.Costs(forward=1, backward=3, backward_input=2)
    (axes,) = picture.to_figure(plan, costs).axes
    assert axes.get_xlim() == (0, report.measure(plan, costs).lockstep_time)
    boxes = {
        (box.get_x(), int(box.get_y()), box.get_width())
        for box in axes.patches
        if box.get_zorder() == 2
    }
    assert len(boxes) == len(list(plan.tasks()))
    assert (0, 0, 1) in boxes  # forward of microbatch 0 on stage 0
    assert (2, 1, 3) in boxes  # its backward on stage 1, after the forward in tick 1
    numbers = sorted(text.get_text() for text in axes.texts if text.get_zorder() == 4)
    assert numbers == sorted("0123" * 4)


def test_large_picture_stays_within_its_width_and_drops_unreadable_labels():
    figure = picture.to_figure(builders.build("1f1b", 4, 200))
    assert figure.get_size_inches()[0] <= 24
    assert not [text for text in figure.axes[0].texts if text.get_zorder() == 4]


def test_command_prints_the_diagram_and_writes_an_svg(in_tmp_path, capsys):
    draw.main("--schedule 1f1b --stages 2 --microbatches 3".split())
    output = capsys.readouterr().out
    assert "stage 1  F  · 0 1 2 ·\n         B  · 0 1 2 ·\n" in output
    assert output.endswith("wrote 1f1b_2x3.svg\n")
    assert "\x1b" not in output  # no colors where there is no terminal
    root = xml.etree.ElementTree.parse(in_tmp_path / "1f1b_2x3.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "1f1b: 2 stages, 3 microbatches" in "".join(root.itertext())


def test_command_writes_a_png_where_it_is_told(in_tmp_path, capsys):
    command = "--schedule interleaved_1f1b --stages 2 --microbatches 4 --chunks 2"
    draw.main([*command.split(), "--output=mine.png"])
    assert (in_tmp_path / "mine.png").read_bytes().startswith(PNG_HEADER)
    assert "wrote mine.png" in capsys.readouterr().out


def test_command_writes_nothing_if_text_is_all_that_is_wanted(in_tmp_path, capsys):
    draw.main(["--text_only", "--head_delay=1", "--costs", "1", "2", "1"])
    assert "15 ticks, time 44, idle 27.3%" in capsys.readouterr().out
    assert list(in_tmp_path.iterdir()) == []


def test_picture_of_a_schedule_is_the_same_twice(tmp_path):
    plan = builders.build("gpipe", 2, 3)
    for name in ("first.svg", "second.svg"):
        picture.save(picture.to_figure(plan), tmp_path / name)
    first, second = ((tmp_path / f"{name}.svg") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--stages 4 --microbatches 2",
            "Schedule '1f1b': num_microbatches=2 is fewer than the 4 pipeline stages.",
        ),
        ("--output picture.gif", "'picture.gif' does not end in .svg, .png, .pdf"),
        ("--schedule 2f2b", "invalid choice: '2f2b'"),
        ("--costs 0 1 1", "The cost of a forward task is 0.0, but every task takes"),
    ],
)
def test_wrong_command_names_the_reason_and_draws_nothing(
    in_tmp_path, capsys, arguments, message
):
    with pytest.raises(SystemExit, match="2"):
        draw.main(arguments.split())
    assert message in capsys.readouterr().err
    assert list(in_tmp_path.iterdir()) == []


def test_picture_that_cannot_be_written_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        draw.main(["--stages=2", f"--output={tmp_path / 'absent' / 'a.svg'}"])

    assert stop.value.code == 2
    assert "a.svg' cannot be written: No such file" in capsys.readouterr().err


def test_picture_file_of_unknown_kind_names_the_kinds(tmp_path):
    message = "ends in '.gif', but pictures are written as .svg, .png, .pdf. Choose one"
    with pytest.raises(ValueError, match=re.escape(message)):
        picture.save(
            picture.to_figure(builders.build("gpipe", 1, 1)), tmp_path / "a.gif"
        )
