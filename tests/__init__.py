"""The tests and their helpers: a package, so that no installed package of this name takes its place.

The tools come from the checkout, whether they are installed or not.
"""

import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))
