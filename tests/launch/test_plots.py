import pytest
from matplotlib.image import imread

from launch.plots import save_loss_curves

TRAINING_RGB = (0x2A / 255, 0x6F / 255, 0xBB / 255)
VALIDATION_RGB = (0xD9 / 255, 0x54 / 255, 0x1E / 255)


def has_color(path, rgb):
    pixels = imread(path)[..., :3]
    return bool((abs(pixels - rgb).max(-1) < 0.01).any())


def make_records(num, *, parts):
    records = []
    for step in range(1, num + 1):
        losses = {"loss": 10 / step} | {part: 5 / step for part in parts}
        records.append({"step": step, "grad_norm": 1.0} | losses)
        records.append({"step": step, "eval_loss": 11 / step})
    return records


@pytest.mark.parametrize("num", [1, 10, 100])
@pytest.mark.parametrize("parts", [[], ["mlm_loss", "nsp_loss"]], ids=["one", "parts"])
def test_both_curves_are_drawn(tmp_path, num, parts):
    path = tmp_path / "loss.png"
    save_loss_curves(make_records(num, parts=parts), path, title="a run")
    assert imread(path).shape[0] == 750
    assert has_color(path, TRAINING_RGB)
    assert has_color(path, VALIDATION_RGB)


def test_values_that_are_not_finite_are_left_out(tmp_path):
    path = tmp_path / "loss.png"
    records = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}]
    save_loss_curves(records, path, title="a run")
    assert has_color(path, TRAINING_RGB)
    assert not has_color(path, VALIDATION_RGB)


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="None of the 1 records has a loss to draw"):
        save_loss_curves([{"step": 1, "eval_loss": 1.0}], tmp_path / "x", title="")
