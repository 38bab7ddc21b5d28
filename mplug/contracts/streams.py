"""The names of entries of a micro batch that carry rows of streams (`mplug.Stream`)."""

STREAMS = "streams"
"""In the answer of `batch_entries`: all entries that the processor of the model (`mplug_streams.Processor`) makes."""
WHOLE_SEQUENCE = "whole_sequence"
"""The axis of entries along the tokens of a sample that no strategy divides: every rank has them of all tokens."""
RETURNS = "returns"
"""The entry of a micro batch by which rows of streams return to the rank whose tokens refer to them.

It maps the named axis of each stream to the way of its rows. The host makes it if ranks balance streams
(`parallel.balance`); a unit that joins rows of a stream with tokens names it in `Unit.optional`.
"""
