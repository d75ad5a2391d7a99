"""Defaults of every experiment, section by section.

A field at ``None`` is derived by the run, shown, and saved in its ``config.yaml``.
"""

import dataclasses

import ml_collections
from ml_collections import config_dict

from models import bert


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults: the smallest BERT on the embedded corpus."""
    return ml_collections.ConfigDict(
        {
            # "none", "selective" or "full": what is computed again in the backward
            # pass; or an action by tensor, such as {"qkv": "save"}, see docs/memory.md
            "remat": config_dict.FieldReference("none", field_type=object),
            # Begin with a pre-trained model: workdir, or Hugging Face directory
            "init_from": None,
            "model": {"name": "bert", **dataclasses.asdict(bert.SIZES["tiny"])},
            "data": {
                "files": (),  # text or JSON lines; none: Python's own documentation
                "tokenizer": None,  # tokenizer.json or vocab.txt; None: train one
                "cache_dir": None,  # tokenizer and tokens; None: ~/.cache/sbp-jax
                "seq_length": 128,
                "validation_fraction": 0.05,  # of the documents
                "masked_fraction": 0.15,  # of the tokens
                "masking": "whole_word",  # or "token", or "ngram"
                "short_fraction": 0.1,  # of the samples are shorter than seq_length
                # GPT-2: documents in a row do not see each other
                "separate_documents": True,
                # What is held out, like files; none: a part of files
                "validation_files": (),
                "classes": None,  # names, by label; None: those in the data, in order
                "label_smoothing": 0.0,  # share of the target that all classes have
                "skip_broken": False,  # image files; False: they are an error
                "pixel_mean": (0.5,),  # of all channels, or one each; pixels 0 to 1
                "pixel_std": (0.5,),
                "crop_area": 1.0,  # smallest share in a random crop; 1: the center
                "flip": False,  # left and right, every second image
                "randaugment_layers": 0,  # random changes of each image
                "randaugment_magnitude": 9.0,  # of 10
                "erasing_probability": 0.0,  # of a rectangle in each image
                "mixup_alpha": 0.0,  # of Beta(alpha, alpha); 0: no mixup
                "cutmix_alpha": 0.0,  # both above 0: one or the other
                "num_workers": 0,  # processes; 0: threads of this one
            },
            "optim": {
                "name": "adamw",  # or "lamb", "adafactor", "lion", "muon"
                "learning_rate": 1e-4,
                "weight_decay": 0.01,  # of all but biases and norms
                "betas": (0.9, 0.999),  # Lion's paper: (0.9, 0.99)
                "momentum": 0.95,  # of "muon", where it is not AdamW
                "epsilon": 1e-8,
                "grad_clip_norm": None,  # None: no clipping
                "warmup_steps": 0,
                # "constant", "cosine", "polynomial", "exponential" or "steps"
                "schedule": "polynomial",
                "final_fraction": 0.0,  # of the learning rate, at the last step
                "power": 1.0,  # of "polynomial"; 1 is linear
                "milestones": (0.5, 0.75),  # of "steps", as shares of num_steps
                "decay_factor": 0.1,  # of "steps", at each milestone
                "state_dtype": "float32",  # of the moments; or "bfloat16"
                "offload": False,  # keep the moments in the memory of the host
            },
            "train": {
                "num_steps": 1000,
                "global_batch_size": 32,
                "num_microbatches": 1,  # of each data-parallel rank
                # Or (size, increment, samples): begin with batches of this size, which
                # grows to global_batch_size over so many samples
                "rampup_batch_size": None,
                "seed": 1234,
                "log_every": 20,
            },
            "dist": {
                "data_parallel_size": None,  # None: the devices that are left over
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                # Ranks that share the tokens of each sample, see docs/long_context.md
                "context_parallel_size": 1,
                # Between attention and MLP each rank of "tensor" has its positions
                "sequence_parallel": False,
                "pipeline_num_layers": None,  # None: the layers of the model
                # "1f1b", "gpipe", "interleaved_1f1b" or "zero_bubble"
                "pipeline_schedule": "1f1b",
                "pipeline_num_chunks": 1,  # of each stage, for "interleaved_1f1b"
                # None: balanced; "libai"; or the layers of each stage, a tuple
                "pipeline_stage_layers": None,
                # or "first_and_last_stage": where embedding and output layer are
                "pipeline_vocabulary": "all_stages",
            },
            "zero": {  # parts of the state over "data"; see docs/zero.md
                # 0: none; 1: optimizer state; 2: and gradients; 3: and parameters
                "stage": 0,
                "min_size": 2**14,  # parameters of fewer elements are left whole
                "group_size": None,  # ranks that share a state; None: all of "data"
            },
            "precision": {  # beside model.dtype and model.param_dtype
                # "fp8": the linear maps of the blocks multiply in eight bits; None:
                # in model.dtype
                "matmul": None,
                # Their scales: "current", of each tensor itself, or "delayed", of the
                # largest elements in the last steps
                "fp8_scaling": "current",
                "fp8_history": 16,  # so many, if "delayed"
                # Paths of modules that compute in float32, as "blocks/*/mlp"
                "float32": (),
                # Of the one sum over data-parallel ranks; else sums are in float32
                "gradient_dtype": "float32",
                # "off", "static" or "dynamic"; None: "dynamic" for float16, else "off"
                "loss_scaling": None,
                "initial_loss_scale": 2.0**16,  # the only one, if "static"
                "loss_scale_growth": 2.0,  # factor, if "dynamic" ...
                "loss_scale_interval": 2000,  # ... after so many steps
                "loss_scale_backoff": 0.5,  # factor when a gradient is not finite
                "min_loss_scale": 1.0,  # if not even this helps, the run ends
            },
            "lora": {
                "rank": None,  # of adapters, which alone are trained; None: all is
                "alpha": 16.0,  # adapters count alpha / rank times
                # Linear layers that have one; "*" stands for one segment
                "targets": ("blocks/*/attention/qkv", "blocks/*/attention/out"),
                "train_also": None,  # parameters, like targets; None: the heads
            },
            "eval": {
                "every_steps": None,  # None: only at the end
                "num_batches": None,  # None: the whole validation split
            },
            "checkpoint": {
                "every_steps": None,  # None: only at the end
                "keep": 3,  # of the newest, besides the best
            },
        }
    )
