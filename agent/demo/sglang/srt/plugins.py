"""Stand-in for SGLang's plugin loader: runs each entry point of the group once, logs those that fail."""

import logging
import os
from importlib.metadata import entry_points

GROUP = "sglang.srt.plugins"


def load_plugins():
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    for entry_point in entry_points(group=GROUP):
        if allowed and entry_point.name not in allowed:
            logging.info("Skipping plugin %s (not in SGLANG_PLUGINS)", entry_point.name)
            continue
        try:
            entry_point.load()()
        except Exception:
            logging.exception("Failed to load plugin %s", entry_point.name)
