"""From text to BERT samples; `launch.input_pipeline` makes batches of them.

In the order of the data: `python_docs` (the embedded corpus) and `corpus` (files to
documents of sentences), `tokenizer`, `token_store` (tokens on disk), `bert_samples`
(tokens to samples) with `masking` and `draws`. `cache` keeps what was once made.
"""
