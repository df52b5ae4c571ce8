"""The algorithm core: pure functions on tensors. Import the module that you need."""
