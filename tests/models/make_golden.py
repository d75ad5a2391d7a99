"""What `transformers` computes with random weights: golden files for the model tests.

    python -m tests.models.make_golden

writes ``tests/models/golden/*.safetensors`` and needs ``torch`` and ``transformers``.
Weights are float32; outputs and gradients are computed in float64, so that all that a
comparison shows is the rounding of the model under test.
"""

import dataclasses
import json
import pathlib
import tempfile

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

DIRECTORY = pathlib.Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """One model, what it is given and what it gives.

    Attributes:
        config: Its ``config.json``.
        weights: Tensors by published name.
        gradients: Of the loss, by the same names.
        inputs: The batch, as `models` has it.
        outputs: Logits by name, and the ``loss``.
    """

    config: dict
    weights: dict
    gradients: dict
    inputs: dict
    outputs: dict

    def save(self, path):
        """Writes one file."""
        groups = dataclasses.asdict(self)
        config = groups.pop("config")
        tensors = {
            f"{group}/{name}": np.ascontiguousarray(value)
            for group, values in groups.items()
            for name, value in values.items()
        }
        save_file(tensors, path, {"config": json.dumps(config)})


def load(name):
    """Returns the `Golden` of a file."""
    path = DIRECTORY / f"{name}.safetensors"
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["config"])
    groups = {"weights": {}, "gradients": {}, "inputs": {}, "outputs": {}}
    for key, value in load_file(path).items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    return Golden(config=config, **groups)


def bert(*, length=10, **sizes):
    """Returns the `Golden` of ``BertForPreTraining`` of these sizes."""
    import torch
    import transformers

    config = transformers.BertConfig(**sizes)
    model = transformers.BertForPreTraining(config)
    rng = np.random.default_rng(0)
    batch = _bert_batch(rng, config, length)
    num_samples, num_predicted = len(batch["tokens"]), 4
    positions = np.sort(rng.integers(5, size=(num_samples, num_predicted)))
    targets = rng.integers(config.vocab_size, size=(num_samples, num_predicted))
    batch["positions"] = positions.astype(np.int32)
    batch["targets"] = targets.astype(np.int32)
    batch["is_random_next"] = np.array([1, 1, 1, 0], np.int32)
    batch["weights"] = np.ones((num_samples, num_predicted), np.float32)
    batch["weights"][2, 3] = 0
    batch["sample_weights"] = np.ones(num_samples, np.float32)

    def run(model):
        out = model(**_bert_inputs(batch))
        rows = torch.arange(num_samples)[:, None]
        logits = out.prediction_logits[rows, torch.tensor(batch["positions"]).long()]
        next_sentence = torch.nn.functional.cross_entropy(
            out.seq_relationship_logits, torch.tensor(batch["is_random_next"]).long()
        )
        return _weighted_loss(logits, batch) + next_sentence, {
            "masked_lm": logits,
            "next_sentence": out.seq_relationship_logits,
        }

    return _compute(model, config, batch, run)


def bert_classifier(*, num_labels, length=10, **sizes):
    """Returns the `Golden` of ``BertForSequenceClassification`` of these sizes."""
    import torch
    import transformers

    config = transformers.BertConfig(**sizes, num_labels=num_labels)
    model = transformers.BertForSequenceClassification(config)
    rng = np.random.default_rng(0)
    batch = _bert_batch(rng, config, length)
    num_samples = len(batch["tokens"])
    targets = rng.dirichlet(np.ones(num_labels), num_samples)
    batch["targets"] = targets.astype(np.float32)
    batch["weights"] = np.ones(num_samples, np.float32)

    def run(model):
        logits = model(**_bert_inputs(batch)).logits
        targets = torch.tensor(batch["targets"]).double()
        return torch.nn.functional.cross_entropy(logits, targets), {"logits": logits}

    return _compute(model, config, batch, run)


def bert_tagger(*, num_labels, length=10, **sizes):
    """Returns the `Golden` of ``BertForTokenClassification`` of these sizes."""
    import transformers

    config = transformers.BertConfig(**sizes, num_labels=num_labels)
    model = transformers.BertForTokenClassification(config)
    rng = np.random.default_rng(0)
    batch = _bert_batch(rng, config, length)
    shape = batch["tokens"].shape
    batch["targets"] = rng.integers(num_labels, size=shape).astype(np.int32)
    is_counted = batch["is_token"] & (rng.random(shape) < 0.7)
    batch["weights"] = is_counted.astype(np.float32)

    def run(model):
        logits = model(**_bert_inputs(batch)).logits
        return _weighted_loss(logits, batch), {"logits": logits}

    return _compute(model, config, batch, run)


def _bert_batch(rng, config, length):
    lengths = np.array([length, length - 3, 5, length])
    shape = len(lengths), length
    segments = np.tile(np.arange(length) >= length // 2, (len(lengths), 1))
    return {
        # Token 0 is padding there, and has no gradient.
        "tokens": rng.integers(1, config.vocab_size, size=shape).astype(np.int32),
        "segments": segments.astype(np.int32),
        "is_token": np.arange(length) < lengths[:, None],
    }


def _bert_inputs(batch):
    import torch

    return {
        "input_ids": torch.tensor(batch["tokens"]).long(),
        "token_type_ids": torch.tensor(batch["segments"]).long(),
        "attention_mask": torch.tensor(batch["is_token"]).long(),
    }


def _weighted_loss(logits, batch):
    import torch

    weights = torch.tensor(batch["weights"])
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        torch.tensor(batch["targets"]).long().flatten(),
        reduction="none",
    )
    return (loss * weights.flatten()).sum() / weights.sum()


def gpt2(*, length=12, **sizes):
    """Returns the `Golden` of ``GPT2LMHeadModel`` of these sizes."""
    import torch
    import transformers

    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    rng = np.random.default_rng(0)
    row = rng.integers(config.vocab_size, size=(4, length + 1), dtype=np.int32)
    weights = np.ones((4, length), np.float32)
    weights[1, 7:] = 0
    batch = {"tokens": row[:, :-1], "targets": row[:, 1:], "weights": weights}

    def run(model):
        logits = model(input_ids=torch.tensor(batch["tokens"]).long()).logits
        return _weighted_loss(logits, batch), {"logits": logits}

    return _compute(model, config, batch, run)


def vit(*, num_labels, **sizes):
    """Returns the `Golden` of ``ViTForImageClassification`` of these sizes."""
    import torch
    import transformers

    config = transformers.ViTConfig(**sizes, num_labels=num_labels)
    model = transformers.ViTForImageClassification(config)
    rng = np.random.default_rng(0)
    size = config.image_size
    targets = rng.dirichlet(np.ones(num_labels), 4)
    batch = {
        "images": rng.normal(size=(4, size, size, config.num_channels)),
        "targets": targets,
        "weights": np.ones(4),
    }
    batch = {name: array.astype(np.float32) for name, array in batch.items()}

    def run(model):
        pixels = torch.tensor(batch["images"]).double().permute(0, 3, 1, 2)
        logits = model(pixel_values=pixels).logits
        targets = torch.tensor(batch["targets"]).double()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return loss, {"logits": logits}

    return _compute(model, config, batch, run)


def _compute(model, config, batch, run):
    import torch

    _randomize(model)
    weights = _published_tensors(model)
    model = model.double().eval()
    loss, outputs = run(model)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return Golden(
        config=config.to_dict(),
        weights=weights,
        gradients=_published_tensors(model.float()),
        inputs=batch,
        outputs={
            name: value.detach().float().numpy()
            for name, value in {**outputs, "loss": loss}.items()
        },
    )


def _randomize(model):
    """Draws all weights anew, norms and biases too, large enough to matter."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            scale = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(float(is_norm) + scale * drawn)


def _published_tensors(model):
    """Returns the tensors that the model writes into a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(pathlib.Path(directory) / "model.safetensors")


SIZES = dict(hidden_size=16, num_hidden_layers=4, num_attention_heads=4)

BERT_SIZES = dict(
    **SIZES, vocab_size=90, intermediate_size=32, max_position_embeddings=12
)

SMALL = {
    "bert": lambda: bert(**BERT_SIZES),
    "bert_classifier": lambda: bert_classifier(**BERT_SIZES, num_labels=7),
    "bert_tagger": lambda: bert_tagger(**BERT_SIZES, num_labels=3),
    "gpt2": lambda: gpt2(
        vocab_size=90, n_positions=12, n_embd=16, n_layer=4, n_head=4, n_inner=32
    ),
    "vit": lambda: vit(
        **SIZES, intermediate_size=32, image_size=8, patch_size=4, num_labels=7
    ),
}


if __name__ == "__main__":
    for name, make in SMALL.items():
        make().save(DIRECTORY / f"{name}.safetensors")
