"""Reward functions: built-in rules, a user's own file, and the scorer that applies them to a batch."""
