"""From text and images to samples; `launch.input_pipeline` makes batches of them.

In the order of the data:

- BERT: `python_docs` (the embedded corpus) and `corpus` (files to documents of
  sentences), `tokenizer`, `token_store` (tokens on disk), `bert_samples` with
  `masking`;
- GPT-2: `whole_texts` (files to documents), `byte_bpe`, `token_store`,
  `packed_samples`;
- ViT: `images` (folders or digits), `image_samples` with `augmentation` and `mixing`.

`text_files` reads files, `draws` has the random numbers, `cache` keeps what was once
made.
"""
