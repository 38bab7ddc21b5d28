"""x"""
class Rollouts: pass
