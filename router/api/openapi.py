"""What the OpenAPI document says of bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The entry for a JSON body; nested definitions are written out in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(reference := node.get("$ref"), str):
        return _inlined(definitions[reference.rsplit("/", 1)[-1]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
