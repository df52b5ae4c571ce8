"""The training loop and its three stages."""
