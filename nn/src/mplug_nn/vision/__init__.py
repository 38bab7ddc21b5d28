"""Blocks for a stream of patches beside the tokens: embedding of patches, merging of neighbours, the join with tokens.

A stream is a row of vectors [1, P, D]: the patches of all frames of a micro batch, concatenated, as packed documents
are. The blocks between embedding and merging are those of decoders, with `causal=False` and the lengths of frames or
windows as lengths of documents. D width of the tower, E width of the decoder, P patches, p patches of this rank.
"""
