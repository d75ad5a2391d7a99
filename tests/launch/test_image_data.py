"""Folders of small images, most of one color that names the class."""

import dataclasses
import shutil

import numpy as np
import pytest
from PIL import Image

from launch import image_data
from launch.data import images
from launch.run_config import DataConfig
from models.vit import VitConfig

CLASSES = ("blue", "green", "red")
MODEL = VitConfig(image_size=16, patch_size=8, num_channels=3, num_classes=3)
GRAY = dataclasses.replace(MODEL, num_channels=1)
DIGITS = VitConfig(image_size=16, patch_size=8, num_channels=1, num_classes=10)
NUM_EACH = 8
EVERYTHING = {
    "crop_area": 0.3,
    "flip": True,
    "randaugment_layers": 2,
    "erasing_probability": 0.5,
    "mixup_alpha": 0.8,
    "cutmix_alpha": 1.0,
}


def write_image(path, color, *, seed, size=(24, 18)):
    """A file of one color, but for a pixel, so that no two files are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, color)
    image.putpixel((0, 0), (seed % 256, seed // 256, 0))
    image.save(path)


@pytest.fixture
def folder(tmp_path):
    for label, name in enumerate(CLASSES):
        for number in range(NUM_EACH):
            suffix = ("png", "bmp")[number % 2]
            path = tmp_path / "images" / name / f"{number}.{suffix}"
            write_image(path, name, seed=label * NUM_EACH + number)
    return tmp_path / "images"


def make_data(folder, **fields):
    cache = str(folder.parent / "cache")
    return DataConfig(
        files=(str(folder),), cache_dir=cache, validation_fraction=0.25, **fields
    )


def batch_of(samples, numbers=None):
    items = np.arange(len(samples))
    return samples.make(items, items if numbers is None else numbers)


def test_images_have_the_label_of_their_folder(folder):
    splits = image_data.open_splits(make_data(folder), MODEL, 3)
    batch = batch_of(splits.train)

    # Blue, green ("green" is half as bright) and red, normalized to -1 .. 1.
    colors = np.array([[-1, -1, 1], [-1, 128 / 127.5 - 1, -1], [1, -1, -1]])
    found = batch["images"][:, 8, 8]
    np.testing.assert_allclose(found, colors[batch["targets"].argmax(1)], atol=1e-5)
    assert (batch["targets"].sum(1) == 1).all()
    assert len(np.unique(batch["targets"], axis=0)) == 3


def test_classes_may_be_named_in_another_order(folder):
    classes = ("red", "blue", "green")

    splits = image_data.open_splits(make_data(folder, classes=classes), MODEL, 3)

    batch = batch_of(splits.train)
    assert splits.classes == classes
    is_red = batch["images"][:, 8, 8, 0] == 1
    np.testing.assert_array_equal(batch["targets"][:, 0], is_red)


def test_smoothed_targets_are_of_training_alone(folder):
    data = make_data(folder, label_smoothing=0.3)

    splits = image_data.open_splits(data, MODEL, 3)

    smoothed = np.sort(batch_of(splits.train)["targets"], axis=1)
    np.testing.assert_allclose(smoothed, [[0.1, 0.1, 0.8]] * 18, rtol=1e-6)
    assert set(batch_of(splits.validation)["targets"].ravel()) == {0, 1}


def test_splits_are_those_asked_for_and_share_nothing(folder):
    splits = image_data.open_splits(make_data(folder), MODEL, 3)

    trained, held_out = splits.train.indices, splits.validation.indices
    assert (len(trained), len(held_out)) == (18, 6)
    assert not set(trained) & set(held_out)
    assert "18 images to train on of 3 classes, 6 held out" in splits.summary
    other = image_data.open_splits(make_data(folder), MODEL, 4)
    assert set(other.validation.indices) != set(held_out)


def test_copies_of_an_image_are_on_one_side(folder):
    for name in CLASSES:
        for path in list((folder / name).iterdir()):
            shutil.copy(path, path.with_name(f"copy_of_{path.name}"))

    splits = image_data.open_splits(make_data(folder), MODEL, 3)

    hashes = splits.train.images.hashes
    trained, held_out = splits.train.indices, splits.validation.indices
    assert not set(hashes[trained]) & set(hashes[held_out])
    assert len(held_out) % 2 == 0


def test_own_validation_folder_is_held_out_of_training(folder, tmp_path):
    for path in list((folder / "red").iterdir())[:3]:
        (tmp_path / "test" / "red").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "test" / "red")
    data = make_data(folder, validation_files=(str(tmp_path / "test"),))

    splits = image_data.open_splits(data, MODEL, 3)

    assert (len(splits.train), len(splits.validation)) == (21, 3)
    # Red is the third class, although it is the only one here.
    assert (batch_of(splits.validation)["targets"].argmax(1) == 2).all()
    assert "3 left out, as they are held out too" in splits.summary


def test_validation_shows_the_middle_of_an_image_unchanged(folder, tmp_path):
    wide = np.zeros((16, 32, 3), np.uint8)
    wide[:, 8:24] = 255
    (tmp_path / "test" / "red").mkdir(parents=True)
    Image.fromarray(wide).save(tmp_path / "test" / "red" / "1.png")
    files = {"validation_files": (str(tmp_path / "test"),)}

    splits = image_data.open_splits(make_data(folder, **files, **EVERYTHING), MODEL, 3)
    batch = batch_of(splits.validation)

    assert (batch["images"] == 1).all()
    assert batch["targets"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["plain", "everything"])
def test_sample_depends_on_seed_and_number_alone(folder, fields):
    splits = image_data.open_splits(make_data(folder, **fields), MODEL, 3)
    items, numbers = np.array([4, 0, 4]), np.array([100, 7, 33])

    whole = splits.train.make(items, numbers)
    alone = splits.train.make(items[1:2], numbers[1:2])

    for name, array in whole.items():
        np.testing.assert_array_equal(array[1:2], alone[name])
    changes = bool(fields)
    assert (whole["images"][0] != whole["images"][2]).any() == changes


def test_small_jpeg_is_decoded_to_what_the_large_one_shows(tmp_path):
    ramp = np.linspace(0, 255, 256).astype(np.uint8)
    picture = np.stack([np.tile(ramp, (256, 1))] * 3, axis=-1)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        path = tmp_path / "images" / name / "1.jpg"
        Image.fromarray(picture + (name == "b")).save(path, quality=95)
    data = make_data(tmp_path / "images")

    batch = batch_of(image_data.open_splits(data, MODEL, 3).train)

    expected = (np.arange(16) + 0.5) / 8 - 1
    np.testing.assert_allclose(
        batch["images"][0, 8, 2:-2, 0], expected[2:-2], atol=0.02
    )


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGBA", "CMYK", "1"])
def test_files_of_every_mode_become_gray_or_rgb(tmp_path, mode):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        image = Image.new("RGB", (20, 20), "white").convert(mode)
        image.save(tmp_path / "images" / name / "1.tiff")
        write_image(tmp_path / "images" / name / "2.png", "red", seed=1)
    data = dataclasses.replace(make_data(tmp_path / "images"), validation_fraction=0.0)

    for model in (MODEL, GRAY):
        batch = batch_of(image_data.open_splits(data, model, 3).train)

        assert batch["images"].shape == (4, 16, 16, model.num_channels)
        assert (batch["images"][::2] > 0.97).all()


def test_pixels_are_normalized_by_channel(folder):
    fields = {"pixel_mean": (0.0, 0.5, 1.0), "pixel_std": (1.0, 0.5, 0.25)}
    splits = image_data.open_splits(make_data(folder, **fields), MODEL, 3)
    batch = batch_of(splits.train)

    red = batch["images"][batch["targets"][:, 2] == 1]
    np.testing.assert_allclose(red[:, 8, 8], [[1, -1, -4]] * len(red), atol=1e-5)


def test_flipped_images_are_half_of_them(folder):
    halves = np.zeros((16, 16, 3), np.uint8)
    halves[:, 8:] = 255
    shutil.rmtree(folder)
    for name in "ab":
        (folder / name).mkdir(parents=True)
        Image.fromarray(halves + (name == "b")).save(folder / name / "1.png")
    samples = image_data.open_splits(make_data(folder, flip=True), MODEL, 3).train

    images_B = samples.make(np.zeros(200, int), np.arange(200))["images"]

    is_left_dark = images_B[:, 8, 0, 0] < images_B[:, 8, -1, 0]
    assert 70 < is_left_dark.sum() < 130


def test_mixed_targets_say_how_much_there_is_of_each(folder):
    for fields in ({"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}):
        splits = image_data.open_splits(make_data(folder, **fields), MODEL, 3)
        batch = splits.train.make(np.arange(18), np.arange(18))

        # Red, green and blue say how much there is of a class.
        shares = (batch["images"].mean((1, 2))[:, ::-1] + 1) / 2
        shares /= [1, 128 / 255, 1]
        np.testing.assert_allclose(batch["targets"], shares, atol=0.02)
        np.testing.assert_allclose(batch["targets"].sum(1), 1, atol=1e-6)
        assert (batch["targets"].max(1) < 0.95).sum() > 4


def break_file(folder):
    path = next(iter(sorted((folder / "red").iterdir())))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    (folder / "green" / "notes.txt").write_text("not an image")


def test_broken_files_are_an_error_that_names_them(folder):
    break_file(folder)

    with pytest.raises(ValueError, match="2 of 25 image files cannot be") as error:
        image_data.open_splits(make_data(folder), MODEL, 3)

    assert "notes.txt: cannot identify image file'" in str(error.value)
    assert "red/0.png: " in str(error.value)
    assert "set data.skip_broken=True to do without" in str(error.value)


def test_broken_files_are_left_out_and_counted_if_asked(folder):
    break_file(folder)

    splits = image_data.open_splits(make_data(folder, skip_broken=True), MODEL, 3)

    assert splits.summary.endswith("; 2 broken files left out")
    assert len(splits.train) + len(splits.validation) == 23
    assert np.isfinite(batch_of(splits.train)["images"]).all()


def test_files_are_read_once(folder, monkeypatch):
    first = image_data.open_splits(make_data(folder), MODEL, 3)
    monkeypatch.setattr(images, "_read", None)

    again = image_data.open_splits(make_data(folder), MODEL, 3)

    assert again.fingerprint == first.fingerprint


def clear(folder, name):
    for path in list((folder / name).iterdir()):
        path.unlink()


BAD_FOLDERS = {
    "empty class": (lambda f: clear(f, "red"), {}, "1 class folders hold no image: '"),
    "all broken": (
        lambda f: (clear(f, "red"), (f / "red" / "1.png").write_text("x")),
        {"skip_broken": True},
        "Every file of the classes 'red' is broken",
    ),
    "no classes": (
        lambda f: shutil.rmtree(f) or write_image(f / "1.png", "red", seed=0),
        {},
        "has no folders, but the folders in it are the classes",
    ),
    "missing": (lambda f: shutil.rmtree(f), {}, "names 1 of 1 folders that do not"),
    "deep colors": (
        lambda f: Image.new("I;16", (9, 9)).save(f / "red" / "deep.png"),
        {},
        "more than 8 bits per channel, mode 'I;16'",
    ),
    "too many classes": (
        lambda f: write_image(f / "white" / "1.png", "white", seed=0),
        {},
        "of 4 classes, more than model.num_classes=3. Set model.num_classes=4",
    ),
    "class that is not named": (
        lambda f: None,
        {"classes": ("red", "blue")},
        "classes that are not among the 2 known ones: 'green'. Rename or remove",
    ),
    "classes of one name": (
        lambda f: None,
        {"classes": ("red", "blue", "green", "red")},
        "of 4 classes, more than",
    ),
    "unknown class": (
        lambda f: write_image(f.parent / "test" / "rde" / "1.png", "red", seed=0),
        {"validation_files": ("test",)},
        "classes that are not among the 3 known ones: 'rde'. Rename",
    ),
    "nothing left": (
        lambda f: None,
        {"validation_files": ("images",)},
        "All 24 images",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_folders_that_cannot_be_used_are_an_error(folder, monkeypatch, name):
    spoil, fields, message = BAD_FOLDERS[name]
    monkeypatch.chdir(folder.parent)
    spoil(folder)

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        image_data.open_splits(make_data(folder, **fields), MODEL, 3)


def test_default_is_the_digits_each_on_one_side():
    data = DataConfig(validation_fraction=0.2)

    splits = image_data.open_splits(data, DIGITS, 3)

    assert splits.summary == (
        "the digits of scikit-learn: 1,437 images to train on of 10 classes, 360 held"
        " out"
    )
    batch = batch_of(splits.validation)
    assert batch["images"].shape == (360, 16, 16, 1)
    assert (batch["images"].min(), batch["images"].max()) == (-1, 1)
    counts = batch["targets"].sum(0)
    assert counts.min() > 20


def test_digits_may_have_any_label_but_must_have_one():
    data = DataConfig(classes=("9", *"012345678"))
    splits = image_data.open_splits(data, DIGITS, 3)
    default = image_data.open_splits(DataConfig(), DIGITS, 3)
    np.testing.assert_array_equal(
        np.roll(batch_of(default.validation)["targets"], 1, axis=1),
        batch_of(splits.validation)["targets"],
    )

    data = DataConfig(classes=("cat", *"12345678"))
    with pytest.raises(ValueError, match="names 9 classes, but not '0', '9'. Without"):
        image_data.open_splits(data, DIGITS, 3)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)

    with pytest.raises(ValueError, match=r"Install the extra 'vision'"):
        image_data.open_splits(DataConfig(), DIGITS, 3)
