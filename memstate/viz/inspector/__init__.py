"""The inspector: one HTML page that shows an inspection, without a server and without a request to anywhere."""

from memstate.viz.inspector.page import page

__all__ = ["page"]
