"""From hooks to a model that computes: building, slots, memory, initial values, compilation."""
