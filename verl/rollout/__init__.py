"""Rollout: the engine protocol and the embedded engine."""
