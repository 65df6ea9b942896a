"""Runs SGLang's real scheduler on a CPU, over its own pools and over memstate's."""
