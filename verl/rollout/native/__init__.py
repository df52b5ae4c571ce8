"""The embedded engine's steps in compiled code."""
