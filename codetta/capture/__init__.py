"""From the graph of a model to values on token matrices."""

from codetta.capture.graph import Graph, Leaf, Value, Weight
from codetta.capture.reader import capture

__all__ = ["Graph", "Leaf", "Value", "Weight", "capture"]
