"""Exact masks: special tokens in messages, white space, several kinds of tokenizers, random conversations."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmtrain.data.chat.conversation import RowError, conversation
from llmtrain.data.chat.encode import Encoded
from llmtrain.data.chat.template import ChatTemplate, load_template
from llmtrain.errors import DataError
from llmtrain.plan.facts.vocabulary import shipped_templates
from tests.helpers.chat_tokenizers import Case, case, write_chat_tokenizer

WORDS = ["a", "snow", "雪", "🙂", "e\u0301", "<b>", "</think>", "[INST]", "\n", "\n\n", "  ", "\t", "<|im_", "end|>"]
SPELLED = ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>"]


def turns(*texts: str, **more: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text, **more} for number, text in enumerate(texts)]


def encoded(one: Case, messages: list[dict[str, Any]], **options: Any) -> Encoded:
    (found,) = one.encoder(**options).encode([conversation(messages)])
    assert isinstance(found, Encoded), str(found)
    return found


@pytest.fixture
def chatml(tmp_path: Path) -> Case:
    return case("chatml", tmp_path)


def test_random_conversations_train_only_on_the_assistants_tokens(chatml: Case) -> None:
    """ChatML's special tokens stand around each message, so its tokens are those of its parts."""
    rng = random.Random(0)
    plain = Tokenizer.from_file(str(chatml.folder / "tokenizer.json"))
    plain.encode_special_tokens = True
    start, end = (plain.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>"))

    def ids(text: str) -> list[int]:
        return list(plain.encode(text, add_special_tokens=False).ids)

    chats = []
    for _ in range(200):
        texts = ["".join(rng.choices(WORDS + SPELLED, k=rng.randint(1, 12))) for _ in range(2 * rng.randint(1, 3))]
        chats.append(turns(*(text if text.strip() else "a" for text in texts)))
    compared = 0
    for chat, found in zip(chats, chatml.encoder().encode([conversation(chat) for chat in chats]), strict=True):
        assert isinstance(found, Encoded), str(found)
        tokens, trained, separable = [], [], True
        for message in chat:
            header, mine = ids(message["role"] + "\n"), ids(message["role"] + "\n" + message["content"])
            is_trained = message["role"] == "assistant"
            # Line ends that begin an answer may be one token with that of the header, which is not trained on.
            separable &= mine[: len(header)] == header
            tokens += [start, *mine, end, *ids("\n")]
            trained += [False] * (1 + len(header)) + [is_trained] * (len(mine) - len(header) + 1) + [False]
        assert found.ids.tolist() == tokens
        if separable:
            assert found.loss_mask.tolist() == trained
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", ["chatml", "llama3_1", "gemma", "deepseek_r1", "glm4", "phi3", "mistral_v1"])
def test_a_message_that_spells_special_tokens_stays_text(name: str, tmp_path: Path) -> None:
    one = case(name, tmp_path)
    spelled = "say " + " ".join(one.about["special"]) + " now"
    plain, spoken = (encoded(one, turns(text, text)) for text in ("say now", spelled))
    tokenizer = Tokenizer.from_file(str(one.folder / "tokenizer.json"))
    special = [token for token, known in tokenizer.get_added_tokens_decoder().items() if known.special]

    def specials(found: Encoded) -> list[int]:
        return [token for token in found.ids.tolist() if token in special]

    assert specials(spoken) == specials(plain)
    assert spelled in one.trained(spoken)[0]
    if name != "deepseek_r1":  # whose parts between specials are added tokens
        parsed = encoded(one, turns(spelled, "fine"), parse_special=True)
        assert len(specials(parsed)) == len(specials(plain)) + len(one.about["special"])


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "deepseek_v3", "glm4", "glm4_5", "gpt_oss", "kimi_k2"])
def test_special_tokens_spelled_in_calls_and_tools_stay_text(name: str, tmp_path: Path) -> None:
    """In names, identifiers, and the keys and values of arguments and of schemas, however deep they are."""
    one = case(name, tmp_path)
    tokenizer = Tokenizer.from_file(str(one.folder / "tokenizer.json"))
    special = [token for token, known in tokenizer.get_added_tokens_decoder().items() if known.special]

    def specials(text: str) -> list[int]:
        call = {"id": text, "function": {"name": text, "arguments": {text: text, "type": [{text: text, "id": text}]}}}
        result = {"role": "tool", "name": text, "tool_call_id": text, "content": text}
        schema = {"type": "function", "function": {"name": text, "description": text, "parameters": {text: text}}}
        messages = [
            *turns(text),
            {"role": "assistant", "tool_calls": [call]},
            result,
            {"role": "assistant", "content": "b"},
        ]
        (found,) = one.encoder().encode([conversation(messages, [schema])])
        assert isinstance(found, Encoded), str(found)
        return [token for token in found.ids.tolist() if token in special]

    assert specials("x" + "".join([*one.about["special"], *one.about.get("added", [])])) == specials("x")


CALLED = [
    *turns("a"),
    {"role": "assistant", "content": "b", "tool_calls": [{"id": "abcdefghi", "name": "f", "arguments": {"x": 1}}]},
    {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("name", "messages", "tools", "part"),
    [
        ("chatml", turns("a", "b"), [{"name": "f"}], "tools"),
        ("chatml", CALLED, None, "tool_calls of message 2"),
        ("zephyr", CALLED[:2], None, "tool_calls of message 2"),
        ("chatml", turns("a", "b", reasoning="c"), None, "reasoning_content of message 2"),
        ("deepseek_r1", turns("a", "b", reasoning="c"), None, "reasoning_content of message 2"),
    ],
)
def test_content_that_a_template_omits_is_refused(
    name: str, messages: list[Any], tools: Any, part: str, tmp_path: Path
) -> None:
    """Such templates pass over it: the model would train on the rest as if it were all."""
    one = case(name, tmp_path)
    encoder = one.encoder()
    # The same text was proven for another conversation, which has no such part.
    assert isinstance(encoder.encode([conversation(turns("a", "b"))])[0], Encoded)
    (found,) = encoder.encode([conversation(messages, tools)])
    assert isinstance(found, RowError)
    assert f"leaves out the {part}" in str(found)


def test_reasoning_of_earlier_turns_may_be_left_out(tmp_path: Path) -> None:
    qwen = case("qwen3", tmp_path)
    thought = turns("a", "b", "c", "d", reasoning="e")
    assert [text.count("e\n") for text in qwen.trained(encoded(qwen, thought))] == [0, 1]
    assert isinstance(qwen.encoder().encode([conversation(CALLED, [{"name": "f"}])])[0], Encoded)


@pytest.mark.parametrize("name", ["deepseek_r1", "qwq_prompted_to_think"])
def test_a_template_that_cuts_the_reasoning_out_of_the_last_text_is_refused(name: str, tmp_path: Path) -> None:
    one = case(name, tmp_path)
    thought = "<think>\nb\n</think>\n\nc"
    earlier = encoded(one, turns("a", thought, "d", "e"))  # the same text around the messages is proven for a later row
    assert len(one.trained(earlier)) == 2
    assert "b" not in one.trained(earlier)[0]
    (found,) = one.encoder().encode([conversation(turns("a", "c", "d", thought))])
    assert isinstance(found, RowError)
    assert str(found) == "the template leaves out a part of message 4: 'b'"


def test_a_turn_that_begins_at_token_0_is_trained_on_entirely(chatml: Case) -> None:
    """transformers#47325: `return_assistant_tokens_mask` masks a span that begins at token 0."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "It is 4."}, *turns("What is 2+2?", "Bye.")]
    one = chatml._replace(source=source, template=ChatTemplate(source, chatml.template.special))
    found = encoded(one, messages)
    assert one.trained(found) == ["It is 4.<|im_end|>", "Bye.<|im_end|>"]
    assert found.loss_mask[0]


def test_white_space_at_the_ends_is_as_the_template_leaves_it(tmp_path: Path) -> None:
    kept, trimmed = case("chatml", tmp_path / "a"), case("llama3", tmp_path / "b")
    assert kept.trained(encoded(kept, turns("a", "  b \n"))) == ["  b \n<|im_end|>"]
    assert trimmed.trained(encoded(trimmed, turns("a", "  b \n"))) == ["b<|eot_id|>"]


def test_a_message_that_is_not_trained_on_is_context(chatml: Case) -> None:
    messages = turns("a", "b", "c", "d")
    messages[1]["weight"] = 0
    assert chatml.trained(encoded(chatml, messages)) == ["d<|im_end|>"]
    everything = encoded(chatml, messages, train_on="all")
    assert "b" not in chatml.trained(everything)[0]
    assert len(chatml.trained(everything)) == 2
    messages[3]["weight"] = 0
    (found,) = chatml.encoder().encode([conversation(messages)])
    assert isinstance(found, RowError)
    assert "none of its tokens are trained on" in str(found)


def test_conversations_can_be_cut_after_each_turn(chatml: Case) -> None:
    found = encoded(chatml, turns("a", "b", "c", "d"))
    short = encoded(chatml, turns("a", "b"))
    assert len(found.cuts) == 2
    assert found.ids[: found.cuts[0]].tolist() == short.ids[: short.cuts[0]].tolist()
    assert [found.loss_mask[end - 1] for end in found.cuts] == [True, True]


def test_errors_of_masks_name_the_fault(chatml: Case, tmp_path: Path) -> None:
    gemma = case("gemma", tmp_path / "gemma")
    for one, messages, fault in (
        (
            gemma,
            [{"role": "user", "content": "a"}, *turns("b", "c")],
            "the chat template refuses it: roles must alternate",
        ),
        (gemma, [{"role": "system", "content": "a"}, *turns("b", "c")], "System role not supported"),
        (chatml, turns("a", "b\U00100000"), "the character U+100000, which is reserved"),
    ):
        (found,) = one.encoder().encode([conversation(messages)])
        assert isinstance(found, RowError)
        assert fault in str(found)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("{{ '\\U000F7000' }}", "writes the character U+F7000"),
        ("{{ '\\uD800' }}", "writes the character U+D800"),
        ("{{ messages[0].content }}", "writes message 1 again after the last turn of the assistant"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% set _ = messages.append(messages[0]) %}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "refuses it: no loader"),
        ("{% for one in range(10 ** 9) %}{% endfor %}", "refuses it: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it: maximum recursion depth"),
    ],
)
def test_an_inconsistent_template_is_refused(written: str, fault: str, chatml: Case) -> None:
    one = chatml._replace(template=ChatTemplate(chatml.source + written, chatml.template.special))
    (found,) = one.encoder().encode([conversation(turns("a", "b"))])
    assert isinstance(found, RowError)
    assert fault in str(found)


def byte_level(texts: list[str]) -> Any:
    """As Llama 3's: words split by an expression, whole words before merges, and a processor that trims offsets."""
    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+|\s+"), "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentence_piece(texts: list[str]) -> Any:
    """As Llama 2's: a mark for spaces, one before each text, and bytes for unknown characters."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *bytes_]))
    return tokenizer


def metaspace(texts: list[str]) -> Any:
    """As T5's and newer Llama 2's: a mark for spaces, one at the very beginning."""
    tokenizer: Any = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return tokenizer


@pytest.mark.parametrize("kind", [byte_level, sentence_piece, metaspace])
@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "vicuna", "phi3", "mistral_v3", "alpaca"])
def test_tokenizers_of_other_kinds_give_the_same_masks(kind: Any, name: str, tmp_path: Path) -> None:
    one = case(name, tmp_path / "plain")
    texts = ["It is 4.", "What is it?", "Tell me, is it cold in here 42", " USER: ASSISTANT: [INST] system"] * 3
    folder = write_chat_tokenizer(tmp_path / "other", one.about, one.source, kind(texts))
    one = one._replace(folder=folder)
    found = encoded(one, turns("What is it?", "It is 4.", "Tell me", "It is cold"))
    expected = encoded(case(name, tmp_path / "again"), turns("What is it?", "It is 4.", "Tell me", "It is cold"))

    def without_spaces(texts: list[str]) -> list[str]:
        return ["".join(re.sub("▁|<0x0A>|<unk>", " ", text).split()) for text in texts]

    runs = without_spaces(one.trained(found))
    assert runs == without_spaces(case(name, tmp_path / "once").trained(expected))


def test_a_template_is_loaded_by_name_from_a_file_or_from_text(tmp_path: Path) -> None:
    one = case("zephyr", tmp_path / "tokenizer")
    assert load_template(None, one.folder).source == one.source
    assert load_template("chatml", one.folder).source == shipped_templates()["chatml"]
    assert load_template("{{ messages }}", one.folder) == ChatTemplate("{{ messages }}", one.template.special)
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}")
    assert load_template(str(tmp_path / "mine.jinja"), one.folder).source == "{{ bos_token }}"
    bare = write_chat_tokenizer(tmp_path / "bare", one.about, None)
    for wanted, fault in (
        (None, "has no chat template"),
        ("nothing", "is neither a file"),
        ("{% if %}", "is not a Jinja"),
    ):
        with pytest.raises(DataError, match=fault):
            load_template(wanted, bare)


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("chat_template.jinja", b"\xff{{ messages }}", "chat_template.jinja cannot be read: is not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "is 5, not a template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": {}}]}', "not a template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": ["default"]}, "default", {}]}', "has no chat template"),
        ("tokenizer_config.json", b'{"a":' + b"[" * 10_000, "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json cannot be read"),
    ],
)
def test_invalid_template_files_of_a_tokenizer_are_refused(file: str, content: bytes, fault: str, chatml: Case) -> None:
    (chatml.folder / "chat_template.jinja").unlink()
    (chatml.folder / file).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(fault)):
        load_template(None, chatml.folder)


def test_masks_of_the_shipped_templates_can_be_determined(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "y"}}]}
    messages = [*turns("a"), {"role": "assistant", "content": "b", "thinking": "t"}, *turns("c"), call]
    spoken = [{"role": "system", "content": "Be brief."}, *turns("a", "b", "c", "d")]
    special = {"eos_token": "<|im_end|>"}
    chatml, plain = (
        case("chatml", tmp_path / name)._replace(template=ChatTemplate(shipped_templates()[name], special))
        for name in ("chatml", "plain")
    )
    assert chatml.trained(encoded(chatml, messages)) == [
        "<think>\nt\n</think>\n\nb<|im_end|>",
        '\n<tool_call>{"name": "f", "arguments": {"x": "y"}}</tool_call><|im_end|>',
    ]
    assert chatml.trained(encoded(chatml, spoken)) == ["b<|im_end|>", "d<|im_end|>"]
    assert plain.trained(encoded(plain, spoken)) == [" b<|im_end|>", " d<|im_end|>"]
    for refused in (messages[:2], [*turns("c"), call]):
        (fault,) = plain.encoder().encode([conversation(refused)])
        assert "has no form for" in str(fault)
