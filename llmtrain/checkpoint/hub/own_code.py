"""Writes the code of a user's own model to the folder of an export, so that `from_pretrained` builds it there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llmtrain.models.hub_names import aliases
from llmtrain.models.own import OwnModel
from llmtrain.plan.facts.own_code import OwnCode

MODULE = "modeling_own"
"""Name of the module with the model's class."""


def write_own_code(model: OwnModel, code: OwnCode, folder: Path) -> None:
    """Writes the model's class and the user's modules, and names the class in `config.json`.

    Modules beside each other are copied, with imports of each other made relative, as `transformers` requires. A module
    in a package is imported from there, so the package has to be installed where the model is loaded.
    """
    config = model.config
    module, _, name = config.build.partition(":")
    modules = {file.removesuffix(".py") for file in code.files}
    is_copied = module in modules and all(each.isidentifier() for each in modules)
    texts = {}
    if is_copied:
        found = {each: Path(config.code_dir, f"{each}.py").read_text(encoding="utf-8") for each in modules}
        texts = {each: relative_imports(text, modules) for each, text in found.items()}
    for each, text in texts.items():
        (folder / f"{each}.py").write_text(text, encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined)
    root = name.partition(".")[0]
    tied = {other: group[0] for other, group in aliases(model).items() if other != group[0]}
    text = environment.get_template(f"{MODULE}.py.jinja").render(
        {
            "source": config.build,
            "import": f"from {'.' if is_copied else ''}{module} import {root}",
            "name": name,
            "model_type": _model_type(config.build),
            "tied": repr(tied or None),
            "embedding": config.found.embedding,
            "head": config.found.head,
            "applies_head": config.found.applies_head,
        }
    )
    (folder / f"{MODULE}.py").write_text(text.rstrip() + "\n", encoding="utf-8")
    _name_class(folder / "config.json", model, bool(tied))


def _name_class(file: Path, model: OwnModel, is_tied: bool) -> None:
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for field in ("build", "code_dir", "tiny", "parts", "seed"):
        config.pop(field, None)
    config |= {
        "model_type": _model_type(model.config.build),
        "architectures": [OwnModel.__name__],
        "auto_map": {
            "AutoConfig": f"{MODULE}.OwnConfig",
            "AutoModelForCausalLM": f"{MODULE}.{OwnModel.__name__}",
        },
        "tie_word_embeddings": is_tied,
        "vocab_size": model.config.vocab_size,
        "hidden_size": model.config.hidden_size,
        "num_hidden_layers": model.config.num_hidden_layers,
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _model_type(build: str) -> str:
    """Returns a `model_type` that no class of this process has."""
    return f"own_{build.partition(':')[2].lower()}"


def relative_imports(text: str, modules: set[str]) -> str:
    """Returns the source text of a module, with imports of its neighbours made relative."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in modules and node.level == 0:
            lines[node.lineno - 1] = re.sub(
                rf"\bfrom\s+{node.module}\b", f"from .{node.module}", lines[node.lineno - 1]
            )
        elif isinstance(node, ast.Import) and any(alias.name in modules for alias in node.names):
            line = lines[node.lineno - 1]
            indent = line[: len(line) - len(line.lstrip())]
            statements = (_import_statement(alias, alias.name in modules) for alias in node.names)
            lines[node.lineno - 1] = f"{indent}{'; '.join(statements)}\n"
    return "".join(lines)


def _import_statement(alias: ast.alias, is_relative: bool) -> str:
    name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
    return f"from . import {name}" if is_relative else f"import {name}"
