"""Compiled code with the bits of torch's operators."""
