"""Models as pure functions over pytrees of parameters."""
