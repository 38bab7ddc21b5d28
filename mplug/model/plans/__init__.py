"""From modules to a plan: what parameters mean, what is trained, what a step computes."""
