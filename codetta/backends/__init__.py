"""Lowerings of a Program that must agree: reference, cpu and triton."""
