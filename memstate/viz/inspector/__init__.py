"""The inspector: one HTML page that shows an inspection. It needs no server and sends no request."""

from memstate.viz.inspector.page import page

__all__ = ["page"]
