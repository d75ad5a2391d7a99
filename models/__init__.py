"""Single-device Flax NNX models. Nothing here knows about a mesh.

Shape letters, at the end of the names of tensors: **B** batch, **L** length,
**D** model, **H** heads, **K** head, **F** mlp, **V** vocabulary, **N** predicted
positions. A training model has this form, whatever its family:

- ``blocks``: an ``nnx.List`` of equal blocks, ``block(x_BLD, mask, keys_B)``;
- ``embed(batch, keys_B)``: what comes before the blocks;
- ``attention_mask(batch)``: what every block sees besides its input, no parameters;
- ``losses(x_BLD, batch)``: what comes after them, *sums* over the batch by name;
- ``counts(batch)``: what each of these sums is to be divided by, no parameters.

``keys_B`` is one PRNG key per sample, or None to switch dropout off: a mask
depends on the sample, never on how samples are grouped or placed.
"""
