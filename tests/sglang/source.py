"""Takes from a release's source what is wanted of files that are too heavy to import."""

import __future__
import ast
from pathlib import Path


def file_of(release: Path, module: str) -> Path:
    return release.joinpath(*module.split(".")).with_suffix(".py")


def classes(path: Path, module: str, *names: str) -> dict:
    """Small self-contained classes, compiled from the release's own text."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name in names]
    namespace = {"__name__": module}
    code = compile(ast.Module(found, []), str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, namespace)
    return {name: namespace[name] for name in names}


def attributes(path: Path, class_name: str) -> list[str]:
    """Names that a class assigns on `self`, in source order: an object made with them has the real one's layout."""
    body = ast.parse(path.read_text()).body
    tree = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    init = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return list(dict.fromkeys(assigned(init) + assigned(tree)))


def assigned(tree: ast.AST) -> list[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
             and isinstance(node.value, ast.Name) and node.value.id == "self"]
    return [node.attr for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]
