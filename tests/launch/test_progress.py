import io

import pytest
from rich.console import Console

from launch.progress import Progress, format_bytes, format_metrics


def make_terminal(width):
    screen = io.StringIO()
    return screen, Console(file=screen, force_terminal=True, width=width)


@pytest.mark.parametrize("width", [60, 200])
def test_terminal_shows_bar_time_left_and_all_metrics(width):
    screen, console = make_terminal(width)
    progress = Progress(200, console=console)
    progress.start()
    progress.show(10, {"loss": 6.5, "step_seconds": 2.0, "utilization": 0.25})
    progress.stop()
    text = screen.getvalue()
    for part in ("step  10/200", "━", "eta 0:06:20", "loss 6.5000", "25.0% of peak"):
        assert part in text


def test_terminal_keeps_evaluations_above_the_bar():
    screen, console = make_terminal(200)
    progress = Progress(200, console=console)
    progress.start()
    progress.show_eval(100, {"loss": 6.5, "mlm_accuracy": 0.25})
    progress.print("Saved [1].")
    progress.stop()
    text = screen.getvalue()
    assert "step 100/200  evaluation  loss 6.5000  mlm accuracy 25.0%\n" in text
    assert "Saved [1].\n" in text


def test_steps_between_logged_ones_move_the_bar():
    screen, console = make_terminal(200)
    progress = Progress(200, console=console)
    progress.start()
    progress.show(10, {"loss": 6.5, "step_seconds": 1.0})
    progress.advance(50)
    progress.stop()
    last = screen.getvalue().rpartition("step")[2]
    assert last.startswith("  50/200")
    assert "eta 0:02:30" in last


def test_silent_processes_show_nothing(capsys):
    progress = Progress(200, is_shown=False)
    progress.start()
    progress.show(10, {"loss": 6.5})
    progress.show_eval(10, {"loss": 6.5})
    progress.print("text")
    progress.stop()
    assert capsys.readouterr() == ("", "")


def test_long_lines_of_a_log_file_are_not_wrapped(capsys):
    Progress(200).print("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1


def test_metrics_come_in_the_order_of_the_table():
    metrics = {"a_loss": 2.0, "grad_norm": 1234.5, "loss": 3.0, "b_loss": 1.0, "z": 1.0}
    line = "loss 3.0000  grad norm 1.23e+03  a 2.0000  b 1.0000"
    assert format_metrics(metrics) == line


def test_a_single_part_of_the_loss_is_not_shown_twice():
    assert format_metrics({"lm_loss": 3.0, "loss": 3.0}) == "loss 3.0000"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (80e9, "80 GB"), (1.5e12, "1.5 TB")],
)
def test_sizes_have_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text
