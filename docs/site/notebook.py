"""Turns a notebook into a page of the site, from its stored outputs."""

import json
import re
from pathlib import Path


def notebook(path: Path) -> tuple[str, dict[str, str]]:
    """Returns the cells and outputs of a notebook as Markdown, and its pictures: name -> SVG."""
    parts, pictures, heading = [], dict[str, str](), ""
    for at, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"(?m)^#+ (.*)", source) or [heading])[-1]
            parts.append(source)
            if at == 0:
                parts.append(f"To run it, in a checkout: `jupyter lab notebooks/{path.name}`")
            continue
        parts.append(f"```python\n{source}\n```")
        if "@interact(" in source:
            parts.append("*The sliders need the notebook itself. At first they show:*")
        for output in cell["outputs"]:
            said = {kind: "".join(text) for kind, text in output.get("data", {"text": output.get("text")}).items()}
            if "image/svg+xml" in said:
                pictures[name := f"{path.stem}-{at}.svg"] = said["image/svg+xml"]
                parts.append(f"![{heading}: picture {len(pictures)}]({name})")
            elif "text/html" in said:
                parts.append(said["text/html"])
            else:
                parts.append(f"``` {{ .text .no-copy }}\n{said.get('text', said.get('text/plain')).rstrip()}\n```")
    return "\n\n".join(parts), pictures
