"""Reads the arguments that a Python script gives to the classes of `transformers`, TRL and PEFT. It is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError

MAX_EXPRESSION = 80
ARGUMENTS = (
    *("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig"),
    *("RewardConfig", "CPOConfig", "GRPOConfig", "PPOConfig", "RLOOConfig", "OnlineDPOConfig", "GKDConfig"),
)
"""Classes whose keywords are settings of their own names."""
TRAINERS = (
    *("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "RewardTrainer"),
    *("CPOTrainer", "GRPOTrainer", "PPOTrainer"),
)
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "bias": "lora_bias",
    "task_type": "lora_task_type",
    "init_lora_weights": "lora_init",
    "inference_mode": "lora_inference_mode",
    "fan_in_fan_out": "lora_fan_in_fan_out",
    "ensure_weight_tying": "lora_weight_tying",
}
BITS_AND_BYTES = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}
MODEL = {
    "torch_dtype": "torch_dtype",
    "dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
    "use_flash_attention_2": "use_flash_attention_2",
    "num_labels": "num_labels",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "low_cpu_mem_usage": "low_cpu_mem_usage",
    "use_cache": "use_cache",
}
DATASET = {
    "name": "dataset_config",
    "split": "dataset_train_split",
    "data_files": "data_files",
    "revision": "dataset_revision",
}
OBJECTS = (
    "model",
    "ref_model",
    "tokenizer",
    "processing_class",
    "args",
    "train_dataset",
    "eval_dataset",
    "peft_config",
)
"""Arguments of a trainer that are objects which other calls have made."""
CODE = ("callbacks", "compute_metrics", "data_collator", "formatting_func", "optimizers", "compute_loss_func")
"""Arguments of a trainer that are code."""


@dataclass
class Script:
    """What the calls of a script say."""

    program: str = ""
    """The class of the arguments, or else of the trainer."""
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """Setting → how the script writes it."""
    lines: dict[str, int] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """Setting → the expression that computes it, with its line."""

    def add(self, key: str, written: str, node: ast.expr, constants: Mapping[str, Any]) -> None:
        """Adds an argument of a call; the first call that has it counts."""
        if key in self.values or key in self.computed:
            return
        self.written[key] = written
        self.lines[key] = node.lineno
        try:
            self.values[key] = _literal(node, constants)
        except (ValueError, RecursionError):
            self.computed[key] = f"line {node.lineno}: {_shown(node)}"


def parse_script(path: Path, text: str) -> Script:
    """Returns what the calls of a script say. Raises RecipeError if it is no Python, or has no such calls."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = f"is not Python: {getattr(error, 'msg', None) or error}"
        raise RecipeError(Problem("import.python", f"{path}:{line}" if line else str(path), message)) from None
    constants, script = _constants(tree), Script()
    calls = [(name, owner, call) for name, owner, call in _calls(tree)]
    arguments = [(name, call) for name, _, call in calls if name in ARGUMENTS]
    if len(arguments) > 1:
        raise RecipeError(
            Problem("import.python", f"{path}:{call.lineno}", f"{name} is one of {len(arguments)}", "leave one of them")
            for name, call in arguments[1:]
        )
    for name, owner, call in calls:
        _read(script, name, owner, call, constants)
    if not script.program:
        known = ", ".join(ARGUMENTS[:6])
        raise RecipeError(Problem("import.python", str(path), f"constructs none of {known} or their trainers"))
    return script


def _calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yields the name of each called function, that of the object which has it, and the call, in their order."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func
        if isinstance(function, ast.Name):
            yield function.id, "", call
        elif isinstance(function, ast.Attribute):
            owner = function.value
            yield function.attr, owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", ""), call


def _read(script: Script, name: str, owner: str, call: ast.Call, constants: Mapping[str, Any]) -> None:
    if name in ARGUMENTS:
        script.program = name
        if call.args:
            script.add("output_dir", f"{name}(output_dir)", call.args[0], constants)
        _keywords(script, name, call, constants, None)
    elif name in TRAINERS:
        script.program = script.program or name.replace("Trainer", "Config").replace("Seq2Seq", "")
        if script.program == "Config":
            script.program = "TrainingArguments"
        _trainer(script, name, call, constants)
    elif name == "LoraConfig":
        script.values["use_peft"], script.written["use_peft"] = True, "LoraConfig(…)"
        _keywords(script, name, call, constants, LORA)
    elif name == "BitsAndBytesConfig":
        _keywords(script, name, call, constants, BITS_AND_BYTES)
        script.values.setdefault("bnb_4bit_quant_type", "fp4")  # the class's default
    elif name == "from_pretrained" and "Tokenizer" in owner:
        if call.args:
            script.add("tokenizer_name_or_path", f"{owner}.from_pretrained", call.args[0], constants)
    elif name == "from_pretrained" and "Model" in owner:
        if call.args:
            script.add("model_name_or_path", f"{owner}.from_pretrained", call.args[0], constants)
        _keywords(script, f"{owner}.from_pretrained", call, constants, MODEL, ("quantization_config", "device_map"))
    elif name == "load_dataset":
        for key, node in zip(("dataset_name", "dataset_config"), call.args, strict=False):
            script.add(key, "load_dataset", node, constants)
        _keywords(script, name, call, constants, DATASET)


def _keywords(
    script: Script,
    name: str,
    call: ast.Call,
    constants: Mapping[str, Any],
    names: Mapping[str, str] | None,
    skipped: tuple[str, ...] = (),
) -> None:
    """Adds the keywords of a call. names: keyword → setting; by default they are the same."""
    for keyword in call.keywords:
        if keyword.arg is None:
            key = f"{name}(**…)"
            script.computed[key] = f"line {keyword.value.lineno}: {_shown(keyword.value)}"
        elif keyword.arg not in skipped:
            key = keyword.arg if names is None else names.get(keyword.arg, f"{name}({keyword.arg})")
            written = keyword.arg if names is None else f"{name}({keyword.arg})"
            script.add(key, written, keyword.value, constants)


def _trainer(script: Script, name: str, call: ast.Call, constants: Mapping[str, Any]) -> None:
    for keyword in call.keywords:
        if keyword.arg in CODE:
            if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None):
                script.computed[f"{name}({keyword.arg})"] = f"line {keyword.value.lineno}: code of yours"
        elif keyword.arg == "model" and isinstance(keyword.value, (ast.Constant, ast.Name)):
            value = constants.get(getattr(keyword.value, "id", ""), getattr(keyword.value, "value", None))
            if isinstance(value, str):
                script.add("model_name_or_path", f"{name}(model)", keyword.value, constants)
        elif keyword.arg is not None and keyword.arg not in OBJECTS:
            script.add(keyword.arg, f"{name}({keyword.arg})", keyword.value, constants)


def _shown(node: ast.expr) -> str:
    """Returns an expression on one line, cut if it is long."""
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        return "an expression"
    return text if len(text) <= MAX_EXPRESSION else f"{text[:MAX_EXPRESSION]}…"


def _constants(tree: ast.AST) -> dict[str, Any]:
    """Returns the names that a script assigns once, and to a literal."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, [])
    stores = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    constants = {}
    for name, values in assigned.items():
        if len(values) == 1 and stores.count(name) == 1:
            try:
                constants[name] = _literal(values[0], {})
            except (ValueError, RecursionError):
                continue
    return constants


def _literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of literals. Raises ValueError for any other."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, (str, int, float, bool)) or node.value is None:
            return node.value
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_literal(item, constants) for item in node.elts]
    elif isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {
            str(_literal(key, constants)): _literal(value, constants)  # type: ignore[arg-type]
            for key, value in zip(node.keys, node.values, strict=True)
        }
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, constants)
        if isinstance(value, (int, float)):
            return -value
    elif isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    elif (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch") or (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id.endswith("Type")
    ):
        return node.attr
    raise ValueError("is computed")
