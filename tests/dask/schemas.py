"""Schemas that installed packages publish."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest


def published(package: str, end: str) -> Path:
    """A file that a distribution of PyPI holds."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"pip install {package}, for the schema that it holds")
    [file] = [file for file in files if str(file).endswith(end)]
    return Path(str(file.locate()))


def closed(schema: object) -> object:
    """The schema without room for names that it does not know: Kubernetes drops them in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        inner.setdefault("additionalProperties", False)
    return inner


def calls_in_docs(name: str) -> list[dict[str, Any]]:
    """The keyword arguments of each call of a function in the code of the pages, as far as they are literals."""
    pages = [path.read_text() for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.md"))]
    blocks = re.findall(r"^```\{code-block\} python\n(.*?)^```$", "\n".join(pages), re.MULTILINE | re.DOTALL)
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    return [
        {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == name
    ]


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of the ``spec`` of a kind of the Dask operator's objects."""
    yaml = pytest.importorskip("yaml", reason="Dask comes with it")
    file = published("dask-kubernetes", f"crds/{kind}.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # it is long
    [version] = yaml.load(file.read_text(), loader)["spec"]["versions"]
    assert version["name"] == "v1"
    schema: dict[str, Any] = closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])  # type: ignore[assignment]
    return schema
