"""Load YAML in which a key that occurs twice is an error.

PyYAML would silently keep the last one.
"""

from collections.abc import Hashable
from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """Load safe YAML; raise YAMLError, with key and line, for a key that occurs twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: *other
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"{key} stands twice (line {line}); keep one of them")
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)
