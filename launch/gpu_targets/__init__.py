"""What XLA needs to know of a GPU to compile for it, one file per kind."""
