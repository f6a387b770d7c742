# SPDX-License-Identifier: Apache-2.0
"""Functions with doctests out of pure-Python packages, as tasks like HumanEval's. They are parsed, not imported."""

from __future__ import annotations

import ast
import builtins
import copy
import doctest
import importlib.metadata
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.errors import UserError

__all__ = ["PACKAGES", "STDLIB_MODULES", "Function", "functions_of", "package_functions"]

PACKAGES = ("algorithms", "boltons", "inflection", "more-itertools", "pydash", "toolz")
STDLIB_MODULES = ("calendar", "colorsys", "difflib", "heapq", "statistics", "string", "textwrap")
_MOST_DOC_CHARACTERS = 900
_MOST_BODY_LINES = 30
_ANY_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Function:
    """A function to be written.

    id: "package.module:name". prompt: the imports it may use, its signature and its docstring, ending in a newline.
    body: its own source after the docstring. module: where its doctests run; doc: the docstring with them.
    paths: the folder that the module's package is installed in; none for the standard library's.
    """

    id: str
    name: str
    module: str
    prompt: str
    body: str
    doc: str
    paths: list[str]


def package_functions() -> Iterator[Function]:
    """Those of `PACKAGES` and `STDLIB_MODULES`, in a fixed order.

    Raises UserError with the name of a package that isn't installed.
    """
    for package in PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"train: needs the package {package} (pip install -e '.[train]')") from None
        for file in sorted(files):
            if file.suffix == ".py" and "test" not in file.parts[-1] and file.parts[-1] != "__init__.py":
                module = ".".join(file.with_suffix("").parts)
                source = Path(str(file.locate()))
                folder = str(source.parents[len(file.parts) - 1])
                yield from functions_of(source.read_text(encoding="utf-8"), module, [folder])
    for module in STDLIB_MODULES:
        source = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
        yield from functions_of(source.read_text(encoding="utf-8"), module)


def functions_of(source: str, module: str, paths: Sequence[str] = ()) -> Iterator[Function]:
    """The functions of a module that can be asked for: at its top level, public, with doctests that say what is
    expected, of a moderate size, and with a signature that means something outside the module."""
    tree = ast.parse(source)
    imports = dict(_stdlib_imports(tree.body))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            if doc and _is_askable(node, doc, imports):
                yield _function(node, doc, source, module, imports, paths)


def _is_askable(node: ast.FunctionDef, doc: str, imports: dict[str, str]) -> bool:
    if len(doc) > _MOST_DOC_CHARACTERS or '"""' in doc or len(node.body) < 2:
        return False
    body_lines = (node.end_lineno or 0) - node.body[1].lineno + 1
    known = {*imports, *dir(builtins)}
    defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
    if body_lines > _MOST_BODY_LINES or any(not _names(d) <= known for d in defaults):
        return False
    try:
        examples = doctest.DocTestParser().get_examples(doc)
    except ValueError:
        return False
    return any(e.want and re.search(rf"\b{node.name}\b", e.source) for e in examples)


def _function(
    node: ast.FunctionDef, doc: str, source: str, module: str, imports: dict[str, str], paths: Sequence[str]
) -> Function:
    known = {*imports, *dir(builtins)}
    annotations = [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.annotation]
    annotations += [node.returns] if node.returns else []
    keep = all(_names(a) <= known for a in annotations)
    signature = ast.unparse(_header(node, keep))
    used = {n for part in node.body[1:] for n in _names(part)} | {n for d in node.args.defaults for n in _names(d)}
    if keep:
        used |= {n for a in annotations for n in _names(a)}
    lines = sorted({imports[n] for n in used & imports.keys()})
    quotes = 'r"""' if "\\" in doc else '"""'
    doc_lines = textwrap.indent(f'{quotes}{doc}\n"""', "    ")
    header = "\n".join(lines) + "\n\n\n" if lines else ""
    body = "\n".join(source.splitlines()[node.body[1].lineno - 1 : node.end_lineno])
    return Function(
        id=f"{module}:{node.name}",
        name=node.name,
        module=module,
        prompt=f"{header}{signature}\n{doc_lines}\n",
        body=textwrap.indent(textwrap.dedent(body), "    ") + "\n",
        doc=doc,
        paths=list(paths),
    )


def _header(node: ast.FunctionDef, keep_annotations: bool) -> ast.FunctionDef:
    """The function with nothing in it."""
    bare = copy.deepcopy(node)
    bare.body = []
    if not keep_annotations:
        bare.returns = None
        for argument in ast.walk(bare.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
    return bare


def _stdlib_imports(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names that a module's top level imports from the standard library, each with a line that imports it."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_stdlib(alias.name):
                    yield alias.asname or alias.name.split(".")[0], ast.unparse(ast.Import([alias]))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_stdlib(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, ast.unparse(ast.ImportFrom(node.module, [alias], 0))


def _is_stdlib(module: str | None) -> bool:
    return module is not None and module != "__future__" and module.split(".")[0] in sys.stdlib_module_names


def _names(node: ast.AST) -> set[str]:
    """The names that a piece of code reads; in a text annotation, every word."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if isinstance(node, ast.Constant):
        names |= {word for text in texts for word in _ANY_NAME.findall(text)}
    return names
