import pathlib

import pytest

from configs import base
from launch import resolve
from launch.resolve import ConfigError, DeviceCount

NOT_EXPERIMENTS = ("__init__", "base")
CONFIGS = [
    path
    for path in sorted(pathlib.Path("configs").glob("*.py"))
    if path.stem not in NOT_EXPERIMENTS
]
VIRTUAL = DeviceCount(num_devices=None)
EIGHT = DeviceCount(num_devices=8, remedy=", or hide some with CUDA_VISIBLE_DEVICES")


def tiny(overrides=None, devices=VIRTUAL):
    overrides = {name: str(value) for name, value in (overrides or {}).items()}
    return resolve.resolve(resolve.load("configs/bert_tiny.py"), overrides, devices)


def message_of(overrides, devices=VIRTUAL):
    with pytest.raises(ConfigError) as caught:
        tiny(overrides, devices)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_survives_a_round_trip_by_yaml(path, tmp_path):
    # The directories of pre-trained models are not here.
    config = resolve.resolve(resolve.load(str(path)), {"init_from": "None"}, EIGHT)

    saved = tmp_path / "config.yaml"
    saved.write_text(resolve.to_yaml(config))

    assert resolve.resolve(resolve.load(str(saved)), {}, EIGHT) == config


def test_data_parallel_size_is_what_the_other_sizes_leave_over():
    config = tiny({"dist.tensor_parallel_size": 2}, EIGHT)

    assert config.dist.data_parallel_size == 4
    assert tiny().dist.data_parallel_size == 1


def test_every_broken_rule_is_listed_at_once():
    message = message_of(
        {
            "optim.weight_decy": 0.1,
            "trian.seed": 1,
            "optim.learning_rate": "fast",
            "optim.betas": 0.9,
            "model.dtype": "float8",
            "train.log_every": 0,
        }
    )

    assert message.splitlines() == [
        "The run config breaks 6 rules:",
        "  optim.weight_decy: no such field. Did you mean 'weight_decay'?",
        "  trian: no such section. Did you mean 'train'?",
        "  model.dtype='float8' is not one of 'float32', 'bfloat16', 'float16'.",
        "  optim.betas=0.9 is not of type tuple[float, float]. Give one"
        " like (0.9, 0.999).",
        "  optim.learning_rate='fast' is not of type float. Give one like 0.0001.",
        "  train.log_every=0 must be at least 1.",
    ]


def test_relations_between_sections_name_values_and_remedy():
    message = message_of(
        {
            "dist.tensor_parallel_size": 8,
            "train.global_batch_size": 31,
            "train.num_microbatches": 2,
            "data.seq_length": 256,
            "optim.warmup_steps": 201,
        },
        EIGHT,
    )

    assert message.splitlines()[1:] == [
        "  train.global_batch_size=31 is not divisible by dist.data_parallel_size=1 x"
        " train.num_microbatches=2. Use 30 or 32, or fewer microbatches.",
        "  optim.warmup_steps=201 is more than train.num_steps=200. Warm up in fewer"
        " steps.",
        "  model.num_heads=4 is not divisible by dist.tensor_parallel_size=8. Use a"
        " size of 1, 2, 4, or another num_heads.",
        "  data.seq_length=256 is longer than the 128 positions of model.max_len."
        " Shorten the sequences or raise max_len.",
    ]


def test_sizes_that_do_not_match_the_devices_are_an_error():
    sizes = {"dist.tensor_parallel_size": 2, "dist.data_parallel_size": 2}

    assert (
        "dist: stage 1 x data 2 x tensor 2 needs 4 devices, but there are 8. Choose"
        " sizes whose product is 8, or hide some with CUDA_VISIBLE_DEVICES."
    ) in message_of(sizes, EIGHT)


def test_more_virtual_devices_than_allowed_are_an_error():
    sizes = {"dist.data_parallel_size": 128, "train.global_batch_size": 128}

    assert (
        "needs 128 devices, but without GPUs a run has at most 64 virtual CPU devices"
    ) in message_of(sizes)


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        ("x = 1\n", "a.py", "it defines no get_config()"),
        ("- 1\n- 2\n", "a.yaml", "not a mapping of sections"),
        ("a: [1\n", "a.yaml", "while parsing"),
        ("def f(:\n", "a.py", "SyntaxError: invalid syntax"),
        ("import nowhere\n", "a.py", "No module named 'nowhere'"),
        ("def get_config():\n    return {}['x']\n", "a.py", "KeyError: 'x'"),
    ],
    ids=["no function", "no mapping", "no yaml", "no python", "no import", "no key"],
)
def test_file_that_is_no_config_is_an_error(tmp_path, content, name, part):
    file = tmp_path / name
    file.write_text(content)

    with pytest.raises(ConfigError, match=name) as caught:
        resolve.load(str(file))

    assert part in str(caught.value)


def test_missing_config_file_is_an_error():
    with pytest.raises(ConfigError, match=r"--config=nowhere.py: there is no such"):
        resolve.load("nowhere.py")


def test_folder_of_configs_is_an_error():
    with pytest.raises(ConfigError, match="--config=configs: this is a folder. Name"):
        resolve.load("configs")


def test_value_for_a_whole_section_is_an_error():
    message = message_of({"train": "3"})

    assert "train=3 names a section. Write --config.train.FIELD=VALUE." in message


def test_files_on_the_command_line_are_separated_by_commas():
    assert tiny({"data.files": "a.txt,b.txt"}).data.files == ("a.txt", "b.txt")


def test_fast_development_run_takes_two_steps_of_a_sample_per_microbatch():
    config = tiny({"dist.data_parallel_size": 4, "train.num_microbatches": 2})

    short = resolve.shorten(config)

    assert short.train.num_steps == 2
    assert short.train.global_batch_size == 8
    assert short.microbatch_size == 1
    assert not list(short.broken_rules())


def test_field_of_no_section_is_overridden_by_its_name_alone(tmp_path):
    config = tiny({"remat": "full"})

    assert config.root.remat == "full"
    saved = tmp_path / "config.yaml"
    saved.write_text(resolve.to_yaml(config))
    assert resolve.load(str(saved))["remat"] == "full"
    assert resolve.by_path(resolve.to_values(config))["remat"] == "full"


def test_field_of_actions_by_name_is_overridden_and_read_back(tmp_path):
    actions = {"qkv": "save", "mlp_up": "offload"}
    config = tiny({"remat": str(actions)})

    assert config.root.remat == actions
    saved = tmp_path / "config.yaml"
    saved.write_text(resolve.to_yaml(config))
    assert resolve.load(str(saved))["remat"] == actions


def test_field_of_actions_by_name_takes_names_and_actions_alone():
    message = message_of({"remat": "{'qkv': 1}"})
    assert "remat={'qkv': 1} is not of type str | dict[str, str]. Give one" in message
    message = message_of({"remat": "{'qkv': 'keep'}"})
    assert "remat['qkv']='keep' is not one of 'save', 'offload', 'recompute'" in message


def test_a_config_file_may_set_actions_by_name():
    config = base.get_config()
    config.remat = {"qkv": "save"}
    assert config.to_dict()["remat"] == {"qkv": "save"}


def test_field_of_no_section_obeys_its_rule():
    assert "remat='all' is not one of 'none', 's" in message_of({"remat": "all"})
