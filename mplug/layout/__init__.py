"""Mesh, plan and placements: pure data without torch, computed for any rank on a laptop."""
