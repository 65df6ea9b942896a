"""Tests, and what they share. A package, so that none that is installed under this name can stand in for it.

The tools are those of the checkout, whether they are installed or not.
"""

import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))
