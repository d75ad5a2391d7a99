"""Names of what is in the folder of a run."""

CONFIG_FILE = "config.yaml"
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS = "checkpoints"
