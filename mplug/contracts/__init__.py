"""The types that plugins and the host exchange. Torch-free: tensors appear in annotations only."""
