"""Compiled parts of the embedded engine, with the bits of torch's operators."""
