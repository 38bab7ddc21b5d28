"""The mixing function of SplitMix64 (Steele, Lea and Flood, 2014), on Python's integers."""

WORD = 2**64 - 1


def hashed(bits: int) -> int:
    """64 bits that depend on all of 64 bits."""
    for by, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = ((bits ^ (bits >> by)) * factor) & WORD
    return bits ^ (bits >> 31)
