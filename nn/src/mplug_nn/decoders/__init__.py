"""Families of decoders: the config that they share, and the model that it describes. Imports no torch by itself."""
