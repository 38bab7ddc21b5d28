"""Slots: what blocks declare, what plugins offer, and which offer fills each site."""
